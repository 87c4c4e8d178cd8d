"""Results pages: running their scripts changes nothing, and their main tables are what the runs say, computed anew."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("tiny-protocol", "tiny-control", "tiny-comparisons", "smollm2")  # the others are of finished studies


@pytest.mark.parametrize("name", PAGES)
def test_running_the_script_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    folder, readme = tmp_path / name, tmp_path / "README.md"
    shutil.copytree(RESULTS / name, folder)
    shutil.copy(ROOT / "README.md", readme)
    options = ["--readme", str(readme)] if name == "tiny-protocol" else []
    script = importlib.import_module("page_tables")
    monkeypatch.setattr(sys, "argv", ["page_tables", str(folder), *options])
    script.main()
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written == (RESULTS / name / "README.md").read_text(encoding="utf-8")
    assert readme.read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")


# The main table of every page, without the scripts


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
    for text, number in zip(shown, numbers, strict=True):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(number, abs=0.501 * 10**-digits), (cell, numbers)


def greedy_accuracy(page: str, stage: str) -> pd.Series:
    """Accuracy in percent by experiment, setting and seed, of models returned (after) or final."""
    values = pd.read_parquet(RESULTS / page / "runs.parquet").query(
        "measure == 'accuracy' and temperature == '0' and evaluation == 'summary'"
    )
    values = values[values["group"].isna() & (values["stage"] == stage)]
    return 100 * values.set_index(["experiment", "setting", "seed"])["value"].sort_index()


def rollouts(page: str, column: str) -> pd.Series:
    """A metric of every rollout that has it, in order, by experiment, setting and seed."""
    metrics = pd.read_parquet(RESULTS / page / "runs.parquet").sort_values("step").dropna(subset=column)
    return metrics.set_index(["experiment", "setting", "seed"])[column]


def final_rewards(page: str) -> pd.Series:
    return rollouts(page, "validation_reward").groupby(level=[0, 1, 2]).last()


def test_tiny_protocol():
    shown = table("tiny-protocol", "accuracy")
    for stage, column in (("after", 0), ("final", 1)):
        for (model, setting), values in greedy_accuracy("tiny-protocol", stage).groupby(level=[0, 1]):
            (row,) = (name for name in shown if name.split(",")[0] == setting.split(" ")[0])
            assert len(values) == 5
            assert_shown(shown[row][column + 3 * (model == "tiny-math")], interval(values))
    assert len(shown) == 6


def test_tiny_control():
    accuracy, area = greedy_accuracy("tiny-control", "final"), rollouts("tiny-control", "reward")
    area, validation = area.groupby(level=[0, 1, 2]).mean(), final_rewards("tiny-control")
    shown = table("tiny-control", "differences")
    for name in ("Clip", "NoClip 1 epoch"):  # rows with clipping come last, and are those that are left by this name
        setting = name.replace(" 1 epoch", "") + (" (epochs=1, " if "epoch" in name else " (") + "max_grad_norm=0.1)"
        for part, experiment in enumerate(("tokens", "steps")):
            for column, values in enumerate((area, validation, accuracy)):
                apart = values[experiment, setting] - values[experiment, "NoClip (max_grad_norm=0.1)"]
                assert len(apart) == 8
                assert_shown(shown[name][1 + 3 * part + column], interval(apart))


# scripts/answers.py


def script(name: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *map(str, args)], capture_output=True, encoding="utf-8"
    )


def evaluation(path: Path, answers: list[tuple[str, str, bool]]) -> Path:
    records = [
        {"problem": i, "prompt": f"problem {i}", "gold": gold, "completion": text, "correct": right,
         "contains_gold": gold in text} for i, (text, gold, right) in enumerate(answers)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records[::-1]))  # in any order
    return path


def test_changed_answers(tmp_path):
    before = [
        ("7 - 2 = 5", "9", False),
        ("2 + 3 + 4 = 9", "9", True),
        ("12 * 3 - 4 = 32", "32", True),
        ("x", "1", False),
    ]
    after = [
        ("so $7 + 2 = $9.", "9", True),
        ("3 * 3 = 10", "9", False),
        ("1,000 / 2 = 500", "32", False),
        ("1", "1", True),
    ]
    files = [evaluation(tmp_path / name, answers) for name, answers in (("a", before), ("b", after))]
    done = script("answers.py", "changed", *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "correct, 4 problems: 2 now, 2 no longer",
        "contains_gold, 4 problems: 2 now, 2 no longer",
        "before: 1 answers with an equation; first one computed right 1, its value is the gold 0, both 0",
        "after:  3 answers with an equation; first one computed right 2, its value is the gold 2, both 1",
    ]
    other = evaluation(tmp_path / "c", before[:3])
    assert "not of the same problems" in script("answers.py", "changed", files[0], other).stderr


def test_solvable_problems(tmp_path):
    completions = evaluation(tmp_path / "completions.jsonl", [("7 of 9", "9", False), ("x", "1", False)])
    done = script("answers.py", "solvable", completions, tmp_path / "problems" / "train.jsonl")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "problems" / "train.jsonl").read_text()) == {"prompt": "problem 0", "answer": "9"}
