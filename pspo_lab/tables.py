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

from pspo.evaluate.statistics import Number, as_text
from pspo.terminal import one_line
from pspo_lab.power import Estimate, estimate
from pspo_lab.runs import STAGES, LabRun, Runs, TestResult, grouped, read_problems, skip_unreadable
from pspo_lab.settings import Setting, differing, make_setting, methods

BASELINES = ("Clip", "NoClip")  # methods that paired differences subtract
TREATMENT = ("algorithm.", "optimizer.")  # switches in which the two runs of a pair may differ
SEEDS_FOR_AN_INTERVAL = 3
COMPARED = ("final reward", "mean reward", "final validation reward")
OF_SEEDS = ("collapsed", "returned untrained")  # shares, which have no interval
DIFFERENCES = "Paired differences"
NOTES = {
    "Accuracy": "Greedy or at temperature T, of the model that each run returned, the best by validation, and of its "
    "final one; gold anywhere is the paper's true accuracy. Mean over seeds, from three on with the 95% t-interval "
    "over seeds and problems, both taken as samples; for one seed over problems.",
    "Learning": "Training reward: peak and final are means over a tenth of the rollouts, mean over all. A seed has "
    "collapsed when its final reward is below half of its peak; it returned the untrained model when no validation was "
    "better than step 0's.",
    DIFFERENCES: "Setting minus baseline of the same seed and experiment, which saw the same prompts in the "
    "same order, with its 95% t-interval. detects: the smallest difference that so many seeds and problems find at 80% "
    "power; then the seeds that would find so little, - if no 1,000 would on so many problems.",
}


class Column(NamedTuple):
    """A measure in tables, of a test such as "gsm8k test, n = 1,319", or of the training."""

    test: str  # "" for the training
    measure: str

    def __str__(self) -> str:
        return f"{self.test}: {self.measure}".removeprefix(": ")

    def text(self, number: float, interval: Sequence[float] | None = None) -> str:
        return as_text(self.measure, Number(number, interval))

    def difference_text(self, number: float, interval: Sequence[float] | None = None) -> str:
        """The text of a difference of two numbers: "0.7 points [-5.1, 6.4]"; of rewards "0.007 [-0.051, 0.064]"."""
        return self.text(number, interval).replace("%", " points")


@dataclass(frozen=True)
class Value:
    """A number of a run, or the difference of two runs."""

    run: LabRun | None  # None for a model before training
    row: str  # the setting, the untrained model, or the difference of two settings
    column: Column
    value: float
    interval: Sequence[float] | None = None  # 95% over problems
    answers: pd.Series | None = None  # one value per problem, whose mean it is; None if unknown

    def __sub__(self, other: "Value") -> "Value":
        answers = None
        if self.answers is not None and other.answers is not None and self.answers.index.equals(other.answers.index):
            answers = self.answers - other.answers
        row = f"{self.row} - {other.row}"
        return Value(self.run, row, self.column, self.value - other.value, answers=answers)


def accuracies(runs: Runs, *stages: str, sampled: bool = False) -> list[Value]:
    """Return values of tests in these stages, greedy or all; an evaluation replaces the same number of a summary."""
    has_limits = len({test.limit for test in runs.tests} - {None}) > 1
    prompts = [name for name in differing(runs.configs) if name.startswith(("data.", "rollout.stop"))]
    values: dict[tuple[LabRun | str, Column], Value] = {}
    for test in sorted(runs.tests, key=lambda test: STAGES.index(test.stage)):  # a stage begins with the summary
        is_greedy = test.temperature == "0"
        if test.stage not in stages or not (is_greedy or sampled):
            continue
        title = test.problems
        if has_limits and test.limit is not None:
            title += f", {test.limit} tokens"
        if not is_greedy:
            title += f", T = {test.temperature}"
        for measure in shown_measures(test):
            name = f"{'final ' if test.stage == 'final' else ''}{measure.replace('_', ' ')}"
            column = Column(title, name)
            run = None if test.stage == "before" else test.run
            row = test.model if run is None else runs.labels[run]
            if run is None and test.run is not None and prompts:  # which change what an untrained model does
                row = f"{test.model}, as in {runs.labels[test.run]}"
            values.pop((run or row, column), None)
            number = test.numbers[measure]
            answers = problem_values(test, measure)
            values[run or row, column] = Value(run, row, column, number.value, number.ci95, answers)
    return list(values.values())


