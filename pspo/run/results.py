"""Evaluation results: means with 95% intervals, pass@k, breakdowns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from scipy.stats import binomtest, bootstrap

from pspo.tasks import Problem


@dataclass(frozen=True)
class Evaluation:
    """Means over n problems, and over the samples of each.

    Attributes:
        accuracy: share whose extracted answer is right; ci95 is its interval.
        true_accuracy: share with the gold value anywhere in the response.
        pass_at_k: by k, the unbiased estimate (Chen et al. 2021, "Evaluating LLMs Trained on Code").
        format_share: share ending in the format "#### number".
        truncated_share: share that hit the token limit.
        completion_tokens: mean length.
        breakdown: n, accuracy and true accuracy by each value of "source", "category" and "level" in which the problems
            differ.
        completions: one record per sample, in the order of the problems.
    """

    accuracy: float
    ci95: tuple[float, float]
    n: int
    true_accuracy: float
    true_accuracy_ci95: tuple[float, float]
    mean_reward: float
    format_share: float
    truncated_share: float
    completion_tokens: float
    samples: int = 1
    pass_at_k: dict[int, float] = field(default_factory=dict)
    pass_at_k_ci95: dict[int, tuple[float, float]] = field(default_factory=dict)
    breakdown: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict, repr=False)
    completions: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def record(self) -> dict[str, Any]:
        """The numbers in one flat dict, without breakdown and completions."""
        left_out = ("breakdown", "completions")
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name not in left_out}

    def results(self) -> dict[str, Any]:
        """All but the completions, as ``results.json`` has it: each estimate beside its interval."""
        return {
            "samples": self.samples,
            "accuracy": {"value": self.accuracy, "ci95": self.ci95},
            "true_accuracy": {"value": self.true_accuracy, "ci95": self.true_accuracy_ci95},
            **{f"pass@{k}": {"value": self.pass_at_k[k], "ci95": self.pass_at_k_ci95[k]} for k in self.pass_at_k},
            "mean_reward": self.mean_reward,
            "format_share": self.format_share,
            "truncated_share": self.truncated_share,
            "completion_tokens": self.completion_tokens,
            "breakdown": self.breakdown,
        }


def summarise(problems: Sequence[Problem], completions: Sequence[dict[str, Any]], samples: int) -> Evaluation:
    """Means and intervals over the records of `pspo.run.evaluation.evaluate`: ``samples`` of each problem, in order.

    Intervals are Wilson's for one sample per problem, otherwise a bootstrap's over the problems (of no width if all
    problems come out alike).
    """

    def by_problem(key: str) -> np.ndarray:  # (n,) mean over each problem's samples
        values = np.array([completion[key] for completion in completions], dtype=float)
        return values.reshape(len(problems), samples).mean(axis=1)

    def interval(values: np.ndarray) -> tuple[float, float]:  # of the mean of values (m,), one per problem
        return wilson(int(values.sum()), len(values)) if samples == 1 else cluster_bootstrap(values)

    correct, contains = by_problem("correct"), by_problem("contains_gold")
    powers = {2**j for j in range(samples.bit_length())}  # all up to samples
    passes = {  # by k, (n,)
        k: np.array([pass_at_k(samples, round(share * samples), k) for share in correct])
        for k in sorted(powers | {samples})
    }

    breakdown = {}
    for part in ("source", "category", "level"):
        groups: dict[str, list[int]] = {}  # indices of the problems
        for i, problem in enumerate(problems):
            groups.setdefault(getattr(problem, part), []).append(i)
        if len(groups) > 1:
            breakdown[part] = {
                value: {
                    "n": len(group),
                    "accuracy": {"value": float(correct[group].mean()), "ci95": interval(correct[group])},
                    "true_accuracy": {"value": float(contains[group].mean()), "ci95": interval(contains[group])},
                }
                for value, group in sorted(groups.items())
            }

    return Evaluation(
        accuracy=float(correct.mean()),
        ci95=interval(correct),
        n=len(problems),
        true_accuracy=float(contains.mean()),
        true_accuracy_ci95=interval(contains),
        mean_reward=float(by_problem("reward").mean()),
        format_share=float(by_problem("format").mean()),
        truncated_share=float(by_problem("truncated").mean()),
        completion_tokens=float(by_problem("tokens").mean()),
        samples=samples,
        pass_at_k={k: float(values.mean()) for k, values in passes.items()},
        pass_at_k_ci95={k: interval(values) for k, values in passes.items()},
        breakdown=breakdown,
        completions=completions,
    )


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927)."""
    low, high = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


def cluster_bootstrap(values: np.ndarray, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean of values (n,), one per cluster, resampling the clusters."""
    if len(values) < 2:
        return float(values.mean()), float(values.mean())
    found = bootstrap(
        (values,), np.mean, n_resamples=resamples, batch=100, method="percentile", rng=np.random.default_rng(seed)
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold at least one of the ``correct`` ones."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text, the first one as the header; all but the first column right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip())
    return "\n".join(lines)


def percent(share: float, ci95: tuple[float, float] | None = None) -> str:
    """A share as "42.0%", with its interval as "42.0% [37.7, 46.4]"."""
    interval = f" [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]" if ci95 else ""
    return f"{100 * share:.1f}%{interval}"
