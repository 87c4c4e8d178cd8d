"""From runs to tables: values of each run, their differences, and cells, which are means over seeds."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from pspo.terminal import one_line
from pspo_lab.power import Estimate, estimate
from pspo_lab.runs import STAGES, LabRun, Runs, TestResult, grouped, read_problems, skip_unreadable
from pspo_lab.settings import make_setting, methods

BASELINES = ("Clip", "NoClip")  # of the paired differences
TREATMENT = ("algorithm.", "optimizer.")  # what the two of a pair may differ in
SEEDS_FOR_AN_INTERVAL = 3
COMPARED = ("final reward", "area under the curve", "final validation reward")
OF_SEEDS = ("collapsed", "returned untrained")  # shares, which have no interval
DIFFERENCES = "Paired differences"
NOTES = {
    "Accuracy": "Greedy or at temperature T, of the model that each run returned, the best by validation, and of its "
    "final one; gold anywhere is the paper's true accuracy. Mean over seeds, from three on with the 95% t-interval "
    "over seeds and problems, both taken as samples; for one seed over problems.",
    "Learning": "Training reward: peak and final are means over a tenth of the rollouts, the area over all. A seed has "
    "collapsed when its final reward is below half of its peak; it returned the untrained model when no validation was "
    "better than step 0's.",
    DIFFERENCES: "Setting minus baseline of the same seed and experiment, which saw the same prompts in the "
    "same order, with its 95% t-interval. detects: the smallest difference that so many seeds and problems find at 80% "
    "power; then the seeds that would find so little, - if no 1,000 would on so many problems.",
}


class Column(NamedTuple):
    """A measure in tables, of a test such as "gsm8k test, n = 1,319", or of the training; shares are in percent."""

    test: str  # "" for the training
    measure: str
    is_share: bool = False

    def __str__(self) -> str:
        return f"{self.test}: {self.measure}{' (%)' if self.is_share else ''}".removeprefix(": ")

    @property
    def unit(self) -> str:
        return " points" if self.is_share else ""

    def number(self, number: float) -> str:
        factor, digits = (100, 1) if self.is_share else (1, 3)
        return f"{round(factor * float(number), digits) + 0.0:.{digits}f}"

    def amount(self, number: float) -> str:
        return self.number(number) + self.unit


@dataclass(frozen=True)
class Value:
    """A number of a run, or the difference of two runs."""

    run: LabRun | None  # None for a model before training
    row: str  # the setting, that model, or the difference of two settings
    column: Column
    value: float
    interval: Sequence[float] | None = None  # 95% over problems
    answers: pd.Series | None = None  # the problems' values, which it is the mean of; None where they are unknown

    def __sub__(self, other: "Value") -> "Value":
        answers = None
        if self.answers is not None and other.answers is not None and self.answers.index.equals(other.answers.index):
            answers = self.answers - other.answers
        row = f"{self.row} - {other.row}"
        return Value(self.run, row, self.column, self.value - other.value, answers=answers)


def accuracies(runs: Runs, *stages: str, sampled: bool = False) -> list[Value]:
    """Values of tests in these stages, greedy or all. An evaluation counts before the summary's same number."""
    has_limits = len({test.limit for test in runs.tests} - {None}) > 1
    values: dict[tuple[LabRun | str, Column], Value] = {}
    for test in sorted(runs.tests, key=lambda test: STAGES.index(test.stage)):  # of one stage a run's summary is first
        is_greedy = test.temperature == "0"
        if test.stage not in stages or not (is_greedy or sampled):
            continue
        title = test.problems
        if has_limits and test.limit is not None:
            title += f", {test.limit:.0f} tokens"
        if not is_greedy:
            title += f", T = {test.temperature}"
        for measure in shown_measures(test):
            name = f"{'final ' if test.stage == 'final' else ''}{measure.replace('_', ' ')}"
            column = Column(title, name, measure != "mean_reward")
            run, row = (None, test.model) if test.stage == "before" else (test.run, runs.labels[test.run])
            values.pop((run or row, column), None)
            number = test.numbers[measure]
            answers = problem_values(test, measure)
            values[run or row, column] = Value(run, row, column, number.value, number.ci95, answers)
    return list(values.values())


def shown_measures(test: TestResult) -> list[str]:
    """Accuracies, of samples also pass@k and maj@k; without gold answers the reward."""
    shown = "accuracy|gold_anywhere" if "accuracy" in test.numbers else "mean_reward"
    if test.temperature != "0":
        shown += "|(pass|maj)@.*"
    return [measure for measure in test.numbers if re.fullmatch(shown, measure)]


