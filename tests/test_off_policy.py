"""results/off-policy: its tables of cells and differences by other code than the page's, and the page by its script."""

import collections
import functools
import itertools
import json
import runpy
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "off-policy"
RATIOS = ["ess", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share"]
WHERE = ["model", "grid", "lag", "method", "arm"]
Cell = namedtuple("Cell", WHERE)
FAMILIES = {  # which cells are compared, and what is another in those that they are compared with
    "noclip": (lambda cell: cell.arm == "coupled" and cell.method != "NoClip", {"method": "NoClip"}),
    "lag": (lambda cell: cell.arm == "coupled" and cell.lag > 0, {"lag": 0}),
    "decoupled": (lambda cell: cell.arm in ("none", "token_truncate", "sequence_mask"), {"arm": "coupled"}),
    "corrected": (lambda cell: cell.arm in ("token_truncate", "sequence_mask"), {"arm": "none"}),
    "nucleus": (lambda cell: cell.arm in ("replay", "top-p 1"), {"arm": "coupled"}),
}


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


@functools.cache
def cells_of_study() -> dict[Cell, pd.DataFrame]:
    return {Cell(*key): of for key, of in runs_of_study().groupby(WHERE)}


@functools.cache
def runs_by_seed() -> dict[Cell, dict[int, dict[str, float]]]:
    """Final reward and ess of a cell's runs."""
    return {cell: of.set_index("seed")[["final", "ess"]].T.to_dict() for cell, of in cells_of_study().items()}


def interval(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, 95% t-interval and p of being 0; NaN below three values."""
    n, mean = len(values), values.mean()
    if n < 3:
        return (mean, np.nan, np.nan, np.nan)
    if np.ptp(values) == 0:  # t is not defined
        return (values[0], values[0], values[0], float(values[0] == 0))
    error = values.std(ddof=1) / n**0.5
    half = stats.t.ppf(0.975, n - 1) * error
    return (mean, mean - half, mean + half, 2 * stats.t.sf(abs(mean) / error, n - 1))


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
    belongs, other = FAMILIES[name]
    cells, found = runs_by_seed(), {}
    for cell, runs in cells.items():
        base = cells.get(cell._replace(**other), {})
        pairs = [(run, base[seed]) for seed, run in runs.items() if seed in base]
        if belongs(cell) and pairs:
            differences = np.array([one["final"] - two["final"] for one, two in pairs])
            ess = np.mean([min(one["ess"], two["ess"]) for one, two in pairs])
            found[cell] = (len(pairs), *interval(differences), ess)
    adjusted = holm({cell: of[4] for cell, of in found.items()})
    return {cell: (*of[:4], adjusted.get(cell, np.nan), of[5]) for cell, of in found.items()}


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(PAGE / name).set_index(WHERE)


def test_off_policy_cells():
    expected, found = cells_of_study(), table("cells.csv")
    assert set(found.index) == set(expected)
    for key, row in found.iterrows():
        of = expected[key]
        numbers = [len(of), *interval(of["final"].to_numpy())[:3], *of[["peak", *RATIOS]].mean()]
        values = row[["seeds", "final", "low", "high", "peak", *RATIOS]].astype(float)
        assert values.tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-6, nan_ok=True), key


@pytest.mark.parametrize("name", FAMILIES)
def test_off_policy_differences(name):
    expected, found = family(name), table("differences.csv").query("family == @name")
    assert set(found.index) == set(expected)
    for key, row in found.iterrows():
        values = row[["seeds", "mean", "low", "high", "holm", "ess"]].astype(float)
        assert values.tolist() == pytest.approx(expected[key], rel=1e-5, abs=1e-6, nan_ok=True), key


def test_off_policy_in_words():
    """The first sentences, and the methods with the lowest means: what lag costs, and of how much."""
    grid = runs_of_study().query("arm == 'coupled'")
    text = " ".join((PAGE / "README.md").read_text(encoding="utf-8").split())
    plan = " ".join((ROOT / "benchmarks/plan/README.md").read_text(encoding="utf-8").split())
    numbers, means = {}, grid.groupby(["model", "lag", "method", "grid"])["final"].mean()
    for model, untrained in (("tiny-base", 0.381), ("tiny-math", 0.829)):
        of, lag8 = means[model].groupby(level=["lag", "method"]).max(), means[model, 8]
        far = means[model].xs("4 epochs, lr 1e-4", level="grid")
        numbers[model] = [of[0].mean() - untrained, (of[0] - of[8]).mean(), (far[0] - far[8]).mean()]
        assert set(of[8].nsmallest(2).index) == {"GSPO", "LUSPO"}
        runs = grid.query("model == @model and lag == 8 and seed < 3")
        runs = runs.set_index(["method", "grid", "seed"])["final"].sort_index()
        shared = {method: runs[cell] for method, cell in lag8.groupby(level="method").idxmax().items()}
        pairs = [(low, other) for low in ("GSPO", "LUSPO") for other in set(shared) - {"GSPO", "LUSPO"}]
        apart = [interval((shared[low] - shared[other]).to_numpy()) for low, other in pairs]
        assert len(apart) == 22
        assert any(high < 0 for _, _, high, _ in apart) == (model == "tiny-math")
        numbers[model] += [shared[method].mean() for method in ("GSPO", "Clip")]
    base, math = ([f"{number:.3f}" for number in numbers[model]] for model in ("tiny-base", "tiny-math"))
    at, shown = ("tiny-base", "4 epochs, lr 1e-4", 8, "NoClip"), {}
    for name, arm in itertools.product(("decoupled", "corrected"), ("none", "sequence_mask", "token_truncate")):
        if (name, arm) != ("corrected", "none"):
            shown[name, arm] = "{1:.3f} [{2:.3f}, {3:.3f}]".format(*family(name)[Cell(*at, arm)])
    above = collections.Counter(cell.arm for cell, of in family("corrected").items() if cell.lag == 8 and of[2] > 0)
    lost = -family("lag")[Cell(*at, "coupled")][1]
    assert 0.45 < family("decoupled")[Cell(*at, "none")][1] / lost < 0.55
    survivors = [cell for cell, of in family("noclip").items() if of[4] < 0.05]
    assert survivors == [Cell("tiny-base", "4 epochs, lr 1e-4", 8, "Clip", "coupled")]
    for page, sentence in (
        (text, f"held for {above['sequence_mask']} of 6 with sequence_mask, {above['token_truncate']} of 6 with"),
        (
            text,
            f"by {shown['decoupled', 'none']} without a correction, by {shown['decoupled', 'sequence_mask']} with "
            f"`sequence_mask`, {shown['corrected', 'sequence_mask']} more, "
            f"and by {shown['decoupled', 'token_truncate']}",
        ),
        (
            text,
            f"costs {base[1]} of the {base[0]} that training gains on tiny-base, {math[1]} of {math[0]} on tiny-math",
        ),
        (text, f"with 4 epochs at 1e-4 for all, {base[2]} and {math[2]}"),
        (text, f"on tiny-math GSPO ends at {math[3]} and Clip at {math[4]}"),
        (text, f"over the first three Clip has {math[4]} in place of {means['tiny-math', 8, 'Clip'].max():.3f}"),
        (
            plan,
            f"a lag of 8 costs {base[1]} of the {base[0]} of reward that training gains, and {math[1]} of {math[0]}",
        ),
        (plan, f"with 4 epochs at 1e-4 for all {base[2]} and {math[2]}"),
    ):
        assert sentence in page, sentence


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["tiny-base", "tiny-math"])
def test_off_policy_untrained(model, tmp_path):
    """The level on the page is that of a run of the study before its first step."""
    study = yaml.safe_load((ROOT / "configs/sweep/off-policy.yaml").read_text(encoding="utf-8"))["experiments"]
    switches = study["base-1"]["shared"] | {"model.name_or_path": model, "run.max_steps": 1}
    args = [f"--{name}={value}" for name, value in switches.items()]
    subprocess.run([sys.executable, "-m", "pspo.train", *args, f"--run.output_dir={tmp_path}/run"], check=True)
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    level = f"{summary['validation']['untrained']['validation_reward']:.3f}"
    assert f'"{model}": {level}' in (ROOT / "scripts/off_policy.py").read_text(encoding="utf-8")


def test_off_policy_page_is_of_its_runs(tmp_path, monkeypatch):
    """The script, run again, does not change the page and its tables."""
    again = shutil.copytree(PAGE, tmp_path / "again")
    monkeypatch.setattr(sys, "argv", ["off_policy.py", str(again)])
    runpy.run_path(str(ROOT / "scripts/off_policy.py"), run_name="__main__")
    for name in ("README.md", "cells.csv", "differences.csv"):
        assert (again / name).read_bytes() == (PAGE / name).read_bytes()