def shown_measures(test: TestResult) -> list[str]:
    """Return the accuracies, and for samples pass@k and maj@k; without gold answers, the mean reward."""
    shown = "accuracy|gold_anywhere" if "accuracy" in test.numbers else "mean_reward"
    if test.temperature != "0":
        shown += "|(pass|maj)@.*"
    return [measure for measure in test.numbers if re.fullmatch(shown, measure)]


def problem_values(test: TestResult, measure: str) -> pd.Series | None:
    """Return a measure of each problem of a test; None if the file of completions is missing."""
    if test.file.exists():
        with skip_unreadable(test.file):
            return read_problems(test.file)[test.temperature].get(measure)
    return None


def smoothed(values: pd.Series) -> pd.Series:
    """Return means over sliding windows, each a tenth of the values, under the index of a window's last value."""
    windows = np.lib.stride_tricks.sliding_window_view(values, math.ceil(len(values) / 10))
    return pd.Series(windows.mean(axis=1), values.index[-len(windows) :])


def learning(runs: Runs) -> list[Value]:
    """Return the values that describe the course of the training reward."""
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
            "mean reward": rewards.mean(),
            "collapsed": float(final < peak / 2) if peak > 0 else np.nan,  # half of a negative peak is above it
            "best trained validation reward": validation.max(),
            "final validation reward": validation.iloc[-1] if len(validation) else np.nan,
            "returned untrained": np.nan if best_step is None else float(best_step == 0),
        }
    numbers = pd.DataFrame.from_dict(courses, orient="index").melt(ignore_index=False).dropna()  # column by column
    return [Value(run, runs.labels[run], Column("", name), value) for run, name, value in numbers.itertuples()]


def paired_differences(runs: Runs) -> list[Value]:
    """Return every setting minus every baseline of its experiment, by seed; two baselines have one difference."""
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
    """Return the values of the column that compares the most settings, first of a test, else of the training."""
    columns = grouped(accuracies(runs, "after") or learning(runs), lambda value: value.column).values()
    return max(columns, key=lambda values: (len({value.row for value in values}), len(values)), default=[])


def noise_floor(values: Sequence[Value], algorithm: dict[LabRun, Setting]) -> tuple[float, int]:
    """SD of the difference of two runs of one algorithm, and its degrees of freedom; NaN and 0 without two runs."""
    numbers = [(algorithm[value.run], value.run.seed, value.value) for value in values]
    rows = pd.DataFrame(numbers, columns=["algorithm", "seed", "value"])
    groups = rows.drop_duplicates().groupby("algorithm", sort=False)["value"]  # equal runs of a seed count once
    df = groups.size() - 1
    return float(np.sqrt(2 * (groups.var() * df).sum() / df.sum())) if df.sum() else np.nan, int(df.sum())


@dataclass(frozen=True)
class Cell:
    """The mean of a column over the seeds of a row."""

    row: str
    column: Column
    seeds: int  # 0 for a model before training
    mean: float
    interval: Sequence[float] | None  # 95%: from three seeds on over seeds and problems, for one seed over problems
    estimate: Estimate | None = None  # from three seeds on
    holm: float | None = None  # p of a difference, adjusted for all differences in the table by Holm (1979)

    def record(self) -> dict[str, Any]:
        """Columns of table.csv, in which shares are written as shares."""
        record = {"row": one_line(self.row), "column": one_line(str(self.column))}
        low, high = self.interval or (None, None)
        record |= {"seeds": self.seeds, "mean": self.mean, "low": low, "high": high}
        if self.holm is not None:
            found = self.estimate
            record |= {"p": found.p(), "holm": self.holm, "detects": found.detects(), "needs": found.seeds_text()}
        return record


