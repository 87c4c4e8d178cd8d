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
        means = {}
        for name, values in measures(self.completions, self.samples).items():
            problem_means = by_problem(values)
            if len(problem_means):
                means[name] = float(problem_means.mean())
        return means

    def record(self) -> Record:
        """The numbers in one flat dict, as in ``summary.json``: accuracy, ci95, mean_reward, mean_reward_ci95, ..."""
        flat: Record = {"n": len(self.problems)}
        for name, numbers in estimates(measures(self.completions, self.samples)).items():
            for key, value in numbers.items():
                flat[name if key == "value" else f"{name}_{key}".removeprefix("accuracy_")] = value
        return flat | self.plain_means()

    def results(self) -> Record:
        """The numbers as in ``results.json``; what no completion has a value of is left out.

        Each an `estimate`: accuracy (the extracted answer is right), gold_anywhere (the gold value is anywhere in the
        response), mean_reward, every reward/<function>, pass@k, maj@k, and of several sources macro_<measure>, the mean
        over them. Besides `MEANS`, and a breakdown by source, category and level.
        """
        values = measures(self.completions, self.samples)
        results = {"samples": self.samples} | estimates(values)
        for name, column in at_k(self.completions, self.samples).items():
            problem_means = by_problem(column)
            if len(problem_means):
                results[name] = estimate(problem_means)
        breakdown = {}
        for attribute in ("source", "category", "level"):
            kinds = np.array([getattr(problem, attribute) for problem in self.problems])
            groups = {kind: {name: values[name][kinds == kind] for name in ESTIMATES} for kind in np.unique(kinds)}
            if len(groups) == 1:
                continue
            breakdown[attribute] = {
                str(kind): {"n": int((kinds == kind).sum())} | estimates(group) for kind, group in groups.items()
            }
            if attribute == "source":
                results |= macro_estimates(list(groups.values()))
        return results | self.plain_means() | {"breakdown": breakdown}

    def plain_means(self) -> dict[str, float]:
        """The means that have no interval."""
        return {name: mean for name, mean in self.means().items() if name in MEANS}


def at_k(completions: Sequence[Record], samples: int) -> dict[str, np.ndarray]:
    """Values (n, 1) of pass@k and maj@k for k = 1, 2, 4, ... and all samples; NaN without a gold answer."""
    ks = sorted({2**j for j in range(samples.bit_length())} | {samples})
    kinds = ("pass", "maj") if samples <= MOST_VOTES else ("pass",)
    problems = len(completions) // samples
    values = {f"{kind}@{k}": np.full((problems, 1), np.nan) for kind in kinds for k in ks}
    for i in range(problems):
        records = completions[i * samples : (i + 1) * samples]
        if records[0]["gold"] is None:
            continue
        correct = sum(record["correct"] for record in records)
        for k in ks:
            values[f"pass@{k}"][i] = pass_at_k(samples, correct, k)
        if "maj" in kinds:
            majority = majority_at_k(samples, count_votes(records))
            for k in ks:
                values[f"maj@{k}"][i] = majority[k]
    return values


def count_votes(records: Sequence[Record]) -> list[tuple[int, bool]]:
    """(count, correct) of each distinct answer to one problem; a completion without an answer has no vote."""
    extract = extract_text if records[0]["format"] is None else extract_answer
    votes = Counter((extract(record["completion"]), record["correct"]) for record in records)
    return [(count, correct) for (answer, correct), count in votes.items() if answer not in (None, "")]


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
    result: dict[str, Record] = {}
    for name, measure in values.items():
        unknown = int(np.isnan(measure).sum())
        if name in MEANS or unknown == measure.size:
            continue
        result[name] = estimate(by_problem(measure))
        if unknown:
            result[name]["left_out"] = unknown
    return result


def macro_estimates(groups: Sequence[dict[str, np.ndarray]]) -> dict[str, Record]:
    """`estimate` of the mean over groups of problems of each of their measures (n, samples)."""
    macro = {}
    for name in ESTIMATES:
        sets = [by_problem(group[name]) for group in groups]
        if all(map(len, sets)):
            macro[f"macro_{name}"] = estimate(*sets)
    return macro


