r"""Extract the number that a completion gives as its answer, exactly.

A *number* is an optional sign (`+`, `-`, U+2212, U+2013 ...) and one of

    12   1,234,567   5.   .5   1,234.50        ASCII digits; a comma joins one to three digits to exactly three
    1 234   1\,234   1'234   1_234             other separators of thousands, no-break and thin spaces among them
    2e-3   1E5   3 \times 10^5   10^{6}        a decimal with an exponent of up to four digits
    3/4   1.5/2                                a quotient, without blanks, of two decimals
    \frac{1}{2}   \dfrac12   \tfrac{-1}{2}     LaTeX, of integers; LaTeX's own commas `1,\!000`, `1{,}000` too
    2 1/2   2\frac{1}{2}                       an integer and such a fraction: their sum

- A number with a power, a root, pi or a factorial is no number as a whole: `2^5`, `5!`, `2\sqrt{3}`. Nor is one with
  a zero denominator, more than 1,000 digits or an exponent of more than four digits.
- `1,2` and `1234,567` are two numbers each, as are `100-50` and `6*7`; `12/25/2024` is three.
- A sign counts only where no digit, letter or `)` stands right before it. A currency sign may follow it: `-$5` is -5.
  A sign before a blank counts only at the beginning and after `=`, `<`, `*`, `$` or an opening bracket.
- Anything else that is glued to the digits is ignored: `5kg`, `x5`, `50%` and `\boxed{5}` hold 5, 5, 50 and 5.
- An answer is read after the thoughts `<think>...</think>`; a completion with unclosed thoughts at its end has none.

Arithmetic is exact, on Decimals (1e9999 costs no more than 1) and Fractions. Every quantifier below is possessive or
short, so parsing takes time linear in the text, and no text raises.
"""

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Literal

TOLERANCE = Fraction(1, 10**6)  # |prediction - gold| up to this is correct (the paper's reward)
MAX_DIGITS = 1000  # below Python's own limit of 4,300 for int(str), beyond which it raises
MAX_EXPONENT_DIGITS = 4
MAX_FORMULAS = 1000  # on a line; one with more has no value

_DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_COMMAS = r"(?:(?:,(?:\\![ ]?)?|\{,\})[0-9]{3}(?![0-9]))++"  # ,234,567 and ,\!234 and {,}234
_SPACES = r"(?:(?:\\[,;:\ ]|['_\u2019\u00a0\u2009\u202f])[0-9]{3}(?![0-9]))++"  # \,234 and '234
_BLANKS = r"(?:[ ][0-9]{3}(?![0-9]))++(?![ ][0-9]|-?[a-z])"  # " 234 567", but neither 100 200 3 nor 12 100-dollar bills
_DIGITS = rf"(?>[1-9][0-9]{{0,2}}(?:{_COMMAS}|{_SPACES})|(?<![0-9][ ])[1-9][0-9]{{0,2}}{_BLANKS}|[0-9]++)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*+)?+|(?<![\w.])\.[0-9]++)"  # 1,234.50 and 5. and .5
_ARGUMENT = rf"(?:\{{[ ]*+[-+]?{_DIGITS}[ ]*+\}}|[0-9])"  # {12} and 1 of \frac{12}{7} and \frac12
_FRAC = r"\\[dtc]?frac[ ]*+"
_TIMES = r"[ ]*+(?:\\times|\\cdot|[*×x·⋅])[ ]*+"
# These make the number beside them no number: a root, \pi, \pm, a fraction of more than integers, a power.
_BRACES = r"\{[^{}\n]*+(?:\{[^{}\n]*+(?:\{[^{}\n]*+\}[^{}\n]*+)*+\}[^{}\n]*+)*+\}?+"  # up to three levels deep
_TERM = rf"[ ]*+(?:{_BRACES}|\([^()\n]{{0,60}}+\)|[-+]?[\w.]++|\\[a-zA-Z]++)"  # {2x} and (a + b) and x2 and \alpha
_NO_NUMBER = rf"""(?:
    (?:\\?sqrt|\\ln|\\log|√)(?:\[[0-9a-z]{{1,3}}\]|_{_TERM})?+{_TERM}
    |\\pi(?![a-zA-Z])|π|(?:±|\\pm){_TERM}
    |(?!{_FRAC}{_ARGUMENT}[ ]*+{_ARGUMENT}){_FRAC}(?:{_TERM}){{0,2}}+
    |\^(?!\W{{0,4}}(?:circ|text|mathrm|st|nd|rd|th)\b){_TERM}
)"""  # 5^\circ is 5, 2^{nd} is 2
_NUMBER = re.compile(
    rf"""
    (?=(?:-[ ]|[-+])?\\?[$£€¥₹]?[.0-9\\√π±^]|sqrt)  # implied by the rest; skips plain text ten times as fast
    (?:
        (?=[-+])
        (?P<sign>(?:(?<![^=([{{*$<])|(?<=[=([{{<][ ]))-[ ]|(?<![^\W_])(?<!\))[-+])  # [^\W_]: of any script
        (?:\\?[$£€¥₹])?+
    )?+
    (?:  # 2\frac{{1}}{{2}}, 2 1/2 and 3/4
        (?:(?P<whole>{_DIGITS})(?:[ ]|\\,|(?=\\)))?+
        (?:
            {_FRAC}(?P<numerator>{_ARGUMENT})[ ]*+(?P<denominator>{_ARGUMENT})
            |(?<![0-9]/)(?P<dividend>{_DECIMAL})/(?P<divisor>{_DECIMAL})(?!/[0-9])
        )  # or 12.5, 2e-3, 3 \times 10^5 and 10^{{6}}
        |(?P<decimal>(?=10\^\{{?[-+]?[0-9])|{_DECIMAL})
        (?:(?:[eE]|(?:{_TIMES})?+10\^\{{?+)(?P<exponent>[-+]?[0-9]++)\}}?+)?+
        |(?={_NO_NUMBER})
    )
    (?P<rest>  # what makes the whole no number: 2\sqrt{{3}}, 2^5, 2**5, 5!, 10_2, 2½
        (?=[ *×x·⋅\\^√π±!_s¼-¾⅐-⅞])
        (?:(?:{_TIMES}|[ ])?+{_NO_NUMBER}|\*\*[0-9]++|!|_(?:[0-9]++|{_BRACES})|[¼-¾⅐-⅞])++
        (?:/{_DIGITS})?+
    )?+
    """,
    re.VERBOSE,
)
_SEPARATORS = str.maketrans("", "", ",!\\{} ;:~'_\u2019\u00a0\u2009\u202f")

