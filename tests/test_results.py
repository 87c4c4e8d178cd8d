"""Results pages: running their script changes nothing, and their key numbers are what the runs say, computed anew."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("tiny-protocol", "tiny-control", "smollm2", "stale-rollouts")


def test_running_the_script_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    shutil.copytree(RESULTS, tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    script = importlib.import_module("results_pages")
    monkeypatch.setattr(sys, "argv", ["results_pages", "--root", str(tmp_path)])
    script.main()
    for page in ("README.md", *(f"results/{name}/README.md" for name in PAGES)):
        assert (tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")


def test_condensed_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    for seed in (0, 1):
        folder = tmp_path / f"first/noclip/seed-{seed}"
        folder.mkdir(parents=True)
        config = {"model": {"name_or_path": "tiny"}, "data": {"name": "sums"}, "run": {"seed": seed}}
        config["algorithm"] = {"surrogate": {"class_path": "pspo.losses.NoClip", "init_args": {}}}
        (folder / "config.yaml").write_text(json.dumps(config))
        rollouts = [{"step": 2, "reward": 0.2}, {"step": 4, "reward": 0.4 + seed, "validation_reward": 0.5}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
        (folder / "summary.json").write_text(json.dumps({"best_step": 4}))
    output = tmp_path / "runs.csv"
    monkeypatch.setattr(sys, "argv", ["condense_runs", str(tmp_path / "first"), "--output", str(output)])
    importlib.import_module("condense_runs").main()
    assert output.read_text().splitlines() == [
        "experiment,method,seed,reward,validation,best_step",
        "first,NoClip,0,0.3,0.5,4",
        "first,NoClip,1,0.8,0.5,4",
    ]


# Key numbers of every page, without the script


def table(page: str, name: str) -> dict[str, list[str]]:
    """Cells of a table by its rows' first cells."""
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    lines = text.partition(f"<!-- table: {name} -->")[2].partition("<!-- /table -->")[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {first: cells for first, *cells in rows}


def number(page: str, name: str) -> str:
    """A text between markers in a sentence."""
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    return text.partition(f"<!-- n: {name} -->")[2].partition("<!-- /n -->")[0]


def interval(values) -> list[float]:
    """Mean and ends of the 95% t-interval."""
    values = np.asarray(values, dtype=float)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


def assert_shown(cell: str, numbers: list[float]) -> None:
    """A cell's numbers are these, to the last digit that it shows."""
    shown = re.findall(r"[-+]?\d+(?:\.\d+)?", cell)
    assert len(shown) == len(numbers), (cell, numbers)
    for text, value in zip(shown, numbers, strict=True):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(value, abs=0.501 * 10**-digits), (cell, numbers)


def seeds(runs: pd.DataFrame, measure: str, **where) -> np.ndarray:
    """A measure of the runs that have these values, in order of seeds."""
    for column, value in where.items():
        runs = runs[runs[column] == value]
    assert runs["seed"].is_unique
    return runs.sort_values("seed")[measure].to_numpy()


def test_tiny_protocol():
    runs = pd.read_csv(RESULTS / "tiny-protocol/runs.csv")
    shown = table("tiny-protocol", "accuracy")
    for method in ("NoClip", "Clip", "PSPO", "P3O", "SAPO", "TOPR"):
        (row,) = (name for name in shown if name.split(",")[0] == method)
        for column, model in ((0, "tiny-base"), (3, "tiny-math")):
            values = seeds(runs, "returned_accuracy", experiment=model, method=method)
            assert len(values) == 5
            assert_shown(shown[row][column], interval(values))
            if method != "NoClip":
                noclip = seeds(runs, "returned_accuracy", experiment=model, method="NoClip")
                assert_shown(shown[row][column + 1], interval(values - noclip))


def test_tiny_control():
    runs = pd.read_csv(RESULTS / "tiny-control/runs.csv")
    shown = table("tiny-control", "control")
    for column, clip, measures in ((2, 0.0, ("validation", "accuracy")), (4, 0.1, ("validation",))):
        base = {"method": "NoClip", "epochs": 2, "max_grad_norm": clip}
        for row, experiment, where, base_experiment in (
            ("PSPO 0.4, 2 epochs", "tokens", {"method": "PSPO", "alpha": 0.4}, "tokens"),
            ("NoClip, 1 epoch", "tokens", {"method": "NoClip", "epochs": 1}, "tokens"),
            ("NoClip, 1 epoch, twice the rate", "path", {"method": "NoClip"}, "tokens"),
            ("NoClip, 1 epoch, twice the tokens", "steps", {"method": "NoClip", "epochs": 1}, "steps"),
        ):
            for i, measure in enumerate(measures):
                values = seeds(runs, measure, experiment=experiment, max_grad_norm=clip, **where)
                apart = values - seeds(runs, measure, experiment=base_experiment, **base)
                assert len(apart) == 8
                assert_shown(shown[row][column + i].strip("*"), interval(apart))

    alphas = runs[runs["experiment"] == "alpha"].assign(scale=lambda rows: rows["advantage_scale"].fillna("none"))
    means = alphas.groupby(["scale", "max_grad_norm", "dtype", "alpha"])["validation"].mean().unstack()
    assert means.shape == (8, 6)
    assert_shown(number("tiny-control", "spread"), [(means.max(axis=1) - means.min(axis=1)).max()])


def test_smollm2():
    runs = pd.read_parquet(RESULTS / "smollm2/runs.parquet")
    found = []
    for name in ("before", "seed-0", "seed-1"):
        rows = runs[(runs["evaluation"] == f"{name}-word-problems") & runs["group"].isna()]
        found.append(976 * rows.set_index("measure").loc["true_accuracy", "value"])
    assert found == pytest.approx([110, 159, 133])
    p = stats.fisher_exact([[110, 866], [133, 843]]).pvalue
    assert_shown(number("smollm2", "p"), [p])
    for name, count in zip(("before", "seed 0", "seed 1"), found, strict=True):
        assert_shown(number("smollm2", name), [100 * count / 976])


def test_costs_of_stale_rollouts():
    runs = pd.read_csv(RESULTS / "stale-rollouts/runs.csv")
    names = runs["method"] + (runs["aggregation"] == "dr_grpo").map({True: " by length", False: ""})
    for model, untrained, suffix in (("tiny-base", 0.381, ""), ("tiny-math", 0.829, " math")):
        best = {0: [], 8: []}
        for lag, values in best.items():
            for method in names.unique():
                chosen = runs[(names == method) & (runs["lag"] == lag) & (runs["name_or_path"] == model)]
                settings = [of["validation"].mean() for _, of in chosen.groupby(["epochs", "lr"])]
                assert len(settings) == 4
                values.append(max(settings))
        assert len(best[0]) == 13
        gain, cost = np.mean(best[0]) - untrained, np.mean(best[0]) - np.mean(best[8])
        if model == "tiny-base":
            assert_shown(number("stale-rollouts", "gain"), [gain])
            assert_shown(number("stale-rollouts", "cost"), [cost])
        row = table("stale-rollouts", "lags")["8"]
        assert_shown(row[1 if not suffix else 3], [cost])


def test_clip_against_noclip():
    shown = table("stale-rollouts", "evidence")
    forks = pd.read_csv(RESULTS / "stale-rollouts/forks.csv").query("model == 'tiny-base'")
    for lag in (0, 1, 2, 4, 8):
        chosen = forks.query("lag == @lag and aim == 0.004 and rollouts == 9 and stage in ('first', 'dose')")
        by_run = chosen.set_index(["surrogate", "run"])["correct"]
        apart = (by_run["Clip"] - by_run["NoClip"]).to_numpy()
        assert len(apart) == 10
        assert_shown(shown[f"one rollout, lag {lag}"][1], interval(apart))
    own = forks.query("stage == 'lateclip' and surrogate == 'Clip'")["correct"]
    assert_shown(number("stale-rollouts", "own"), interval(own))

    gradients = pd.read_csv(RESULTS / "stale-rollouts/gradients.csv")
    chosen = gradients.query("model == 'SmolLM2' and lag == 8 and metric == 'plain'").set_index(["surrogate", "run"])
    apart = (chosen["dot"]["Clip"] - chosen["dot"]["NoClip"]) / chosen["target2"]["NoClip"].mean()
    assert_shown(number("stale-rollouts", "product"), interval(apart))

    controls = pd.read_csv(RESULTS / "stale-rollouts/controls.csv")
    wide = seeds(controls, "validation", experiment="ranges", method="Clip", epsilon=0.4, lr=3e-5)
    noclip = seeds(controls, "validation", experiment="rates", method="NoClip", lag=8, lr=1e-5)  # every seed's choice
    assert_shown(number("stale-rollouts", "range"), interval(wide - noclip))
