"""results/off-policy holds the numbers of its table of runs; computed here by other code than the page's."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "off-policy"

MODELS, RATIOS = ["tiny-base", "tiny-math"], ["ess", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share"]
HOLD = ["Clip", "DPPO", "TOPR", "GSPO", "LUSPO", "GMPO", "VESPO"]  # by masks, or by weights of whole completions
LOWEST = [["GSPO", "LUSPO"], ["LUSPO", "GSPO"]]
FALL = ["NoClip", "PSPO", "P3O", "CISPO", "REINFORCE"]
WHERE = ["model", "grid", "lag", "method", "arm"]


@functools.cache
def runs_of_study() -> pd.DataFrame:
    """Final and peak reward, means of diagnostics and seconds of every finished run, with what it is."""
    settings = yaml.load((PAGE / "settings.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    key = ["experiment", "setting", "seed"]
    seconds = pd.read_parquet(PAGE / "summaries.parquet").query("measure == 'seconds'").set_index(key)["value"]
    rollouts = pd.read_parquet(PAGE / "runs.parquet").sort_values("step")
    by_run = rollouts.groupby(key)
    found = by_run[RATIOS].mean()
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


@functools.cache
def page() -> str:
    return " ".join((PAGE / "README.md").read_text(encoding="utf-8").split())


def rows(name: str) -> dict[str, list[str]]:
    """The cells of a block's table by its first column."""
    text = (PAGE / "README.md").read_text(encoding="utf-8").partition(f"<!-- {name} -->")[2]
    lines = [line.strip("|").split(" | ") for line in text.partition("<!-- end")[0].splitlines() if line[:1] == "|"]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[2:]}


def text(cell: tuple, digits: int = 3) -> str:
    return f"{cell[0]:.{digits}f} [{cell[1]:.{digits}f}, {cell[2]:.{digits}f}]"


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(PAGE / name).set_index(WHERE)


def test_off_policy_cells():
    expected, found = cells_of(runs_of_study()), table("cells.csv")
    assert set(found.index) == set(expected)
    for key, row in found.iterrows():
        of = expected[key]
        numbers = [len(of), *interval(of["final"].to_numpy())[:3], *of[["peak", *RATIOS]].mean()]
        values = row[["seeds", "final", "low", "high", "peak", *RATIOS]].astype(float)
        assert values.tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-6, nan_ok=True), key


@pytest.mark.parametrize("name", ["noclip", "lag", "decoupled", "corrected", "nucleus"])
def test_off_policy_differences(name):
    expected, found = family(name), table("differences.csv").query("family == @name")
    assert set(found.index) == set(expected)
    for key, row in found.iterrows():
        values = row[["seeds", "mean", "low", "high", "holm", "ess"]].astype(float)
        assert values.tolist() == pytest.approx(expected[key], rel=1e-5, abs=1e-6, nan_ok=True), key


def test_off_policy_best_settings():
    means = grid_runs().groupby(["model", "method", "lag", "grid"])["final"].mean().reset_index()
    shown, costs = rows("best"), {}
    for (model, method), of in means.groupby(["model", "method"]):
        best = [of[of["lag"] == lag].nlargest(1, "final").iloc[0] for lag in (0, 8)]
        costs[model, method] = best[0]["final"] - best[1]["final"]
        texts = [f"{cell['final']:.3f} ({re.sub(' epochs?, lr ', ' x ', cell['grid'])})" for cell in best]
        first = 1 if model == "tiny-base" else 4
        assert shown[method][first : first + 3] == [*texts, f"{costs[model, method]:.3f}"]
    mean = [pd.Series(costs).xs(model).mean() for model in MODELS]
    assert "cost {:.3f} of reward on tiny-base and {:.3f} on tiny-math".format(*mean) in page()
    for i in (2, 5):
        assert sorted(shown.keys() - {"untrained"}, key=lambda method: shown[method][i])[:2] in LOWEST


def contrast(model: str, grid: str, lag: int, ahead: list[str], behind: list[str]) -> str:
    """Mean over methods minus mean over others, over the seeds that all have."""
    of = grid_runs().query("model == @model and grid == @grid and lag == @lag")
    by_seed = of.pivot(index="seed", columns="method", values="final")[ahead + behind].dropna()
    return text(interval((by_seed[ahead].mean(axis=1) - by_seed[behind].mean(axis=1)).to_numpy()))


def test_off_policy_contrasts():
    corner, mild = "4 epochs, lr 1e-4", "1 epoch, lr 3e-5"
    base, math = (contrast(model, corner, 8, ["Clip", "TOPR"], ["NoClip", "P3O"]) for model in MODELS)
    assert f"above NoClip and P3O by {base} on tiny-base and {math} on tiny-math" in page()
    base, math = (contrast(model, corner, 8, HOLD, FALL) for model in MODELS)
    assert f"CISPO and REINFORCE by {base} and {math}" in page()
    base, math = (contrast(model, mild, 8, FALL, HOLD) for model in MODELS)
    assert f"below the five by {base} and {math}" in page()


