"""More rewards: exact text, regular expression, multiple choice, length, and mathematics by math-verify."""

import importlib.util
import re
from dataclasses import dataclass

from pspo.tasks.answers import after_thoughts, extract_text
from pspo.tasks.failures import RewardError, WorkerError
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward
from pspo.tasks.workers import worker_pool

WORKER_MEMORY = 4 * 2**30  # bytes of each process's address space


@dataclass(frozen=True)
class ExactMatch(Reward):
    """1 if the text that the completion gives as its answer (`extract_text`) is the gold answer, else 0.

    White space counts as one blank. A problem without an answer has no value (None).

    Attributes:
        ignore_case: compare case-folded texts.
    """

    ignore_case: bool = False

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        values: list[float | None] = []
        for completion, problem in zip(completions, problems, strict=True):
            if problem.answer is None:
                values.append(None)
                continue
            text = extract_text(completion)
            gold = " ".join(str(problem.answer).split())
            if self.ignore_case:
                text = text.casefold()
                gold = gold.casefold()
            values.append(float(text == gold))
        return values


def regex_matches(pattern: str, full: bool, text: str) -> bool:
    """True if the expression matches in the text, or all of it; called in worker processes."""
    match = re.fullmatch if full else re.search
    return match(pattern, text) is not None


@dataclass(frozen=True)
class RegexMatch(Reward):
    """1 if a regular expression (of Python's `re`) matches in the completion, else 0.

    Patterns such as `(a+)+b` take exponential time on texts that a model will find, so the search runs in a process of
    its own: a completion on which it takes longer than ``seconds`` counts as no match.

    Attributes:
        pattern: the expression; flags inside, as in `(?is)<think>.*</think>`.
        full: the whole completion must match.
        seconds: limit for one completion.
    """

    pattern: str
    full: bool = False
    seconds: float = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completions: list[str]) -> list[float]:
        calls = [(self.pattern, self.full, completion) for completion in completions]
        results = worker_pool(1, WORKER_MEMORY).map(regex_matches, calls, self.seconds, TimeoutError())
        return [float(result is True) for result in results]  # not a TimeoutError or WorkerError


@dataclass(frozen=True)
class MultipleChoice(Reward):
    """1 if the completion chooses the gold answer's letter, else 0; None without a gold answer.

    The choice is the letter on the line of the last `####`, else the last `\\boxed{B}`, else the last "answer is B"
    or "answer: (B)", else the last "(B)" or "B)", else a completion that is one letter.

    Attributes:
        letters: the choices.
    """

    letters: str = "ABCDE"

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        values: list[float | None] = []
        for completion, problem in zip(completions, problems, strict=True):
            if problem.answer is None:
                values.append(None)
                continue
            gold = self.choice(str(problem.answer))
            if gold is None:
                raise RewardError(f"MultipleChoice needs answers from {self.letters}, not {problem.answer!r}")
            values.append(float(self.choice(completion) == gold))
        return values

    def choice(self, completion: str) -> str | None:
        """Return the letter that the completion chooses, or None."""
        completion = after_thoughts(completion)
        one = f"([{re.escape(self.letters)}])(?![A-Za-z])"
        line = extract_text(completion) if "####" in completion else ""
        for text, pattern in (
            (line, rf"(?<![A-Za-z]){one}"),
            (completion, rf"\\boxed\{{(?:\\text\{{)?\(?{one}"),
            (completion, rf"(?i:\banswer(?: is)?)[:\s*]{{0,5}}\(?{one}"),
            (completion, rf"(?<![A-Za-z]){one}\)"),
            (completion.strip(" .*\n"), rf"\A{one}\Z"),
        ):
            if choices := re.findall(pattern, text):
                return choices[-1]
        return None


@dataclass(frozen=True)
class SoftOverlong(Reward):
    """Punish completions that come close to the token limit: DAPO's soft overlong punishment.

    With length n, limit L = ``max_tokens`` and B = ``buffer``:

        0 if n <= L - B;  (L - B - n) / B if L - B < n <= L;  -1 if n > L      (Yu et al. 2025, 2503.14476, eq. 13)

    Attributes:
        buffer: tokens before the limit over which the punishment grows.
        max_tokens: the limit; unset, --rollout.max_completion_tokens.
    """

    buffer: int
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= (self.max_tokens or self.buffer):
            raise ValueError(f"buffer must be above 0 and at most max_tokens, not {self.buffer}")

    def __call__(self, completion_tokens: list[int], max_completion_tokens: int) -> list[float]:
        free = (self.max_tokens or max_completion_tokens) - self.buffer
        return [max(-1.0, min(0.0, (free - length) / self.buffer)) for length in completion_tokens]


@dataclass(frozen=True)
class MathVerifyReward(Reward):
    """1 if math-verify (pip install 'pspo[math]') finds the completion's answer equal to the gold one, else 0.

    It reads sets, intervals, matrices and formulas, by sympy: a completion can make it compute for ever or take all
    memory. So it runs in processes of its own; one that takes longer than ``seconds`` or dies counts as wrong. None
    without a gold answer, or if math-verify cannot read that.

    Attributes:
        seconds: limit for one completion.
        processes: completions compared at a time.
    """

    seconds: float = 10.0
    processes: int = 2

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError("MathVerifyReward needs math-verify: pip install 'pspo[math]'")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        from pspo.tasks.math_verifier import verify  # needs the extra

        golds = [problem.answer for problem in problems]
        answers = map(after_thoughts, completions)
        calls = [(answer, str(gold)) for answer, gold in zip(answers, golds, strict=True) if gold is not None]
        pool = worker_pool(self.processes, WORKER_MEMORY)
        results = iter(pool.map(verify, calls, self.seconds, TimeoutError()))
        values: list[float | None] = []
        for gold in golds:
            result = None if gold is None else next(results)
            failed = isinstance(result, WorkerError | TimeoutError)
            values.append(0.0 if failed else None if result is None else float(result))
        return values