def problem_values(test: TestResult, measure: str) -> pd.Series | None:
    """A measure of each problem of a test; None without their file."""
    if test.file.exists():
        with skip_unreadable(test.file):
            return read_problems(test.file)[test.temperature].get(measure)
    return None


def smoothed(values: pd.Series) -> pd.Series:
    """Means over the windows of a tenth of consecutive values, under the index of each window's last value."""
    windows = np.lib.stride_tricks.sliding_window_view(values, math.ceil(len(values) / 10))
    return pd.Series(windows.mean(axis=1), values.index[-len(windows) :])


def learning(runs: Runs) -> list[Value]:
    """Values of the course of the training reward."""
    courses = {}
    for run in runs.labels:
        metrics = run.metrics.reindex(columns=["reward", "validation_reward"])
        rewards = metrics["reward"].dropna()
        validation = metrics["validation_reward"].dropna()
        if rewards.empty:
            continue
        windows = smoothed(rewards)
        peak = windows.max()
        final = windows.iloc[-1]
        best_step = run.summary.get("best_step")
        courses[run] = {
            "final reward": final,
            "peak reward": peak,
            "area under the curve": rewards.mean(),
            "collapsed": float(final < peak / 2) if peak > 0 else np.nan,  # half of a negative peak is above it
            "best trained validation reward": validation.max(),
            "final validation reward": validation.iloc[-1] if len(validation) else np.nan,
            "returned untrained": np.nan if best_step is None else float(best_step == 0),
        }
    numbers = pd.DataFrame.from_dict(courses, orient="index").melt(ignore_index=False).dropna()  # column by column
    columns = {name: Column("", name, name in OF_SEEDS) for name in numbers["variable"]}
    return [Value(run, runs.labels[run], columns[name], value) for run, name, value in numbers.itertuples()]


def paired_differences(runs: Runs) -> list[Value]:
    """Every setting minus every baseline of its experiment, by seed; of two baselines one difference."""
    rest = {run: make_setting(run.switches, ignore=TREATMENT) for run in runs.labels}
    is_baseline = {run: method in BASELINES for run, method in methods(runs.configs).items()}
    rows = list(dict.fromkeys(runs.labels.values()))
    rewards = [value for value in learning(runs) if value.column.measure in COMPARED]
    together: dict[tuple[Any, ...], list[Value]] = {}
    for value in accuracies(runs, "after", "final") + rewards:
        for experiment in value.run.experiments:
            key = (value.run.seed, value.column, experiment, rest[value.run])
            together.setdefault(key, []).append(value)
    differences = {}
    for (seed, column, *_), comparable in together.items():
        for base, value in product(comparable, comparable):
            pair = (rows.index(base.row), rows.index(value.row))
            if is_baseline[base.run] and (pair[0] < pair[1] or not is_baseline[value.run]):
                differences.setdefault((pair, seed, column), value - base)
    return [differences[key] for key in sorted(differences, key=lambda key: key[0])]


def main_values(runs: Runs) -> list[Value]:
    """Values of the one column that settings are compared in first: a test, or the reward."""
    values = accuracies(runs, "after") or learning(runs)
    return [value for value in values if value.column == values[0].column]


def noise_floor(values: Sequence[Value]) -> tuple[float, int]:
    """SD of the difference of two runs of one setting, and its degrees of freedom; NaN and 0 without two seeds."""
    groups = pd.Series([value.value for value in values], [value.row for value in values], float).groupby(level=0)
    df = groups.size() - 1
    return float(np.sqrt(2 * (groups.var() * df).sum() / df.sum())) if df.sum() else np.nan, int(df.sum())


@dataclass(frozen=True)
class Cell:
    """The mean of a column over the seeds of a row."""

    row: str
    column: Column
    seeds: int  # 0 for a model before training
    mean: float
    interval: Sequence[float] | None  # 95%: of three seeds or more over seeds and problems, of one over problems
    estimate: Estimate | None = None  # of three seeds or more
    holm: float | None = None  # p of a difference, adjusted for the number of all in its table by Holm (1979)

    def record(self) -> dict[str, Any]:
        """Columns of table.csv, in which shares are written as shares."""
        record = {"row": one_line(self.row), "column": one_line(str(self.column).removesuffix(" (%)"))}
        low, high = self.interval or (None, None)
        record |= {"seeds": self.seeds, "mean": self.mean, "low": low, "high": high}
        if self.holm is not None:
            found = self.estimate
            record |= {"p": found.p(), "holm": self.holm, "detects": found.detects(), "needs": found.seeds_text()}
        return record

    def __str__(self) -> str:
        mean = self.column.number(self.mean)
        if self.interval is None:
            return mean
        low, high = map(self.column.number, self.interval)
        return f"{mean} [{low}, {high}]"


