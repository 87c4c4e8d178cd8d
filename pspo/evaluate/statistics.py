"""Statistics of completions: means with 95% intervals, pass@k and maj@k; and how they are shown."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pspo.tasks import extract_answer, extract_text
from pspo.terminal import one_line

# By measure, the field of records that it is of: estimates with intervals, and means.
ESTIMATES = {"accuracy": "correct", "gold_anywhere": "contains_gold", "mean_reward": "reward"}
MEANS = {"format_share": "format", "truncated_share": "truncated", "completion_tokens": "tokens"}

Record = dict[str, Any]


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
    """1 if the most frequent answer to a problem is correct, else 0; of tied answers the share that is.

    Correct answers vote together, wrong ones by their exact value; a completion without an answer does not vote.
    """
    extract = extract_text if records[0]["format"] is None else extract_answer
    answers = [(record["correct"], extract(record["completion"])) for record in records]
    votes = Counter((correct, None if correct else answer) for correct, answer in answers if answer not in (None, ""))
    winners = [correct for (correct, _), count in votes.items() if count == max(votes.values())]
    return sum(winners) / len(winners) if winners else 0.0


def by_problem(values: np.ndarray) -> np.ndarray:
    """Means (m,) over the samples of values (n, samples); NaN, and problems with nothing else, are left out."""
    return np.nanmean(values[~np.isnan(values).all(axis=1)], axis=1)


def estimates(values: dict[str, np.ndarray]) -> Record:
    """By measure (n, samples) its `estimate` and the number of values left out as unknown; of `MEANS` the mean."""
    result: Record = {}
    for name, measure in values.items():
        problem_means = by_problem(measure)
        if len(problem_means) and name in MEANS:
            result[name] = float(problem_means.mean())
        elif len(problem_means):
            unknown = int(np.isnan(measure).sum())
            result[name] = estimate(problem_means) | ({"left_out": unknown} if unknown else {})
    return result


def estimate(values: np.ndarray) -> Record:
    """Mean of values (n,), one per problem, and its 95% interval, None if n is 1.

    Wilson's (1927) if all are 0 or 1, else a percentile bootstrap's: the problems are resampled 10,000 times.
    """
    from scipy.stats import binomtest, bootstrap  # slow to import

    interval = None
    if np.isin(values, (0, 1)).all():
        interval = binomtest(int(values.sum()), len(values)).proportion_ci(0.95, method="wilson")
    elif len(values) > 1:
        rng = np.random.default_rng(0)
        result = bootstrap((values,), np.mean, n_resamples=10_000, batch=100, method="percentile", rng=rng)
        interval = result.confidence_interval
    return {"value": float(values.mean()), "ci95": interval and (float(interval.low), float(interval.high))}


def table(corner: str, columns: Any) -> str:
    """Texts by column and row, or a data frame, as an aligned table; "-" where a column has none."""
    import pandas as pd  # slow to import

    texts = pd.DataFrame(columns).fillna("-").rename(index=one_line, columns=one_line)
    return texts.rename_axis(columns=corner).to_string()


def as_text(name: str, number: Record | float) -> str:
    """A measure as "42.0% [37.7, 46.4]"; rewards as "0.420 [0.377, 0.464]"; lengths as "41.3"."""
    if name == "completion_tokens":
        return f"{number:.1f}"
    if not isinstance(number, dict):
        number = {"value": number}
    factor, digits, unit = (1, 3, "") if "reward" in name else (100, 1, "%")
    text = f"{factor * number['value']:.{digits}f}{unit}"
    if number.get("ci95"):
        low, high = number["ci95"]
        text += f" [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"
    if number.get("left_out"):
        text += f" ({number['left_out']:,} left out)"
    return text


def from_record(record: Record, name: str) -> str:
    """A measure of `Evaluation.record` as text."""
    if name in MEANS:
        return as_text(name, record[name])
    prefix = f"{name}_".removeprefix("accuracy_")
    keys = ("ci95", "left_out")
    return as_text(name, {"value": record[name]} | {key: record.get(f"{prefix}{key}") for key in keys})


def measure_name(name: str) -> str:
    """A measure's name in tables."""
    if name.startswith("reward/"):
        return name
    return name.removeprefix("mean_").removeprefix("completion_").removesuffix("_share").replace("_", " ")