def estimate(*sets: np.ndarray) -> Record:
    """Mean of values (n,), one per problem, and its 95% interval; of several sets the mean of their means.

    The interval is Wilson's if every value of a single set is 0 or 1, otherwise a bootstrap's over the problems.
    """
    mean = float(np.mean([values.mean() for values in sets]))
    if len(sets) == 1 and np.isin(sets[0], (0, 1)).all():
        return {"value": mean, "ci95": wilson(int(sets[0].sum()), len(sets[0]))}
    return {"value": mean, "ci95": cluster_bootstrap(*sets)}


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

    def mean_of_means(*parts: np.ndarray, axis: int) -> np.ndarray:
        return sum(part.mean(axis=axis) for part in parts) / len(parts)

    interval = bootstrap(
        sets,
        mean_of_means,
        vectorized=True,
        n_resamples=10_000,
        batch=100,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples hold a ``correct`` one (Chen et al. 2021, "Evaluating LLMs Trained on Code")."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(n: int, votes: Sequence[tuple[int, bool]]) -> list[float]:
    """Probability that the most frequent answer of k of n samples is correct, for k = 0 to n; ties are drawn by lot.

    Exact, over all subsets: those are counted in which a correct answer has j votes and no rival has more.
    ``votes`` are (count, correct) of each distinct answer; the other samples do not vote.
    """
    wins = np.zeros(n + 1)  # number of subsets by their size; one in which t rivals have j votes, too, is 1 / (t + 1)
    for i, (count, correct) in enumerate(votes):
        if not correct:
            continue
        rivals = [rival for other, (rival, _) in enumerate(votes) if other != i]
        for j in range(1, count + 1):
            ways = count_rests(n, n - count, rivals, j)
            shares = (ways / np.arange(1, ways.shape[1] + 1)).sum(axis=1)
            wins[j:] += math.comb(count, j) * shares[: n + 1 - j]
    return [float(wins[k]) / math.comb(n, k) for k in range(n + 1)]


def count_rests(n: int, others: int, rivals: Sequence[int], j: int) -> np.ndarray:
    """Ways (n + 1, t + 1) to choose among other samples so that no rival has over j votes.

    By how many are chosen, and how many rivals have exactly j. Starts with the samples that cannot reach j votes of one
    answer, and takes in the votes of one rival after the other.
    """
    close = [rival for rival in rivals if rival >= j]
    free = others - sum(close)
    ways = np.zeros((n + 1, len(close) + 1))
    ways[: free + 1, 0] = [math.comb(free, size) for size in range(free + 1)]
    for rival in close:
        longer = np.zeros_like(ways)
        for v in range(j):
            longer[v:] += math.comb(rival, v) * ways[: n + 1 - v]
        longer[j:, 1:] += math.comb(rival, j) * ways[: n + 1 - j, :-1]
        ways = longer
    return ways


def changes(before: Sequence[Record], after: Sequence[Record], most: int, names: tuple[str, str]) -> str:
    """How many problems came out better and worse, one completion each, and up to ``most`` of them in turn."""
    key = "reward" if all(record["correct"] is None for record in before) else "correct"
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if None not in (old[key], new[key])]
    better = sorted(
        (pair for pair in pairs if pair[1][key] > pair[0][key]), key=lambda pair: pair[0][key] - pair[1][key]
    )
    worse = sorted(
        (pair for pair in pairs if pair[1][key] < pair[0][key]), key=lambda pair: pair[1][key] - pair[0][key]
    )
    if key == "correct":
        counts = f"{len(better)} wrong -> right, {len(worse)} right -> wrong"
    else:
        counts = f"{len(better)} with more reward, {len(worse)} with less"
    parts = [f"{counts}, of {problem_count(len(pairs))}"]
    in_turn = [pair for two in zip_longest(better, worse) for pair in two if pair]
    for pair in in_turn[:most]:
        prompt = pair[0]["prompt"]
        lines = {"problem": prompt if isinstance(prompt, str) else prompt[-1]["content"], "gold": pair[0]["gold"]}
        for name, record in zip(names, pair, strict=True):
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
    if "reward" in name:
        text = f"{value:.3f}"
        interval = f" [{ci95[0]:.3f}, {ci95[1]:.3f}]" if ci95 else ""
    else:
        text = f"{100 * value:.1f}%"
        interval = f" [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]" if ci95 else ""
    return text + interval + (f" ({left_out:,} left out)" if left_out else "")


def from_record(record: Record, name: str) -> str:
    """A measure of `Evaluation.record` as text; "-" if it is not there."""
    if name not in record:
        return "-"
    prefix = f"{name}_".removeprefix("accuracy_")
    return as_text(name, record[name], record.get(f"{prefix}ci95"), record.get(f"{prefix}left_out"))


def label(name: str) -> str:
    """A measure's name in tables."""
    return name.removeprefix("mean_").removeprefix("completion_").removesuffix("_share").replace("_", " ")
