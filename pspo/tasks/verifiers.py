"""More rewards: exact text, regular expression, multiple choice, length, and mathematics by math-verify."""

import importlib.util
import re
from dataclasses import dataclass

import regex

from pspo.tasks.answers import after_thoughts, extract_text
from pspo.tasks.failures import RewardError, WorkerError
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward
from pspo.tasks.workers import worker_pool

MATH_MEMORY = 4 * 2**30  # bytes of each process's address space


@dataclass(frozen=True)
class ExactMatch(Reward):
    """1 if the text that the completion gives as its answer (`extract_text`) is the gold answer, else 0.

    White space counts as one blank. A problem without an answer has no value (None).

    Attributes:
        ignore_case: compare case-folded texts.
    """

    ignore_case: bool = False

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        def normal(text: str) -> str:
            return " ".join((text.casefold() if self.ignore_case else text).split())

        pairs = zip(map(extract_text, completions), (problem.answer for problem in problems), strict=True)
        return [None if gold is None else float(normal(text) == normal(str(gold))) for text, gold in pairs]


@dataclass(frozen=True)
class RegexMatch(Reward):
    """1 if a regular expression (of the library `regex`, a superset of `re`) matches in the completion, else 0.

    A completion on which the search takes longer than ``seconds`` counts as no match: patterns such as `(a+)+b` take
    exponential time on texts that a model will find.

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
            regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(self.matches(completion)) for completion in completions]

    def matches(self, completion: str) -> bool:
        match = regex.fullmatch if self.full else regex.search
        try:
            return match(self.pattern, completion, timeout=self.seconds) is not None
        except TimeoutError:
            return False


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
        values = []
        for completion, answer in zip(completions, (problem.answer for problem in problems), strict=True):
            gold = None if answer is None else self.choice(str(answer))
            if answer is not None and gold is None:
                raise RewardError(f"MultipleChoice needs answers from {self.letters}, not {answer!r}")
            values.append(None if gold is None else float(self.choice(completion) == gold))
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
            if found := re.findall(pattern, text):
                return found[-1]
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
        pairs = zip(map(after_thoughts, completions), golds, strict=True)
        calls = [{"completion": answer, "gold": str(gold)} for answer, gold in pairs if gold is not None]
        results = iter(worker_pool(self.processes, MATH_MEMORY).map(verify, calls, self.seconds, TimeoutError()))
        values = [None if gold is None else next(results) for gold in golds]
        return [0.0 if isinstance(v, WorkerError | TimeoutError) else None if v is None else float(v) for v in values]