_SUPERSCRIPT = re.compile(r"[⁰¹²³⁴-⁹⁻]++")
_MARKER = re.compile(r"(?<!#)####(?!#)")
_EXCLAMATION = re.compile(  # a `!` that ends a sentence: no formula goes on behind it, as behind a factorial's
    r"(####[^a-zA-Z\n]*+)|(?<=[0-9])!++(?! ?(?:[-+/^=<>0-9a-z\\(),.;:}\]$]|\*(?!\*)))"
)
# What stands behind or before a number in a formula. Repetitions are bounded, because no match may take long.
_OPERATOR = r"(?:[-+×÷·⋅±/]|(?<!\*)\*(?!\*)|(?<![a-z])x(?![a-z])|\\(?:times|cdot|div|pm)|plus|minus|times|divided by)"
_DIGIT = r"[ ]{0,2}[-+]?[ ]?(?:\\?[$£€¥₹]|[({*]){0,3}(?:\.?[0-9]|\\[dt]?frac|\\?sqrt|√)"  # where an operand begins
_VARIABLE = r"(?<![a-zA-Z\\])[b-hj-zB-HJ-Z](?![a-zA-Z])"  # neither `a` nor `I`, which are words
_BEHIND = re.compile(
    rf"""
    [ ]?:[ ]?[0-9]  # 3:45
    |\([0-9]  # 2(3 + 4)
    |[xyzn](?![a-zA-Z])  # 3x
    |[a-zA-Z](?:\^[0-9])?[ ]{{0,2}}=  # 3t = 12
    |[)}}\]$%*\\]{{0,4}}[ ]{{0,2}}(?:{_OPERATOR}{_DIGIT}|(?!/){_OPERATOR}[ ]{{0,2}}{_VARIABLE})
    |[)}}\]$%*\\]{{0,4}}(?:[ ]?[a-zA-Z]{{1,20}}(?:\^[0-9])?){{1,2}}[)}}\]$*]{{0,4}}[ ]{{0,2}}{_OPERATOR}{_DIGIT}
    """,
    re.VERBOSE,
)
_BEFORE = re.compile(rf"(?:[0-9)\]}}!]|{_VARIABLE})\$?[ ]{{0,2}}{_OPERATOR}[ ]{{0,2}}(?:\\?[$£€¥₹]|[({{*]){{0,3}}$")

Marker = Literal["last", "first"]
Number = Decimal | Fraction


def _read(match: re.Match[str]) -> Number | None:
    """Value of a match of `_NUMBER`; None for what is no number, a zero denominator or too many digits."""
    sign, whole, numerator, denominator, dividend, divisor, decimal, exponent, rest = match.groups("")
    whole = whole.translate(_SEPARATORS)
    top = (numerator or dividend or decimal or "1").translate(_SEPARATORS)
    bottom = (denominator or divisor or "1").translate(_SEPARATORS)
    longest = max(len(part.lstrip("+-").replace(".", "")) for part in (whole, top, bottom))
    if rest or longest > MAX_DIGITS or len(exponent.lstrip("+-")) > MAX_EXPONENT_DIGITS:
        return None
    if decimal or exponent:
        return Decimal(f"{sign.strip()}{top}e{exponent or 0}")
    if Fraction(bottom) == 0:
        return None
    value = int(whole or 0) + Fraction(top) / Fraction(bottom)
    return -value if sign.startswith("-") else value


def _prose(text: str) -> str:
    """The text with `-` for every minus, `^2` for a superscript, without a `!` that ends a sentence (`It is 42!`)."""
    text = _SUPERSCRIPT.sub(lambda match: f"^{unicodedata.normalize('NFKC', match[0])}", text)
    for dash in _DASHES:
        text = text.replace(dash, "-")
    return _EXCLAMATION.sub(lambda match: match[1] or " ", text) if "!" in text else text


def find_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers of the text from right to left, each spelling once."""
    starts = {match.group(): match.start() for match in _NUMBER.finditer(text)}  # where each spelling stands last
    for start in sorted(starts.values(), reverse=True):
        number = _read(_NUMBER.match(text, start))
        if number is not None:
            yield number


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else, not even blanks; None for any other text."""
    match = _NUMBER.fullmatch(_prose(text))
    number = _read(match) if match else None
    return None if number is None else Fraction(number)


def parse_gold(text: str) -> Fraction | None:
    r"""Return the value of a gold answer that is one number; None for any other, such as `x=5` and `(1,2)`.

    A currency sign (`$`, `\$`) before the number and `%`, `\%`, `^\circ`, `^{\circ}` or `°` behind it are dropped.
    """
    text = re.sub(r"^\$([^$]+)\$$", r"\1", text.strip())  # `$5$`, as in TRL's data
    text = re.sub(r"^\\?[$£€¥₹]\s*", "", text.strip())
    number = parse_number(re.sub(r"\s*(?:\\?%|°|\^\\circ|\^\{\\circ\})$", "", text))
    is_long = number is not None and max(abs(number.numerator), number.denominator) >= 10**MAX_DIGITS  # 1e5000
    return None if is_long else number


