"""Rewards: their base class and the built-in ones; `pspo.tasks.scoring` calls them.

A reward of your own is a function or a subclass of `Reward`, named by its import path. It gets the inputs that its
parameters name, and returns for each completion a finite number, or None to leave it out (docs/guide/rewards.md).
"""

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from pspo.errors import UserCodeError
from pspo.tasks.answers import TOLERANCE, Marker, after_thoughts, boxed, extract_answer, is_correct, matches_format
from pspo.tasks.problem import Problem
from pspo.tasks.workers import worker_pool

WORKER_MEMORY = 4 * 2**30  # bytes of the address space of a process that compares formulas


class Reward(ABC):
    """Base class of all rewards. It is no dataclass, but a subclass may be one."""

    # True for one that compares a completion's answer with the gold one as accuracy does; "numbers": only if it is one
    compares_answers: ClassVar[bool | Literal["numbers"]] = False

    @abstractmethod
    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Return one number per completion; the parameters' names say which inputs are passed."""

    def check_problems(self, problems: Sequence[Problem]) -> None:  # noqa: B027
        """Raise UserCodeError if a problem cannot be scored; called before anything is trained."""


def math_reward(
    completion: str,
    gold: int | Fraction,
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
    """Score by `math_reward` against each problem's answer: 0, 0.05 or 1."""

    tolerance: float = 1e-6  # taken exactly, as the decimal that is written
    format_bonus: float = 0.05  # reward of a wrong answer in the right format, in [0, 1]
    marker: Marker = "last"  # which of several `####` counts, "last" or "first"
    compares_answers = True

    def __post_init__(self) -> None:
        if not 0 <= float(self.tolerance) < math.inf:
            raise ValueError(f"tolerance must be a number of at least 0 such as 1e-6, not {self.tolerance!r}")
        if not 0 <= self.format_bonus <= 1:
            raise ValueError(f"format_bonus must lie in [0, 1], not {self.format_bonus!r}; the paper's is 0.05")

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not isinstance(problem.answer, int | Fraction):
                raise UserCodeError(f"MathReward needs numeric answers, not {problem.answer!r}; ExactMatch takes texts")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        tolerance = Fraction(str(self.tolerance))  # as written: Fraction(1e-6) is slightly below 1/10**6
        pairs = zip(completions, problems, strict=True)
        return [math_reward(text, p.answer, tolerance, self.format_bonus, self.marker) for text, p in pairs]


@dataclass(frozen=True)
class FormatReward(Reward):
    """1 if the completion gives its answer in the format `#### <number>`, else 0."""

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(matches_format(completion)) for completion in completions]


@dataclass(frozen=True)
class ExactMatch(Reward):
    """1 if the completion's answer is the gold one, a text exactly, a number within 1e-6, else 0; None without one."""

    compares_answers = True

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[bool | None]:
        return [is_correct(text, problem.answer) for text, problem in zip(completions, problems, strict=True)]


@dataclass(frozen=True)
class SoftOverlong(Reward):
    """Punish completions that come close to the token limit: DAPO's soft overlong punishment.

    For length n (observations of an episode included), limit L = --rollout.max_completion_tokens and B = ``buffer``:

        0 if n <= L - B;  (L - B - n) / B if L - B < n <= L;  -1 if n > L      (Yu et al. 2025, 2503.14476, eq. 13)
    """

    buffer: int

    def __post_init__(self) -> None:
        if self.buffer <= 0:
            raise ValueError(f"buffer must be above 0, not {self.buffer}")

    def __call__(self, completion_tokens: list[int], max_completion_tokens: int) -> list[float]:
        free = max_completion_tokens - self.buffer
        return [max(-1.0, min(0.0, (free - length) / self.buffer)) for length in completion_tokens]


def verify(completion: str, gold: str | None) -> bool | None:
    """True if the completion's answer equals the gold answer; None without a gold answer that math-verify can read."""
    if gold is None:
        return None
    import math_verify  # needs the extra

    boxes = boxed(completion)
    if len(boxes) > 1:
        completion = rf"\boxed{{{boxes[-1]}}}"
    expected = math_verify.parse(f"${gold}$") or math_verify.parse(gold)
    return math_verify.verify(expected, math_verify.parse(completion)) if expected else None


@dataclass(frozen=True)
class MathVerifyReward(Reward):
    """1 if math-verify (pip install 'pspo[math]') finds the completion's answer equal to the gold one, else 0.

    math-verify uses sympy, which a completion can make compute for ever or take all memory. It runs in processes of its
    own: a comparison that takes too long or kills its process gives None, as does a gold answer that is missing or that
    math-verify cannot read. The last of several `\\boxed` answers counts, as in MATH's own rule.
    """

    seconds: float = 10.0  # limit for one completion
    processes: int = 2  # completions compared at a time
    compares_answers = "numbers"  # accuracy compares a gold formula as text

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("MathVerifyReward needs math-verify: pip install 'pspo[math]'")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[bool | None]:
        golds = [None if problem.answer is None else str(problem.answer) for problem in problems]
        calls = [(after_thoughts(text), gold) for text, gold in zip(completions, golds, strict=True)]
        results = worker_pool(self.processes, WORKER_MEMORY).map(verify, calls, self.seconds)
        return [result if isinstance(result, bool) else None for result in results]
