"""Results pages: running their script changes nothing, and their key numbers are what the runs say, computed anew."""

import importlib
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


# Key numbers of every page, without the script


def table(page: str, name: str) -> dict[str, list[str]]:
    """Cells of a table by its rows' first cells."""
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    lines = text.partition(f"<!-- table: {name} -->")[2].partition("<!-- /table -->")[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {first: cells for first, *cells in rows}


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
