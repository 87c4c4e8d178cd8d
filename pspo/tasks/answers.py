r"""Extract the number that a completion gives as its answer, exactly.

A *number* is an optional sign (`+`, `-`, U+2212) and one of

    12   1,234,567   5.   .5   1,234.50        ASCII digits; a comma joins one to three digits to exactly three
    2e-3   1E5                                 a decimal with an exponent of up to four digits
    3/4   1.5/2                                a quotient, without blanks, of two decimals
    \frac{1}{2}   \dfrac12   \tfrac{-1}{2}     LaTeX, of integers; LaTeX's own commas `1,\!000`, `1{,}000` too

- `1,2`, `12,34` and `1234,567` are two numbers each; `12/25/2024` is three.
- A zero denominator, over 1,000 digits or a longer exponent make the whole of it no number, not its beginning.
- A sign counts only where no digit, letter or `)` stands right before it: `100-50` holds 100 and 50. A currency
  sign may follow it: `-$5` is -5. A leading `.` counts only where no digit, letter or `.` stands before it.
- What is glued to the digits plays no part: `5kg`, `x5`, `50%` and `\boxed{5}` hold 5, 5, 50 and 5.
- Mixed numbers are not joined: `2\frac{1}{2}` is 2 and 1/2.
- An answer is read after the thoughts `<think>...</think>`; a completion whose last one is not closed has none.

Arithmetic is on integers and Fractions. Every quantifier below is possessive or short, so parsing takes time linear in
the text, and no text raises.
"""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, NamedTuple

_INVERSE_TOLERANCE = 10**6
TOLERANCE = Fraction(1, _INVERSE_TOLERANCE)  # |prediction - gold| up to this is correct (the paper's reward)
MAX_DIGITS = 1000  # below Python's own limit of 4,300 for int(str), beyond which it raises
MAX_EXPONENT_DIGITS = 4

_DIGITS = r"(?>[1-9][0-9]{0,2}(?:(?:,(?:\\! ?)?|\{,\})[0-9]{3}(?![0-9]))++|[0-9]++)"  # (?> never gives a comma back
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*+)?+|(?<![\w.])\.[0-9]++)"
_ARGUMENT = rf"(?:\{{ *+[-+]?{_DIGITS} *+\}}|[0-9])"
_NUMBER = re.compile(
    r"(?=[-+]?\\?[$£€¥₹]?[.\\0-9])"  # implied by the rest; skips plain text ten times as fast
    r"(?:(?<![^\W_])(?<!\))([-+])(?:\\?[$£€¥₹])?+)?+"  # [^\W_] is a letter or digit of any script
    rf"(?:\\[dtc]?frac *+({_ARGUMENT}) *+({_ARGUMENT})"
    rf"|(?<![0-9]/)({_DECIMAL})/({_DECIMAL})(?!/[0-9])"
    rf"|({_DECIMAL})(?:[eE]([-+]?[0-9]++))?+)"
)
_NOT_DIGITS = str.maketrans("", "", r"+-,.!\{} ")

_MARKER = re.compile(r"(?<!#)####(?!#)")
_REST_OF_LINE = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*+")  # the line ends of str.splitlines

Marker = Literal["last", "first"]


