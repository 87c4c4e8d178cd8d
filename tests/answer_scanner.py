"""A second reader of answers, which follows the grammar of `pspo/tasks/answers.py` without regular expressions.

It goes character by character; `check` says where the two disagree.
"""

from collections.abc import Iterator
from fractions import Fraction

from pspo.tasks import contains_answer, extract_answer, matches_format, math_reward

PIECES = (
    *"0123456789.,/-+eE#$%£{}()<>* \t\n\r=x:", "####", "#### ", "\n#### ", "\\$", "\\frac{", "\\dfrac", "\\tfrac1",
    "}{", "\\boxed{", ",\\!", ",\\! ", "{,}", "1,234", ",567", "1/2", "3/0", "e-3", "e9999", "e12345", ".5", "5.", "-$",
    "007", "\u2212", "\u0665", "\uff15", "\u00b2", "\u00bd", "\u2028", "\x85", "\x0b", "\x1c", "\x00", "\ud800",
    "\U0001f600", "inf", "nan", "The answer is ", "apples", "9" * 999, "0" * 1001,
)  # fmt: skip
GOLDS = (0, 5, -50, 1234, Fraction(1, 2), Fraction(1, 3), Fraction(-355, 113))
TOLERANCE = Fraction(1, 10**6)


def is_digit(text: str, i: int) -> bool:
    return 0 <= i < len(text) and text[i] in "0123456789"


def skip(text: str, i: int, characters: str) -> int:
    while i < len(text) and text[i] in characters:
        i += 1
    return i


def one_of(text: str, i: int, words: tuple[str, ...]) -> int:
    """The end of the first of the words that stands at i, or i."""
    return next((i + len(word) for word in words if text.startswith(word, i)), i)


def digits(text: str, i: int) -> int:
    """The end of the digits at i, with the commas that join exactly three to one to three; i where there are none."""
    end = skip(text, i, "0123456789")
    if 1 <= end - i <= 3 and text[i] != "0":
        while (start := one_of(text, end, (",\\! ", ",\\!", ",", "{,}"))) > end:
            if skip(text, start, "0123456789") - start != 3:
                break
            end = start + 3
    return end


def decimal(text: str, i: int) -> int:
    if text.startswith(".", i):
        glued = i > 0 and (text[i - 1].isalnum() or text[i - 1] in "_.")
        return i if glued or not is_digit(text, i + 1) else skip(text, i + 1, "0123456789")
    end = digits(text, i)
    return skip(text, end + 1, "0123456789") if end > i and text.startswith(".", end) else end


def argument(text: str, i: int) -> int:
    """The end of a LaTeX argument at i: a digit, or an integer in braces."""
    if is_digit(text, i):
        return i + 1
    if not text.startswith("{", i):
        return i
    start = one_of(text, skip(text, i + 1, " "), ("-", "+"))
    close = skip(text, digits(text, start), " ")
    return close + 1 if is_digit(text, start) and text.startswith("}", close) else i


def scan_one(text: str, i: int) -> tuple[int, Fraction | None] | None:
    """The end and the value (None where it has none) of the number that starts at i; None where none starts."""
    negative, body = False, i
    if text[i] in "+-":
        if i > 0 and (text[i - 1].isalnum() or text[i - 1] == ")"):
            return None
        negative, body = text[i] == "-", i + 1
        currency = one_of(text, body, ("\\",))
        body = currency + 1 if currency < len(text) and text[currency] in "$£€¥₹" else body
    sign = -1 if negative else 1
    fraction = one_of(text, body, ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"))
    if fraction > body:
        over = skip(text, fraction, " ")
        middle = argument(text, over)
        under = skip(text, middle, " ")
        end = argument(text, under)
        if middle == over or end == under:
            return None
        return end, quotient(text[over:middle].strip("{ }"), text[under:end].strip("{ }"), sign)
    middle = decimal(text, body)
    if middle == body:
        return None
    first_of_chain = not (is_digit(text, body - 2) and text[body - 1] == "/")
    if first_of_chain and text.startswith("/", middle):
        end = decimal(text, middle + 1)
        if end > middle + 1 and not (text.startswith("/", end) and is_digit(text, end + 1)):
            return end, quotient(text[body:middle], text[middle + 1 : end], sign)
    power = one_of(text, middle + 1, ("-", "+")) if text[middle : middle + 1] in ("e", "E") else len(text)
    if not is_digit(text, power):
        return middle, quotient(text[body:middle], "1", sign)
    end = skip(text, power, "0123456789")
    value = quotient(text[body:middle], "1", sign)
    return end, None if end - power > 4 or value is None else value * Fraction(10) ** int(text[middle + 1 : end])


def quotient(over: str, under: str, sign: int) -> Fraction | None:
    values = []
    for part in (over, under):
        plain = "".join(character for character in part if character in "0123456789.-")
        if sum(character not in ".-" for character in plain) > 1000:
            return None
        values.append(Fraction(plain))
    return sign * values[0] / values[1] if values[1] else None


def scan(text: str) -> Iterator[Fraction]:
    i, text = 0, text.replace("\u2212", "-")
    while i < len(text):
        found = scan_one(text, i)
        if found and found[1] is not None:
            yield found[1]
        i = found[0] if found else i + 1


def marked_line(text: str) -> str | None:
    """What follows the last run of exactly four `#`, to the end of its line."""
    i, end = 0, None
    while i < len(text):
        run = skip(text, i, "#") - i
        end = i + 4 if run == 4 else end
        i += max(run, 1)
    return None if end is None else (text[end:].splitlines() or [""])[0]


def oracle(text: str) -> tuple[Fraction | None, bool, list[Fraction]]:
    """The answer, whether it is in the format, and all numbers of the text."""
    line, numbers = marked_line(text), list(scan(text))
    answer = next(scan(line), None) if line is not None else None
    if answer is None:
        answer = numbers[-1] if numbers else None
    bare = (line or "").strip(" \t")
    bare = (bare[:-1] if bare.endswith(".") else bare).replace("\u2212", "-")
    # the whole is one number: it ends where the line does. A `.` that ends the line may be the number's own, or not.
    found = scan_one(bare, 0) if bare and not set(bare) & set("$£€¥₹") else None
    return answer, found is not None and found[0] == len(bare) and found[1] is not None, numbers


def check(text: str) -> None:
    """Raise AssertionError where pspo reads the text otherwise than the scanner."""
    answer, formatted, numbers = oracle(text)
    assert extract_answer(text) == answer, f"answer {extract_answer(text)!r}, not {answer!r}"
    assert matches_format(text) is formatted, f"format {not formatted}, not {formatted}"
    for gold in (*GOLDS, *({answer} - {None})):
        found = any(abs(number - gold) <= TOLERANCE for number in numbers)
        assert contains_answer(text, gold) is found, f"contains {gold}: {not found}, not {found}"
        right = answer is not None and abs(answer - gold) <= TOLERANCE
        assert math_reward(text, gold) == (1.0 if right else 0.05 if formatted else 0.0), f"reward for gold {gold}"
