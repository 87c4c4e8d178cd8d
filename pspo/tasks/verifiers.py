"""More built-in rewards: exact text, and formulas compared by math-verify."""

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

    compares_answers = True

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if isinstance(problem.answer, Fraction) and problem.answer.denominator != 1:
                what = f"as text {problem.answer} is not what the data has: --data.answer_kind text"
                raise RewardError(f"ExactMatch compares texts, and {what}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        values: list[float | None] = []
        for completion, problem in zip(completions, problems, strict=True):
            gold = " ".join(str(problem.answer).split())
            values.append(None if problem.answer is None else float(extract_text(completion) == gold))
        return values


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

    By sympy, which can compute for ever or take all memory: in processes of its own. A value that takes too long or
    kills its process is unknown (None), as is one without a gold answer that it reads. The last `\\boxed` counts.
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
