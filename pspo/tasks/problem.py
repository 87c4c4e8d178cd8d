"""Problem: the record that every data source is converted to."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Problem:
    """A word problem with one exact number as its answer.

    Attributes:
        prompt: text of the problem; the user turn of the chat.
        answer: exact gold value.
        source: data set: gsm8k, math, svamp, asdiv, arithmetic or file.
        category: kind of problem (MATH `type`, SVAMP `Type`, ASDiv `Solution-Type`), or "".
        level: difficulty (MATH `level`, ASDiv `Grade`), or "".
        solution: worked solution in the source's own form, or "".
    """

    prompt: str
    answer: Fraction
    source: str = ""
    category: str = ""
    level: str = ""
    solution: str = ""