def make_cells(values: Iterable[Value]) -> list[Cell]:
    """A cell for each row and column that has values."""
    cells = []
    for (row, column), seeds in grouped(values, lambda value: (value.row, value.column)).items():
        mean = float(np.mean([value.value for value in seeds]))
        interval = seeds[0].interval if len(seeds) == 1 else None
        found = None
        if len(seeds) >= SEEDS_FOR_AN_INTERVAL and column.measure not in OF_SEEDS:
            found = estimate_seeds(seeds)
            interval = found.interval()
        n_trained = sum(value.run is not None for value in seeds)
        cells.append(Cell(row, column, n_trained, mean, interval, found))
    return cells


def estimate_seeds(seeds: Sequence[Value]) -> Estimate:
    """Estimate over seeds, and over problems where all seeds have answers to the same ones."""
    answers = [value.answers for value in seeds]
    if all(one is not None and one.index.equals(answers[0].index) for one in answers):
        matrix = np.stack(answers)
        return estimate(matrix[:, ~np.isnan(matrix).any(axis=0)])
    return estimate(np.array([[value.value] for value in seeds], dtype=float))


def mean_over_seeds(values: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Seeds, mean and, from three seeds on, Student's 95% interval, low and high: of the points of curves."""
    groups = values.groupby([*by], sort=False)["value"]
    cells = groups.agg(seeds="size", mean="mean", sem="sem").reset_index()
    half = t.ppf(0.975, cells["seeds"] - 1) * cells["sem"]
    half = half.where(cells["seeds"] >= SEEDS_FOR_AN_INTERVAL)
    return cells.assign(low=cells["mean"] - half, high=cells["mean"] + half)


def tables(runs: Runs) -> dict[str, list[Cell]]:
    """Cells of the tables of one task by title."""
    by_title = {
        "Accuracy": make_cells(accuracies(runs, *STAGES, sampled=True)),
        "Learning": make_cells(learning(runs)),
        DIFFERENCES: add_holm(make_cells(paired_differences(runs))),
    }
    return {title: cells for title, cells in by_title.items() if cells}


def add_holm(differences: Sequence[Cell]) -> list[Cell]:
    """The cells with holm, where they have an estimate."""
    p = pd.Series({i: float(cell.estimate.p()) for i, cell in enumerate(differences) if cell.estimate}, dtype=float)
    adjusted = (p.sort_values() * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    return [replace(cell, holm=adjusted.get(i)) for i, cell in enumerate(differences)]


def table_texts(title: str, cells: Sequence[Cell]) -> dict[str, str]:
    """A table in 100 columns, by test, or of differences by column."""
    make_table = difference_table if title == DIFFERENCES else value_table
    parts = grouped(cells, lambda cell: str(cell.column) if title == DIFFERENCES else cell.column.test)
    frames = {part: make_table(of_part).rename(index=one_line, columns=one_line) for part, of_part in parts.items()}
    return {part: frame.to_string(line_width=100) for part, frame in frames.items()}


def value_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Texts: "86.8 [86.0, 87.5]", its number of seeds behind it where that is not the row's."""
    seeds: dict[str, int] = {}
    for cell in cells:
        seeds[cell.row] = max(seeds.get(cell.row, 0), cell.seeds)
    texts = pd.DataFrame({"seeds": {row: str(n or "–") for row, n in seeds.items()}})
    for cell in cells:
        text = str(cell) if cell.seeds == seeds[cell.row] else f"{cell} (n = {cell.seeds})"
        texts.loc[cell.row, str(cell.column._replace(test=""))] = text
    return texts.fillna("–")


def difference_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Texts of the differences in one column: a line for each pair."""
    lines = {}
    for cell in cells:
        found = cell.estimate
        lines[cell.row] = {
            "seeds": str(cell.seeds),
            "difference": f"{cell}*" if found and cell.holm < 0.05 else str(cell),
            "detects": cell.column.number(found.detects()) if found else "–",
            "seeds for 1, 2, 5 points": found.seeds_text() if found else "–",
        }
    return pd.DataFrame.from_dict(lines, orient="index")
