"""Tables of runs. Two kinds of data frames:

* values: run, column (of a table) and value, a number of a run; of accuracies also low and high, 95% over problems, and
  answers, the value of each problem
* cells: row (a setting, or the difference of two), column, seeds, mean, low and high; of differences also p, holm, what
  they would detect (`Estimate.detects`) and the seeds that they need (`power.seeds_text`)
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t

from pspo.terminal import one_line
from pspo_lab.power import Estimate, estimate, seeds_text
from pspo_lab.runs import Runs, read_problems, skip_unreadable
from pspo_lab.settings import SEED, methods, setting_numbers

BASELINES = ("Clip", "NoClip")  # of the paired differences
TREATMENT = ("algorithm.", "optimizer.")  # what the two of a pair may differ in
SEEDS_FOR_AN_INTERVAL = 3
COMPARED = ("final reward", "area under the curve", "final validation reward")
SHARES = ("collapsed (%)", "returned untrained (%)")  # of the seeds
NOTES = {
    "Accuracy": "Greedy, of the model that each run returned, the best by validation, and of its final one; gold "
    "anywhere is the paper's true accuracy. Mean over seeds, from three on with the 95% t-interval over seeds and "
    "problems, both taken as samples; for one seed over problems.",
    "Accuracy of samples": "The same, sampled at temperature T.",
    "Learning": "Training reward: peak and final are means over a tenth of the rollouts, the area over all. A seed has "
    "collapsed when its final reward is below half of its peak; it returned the untrained model when no validation was "
    "better than step 0's.",
    "Paired differences": "Setting minus baseline of the same seed and experiment, which saw the same prompts in the "
    "same order, with its 95% t-interval. detects: the smallest difference that so many seeds and problems find at 80% "
    "power; then the seeds that would find so little, - if no 1,000 would on so many problems.",
}

# Values


def accuracies(runs: Runs, stage: str, greedy: bool = True) -> pd.DataFrame:
    """Values before training, of models, or after it, of runs' best or final ones; with pass@k, maj@k if sampled.

    Problems without gold answers have their mean reward. An evaluation counts before the summary's same number.
    """
    numbers = runs.numbers[runs.numbers["stage"] == stage]
    numbers = numbers[(numbers["temperature"] == "0") == greedy]
    test = ["run", "model", "evaluation", "data", "split", "n", "limit", "temperature"]
    is_accuracy = numbers["measure"].eq("accuracy")
    answered = is_accuracy.groupby([numbers[name] for name in test], dropna=False).transform("any").astype(bool)
    measures = "accuracy|gold_anywhere" if greedy else "accuracy|gold_anywhere|(pass|maj)@.*"
    rewards = numbers["measure"].eq("mean_reward") & ~answered
    numbers = numbers[numbers["measure"].str.fullmatch(measures) | rewards]
    numbers = numbers.sort_values("evaluation", key=lambda names: names != "summary", kind="stable")
    numbers["run"] = numbers["model" if stage == "before" else "run"]
    one_limit = runs.numbers["limit"].nunique() <= 1
    numbers["column"] = [accuracy_column(row, stage, greedy, one_limit) for row in numbers.itertuples()]
    numbers = numbers.drop_duplicates(["run", "column"], keep="last")
    numbers = numbers.sort_values("measure", key=lambda names: names == "gold_anywhere", kind="stable")
    numbers["answers"] = [problem_values(row) for row in numbers.itertuples()]
    return numbers[["run", "column", "value", "low", "high", "answers"]]


def problem_values(number: Any) -> pd.Series | None:
    """The values of the problems behind a row of `Runs.numbers`; None without their file."""
    if isinstance(number.file, str) and Path(number.file).exists():
        with skip_unreadable(Path(number.file)):
            return read_problems(Path(number.file))[number.temperature].get(number.measure)
    return None


def accuracy_column(row: Any, stage: str, greedy: bool, one_limit: bool) -> str:
    """Such as "gsm8k test, n = 1,319: final accuracy (%)", with the limit of tokens if tests had several."""
    test = f"{row.data} {row.split}, n = {row.n:,.0f}"
    if not one_limit and pd.notna(row.limit):
        test += f", {row.limit:.0f} tokens"
    if not greedy:
        test += f", T = {row.temperature}"
    measure = row.measure.replace("_", " ")
    if stage == "final":
        measure = f"final {measure}"
    if row.measure != "mean_reward":
        measure += " (%)"
    return f"{test}: {measure}"


def smoothed(values: pd.Series) -> pd.Series:
    """Means over the windows of a tenth of consecutive values, under the index of each window's last value."""
    windows = np.lib.stride_tricks.sliding_window_view(values, math.ceil(len(values) / 10))
    return pd.Series(windows.mean(axis=1), values.index[-len(windows) :])


