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

Arithmetic is exact, on Decimals (1e9999 costs no more than 1) and Fractions. Every quantifier below is possessive or
short, so parsing takes time linear in the text, and no text raises.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Literal

TOLERANCE = Fraction(1, 10**6)  # |prediction - gold| up to this is correct (the paper's reward)
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
_SEPARATORS = str.maketrans("", "", r",!\{} ")

_MARKER = re.compile(r"(?<!#)####(?!#)")
_REST_OF_LINE = re.compile(r"[^\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*+")  # the line ends of str.splitlines

Marker = Literal["last", "first"]
Number = Decimal | Fraction


def _read(match: re.Match[str]) -> Number | None:
    """Value of a match of `_NUMBER`; None for a zero denominator or too many digits."""
    sign, frac_numerator, frac_denominator, dividend, divisor, decimal, exponent = match.groups("")
    top = (frac_numerator or dividend or decimal).translate(_SEPARATORS)
    bottom = (frac_denominator or divisor or "1").translate(_SEPARATORS)
    longest = max(len(part.lstrip("+-").replace(".", "")) for part in (top, bottom))
    if longest > MAX_DIGITS or len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        return None
    if decimal:
        return Decimal(f"{sign}{top}e{exponent or 0}")
    denominator = Fraction(bottom)
    if denominator == 0:
        return None
    quotient = Fraction(top) / denominator
    return -quotient if sign == "-" else quotient


def find_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers of the text from left to right, each spelling once."""
    seen = set()
    for match in _NUMBER.finditer(text.replace("\u2212", "-")):
        if match.group() not in seen:
            seen.add(match.group())
            number = _read(match)
            if number is not None:
                yield number


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else (outer blanks aside), or None."""
    match = _NUMBER.fullmatch(text.strip().replace("\u2212", "-"))
    number = _read(match) if match else None
    return None if number is None else Fraction(number)


def after_thoughts(completion: str) -> str:
    """Return what follows the completion's thoughts `<think>...</think>`; "" if the last one is not closed."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def _marked_line(text: str, marker: Marker) -> str | None:
    """Return the rest of the line after the last (or first) `####`; None without a marker."""
    ends = [match.end() for match in _MARKER.finditer(text)]
    if not ends:
        return None
    return _REST_OF_LINE.match(text, ends[0] if marker == "first" else ends[-1]).group()


def extract_answer(completion: str, marker: Marker = "last") -> Fraction | None:
    """Return the number that the completion gives as its answer, exact; None if it holds no number.

    It is the first number after the last (or first) marker `####` on the marker's line; without a marker, or with no
    number on that line, the last number of the whole completion. `#####` is no marker.
    """
    text = after_thoughts(completion)
    line = _marked_line(text, marker)
    number = None if line is None else next(find_numbers(line), None)
    if number is None:
        text = text.replace("\u2212", "-")
        starts = {match.group(): match.start() for match in _NUMBER.finditer(text)}  # the last of each spelling
        remaining = sorted(starts.values())
        while remaining and number is None:
            number = _read(_NUMBER.match(text, remaining.pop()))
    return None if number is None else Fraction(number)


def matches_format(completion: str, marker: Marker = "last") -> bool:
    """True if the marker `####` is followed, on its line, by one number and nothing else.

    Blanks and tabs around the number and one `.` after it are allowed; units, currency, `%` or boxes are not.
    """
    line = _marked_line(after_thoughts(completion), marker)
    if line is None or re.search("[$£€¥₹]", line):
        return False
    match = _NUMBER.fullmatch(line.strip(" \t").removesuffix(".").replace("\u2212", "-"))
    return match is not None and _read(match) is not None


def extract_text(completion: str) -> str:
    """Return the text that the completion gives as its answer, runs of white space as one blank.

    It is the rest of the last marker's line; without a marker, the whole completion.
    """
    text = after_thoughts(completion)
    line = _marked_line(text, "last")
    return " ".join((text if line is None else line).split())


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
    low = gold - TOLERANCE
    high = gold + TOLERANCE
    return any(low <= number <= high for number in find_numbers(completion))