def make_cells(values: Iterable[Value]) -> list[Cell]:
    """A cell for each row and column that has values."""
    cells = []
    for (row, column), seeds in grouped(values, lambda value: (value.row, value.column)).items():
        mean = float(np.mean([value.value for value in seeds]))
        interval = seeds[0].interval if len(seeds) == 1 else None
        found = None
        if len(seeds) >= SEEDS_FOR_AN_INTERVAL and column.measure not in OF_SEEDS:
            found = estimate_seeds(seeds)
            mean = float(found.mean)  # over the problems that all seeds have a value for
            interval = found.interval()
        n_trained = sum(value.run is not None for value in seeds)
        cells.append(Cell(row, column, n_trained, mean, interval, found))
    return cells


def estimate_seeds(seeds: Sequence[Value]) -> Estimate:
    """Estimate over seeds, and also over problems if all seeds have answers to the same problems."""
    answers = [value.answers for value in seeds]
    if all(one is not None and one.index.equals(answers[0].index) for one in answers):
        matrix = np.stack(answers)
        return estimate(matrix[:, ~np.isnan(matrix).any(axis=0)])
    return estimate(np.array([[value.value] for value in seeds], dtype=float))


def mean_over_seeds(values: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return each point's number of seeds, mean and, from three seeds on, Student's 95% interval, low and high."""
    groups = values.groupby([*by], sort=False)["value"]
    cells = groups.agg(seeds="size", mean="mean", sem="sem").reset_index()
    half = t.ppf(0.975, cells["seeds"] - 1) * cells["sem"]
    half = half.where(cells["seeds"] >= SEEDS_FOR_AN_INTERVAL)
    return cells.assign(low=cells["mean"] - half, high=cells["mean"] + half)


def tables(runs: Runs) -> dict[str, list[Cell]]:
    """Return the cells of one task's tables, by title of the table."""
    by_title = {
        "Accuracy": make_cells(accuracies(runs, *STAGES, sampled=True)),
        "Learning": make_cells(learning(runs)),
        DIFFERENCES: add_holm(make_cells(paired_differences(runs))),
    }
    return {title: cells for title, cells in by_title.items() if cells}


def add_holm(differences: Sequence[Cell]) -> list[Cell]:
    """Return the cells, with ``holm`` where a cell has an estimate."""
    p = pd.Series({i: float(cell.estimate.p()) for i, cell in enumerate(differences) if cell.estimate}, dtype=float)
    adjusted = (p.sort_values() * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
    return [replace(cell, holm=adjusted.get(i)) for i, cell in enumerate(differences)]


def table_texts(title: str, cells: Sequence[Cell]) -> dict[str, str]:
    """Return the texts of a table, 100 characters wide: one for each test, or for differences one for each column."""
    make_table = difference_table if title == DIFFERENCES else value_table
    parts = grouped(cells, lambda cell: str(cell.column) if title == DIFFERENCES else cell.column.test)
    frames = {part: make_table(of_part).rename(index=one_line, columns=one_line) for part, of_part in parts.items()}
    return {part: frame.to_string(line_width=100) for part, frame in frames.items()}


def value_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return texts such as "86.8% [86.0, 87.5]", with the number of seeds where it differs from the row's."""
    seeds: dict[str, int] = {}
    for cell in cells:
        seeds[cell.row] = max(seeds.get(cell.row, 0), cell.seeds)
    texts = pd.DataFrame({"seeds": {row: str(n or "–") for row, n in seeds.items()}})
    for cell in cells:
        text = cell.column.text(cell.mean, cell.interval)
        if cell.seeds != seeds[cell.row]:
            text += f" (n = {cell.seeds})"
        texts.loc[cell.row, cell.column.measure] = text
    return texts.fillna("–")


def difference_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Texts of the differences in one column: a line for each pair."""
    lines = {}
    for cell in cells:
        found = cell.estimate
        star = "*" if found and cell.holm < 0.05 else ""
        lines[cell.row] = {
            "seeds": str(cell.seeds),
            "difference": cell.column.difference_text(cell.mean, cell.interval) + star,
            "detects": cell.column.difference_text(found.detects()) if found else "–",
            "seeds for 1, 2, 5 points": found.seeds_text() if found else "–",
        }
    return pd.DataFrame.from_dict(lines, orient="index")