def boxed(solution: str) -> list[str]:
    r"""Return the contents of each outermost `\boxed{...}`, in order; "" for a last one that is never closed."""
    contents = []
    end = 0
    while (start := solution.find(r"\boxed{", end)) >= 0:
        start += len(r"\boxed{")
        depth = 1
        end = start
        while depth and end < len(solution):
            depth += {"{": 1, "}": -1}.get(solution[end], 0)
            end += 1
        contents.append("" if depth else solution[start : end - 1])
    return contents


def after_thoughts(completion: str) -> str:
    """Return what follows the completion's thoughts `<think>...</think>`; "" if the last one is not closed."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def _marked_lines(text: str, marker: Marker) -> list[str]:
    """The text behind each marker `####`, to the line's end or through the next marker, the one that counts first."""
    parts = [f"{part}####" for part in _MARKER.split(f"{text}\n")[1:]]
    lines = [part.splitlines()[0] for part in parts]
    return lines if marker == "first" else lines[::-1]


def _line_value(line: str) -> Number | None:
    """The first number of a line that is in no formula, or is the first behind a formula's `=`; None without one."""
    position = 0
    for _ in range(MAX_FORMULAS):
        match = next((match for match in _NUMBER.finditer(line, position) if _read(match) is not None), None)
        if match is None:
            break
        first = match.start() + len(match["sign"] or "")
        # Arithmetic, an equation, a time or a ratio: 5 - 3, 3x = 12, 3:45.
        is_in_formula = _BEHIND.match(line, match.end()) or _BEFORE.search(line[max(0, first - 40) : first])
        if not is_in_formula:
            return _read(match)
        position = line.find("=", match.end()) + 1
        if position == 0:
            break
    return None


def extract_answer(completion: str, marker: Marker = "last") -> Fraction | None:
    """Return the number that the completion gives as its answer, exact; None if it holds no number.

    The answer stands behind the last (or first) marker `####` that has a number on its line: the first number, or an
    equation's value; arithmetic without `=`, `3x` and `3:45` have none. Without such a marker, the last number counts.
    """
    text = _prose(after_thoughts(completion))
    for line in _marked_lines(text, marker):
        if next(find_numbers(line), None) is not None:
            value = _line_value(line.strip())
            return None if value is None else Fraction(value)
    last = next(find_numbers(text), None)
    return None if last is None else Fraction(last)


def matches_format(completion: str, marker: Marker = "last") -> bool:
    """True if the marker `####` is followed, on its line, by one number, blanks and one `.`, and nothing else."""
    lines = _marked_lines(after_thoughts(completion), marker)
    if not lines or re.search("[$£€¥₹]", lines[0]):
        return False
    return parse_number(lines[0].strip(" \t").removesuffix(".")) is not None


def extract_text(completion: str) -> str:
    """Return the rest of the last marker's line, or the completion if it has no marker; white space as one blank."""
    text = after_thoughts(completion)
    return " ".join([*_marked_lines(text, "last"), text][0].split())


def is_correct(completion: str, gold: int | Fraction | str | None) -> bool | None:
    """True if the completion has the gold answer, a number within 1e-6, a text exactly; None without a gold answer."""
    if gold is None:
        return None
    if isinstance(gold, str):
        return extract_text(completion) == " ".join(gold.split())
    answer = extract_answer(completion)
    return answer is not None and abs(answer - gold) <= TOLERANCE


def contains_answer(completion: str, gold: int | Fraction | str | None) -> bool | None:
    """True if gold is anywhere in completion and thoughts (the paper's "true accuracy"); None if gold is None."""
    if gold is None:
        return None
    if isinstance(gold, str):
        return " ".join(gold.split()) in " ".join(completion.split())
    return any(gold - TOLERANCE <= number <= gold + TOLERANCE for number in find_numbers(_prose(completion)))
