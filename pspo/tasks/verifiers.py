"""More built-in rewards: exact text, length, and formulas compared by math-verify."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pspo.errors import RewardError
from pspo.tasks.answers import after_thoughts, extract_text
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward
from pspo.tasks.sources import boxed
from pspo.tasks.workers import worker_pool

WORKER_MEMORY = 4 * 2**30  # bytes of each process's address space


@dataclass(frozen=True)
class ExactMatch(Reward):
    """1 if the text of the completion's answer (`extract_text`) is the gold answer, else 0; None without a gold one."""

    ignore_case: bool = False
    compares_answers = True

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if isinstance(problem.answer, Fraction) and problem.answer.denominator != 1:
                what = f"as text {problem.answer} is not what the data has: --data.answer_kind text"
                raise RewardError(f"ExactMatch compares texts, and {what}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        values: list[float | None] = []
        for completion, problem in zip(completions, problems, strict=True):
            pair = (extract_text(completion), " ".join(str(problem.answer).split()))
            text, gold = map(str.casefold, pair) if self.ignore_case else pair
            values.append(None if problem.answer is None else float(text == gold))
        return values


@dataclass(frozen=True)
class SoftOverlong(Reward):
    """Punish completions that come close to the token limit: DAPO's soft overlong punishment.

    With length n, an episode's with its observations, limit L = --rollout.max_completion_tokens and B = ``buffer``:

        0 if n <= L - B;  (L - B - n) / B if L - B < n <= L;  -1 if n > L      (Yu et al. 2025, 2503.14476, eq. 13)
    """

    buffer: int

    def __post_init__(self) -> None:
        if self.buffer <= 0:
            raise ValueError(f"buffer must be above 0, not {self.buffer}")

    def __call__(self, completion_tokens: list[int], max_completion_tokens: int) -> list[float]:
        free = max_completion_tokens - self.buffer
        return [max(-1.0, min(0.0, (free - length) / self.buffer)) for length in completion_tokens]


def verify(completion: str, gold: str) -> bool | None:
    """True if the completion's answer equals the gold one; None if math-verify cannot read the gold one."""
    import math_verify  # needs the extra

    boxes = boxed(completion)
    if len(boxes) > 1:
        completion = rf"\boxed{{{boxes[-1]}}}"
    expected = math_verify.parse(f"${gold}$") or math_verify.parse(gold)
    return math_verify.verify(expected, math_verify.parse(completion)) if expected else None


@dataclass(frozen=True)
class MathVerifyReward(Reward):
    """1 if math-verify (pip install 'pspo[math]') finds the completion's answer equal to the gold one, else 0.

    By sympy, which a completion can make compute for ever or take all memory: it runs in processes of its own, and a
    value that takes too long or kills its process is unknown (None). Of several `\\boxed` answers the last one counts,
    as in MATH's own rule. None without a gold answer, or if math-verify cannot read that.
    """

    seconds: float = 10.0  # limit for one completion
    processes: int = 2  # completions compared at a time
    compares_answers = True

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("MathVerifyReward needs math-verify: pip install 'pspo[math]'")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        answered = [i for i, problem in enumerate(problems) if problem.answer is not None]
        calls = [(after_thoughts(completions[i]), str(problems[i].answer)) for i in answered]
        results = worker_pool(self.processes, WORKER_MEMORY).map(verify, calls, self.seconds)
        values: list[float | None] = [None] * len(completions)
        for i, result in zip(answered, results, strict=True):
            values[i] = float(result) if isinstance(result, bool) else None
        return values
