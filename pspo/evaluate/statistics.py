"""Statistics of completions: means with 95% intervals, pass@k and maj@k, and their form in files and tables."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pspo.tasks import Problem, extract_answer, extract_text
from pspo.terminal import one_line

# The field of records that each measure averages: `ESTIMATES` have intervals, `MEANS` have none.
ESTIMATES = {"accuracy": "correct", "gold_anywhere": "contains_gold", "mean_reward": "reward"}
MEANS = {"format_share": "format", "truncated_share": "truncated", "completion_tokens": "tokens"}

Record = dict[str, Any]


class Number(NamedTuple):
    """A measure's mean over problems, its 95% interval if it has one, and the number of unknown values."""

    value: float
    ci95: Sequence[float] | None = None
    left_out: int = 0


def measures(completions: Sequence[Record], samples: int) -> dict[str, np.ndarray]:
    """Values (n, samples) of `ESTIMATES`, reward/<function> and `MEANS` by name; NaN where a record has none."""
    columns = {name: [record[key] for record in completions] for name, key in ESTIMATES.items()}
    for name in completions[0]["rewards"]:
        columns[f"reward/{name}"] = [record["rewards"].get(name) for record in completions]
    columns |= {name: [record[key] for record in completions] for name, key in MEANS.items()}
    return {name: np.array(column, dtype=float).reshape(-1, samples) for name, column in columns.items()}


def at_k(completions: Sequence[Record], samples: int) -> dict[str, np.ndarray]:
    """Values (n, 1) of pass@k for k = 1, 2, 4, ... and all samples, and of maj@k for all; NaN without a verdict."""
    ks = sorted({2**j for j in range(samples.bit_length())} | {samples})
    names = [*(f"pass@{k}" for k in ks), f"maj@{samples}"]
    rows = []
    for first in range(0, len(completions), samples):
        records = completions[first : first + samples]
        if records[0]["correct"] is None:
            rows.append([math.nan] * len(names))
            continue
        correct = sum(record["correct"] for record in records)
        rows.append([*(pass_at_k(samples, correct, k) for k in ks), majority(records)])
    return {name: column[:, None] for name, column in zip(names, np.array(rows).T, strict=True)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples hold a ``correct`` one (Chen et al. 2021, "Evaluating LLMs Trained on Code")."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(records: Sequence[Record]) -> float:
    """1 if the most frequent answer to a problem is correct, else 0; if answers tie, the share of correct ones.

    Correct answers vote together, wrong ones by their exact value; a completion without an answer does not vote.
    """
    extract = extract_text if records[0]["format"] is None else extract_answer
    answers = [(record["correct"], extract(record["completion"])) for record in records]
    votes = Counter((correct, None if correct else answer) for correct, answer in answers if answer not in (None, ""))
    winners = [correct for (correct, _), count in votes.items() if count == max(votes.values())]
    return sum(winners) / len(winners) if winners else 0.0


def by_problem(values: np.ndarray) -> np.ndarray:
    """Means (m,) over the samples of values (n, samples), without NaN and without problems that have only NaN."""
    return np.nanmean(values[~np.isnan(values).all(axis=1)], axis=1)


def interval(values: np.ndarray) -> tuple[float, float] | None:
    """The 95% interval of the mean of values (n,), one per problem; None if n is 1.

    It is Wilson's (1927) if all values are 0 or 1, else a percentile bootstrap's with 10,000 resamples of the problems.
    """
    from scipy.stats import binomtest, bootstrap  # slow to import

    if np.isin(values, (0, 1)).all():
        bounds = binomtest(int(values.sum()), len(values)).proportion_ci(0.95, method="wilson")
    elif len(values) > 1:
        rng = np.random.default_rng(0)
        result = bootstrap((values,), np.mean, n_resamples=10_000, batch=100, method="percentile", rng=rng)
        bounds = result.confidence_interval
    else:
        return None
    return float(bounds.low), float(bounds.high)


def summarise(completions: Sequence[Record], intervals: bool = True) -> Record:
    """The numbers of completions, in order of problem and sample, as in ``summary.json`` and ``results.json``.

    {"n": 99, "samples": 1, "accuracy": 0.5, "accuracy_ci95": [0.4, 0.6], "format_share": 0.9}. A measure without any
    known value is left out; the unknown values of another one are counted as NAME_left_out.
    """
    samples = completions[-1]["sample"] + 1
    values = measures(completions, samples)
    if samples > 1:
        values |= at_k(completions, samples)
    record: Record = {"n": len(completions) // samples, "samples": samples}
    for name, measure in values.items():
        means = by_problem(measure)
        if not len(means):
            continue
        record[name] = float(means.mean())
        if intervals and name not in MEANS:
            record[f"{name}_ci95"] = interval(means)
            if left_out := int(np.isnan(measure).sum()):
                record[f"{name}_left_out"] = left_out
    return record


def breakdown(completions: Sequence[Record], problems: Sequence[Problem]) -> dict[str, dict[str, Record]]:
    """`summarise` completions by source, category and level of their problems, where these differ."""
    parts = {}
    for attribute in ("source", "category", "level"):
        groups: dict[str, list[Record]] = {}
        for record in completions:
            groups.setdefault(getattr(problems[record["problem"]], attribute), []).append(record)
        if len(groups) > 1:
            parts[attribute] = {kind: summarise(groups[kind]) for kind in sorted(groups)}
    return parts


def read_numbers(record: Record) -> dict[str, Number]:
    """The numbers, by measure, of a record made by `summarise`, or of results.json of an earlier commit."""
    numbers = {}
    for name, value in record.items():
        number = Number(value, record.get(f"{name}_ci95"), record.get(f"{name}_left_out", 0))
        if isinstance(value, dict):  # a measure in results.json of earlier commits
            number = Number(value.get("value"), value.get("ci95"), value.get("left_out", 0))
        if isinstance(number.value, int | float) and not name.endswith("_left_out"):
            numbers[name] = number
    return numbers


def table(corner: str, columns: Any) -> str:
    """Align texts by column and row, or a data frame, as a table; "-" where a column has no text."""
    import pandas as pd  # slow to import

    texts = pd.DataFrame(columns).fillna("-").rename(index=one_line, columns=one_line)
    return texts.rename_axis(columns=corner).to_string()


def as_text(name: str, number: Number) -> str:
    """A measure as "42.0% [37.7, 46.4]"; rewards as "0.420 [0.377, 0.464]"; lengths as "41.3"."""
    if name == "completion_tokens":
        return f"{number.value:.1f}"
    factor, digits, unit = (1, 3, "") if "reward" in name else (100, 1, "%")
    text = f"{factor * number.value:z.{digits}f}{unit}"  # z: no "-0.0"
    if number.ci95:
        low, high = number.ci95
        text += f" [{factor * low:z.{digits}f}, {factor * high:z.{digits}f}]"
    return f"{text} ({number.left_out:,} left out)" if number.left_out else text


def measure_name(name: str) -> str:
    """A measure's name in tables."""
    if name.startswith("reward/"):
        return name
    return name.removeprefix("mean_").removeprefix("completion_").removesuffix("_share").replace("_", " ")