def test_off_policy_movement():
    final = grid_runs().query("method == 'NoClip'").groupby(["model", "grid", "lag"])["final"].mean()
    texts = [
        "{:.3f} and {:.3f}".format(*(final[model, grid, lag] for grid in ("4 epochs, lr 3e-5", "1 epoch, lr 1e-4")))
        for model in MODELS for lag in (0, 8)
    ]  # fmt: skip
    assert "{} on time, {} at lag 8 on tiny-base; {}, {} on tiny-math".format(*texts) in page()


def test_off_policy_alarms():
    """How much of the final reward of 4 epochs at 1e-4 the KL, the ess and the kind of method explain."""
    corner, shares, ranks, early = grid_runs().query("grid == '4 epochs, lr 1e-4'"), [], [], []
    rollouts = pd.read_parquet(PAGE / "runs.parquet").sort_values("step")
    key = ["experiment", "setting", "seed"]
    first = rollouts.groupby(key).head(8).groupby(key)["kl_old_new"].mean().rename("first")
    for model in MODELS:
        runs = corner[corner["model"] == model]
        cells = runs.groupby(["method", "lag"])[["final", "kl_old_new", "ess"]].mean().reset_index()
        kl, holds = np.log(cells["kl_old_new"]), cells["method"].isin(HOLD).astype(float)
        for of in ([kl], [holds], [kl, holds]):
            x = np.column_stack([np.ones(len(cells)), *of])
            rest = cells["final"] - x @ np.linalg.lstsq(x, cells["final"], rcond=None)[0]
            shares.append(1 - rest.var() / cells["final"].var())
        ranks += [stats.spearmanr(cells[name], cells["final"])[0] for name in ("kl_old_new", "ess")]
        runs = runs.join(first, on=key).assign(first=lambda of: np.log(of["first"]))
        within = runs.groupby(["method", "lag"])[["first", "final"]].transform(lambda of: of - of.mean())
        early.append(within.corr().iloc[0, 1])
        assert (len(cells), len(runs)) == (65, 255)
    of = [f"{shares[i]:.2f} and {shares[i + 3]:.2f}" for i in range(3)]
    said = "R2 {} of the final reward, being one of the seven {}, both together {}".format(*of)
    assert said in page()
    assert "{:.2f} and {:.2f} for the KL, {:.2f} and {:.2f} for the ess".format(*ranks[::2], *ranks[1::2]) in page()
    assert "(r {:.2f} and {:.2f} over 255 runs each)".format(*early) in page()


def test_off_policy_cells_named():
    cells, corner = table("cells.csv"), "4 epochs, lr 1e-4"
    decoupled, coupled = (cells.loc[("tiny-base", corner, 8, "NoClip", arm)] for arm in ("none", "coupled"))
    said = "mean KL of {:.2f} and ends at {:.3f}, coupled NoClip has {:.3f} and ends at {:.3f}"
    assert said.format(*(cell[name] for cell in (decoupled, coupled) for name in ("kl_old_new", "final"))) in page()
    worst = [cells.loc[(model, corner, 8, "REINFORCE", "coupled"), "final"] for model in MODELS]
    assert "4 epochs at 1e-4 ({:.3f} and {:.3f})".format(*worst) in page()
    mild = cells.query("grid == '1 epoch, lr 3e-5' and lag == 8 and method in ['GSPO', 'LUSPO']")
    assert f"leave {mild['zero_weight_share'].min():.0%} or more of the tokens" in page()
    arms = [text(family("decoupled")["tiny-base", corner, 8, method, arm][1:4])
            for arm in ("sequence_mask", "token_truncate") for method in ("NoClip", "PSPO")]  # fmt: skip
    assert "by {} for NoClip and {} for PSPO; with `token_truncate` by {} and {}".format(*arms) in page()


def test_off_policy_families_named():
    for name, about, words in (
        ("noclip", lambda key: key[3] == "PSPO", "40 differences from {:.3f} to {:.3f}, none"),
        ("nucleus", lambda key: key[4] == "replay", "12 differences from {:.3f} to {:.3f}, all intervals with 0"),
    ):
        found = [cell for key, cell in family(name).items() if about(key)]
        assert words.format(min(c[1] for c in found), max(c[1] for c in found)) in page()
        assert len(found) == int(words[:2])
        assert all(cell[2] <= 0 <= cell[3] for cell in found)


def test_off_policy_signal():
    rollouts = pd.read_parquet(PAGE / "runs.parquet")
    groups = 16 * (1 - rollouts["zero_advantage_share"]).groupby(rollouts["experiment"]).mean()
    math = groups[groups.index.str.startswith("math")]
    for of, model in ((groups.drop(math.index), "tiny-base"), (math, "tiny-math")):
        assert re.search(rf"{of.min():.1f} to {of.max():.1f}( of 16)? on {model}", page())


