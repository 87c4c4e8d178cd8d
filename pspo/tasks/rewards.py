"""Rewards: functions of completions and their problems.

A reward of your own is a subclass of `Reward`, named by its import path: --reward.functions '[my_reward.Brevity]'.
"""

import contextlib
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Literal

from pspo.tasks.answers import TOLERANCE, Marker, extract_answer, matches_format, parse_number
from pspo.tasks.problem import Problem

OnError = Literal["raise", "none"]


class Reward(ABC):
    """Base class of all rewards; not a dataclass, so that jsonargparse accepts any subclass by its import path."""

    @abstractmethod
    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        """Return one finite number per completion; completions[i] answers problems[i]."""


def math_reward(
    completion: str,
    gold: int | Fraction,
    *,
    tolerance: Fraction = TOLERANCE,
    format_bonus: float = 0.05,
    marker: Marker = "last",
) -> float:
    """Return min(1, [|prediction - gold| <= tolerance] + format_bonus * [format matches]); by default 0, 0.05 or 1.

    The paper's reward. Prediction and format are `extract_answer` and `matches_format`; the comparison is exact.
    """
    prediction = extract_answer(completion, marker)
    if prediction is not None and abs(prediction - gold) <= tolerance:
        return 1.0
    return format_bonus if matches_format(completion, marker) else 0.0


@dataclass(frozen=True)
class MathReward(Reward):
    """`math_reward` against each problem's answer: 0, 0.05 or 1.

    Attributes:
        tolerance: largest |prediction - gold| that is correct; taken as a decimal: 1e-6 is exactly that.
        format_bonus: reward of a wrong answer in the right format, in [0, 1].
        marker: which `####` counts if a completion has several, "last" or "first".
    """

    tolerance: float = 1e-6
    format_bonus: float = 0.05
    marker: Marker = "last"

    def __post_init__(self) -> None:
        _exact(self.tolerance)
        if not 0 <= self.format_bonus <= 1:
            raise ValueError(f"format_bonus must lie in [0, 1], not {self.format_bonus!r}; the paper's is 0.05")
        if self.marker not in ("last", "first"):
            raise ValueError(f"marker must be 'last' or 'first', not {self.marker!r}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        how = {"tolerance": _exact(self.tolerance), "format_bonus": self.format_bonus, "marker": self.marker}
        return [math_reward(text, problem.answer, **how) for text, problem in zip(completions, problems, strict=True)]


def _exact(tolerance: float) -> Fraction:
    """Return the decimal as written: str(1e-6) is "1e-06", whereas Fraction(1e-6) is slightly below 1/10**6."""
    value = parse_number(str(tolerance))
    if value is None or value < 0:
        raise ValueError(f"tolerance must be a number of at least 0 such as 1e-6, not {tolerance!r}")
    return value


@dataclass(frozen=True)
class FormatReward(Reward):
    """1 if the completion gives its answer in the format `#### <number>`, else 0."""

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        return [float(matches_format(completion)) for completion in completions]


def total_rewards(
    functions: Sequence[Reward],
    weights: Sequence[float] | None,
    completions: list[str],
    problems: list[Problem],
    timeout: float = 0.0,
    on_error: OnError = "raise",
) -> tuple[list[float], dict[str, list[float]]]:
    """Compute the weighted sum of several rewards.

    Args:
        weights: one number per function; None for all 1.
        timeout: seconds each function may take, 0 for no limit; TimeoutError beyond.
        on_error: "raise", or "none": a completion for which a function fails gets NaN from it, and as its total.

    Returns:
        (B,) totals, and by class name (`Name`, `Name_2`, ... if a class comes twice) (B,) unweighted values.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    if len(weights) != len(functions) or not functions:
        raise ValueError(f"{len(functions)} rewards but {len(weights)} weights: give at least one, and as many of each")
    if len(completions) != len(problems):
        raise ValueError(f"{len(completions)} completions but {len(problems)} problems: pass one for each completion")

    by_name: dict[str, list[float]] = {}
    names = [type(function).__name__ for function in functions]
    for i, (name, function) in enumerate(zip(names, functions, strict=True)):
        name = f"{name}_{names[:i].count(name) + 1}" if name in by_name else name
        by_name[name] = _values(function, name, completions, problems, timeout, on_error)
    totals = [sum(w * v for w, v in zip(weights, row, strict=True)) for row in zip(*by_name.values(), strict=True)]
    return totals, by_name


def _values(
    function: Reward, name: str, completions: list[str], problems: list[Problem], timeout: float, on_error: OnError
) -> list[float]:
    try:
        with _time_limit(timeout, name) if timeout else contextlib.nullcontext():
            values = function(completions, problems)
        if not hasattr(values, "__len__"):
            raise ValueError(f"reward {name} returned {values!r}; it must return a list of numbers")
        if len(values) != len(completions):
            raise ValueError(f"reward {name} returned {len(values)} values for {len(completions)} completions")
    except Exception:  # a user's code may raise anything
        if on_error == "raise":
            raise
        return [math.nan] * len(completions)
    finite = [isinstance(value, Real) and math.isfinite(value) for value in values]
    if on_error == "raise" and not all(finite):
        row = finite.index(False)
        raise ValueError(f"reward {name} returned {values[row]!r} for completion {row}; it must be a finite number")
    return [float(value) if ok else math.nan for value, ok in zip(values, finite, strict=True)]


@contextlib.contextmanager
def _time_limit(seconds: float, name: str) -> Iterator[None]:
    """Raise TimeoutError after so many seconds; by SIGALRM, so in the main thread only."""

    def too_late(*_: object) -> None:
        raise TimeoutError(f"reward {name} took longer than --reward.timeout {seconds:g} seconds")

    previous = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