def learning(runs: Runs) -> pd.DataFrame:
    """Values of the course of the training reward."""
    rows = {}
    metrics = runs.metrics.reindex(columns=["run", "reward", "validation_reward"])
    for run, rollouts in metrics.groupby("run", sort=False):
        rewards = rollouts["reward"].dropna()
        validation = rollouts["validation_reward"].dropna()
        if rewards.empty:
            continue
        windows = smoothed(rewards)
        peak = windows.max()
        final = windows.iloc[-1]
        rows[run] = {
            "final reward": final,
            "peak reward": peak,
            "area under the curve": rewards.mean(),
            "collapsed (%)": float(final < peak / 2) if peak > 0 else np.nan,  # half of a negative peak is above it
            "best trained validation reward": validation.max(),
            "final validation reward": validation.iloc[-1] if len(validation) else np.nan,
        }
    table = pd.DataFrame.from_dict(rows, orient="index")
    best_step = runs.numbers[runs.numbers["measure"] == "best_step"].set_index("run")["value"]
    table["returned untrained (%)"] = (best_step == 0).astype(float)
    return table.rename_axis("run").reset_index().melt("run", var_name="column").dropna(subset="value")


def paired_differences(runs: Runs, labels: pd.Series) -> pd.DataFrame:
    """Values by row and seed: every setting minus every baseline of its experiment; of two baselines one difference."""
    configs = runs.configs
    treatments = [name for name in configs if name.startswith(TREATMENT)]
    about = configs[["experiments", SEED]].assign(
        row=labels[configs.index],
        place=labels[configs.index].factorize()[0],
        is_baseline=methods(configs).isin(BASELINES),
        rest=setting_numbers(configs, ignore=treatments),
    )
    rewards = learning(runs)
    tests = [accuracies(runs, stage) for stage in ("after", "final")]
    values = pd.concat([*tests, rewards[rewards["column"].isin(COMPARED)]], ignore_index=True)
    values = values.join(about, on="run").explode("experiments")
    pairs = values.merge(values[values["is_baseline"]], on=["experiments", SEED, "rest", "column"])
    pairs = pairs[(pairs["place_x"] > pairs["place_y"]) | ~pairs["is_baseline_x"].astype(bool)]
    pairs = pairs.drop_duplicates(["row_x", "row_y", SEED, "column"])
    return subtract(pairs.sort_values(["place_y", "place_x"], kind="stable"))


def subtract(pairs: pd.DataFrame) -> pd.DataFrame:
    """Values of differences, from pairs of values with the rows of both."""
    answers = []
    for x, y in zip(pairs["answers_x"], pairs["answers_y"], strict=True):
        same = isinstance(x, pd.Series) and isinstance(y, pd.Series) and x.index.equals(y.index)
        answers.append(x - y if same else None)
    row = pairs["row_x"] + " - " + pairs["row_y"]
    return pairs.assign(row=row, value=pairs["value_x"] - pairs["value_y"], answers=answers)


def main_values(runs: Runs, labels: pd.Series) -> pd.DataFrame:
    """Values, with their row and seed, of the one column that settings are compared in first: a test, or the reward."""
    values = accuracies(runs, "after")
    if values.empty:
        values = learning(runs).query("column == 'final reward'").assign(answers=None)
    values = values[values["column"] == values["column"].iloc[0]] if len(values) else values
    return values.assign(row=values["run"].map(labels), seed=values["run"].map(runs.configs[SEED]))


def noise_floor(values: pd.DataFrame) -> tuple[float, int]:
    """SD of the difference of two runs of one setting, and its degrees of freedom; NaN and 0 without two seeds."""
    groups = values.groupby("row")["value"]
    df = groups.size() - 1
    return float(np.sqrt(2 * (groups.var() * df).sum() / df.sum())) if df.sum() else np.nan, int(df.sum())


# Cells


