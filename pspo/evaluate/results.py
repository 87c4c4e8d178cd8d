"""Evaluation results: means with 95% intervals, pass@k and maj@k, breakdowns; and what changed between two of them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from pspo.cli.escape import one_line
from pspo.tasks import Problem, extract_answer, extract_text

ESTIMATES = {"accuracy": "correct", "gold_anywhere": "contains_gold", "mean_reward": "reward"}  # results: of records'
MEANS = {"format_share": "format", "truncated_share": "truncated", "completion_tokens": "tokens"}  # likewise
MOST_VOTES = 256  # samples of a problem up to which maj@k is computed

Record = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """The completions of problems, ``samples`` of each: records of `pspo.evaluate.evaluation.complete`, in order."""

    problems: Sequence[Problem]
    samples: int
    completions: list[Record] = field(repr=False)

    def means(self) -> dict[str, float]:
        """Every measure's mean over the problems, of those that have one."""
        values = {name: by_problem(every) for name, every in measures(self.completions, self.samples).items()}
        return {name: float(known.mean()) for name, known in values.items() if len(known)}

    def record(self) -> Record:
        """The numbers in one flat dict, as in ``summary.json``: accuracy, ci95, mean_reward, mean_reward_ci95, ..."""
        flat: Record = {"n": len(self.problems)}
        for name, of in estimates(measures(self.completions, self.samples)).items():
            flat |= {name: of.pop("value")} | {f"{name}_{key}".removeprefix("accuracy_"): of[key] for key in of}
        return flat | {name: mean for name, mean in self.means().items() if name in MEANS}

    def results(self) -> Record:
        """The numbers as in ``results.json``; what no completion has a value of is left out.

        Each an `estimate`: accuracy (the extracted answer is right), gold_anywhere (the gold value is anywhere in the
        response), mean_reward, every reward/<function>, pass@k, maj@k, and of several sources macro_<measure>, the mean
        over them. Besides `MEANS`, and a breakdown by source, category and level.
        """
        values, breakdown, macro = measures(self.completions, self.samples), {}, {}
        for part in ("source", "category", "level"):
            kinds = np.array([getattr(problem, part) for problem in self.problems])
            groups = {str(kind): {name: values[name][kinds == kind] for name in ESTIMATES} for kind in np.unique(kinds)}
            if len(groups) > 1:
                breakdown[part] = {kind: {"n": int((kinds == kind).sum())} | estimates(groups[kind]) for kind in groups}
                if part == "source":
                    sets = {name: [by_problem(group[name]) for group in groups.values()] for name in ESTIMATES}
                    macro = {f"macro_{name}": estimate(*of) for name, of in sets.items() if all(map(len, of))}
        means = {name: mean for name, mean in self.means().items() if name in MEANS}
        return {"samples": self.samples, **estimates(values), **self.at_k(), **macro, **means, "breakdown": breakdown}

    def at_k(self) -> dict[str, Record]:
        """`estimate` of each of `at_k`, over the problems with a gold answer."""
        values = {name: by_problem(every) for name, every in at_k(self.completions, self.samples).items()}
        return {name: estimate(known) for name, known in values.items() if len(known)}