def test_off_policy_against_noclip():
    """Counts of the intervals that exclude 0."""
    found, expected = family("noclip"), {}
    for name in rows("against NoClip"):
        of = [cell for key, cell in found.items() if name in ("all", f"{key[0]}, {key[1]}")]
        expected[name] = [str(n) for n in (sum(c[0] >= 3 for c in of), *counts(of))]
    assert rows("against NoClip") == expected
    assert set(expected) == {"all", *(f"{key[0]}, {key[1]}" for key in found)}


def counts(cells: list[tuple]) -> list[int]:
    """How many intervals lie below 0 and above it, and of these after Holm's correction."""
    sides = [[c for c in cells if c[3] < 0], [c for c in cells if c[2] > 0]]
    return [*map(len, sides), *(sum(c[4] < 0.05 for c in side) for side in sides)]


def test_off_policy_predictions():
    """The counts behind each prediction."""
    same = {"PSPO", "Clip", "P3O", "REINFORCE", "CISPO", "DPPO"}
    easy = {"1 epoch, lr 3e-5", "4 epochs, lr 3e-5"}
    chosen = {
        "1: PSPO, ": ("noclip", lambda k, ess: k[2] == 0 and k[1].startswith("1 ") and k[3] in same),
        "1: all within": ("noclip", lambda k, ess: k[2] == 0 and k[1] == "4 epochs, lr 3e-5"),
        "2: none differs": ("noclip", lambda k, ess: ess > 0.9),
        "2: Clip, TOPR": ("noclip", lambda k, ess: ess < 0.5),
        "3: PSPO": ("noclip", lambda k, ess: k[3] == "PSPO"),
        "4: REINFORCE level": ("noclip", lambda k, ess: k[3] == "REINFORCE" and k[2] <= 2 and k[1] in easy),
        "5: with a": ("corrected", lambda k, ess: k[2] == 8),
        "5: decoupled": ("decoupled", lambda k, ess: k[4] != "none"),
        "6: replay level": ("nucleus", lambda k, ess: k[4] == "replay" and k[2] == 0),
        "6: replay above": ("nucleus", lambda k, ess: k[4] == "replay" and k[2] == 4),
    }
    rest = {claim: found for claim, (found, _) in rows("predictions").items()}
    for claim, (name, about) in chosen.items():
        (row,) = [row for row in rest if row.startswith(claim)]
        cells = [cell for key, cell in family(name).items() if cell[0] >= 3 and about(key, cell[5])]
        said = rest.pop(row)
        if not cells:
            assert said == "no differences"
            continue
        numbers = [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", said.replace("below 0", "below"))]
        ends = [min(c[1] for c in cells), max(c[1] for c in cells)]
        assert numbers == pytest.approx([len(cells), *ends, *counts(cells)], abs=5.01e-4), claim
    means = grid_runs().groupby(WHERE)["final"].mean()
    for row, said in rest.items():
        model = re.fullmatch(r"4: REINFORCE worst on (.*) at lag 8 in 4 epochs, lr 1e-4", row)[1]
        of = means.xs((model, "4 epochs, lr 1e-4", 8), level=("model", "grid", "lag")).droplevel("arm")
        assert said == f"place {(of > of['REINFORCE']).sum() + 1} of {len(of)}"


def test_off_policy_budget():
    runs = runs_of_study()
    groups = {**dict(list(runs.groupby("experiment"))), "all": runs}
    assert rows("budget") == {
        name: [str(len(of)), str(of["seed"].nunique()), f"{of['seconds'].sum() / 3600:.2f}"]
        for name, of in groups.items()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_off_policy_untrained(model, tmp_path):
    """The level on the page is that of a run of the study before its first step."""
    study = yaml.safe_load((ROOT / "configs/sweep/off-policy.yaml").read_text(encoding="utf-8"))["experiments"]
    switches = study["base-1"]["shared"] | {"model.name_or_path": model, "run.max_steps": 1}
    args = [f"--{name}={value}" for name, value in switches.items()]
    subprocess.run([sys.executable, "-m", "pspo.train", *args, f"--run.output_dir={tmp_path}/run"], check=True)
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    level = summary["validation"]["untrained"]["validation_reward"]
    assert rows("best")["untrained"][1 if model == "tiny-base" else 4] == f"{level:.3f}"
    assert f"{model} has {level:.3f}" in page() or f"{model} {level:.3f}" in page()


@pytest.mark.nightly
def test_off_policy_page_is_of_its_runs(tmp_path):
    """The script, run again, does not change the page and its tables."""
    again = shutil.copytree(PAGE, tmp_path / "again")
    subprocess.run([sys.executable, ROOT / "scripts/off_policy.py", again], check=True)
    for name in ("README.md", "cells.csv", "differences.csv"):
        assert (again / name).read_bytes() == (PAGE / name).read_bytes()
