"""results/off-policy holds the numbers of its table of runs; computed here by other code than the page's."""

import functools
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "off-policy"

WHERE = ["model", "grid", "lag", "method", "arm"]


@functools.cache
def runs_of_study() -> pd.DataFrame:
    """Final and peak reward, means of diagnostics and seconds of every finished run, with what it is."""
    settings = yaml.load((PAGE / "settings.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    key = ["experiment", "setting", "seed"]
    seconds = pd.read_parquet(PAGE / "summaries.parquet").query("measure == 'seconds'").set_index(key)["value"]
    rollouts = pd.read_parquet(PAGE / "runs.parquet").sort_values("step")
    by_run = rollouts.groupby(key)
    found = by_run[["ess", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share"]].mean()
    found["final"] = by_run.tail(1).set_index(key)["validation_reward"]
    found["peak"] = by_run["reward"].rolling(3).mean().groupby(key).max()
    assert set(by_run.size()[seconds.index]) == {24}
    found = found.join(seconds.rename("seconds"), how="inner").reset_index()  # finished ones
    places = [what_it_is(settings, *of) for of in found[["experiment", "setting"]].itertuples(index=False)]
    return found.join(pd.DataFrame(places))


def what_it_is(settings: dict, experiment: str, setting: str) -> dict[str, str | int]:
    """A run's place in the study by its switches."""
    of_experiment = settings["experiments"][experiment]
    switches = settings["shared"] | of_experiment["shared"] | of_experiment["settings"][setting]
    method = switches["algorithm.surrogate.class_path"].rpartition(".")[2]
    by_sum = (method, switches["algorithm.aggregation"]) == ("GSPO", "dr_grpo")
    arm = switches["algorithm.correction"] if switches["algorithm.ratio_to"] == "proximal" else "coupled"
    arm = "replay" if switches["algorithm.nucleus"] == "replay" else arm
    epochs, rate = switches["algorithm.epochs"], {3e-5: "3e-5", 1e-4: "1e-4"}[float(switches["optimizer.lr"])]
    return {
        "model": switches["model.name_or_path"], "grid": f"{epochs} epoch{'s' if epochs > 1 else ''}, lr {rate}",
        "lag": switches["rollout.lag"], "method": "LUSPO" if by_sum else method,
        "arm": "top-p 1" if switches["rollout.top_p"] == 1 else arm,
    }  # fmt: skip


def grid_runs() -> pd.DataFrame:
    runs = runs_of_study()
    return runs[runs["arm"] == "coupled"]


def cells_of(runs: pd.DataFrame) -> dict[tuple, pd.DataFrame]:
    """Runs of every cell by seed."""
    return {key: of.set_index("seed") for key, of in runs.groupby(WHERE)}


def interval(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, 95% t-interval and p of being 0; NaN below three values."""
    if len(values) < 3:
        return (values.mean(), np.nan, np.nan, np.nan)
    if np.ptp(values) == 0:  # t is not defined
        return (values[0], values[0], values[0], float(values[0] == 0))
    test = stats.ttest_1samp(values, 0)
    return (values.mean(), *test.confidence_interval(0.95), test.pvalue)


def holm(p: dict[tuple, float]) -> dict[tuple, float]:
    """Adjusted p (Holm 1979), by hand."""
    order = sorted((value, key) for key, value in p.items() if value == value)
    adjusted, last = {}, 0.0
    for i, (value, key) in enumerate(order):
        last = adjusted[key] = max(last, min(1.0, (len(order) - i) * value))
    return adjusted


@functools.cache
def family(name: str) -> dict[tuple, tuple]:
    """Differences of a family by cell: seeds, mean, low, high, adjusted p, and ess, the lower one of each pair."""
    base_of = {
        "noclip": lambda model, grid, lag, method, arm: (model, grid, lag, "NoClip", arm),
        "lag": lambda model, grid, lag, method, arm: (model, grid, 0, method, arm),
        "decoupled": lambda model, grid, lag, method, arm: (model, grid, lag, method, "coupled"),
        "corrected": lambda model, grid, lag, method, arm: (model, grid, lag, method, "none"),
        "nucleus": lambda model, grid, lag, method, arm: (model, grid, lag, method, "coupled"),
    }[name]
    of_family = {
        "noclip": lambda key: key[4] == "coupled" and key[3] != "NoClip",
        "lag": lambda key: key[4] == "coupled" and key[2] > 0,
        "decoupled": lambda key: key[4] in ("none", "token_truncate", "sequence_mask"),
        "corrected": lambda key: key[4] in ("token_truncate", "sequence_mask"),
        "nucleus": lambda key: key[4] in ("replay", "top-p 1"),
    }[name]
    cells, found = cells_of(runs_of_study()), {}
    for key, of in cells.items():
        if of_family(key) and base_of(*key) in cells:
            pairs = of.join(cells[base_of(*key)].add_suffix("_base"), how="inner")
            if len(pairs):
                ess = pairs[["ess", "ess_base"]].min(axis=1).mean()
                found[key] = (len(pairs), *interval((pairs["final"] - pairs["final_base"]).to_numpy()), ess)
    adjusted = holm({key: of[4] for key, of in found.items()})
    return {key: (*of[:4], adjusted.get(key, np.nan), of[5]) for key, of in found.items()}


def block(name: str) -> tuple[dict[str, pd.DataFrame], str]:
    """The tables of a block of the page by the line above them, and its text."""
    text = (PAGE / "README.md").read_text(encoding="utf-8")
    text = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end {name} -->")[0].strip()
    parts, found = ["", *text.split("\n\n")], {}
    for title, part in pairwise(parts):
        if part.startswith("|"):
            lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()]
            table = pd.DataFrame(lines[2:], columns=["", *(cell.strip("| ") for cell in lines[0][1:])]).set_index("")
            found[title.strip(":")] = table
    return found, text


def check(text: str, cell: tuple, seeds: str) -> None:
    """That a cell's text is the mean, the interval, its star, and its number of seeds where that is not the row's."""
    n, mean, low, high, *p = cell
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", text)]
    assert numbers == pytest.approx([mean, low, high][: 1 if n < 3 else 3], abs=5.01e-4), (text, cell)
    assert text.replace(" ", "").endswith(f"(n={n})") == (str(n) != seeds), (text, cell)
    assert ("*" in text) == bool(p and p[0] < 0.05), (text, cell)


def check_all(tables: dict[str, pd.DataFrame], cells: dict[tuple, tuple]) -> None:
    """That tables have exactly these cells, which are {(model, row, column): cell}."""
    shown = {
        (model, row, column): (text, table.loc[row, "seeds"])
        for model, table in tables.items()
        for row, texts in table.drop(columns="seeds").iterrows()
        for column, text in texts.items()
        if text != "–"
    }
    assert shown.keys() == cells.keys()
    for key, (text, seeds) in shown.items():
        check(text, cells[key], seeds)


def test_off_policy_rewards():
    cells = {}
    for (model, grid, lag, method, _), of in cells_of(grid_runs()).items():
        for measure in ("final", "peak"):
            if measure == "final" or lag in (0, 8):
                found = (len(of), *interval(of[measure].to_numpy())[:3])
                cells[model, f"{grid}: {method}", f"{measure}, lag {lag}"] = found
    check_all(block("rewards")[0], cells)


def test_off_policy_against_noclip():
    found, (tables, _) = family("noclip"), block("against NoClip")
    counts, expected = tables.pop(""), {}
    for name in counts.index:
        of = [cell for key, cell in found.items() if name in ("all", f"{key[0]}, {key[1]}")]
        sides = [[c for c in of if c[3] < 0], [c for c in of if c[2] > 0]]
        after = [sum(c[4] < 0.05 for c in side) for side in sides]
        expected[name] = [str(n) for n in (sum(c[0] >= 3 for c in of), *map(len, sides), *after)]
    assert {name: list(row) for name, row in counts.iterrows()} == expected
    assert set(expected) == {"all", *(f"{key[0]}, {key[1]}" for key in found)}
    shown = {key: cell for key, cell in found.items() if cell[2] * cell[3] > 0}
    check_all(tables, {(key[0], f"{key[1]}: {key[3]}", f"lag {key[2]}"): cell for key, cell in shown.items()})


def test_off_policy_what_staleness_costs():
    found, (tables, text) = family("lag"), block("lag 8 minus lag 0")
    check_all(tables, {(key[0], key[3], key[1]): cell for key, cell in found.items() if key[2] == 8})
    assert f"for {sum(cell[0] >= 3 for cell in found.values())} differences" in text


def test_off_policy_ess_at_the_drop():
    cells, expected = cells_of(grid_runs()), {}
    for key, cell in sorted(family("lag").items()):
        if cell[0] >= 3:
            model, grid, lag, method, _ = key
            place, ess = (model, method, grid), cells[key]["ess"].mean()
            if cell[3] < 0 and " at " not in expected.get(place, ""):
                expected[place] = f"{ess:.3f} at lag {lag}{'*' if cell[4] < 0.05 else ''}"
            elif " at " not in expected.get(place, ""):
                expected[place] = f"({ess:.3f})"
    shown = {
        (model, method, grid): text
        for model, table in block("ess at the drop")[0].items()
        for method, texts in table.iterrows()
        for grid, text in texts.items()
        if text != "–"
    }
    assert shown == expected


def test_off_policy_ratios():
    names = ["final", "ess", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share"]
    expected = {
        (model, f"{grid}: {method}"): [of[name].mean() for name in names]
        for (model, grid, lag, method, _), of in cells_of(grid_runs()).items()
        if lag == 8 and grid in ("1 epoch, lr 3e-5", "4 epochs, lr 1e-4")
    }
    tables = block("ratios at lag 8")[0].items()
    shown = {(model, row): [float(x) for x in texts] for model, table in tables for row, texts in table.iterrows()}
    assert shown.keys() == expected.keys()
    assert all(shown[key] == pytest.approx(expected[key], abs=5.01e-4) for key in shown)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("decoupled", "decoupled minus coupled"),
        ("corrected", "corrected minus uncorrected"),
        ("nucleus", "nucleus minus ignore"),
    ],
)
def test_off_policy_arms(name, title):
    found, (tables, text) = family(name), block(title)
    assert (text == "No runs.") == (not found)
    check_all(tables, {(key[0], f"{key[3]}, {key[1]}, lag {key[2]}", key[4]): cell for key, cell in found.items()})
    assert not found or f"for {sum(cell[0] >= 3 for cell in found.values())} differences" in text


def test_off_policy_predictions():
    """The counts behind each prediction."""
    same, bounded = {"PSPO", "Clip", "P3O", "REINFORCE", "CISPO", "DPPO"}, {"Clip", "TOPR", "CISPO", "DPPO"}
    easy = {"1 epoch, lr 3e-5", "4 epochs, lr 3e-5"}
    chosen = {
        "1: PSPO, ": ("noclip", lambda k, ess: k[2] == 0 and k[1].startswith("1 ") and k[3] in same),
        "1: all within": ("noclip", lambda k, ess: k[2] == 0 and k[1] == "4 epochs, lr 3e-5"),
        "2: none differs": ("noclip", lambda k, ess: ess > 0.9),
        "2: (no claim": ("noclip", lambda k, ess: 0.5 <= ess <= 0.9),
        "2: Clip, TOPR": ("noclip", lambda k, ess: ess < 0.5 and k[3] in bounded),
        "2: P3O and SAPO": ("noclip", lambda k, ess: ess < 0.5 and k[3] in ("P3O", "SAPO")),
        "3: PSPO": ("noclip", lambda k, ess: k[3] == "PSPO"),
        "4: REINFORCE level": ("noclip", lambda k, ess: k[3] == "REINFORCE" and k[2] <= 2 and k[1] in easy),
        "5: with a": ("corrected", lambda k, ess: k[2] == 8),
        "5: decoupled": ("decoupled", lambda k, ess: k[4] != "none"),
        "6: replay level": ("nucleus", lambda k, ess: k[4] == "replay" and k[2] == 0),
        "6: replay above": ("nucleus", lambda k, ess: k[4] == "replay" and k[2] == 4),
    }
    (table,) = block("predictions")[0].values()
    rest = dict(table["found"])
    for claim, (name, about) in chosen.items():
        (row,) = [row for row in rest if row.startswith(claim)]
        cells = [cell for key, cell in family(name).items() if cell[0] >= 3 and about(key, cell[5])]
        said = rest.pop(row)
        if not cells:
            assert said == "no differences"
            continue
        sides = [[c for c in cells if c[3] < 0], [c for c in cells if c[2] > 0]]
        after = [sum(c[4] < 0.05 for c in side) for side in sides]
        numbers = [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", said.replace("below 0", "below"))]
        ends = [min(c[1] for c in cells), max(c[1] for c in cells)]
        assert numbers == pytest.approx([len(cells), *ends, *map(len, sides), *after], abs=5.01e-4), claim
    means = grid_runs().groupby(WHERE)[["final", "ess"]].mean()
    lowest = means.index[means["ess"] <= means["ess"].min() + 1e-12]  # several where methods make the same runs
    texts = [f"{means['ess'].min():.3f}: {of[3]} on {of[0]}, {of[1]}, lag {of[2]}" for of in lowest]
    assert rest.pop("2: (lowest mean ess)") in texts
    for row, said in rest.items():
        model = re.fullmatch(r"4: REINFORCE worst on (.*) at lag 8 in 4 epochs, lr 1e-4", row)[1]
        of = means["final"].xs((model, "4 epochs, lr 1e-4", 8), level=("model", "grid", "lag")).droplevel("arm")
        assert said == f"place {(of > of['REINFORCE']).sum() + 1} of {len(of)}"


def test_off_policy_budget():
    runs, (table,) = runs_of_study(), block("budget")[0].values()
    groups = {**dict(list(runs.groupby("experiment"))), "all": runs}
    assert {name: list(row) for name, row in table.iterrows()} == {
        name: [str(len(of)), str(of["seed"].nunique()), f"{of['seconds'].sum() / 3600:.2f}"]
        for name, of in groups.items()
    }


@pytest.mark.nightly
def test_off_policy_page_is_of_its_runs(tmp_path):
    """The script, run again, does not change the page."""
    again = shutil.copytree(PAGE, tmp_path / "again")
    subprocess.run([sys.executable, ROOT / "scripts/off_policy.py", again], check=True)
    assert (again / "README.md").read_bytes() == (PAGE / "README.md").read_bytes()