class Number(NamedTuple):
    """numerator / denominator * 10**exponent, not expanded: `1e9999` costs no more than `1`."""

    numerator: int
    denominator: int
    exponent: int

    def value(self) -> Fraction:
        """Exact value; it can have over 4,300 digits, which `str` refuses to print."""
        return Fraction(self.numerator * 10 ** max(self.exponent, 0), self.denominator * 10 ** max(-self.exponent, 0))

    def is_near(self, gold: int | Fraction) -> bool:
        """True if |value - gold| <= TOLERANCE; expands the exponent only if the magnitudes do not settle it."""
        a, b, exponent = self
        p, q = gold.numerator, gold.denominator
        if exponent:
            magnitude = math.log10(abs(a)) - math.log10(b) + exponent  # log10 of |value|
            if magnitude > 1 + math.log10(abs(p) // q + 1):
                return False  # |value| > 10 |gold|, and 10
            if magnitude < -7 and abs(p) * 10**5 > q:
                return False  # |value| < 1e-7 and |gold| > 1e-5
            a, b = a * 10 ** max(exponent, 0), b * 10 ** max(-exponent, 0)
        return abs(a * q - p * b) * _INVERSE_TOLERANCE <= b * q


def _read(match: re.Match[str]) -> Number | None:
    """Number spelled by a match of `_NUMBER`; None for a zero denominator or too many digits."""
    sign, frac_numerator, frac_denominator, dividend, divisor, decimal, exponent = match.groups("")
    top = frac_numerator or dividend or decimal
    bottom = frac_denominator or divisor or "1"
    top_digits = top if top.isdecimal() else top.translate(_NOT_DIGITS)  # the test alone is ten times as fast
    bottom_digits = bottom if bottom.isdecimal() else bottom.translate(_NOT_DIGITS)
    if max(len(top_digits), len(bottom_digits)) > MAX_DIGITS or len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        return None
    a, b = int(top_digits), int(bottom_digits)
    if b == 0:
        return None
    minuses = sign.count("-") + top.count("-") + bottom.count("-")
    decimals = len(top.partition(".")[2]) - len(bottom.partition(".")[2])
    return Number(-a if minuses % 2 else a, b, int(exponent or "0") - decimals if a else 0)


def find_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers of the text from left to right, each spelling once."""
    spellings = set()
    for match in _NUMBER.finditer(text.replace("\u2212", "-")):
        if match.group() not in spellings:
            spellings.add(match.group())
            number = _read(match)
            if number is not None:
                yield number


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else (outer blanks aside), or None."""
    match = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    number = _read(match) if match else None
    return number.value() if number else None


def after_thoughts(completion: str) -> str:
    """Return what follows the completion's thoughts `<think>...</think>`; "" if the last one is not closed."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def _marked_line(completion: str, marker: Marker) -> str | None:
    """Return the rest of the line after the last (or first) `####`; None without a marker."""
    if marker not in ("last", "first"):
        raise ValueError(f"marker must be 'last' or 'first', not {marker!r}")
    end = None
    for match in _MARKER.finditer(completion):
        end = match.end()
        if marker == "first":
            break
    return None if end is None else _REST_OF_LINE.match(completion, end).group()


def extract_answer(completion: str, marker: Marker = "last") -> Fraction | None:
    """Return the number that the completion gives as its answer, exact; None if it holds no number.

    It is the first number after the last (or first) marker `####` on the marker's line; without a marker, or with no
    number on that line, the last number of the whole completion. `#####` is no marker.
    """
    completion = after_thoughts(completion)
    line = _marked_line(completion, marker)
    number = None if line is None else next(find_numbers(line), None)
    if number is None:
        text = completion.replace("\u2212", "-")
        last = {match.group(): match.start() for match in _NUMBER.finditer(text)}  # of each spelling; a match is large
        numbers = (_read(_NUMBER.match(text, start)) for start in sorted(last.values(), reverse=True))
        number = next((number for number in numbers if number is not None), None)
    return None if number is None else number.value()


def matches_format(completion: str, marker: Marker = "last") -> bool:
    """True if the marker `####` is followed, on its line, by one number and nothing else.

    Blanks and tabs around the number and one `.` after it are allowed; units, currency, `%` or boxes are not.
    """
    line = _marked_line(after_thoughts(completion), marker)
    if line is None:
        return False
    line = line.strip(" \t").removesuffix(".").replace("\u2212", "-")
    match = _NUMBER.fullmatch(line)
    return match is not None and not re.search("[$£€¥₹]", line) and _read(match) is not None


def extract_text(completion: str) -> str:
    """Return the text that the completion gives as its answer, runs of white space as one blank.

    It is the rest of the last marker's line; without a marker, the whole completion.
    """
    completion = after_thoughts(completion)
    line = _marked_line(completion, "last")
    return " ".join((completion if line is None else line).split())


def is_correct(completion: str, gold: int | Fraction | str | None) -> bool | None:
    """True if the completion's answer is the gold one: a number within 1e-6, a text exactly; None without a gold."""
    if gold is None:
        return None
    if isinstance(gold, str):
        return extract_text(completion) == " ".join(gold.split())
    answer = extract_answer(completion)
    return answer is not None and abs(answer - gold) <= TOLERANCE


def contains_answer(completion: str, gold: int | Fraction | str | None) -> bool | None:
    """True if gold is anywhere in the completion (the paper's "true accuracy"), thoughts too; None without a gold.

    A number counts within 1e-6 of it; a text counts with white space collapsed.
    """
    if gold is None:
        return None
    if isinstance(gold, str):
        return " ".join(gold.split()) in " ".join(completion.split())
    return any(number.is_near(gold) for number in find_numbers(completion))