def at_k(completions: Sequence[Record], samples: int) -> dict[str, np.ndarray]:
    """Values (n, 1) of pass@k and maj@k for k = 1, 2, 4, ... and all samples; NaN without a gold answer."""
    ks = sorted({2**j for j in range(samples.bit_length())} | {samples})
    names = [f"{name}@{k}" for name in ("pass", "maj")[: 1 + (samples <= MOST_VOTES)] for k in ks]
    values = np.full((len(completions) // samples, len(names)), np.nan)
    for i in range(len(values)):
        records = completions[i * samples : (i + 1) * samples]
        if records[0]["gold"] is None:
            continue
        extract = extract_text if records[0]["format"] is None else extract_answer
        votes = Counter((extract(record["completion"]), record["correct"]) for record in records)
        voted = [(count, right) for (answer, right), count in votes.items() if answer not in (None, "")]
        majority = majority_at_k(samples, voted) if samples <= MOST_VOTES else []
        correct = sum(record["correct"] for record in records)
        values[i] = [*(pass_at_k(samples, correct, k) for k in ks), *(majority[k] for k in ks if majority)]
    return dict(zip(names, np.hsplit(values, len(names)), strict=True))


def measures(completions: Sequence[Record], samples: int) -> dict[str, np.ndarray]:
    """Values (n, samples) of `ESTIMATES`, reward/<function> and `MEANS` by name; NaN where a record has none."""
    columns = {name: [record[key] for record in completions] for name, key in (ESTIMATES | MEANS).items()}
    for name in completions[0]["rewards"]:
        columns[f"reward/{name}"] = [record["rewards"].get(name) for record in completions]
    return {name: np.array(column, dtype=float).reshape(-1, samples) for name, column in columns.items()}


def by_problem(values: np.ndarray) -> np.ndarray:
    """Means (m,) over the samples of values (n, samples); NaN, and problems with nothing else, are left out."""
    return np.nanmean(values[~np.isnan(values).all(axis=1)], axis=1)


def estimates(values: dict[str, np.ndarray]) -> dict[str, Record]:
    """`estimate` of each measure (n, samples) but `MEANS`; with the number of values left out, if any are unknown."""
    by_name: dict[str, Record] = {}
    for name, measure in values.items():
        unknown = int(np.isnan(measure).sum())
        if name not in MEANS and unknown < measure.size:
            by_name[name] = estimate(by_problem(measure)) | ({"left_out": unknown} if unknown else {})
    return by_name


def estimate(*sets: np.ndarray) -> Record:
    """Mean of values (n,), one per problem, and its 95% interval; of several sets the mean of their means.

    The interval is Wilson's if every value of a single set is 0 or 1, otherwise a bootstrap's over the problems.
    """
    zero_or_one = len(sets) == 1 and bool(np.isin(sets[0], (0, 1)).all())
    interval = wilson(int(sets[0].sum()), len(sets[0])) if zero_or_one else cluster_bootstrap(*sets)
    return {"value": float(np.mean([values.mean() for values in sets])), "ci95": interval}


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927)."""
    from scipy.stats import binomtest  # slow to import

    low, high = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


def cluster_bootstrap(*sets: np.ndarray, seed: int = 0) -> tuple[float, float] | None:
    """95% percentile interval of the mean over sets of the mean of values (n,), one per cluster.

    The clusters of each set are resampled, 10,000 times. None if a set is of one cluster.
    """
    from scipy.stats import bootstrap  # slow to import

    if min(map(len, sets)) < 2:
        return None

    def statistic(*parts: np.ndarray, axis: int) -> np.ndarray:
        return sum(part.mean(axis=axis) for part in parts) / len(parts)

    how = {"n_resamples": 10_000, "batch": 100, "method": "percentile", "rng": np.random.default_rng(seed)}
    low, high = bootstrap(sets, statistic, vectorized=True, **how).confidence_interval
    return float(low), float(high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples hold a ``correct`` one (Chen et al. 2021, "Evaluating LLMs Trained on Code")."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(n: int, votes: Sequence[tuple[int, bool]]) -> list[float]:
    """Probability that the most frequent answer of k of n samples is correct, for k = 0 to n; ties are drawn by lot.

    Exact, over all subsets: those are counted in which a correct answer has j votes, some rivals as many, none more.
    ``votes`` are (count, correct) of each distinct answer; the other samples do not vote.
    """
    wins = np.zeros(n + 1)  # subsets by size, a tie of t as 1/t
    for i, (own, correct) in enumerate(votes):
        rivals = [count for count, _ in [*votes[:i], *votes[i + 1 :]]]
        for j in range(1, own + 1 if correct else 1):
            close = [count for count in rivals if count >= j]
            others = n - own - sum(close)  # cannot reach j votes
            ways = np.zeros((n + 1, len(close) + 1))  # by size of the rest of the subset, and rivals that have j votes
            ways[: others + 1, 0] = [math.comb(others, size) for size in range(others + 1)]
            for count in close:
                longer = np.zeros_like(ways)
                for v in range(j):
                    longer[v:] += math.comb(count, v) * ways[: n + 1 - v]
                longer[j:, 1:] += math.comb(count, j) * ways[: n + 1 - j, :-1]
                ways = longer
            wins[j:] += math.comb(own, j) * (ways / np.arange(1, len(close) + 2)).sum(axis=1)[: n + 1 - j]
    return [float(wins[k]) / math.comb(n, k) for k in range(n + 1)]


def changes(before: Sequence[Record], after: Sequence[Record], most: int, names: tuple[str, str]) -> str:
    """How many problems came out better and worse, one completion each, and up to ``most`` of them in turn."""
    key = "reward" if all(record["correct"] is None for record in before) else "correct"
    both = [pair for pair in zip(before, after, strict=True) if None not in (pair[0][key], pair[1][key])]
    pairs = sorted(((new[key] - old[key], old, new) for old, new in both), key=lambda pair: -abs(pair[0]))
    better, worse = [pair for pair in pairs if pair[0] > 0], [pair for pair in pairs if pair[0] < 0]
    words = ("wrong -> right", "right -> wrong") if key == "correct" else ("with more reward", "with less")
    parts = [f"{len(better)} {words[0]}, {len(worse)} {words[1]}, of {problem_count(len(pairs))}"]
    for _, old, new in [pair for two in zip_longest(better, worse) for pair in two if pair][:most]:
        prompt = old["prompt"] if isinstance(old["prompt"], str) else old["prompt"][-1]["content"]
        lines = {"problem": prompt, "gold": old["gold"]}
        for name, record in zip(names, (old, new), strict=True):
            lines[name] = record["completion"] if key == "correct" else f"{record[key]:.3f}: {record['completion']}"
        parts.append("\n".join(f"  {name:<8} {clip(text)}" for name, text in lines.items() if text is not None))
    return "\n\n".join(parts)


def problem_count(n: int) -> str:
    return f"{n:,} problem{'s' * (n != 1)}"


def clip(text: str, width: int = 200) -> str:
    """Text in one line, without its middle if it is long."""
    text = one_line(text)
    return text if len(text) <= width else f"{text[: width // 2 - 3]} ... {text[-width // 2 + 2 :]}"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text, the first one as the header; all but the first column right-aligned."""
    rows = [[one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = map(str.rjust, cells, widths[1:])
        lines.append("  ".join([name.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def as_text(name: str, value: float, ci95: tuple[float, float] | None = None, left_out: int | None = None) -> str:
    """A measure as "42.0% [37.7, 46.4]"; rewards as "0.420 [0.377, 0.464]"; lengths as "41.3"."""
    if name == "completion_tokens":
        return f"{value:.1f}"
    scale, form, unit = (1, ".3f", "") if "reward" in name else (100, ".1f", "%")
    interval = f" [{scale * ci95[0]:{form}}, {scale * ci95[1]:{form}}]" if ci95 else ""
    return f"{scale * value:{form}}{unit}{interval}" + (f" ({left_out:,} left out)" if left_out else "")


def from_record(record: Record, name: str) -> str:
    """A measure of `Evaluation.record` as text; "-" if it is not there."""
    if name not in record:
        return "-"
    more = {key: record.get(f"{name}_{key}".removeprefix("accuracy_")) for key in ("ci95", "left_out")}
    return as_text(name, record[name], **more)


def label(name: str) -> str:
    """A measure's name in tables."""
    return name.removeprefix("mean_").removeprefix("completion_").removesuffix("_share").replace("_", " ")
