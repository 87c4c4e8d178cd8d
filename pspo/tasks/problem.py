"""The one record that every data source is turned into."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Problem:
    """A word problem with one exact number as its answer.

    Attributes:
        prompt: the problem's text as the source has it; the user turn of the chat.
        answer: the gold value, exact.
        source: where it comes from: gsm8k, math, svamp, asdiv, arithmetic, or file, for a user's own.
        category: the source's own kind of problem (MATH `type`, SVAMP `Type`, ASDiv `Solution-Type`); else "".
        level: the source's own difficulty (MATH `level`, ASDiv `Grade`); else "".
        solution: a worked solution in the source's own form, where it has one; else "".
    """

    prompt: str
    answer: Fraction
    source: str = ""
    category: str = ""
    level: str = ""
    solution: str = ""