def mean_over_seeds(values: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Seeds, mean and, from three seeds on, Student's 95% interval, low and high: of the points of curves."""
    groups = values.groupby([*by], sort=False)["value"]
    cells = groups.agg(seeds="size", mean="mean", sem="sem").reset_index()
    half = t.ppf(0.975, cells["seeds"] - 1) * cells["sem"]
    half = half.where(cells["seeds"] >= SEEDS_FOR_AN_INTERVAL)
    return cells.assign(low=cells["mean"] - half, high=cells["mean"] + half)


def estimate_seeds(values: pd.DataFrame) -> Estimate:
    """Estimate of one cell: over seeds, and over problems where all have answers to the same ones."""
    answers = list(values["answers"]) if "answers" in values else [None]
    first = answers[0]
    if all(isinstance(one, pd.Series) and one.index.equals(first.index) for one in answers):
        matrix = np.stack(answers)
        return estimate(matrix[:, ~np.isnan(matrix).any(axis=0)])
    return estimate(values[["value"]].to_numpy(dtype=float))


def make_cells(values: pd.DataFrame, differences: bool = False) -> pd.DataFrame:
    """Cells of values that have a row, with intervals from three seeds on; one seed keeps its own, shares have none."""
    rows = []
    for (row, column), group in values.groupby(["row", "column"], sort=False):
        cell = {"row": row, "column": column, "seeds": len(group), "mean": group["value"].mean()}
        if len(group) >= SEEDS_FOR_AN_INTERVAL and column not in SHARES:
            found = estimate_seeds(group)
            half = float(found.half_width())
            cell |= {"low": cell["mean"] - half, "high": cell["mean"] + half}
            if differences:
                cell |= {"p": float(found.p()), "detects": float(found.detects()), "needs": seeds_text(found)}
        elif len(group) == 1 and "low" in group and not differences:
            cell |= {"low": group["low"].iloc[0], "high": group["high"].iloc[0]}
        rows.append(cell)
    columns = ["row", "column", "seeds", "mean", "low", "high"]
    if differences:
        columns += ["p", "holm", "detects", "needs"]
    return pd.DataFrame(rows, columns=columns)


def tables(runs: Runs, labels: pd.Series, models: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Cells of the tables of one task by title: its finished runs, and these models before training."""
    by_title = {}
    for title, greedy in (("Accuracy", True), ("Accuracy of samples", False)):
        before = accuracies(runs, "before", greedy)
        before = before[before["run"].isin(models)].rename(columns={"run": "row"})
        after = pd.concat([accuracies(runs, stage, greedy) for stage in ("after", "final")])
        after = after.assign(row=after["run"].map(labels))
        by_title[title] = pd.concat([make_cells(before).assign(seeds=0), make_cells(after)])
    rewards = learning(runs)
    by_title["Learning"] = make_cells(rewards.assign(row=rewards["run"].map(labels)))
    by_title["Paired differences"] = add_holm(make_cells(paired_differences(runs, labels), differences=True))
    return {title: by_title[title] for title in NOTES if len(by_title[title])}


def add_holm(differences: pd.DataFrame) -> pd.DataFrame:
    """The cells with holm, p adjusted for their number by Holm (1979)."""
    tested = differences["p"].dropna().sort_values()
    adjusted = (tested * np.arange(len(tested), 0, -1)).cummax().clip(upper=1)
    return differences.assign(holm=adjusted)


# Texts


def table_texts(cells: pd.DataFrame) -> dict[str, str]:
    """A table in 100 columns, by test, such as "gsm8k test, n = 1,319", or of differences by column."""
    if "needs" in cells:
        parts = {column: difference_table(part) for column, part in cells.groupby("column", sort=False)}
    else:
        names = cells["column"].str.rpartition(": ")  # "" is no test
        by_test = cells.assign(column=names[2]).groupby(names[0], sort=False)
        parts = {test: value_table(part) for test, part in by_test}
    texts = {title: part.rename(index=one_line, columns=one_line) for title, part in parts.items()}
    return {title: table.to_string(line_width=100) for title, table in texts.items()}


def value_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Texts: "86.8 [86.0, 87.5]", its number of seeds behind it where that is not the row's."""
    seeds = cells.groupby("row", sort=False)["seeds"].max()
    texts = pd.DataFrame("–", seeds.index, ["seeds", *cells["column"].drop_duplicates()])
    texts = texts.rename_axis(None)
    texts["seeds"] = seeds.astype(str).where(seeds > 0, "–")
    for cell in cells.itertuples():
        text = interval_text(cell)
        if cell.seeds != seeds[cell.row]:
            text += f" (n = {cell.seeds})"
        texts.loc[cell.row, cell.column] = text
    return texts


def difference_table(cells: pd.DataFrame) -> pd.DataFrame:
    """Texts of the differences in one column: a line for each pair."""
    lines = {}
    for cell in cells.itertuples():
        is_tested = pd.notna(cell.low)
        lines[cell.row] = {
            "seeds": str(cell.seeds),
            "difference": interval_text(cell) + ("*" if cell.holm < 0.05 else ""),
            "detects": number_text(cell.column, cell.detects) if is_tested else "–",
            "seeds for 1, 2, 5 points": cell.needs if is_tested else "–",
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def interval_text(cell: Any) -> str:
    """A cell's mean and interval, in percent where its column is."""
    mean, low, high = (number_text(cell.column, number) for number in (cell.mean, cell.low, cell.high))
    return f"{mean} [{low}, {high}]" if pd.notna(cell.low) else mean


def number_text(column: str, number: float) -> str:
    """A number in a column's unit."""
    factor, digits = (100, 1) if column.endswith("(%)") else (1, 3)
    return f"{round(factor * number, digits) + 0.0:.{digits}f}"
