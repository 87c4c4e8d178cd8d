"""Answers: hand-written tables, and hostile texts."""

import time
from fractions import Fraction

import pytest

from pspo.tasks.answers import contains_answer, extract_answer, find_numbers, is_correct, matches_format, parse_number

MINUS = "\u2212"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"), ("007", "7"), ("+5", "5"), ("-5", "-5"), (MINUS + "5", "-5"), ("\u20135", "-5"), ("- 5", "-5"),
        ("5.", "5"), (".5", "1/2"), ("-.5", "-1/2"), ("1,234,567", "1234567"), ("1,234.50", "2469/2"),
        ("1e5", "100000"), ("2e-3", "1/500"), ("1E+2", "100"), ("-1.5e1", "-15"), (".5e1", "5"), ("0e9999", "0"),
        ("3/4", "3/4"), ("-3/4", "-3/4"), ("1.5/2", "3/4"), ("1,000/3", "1000/3"), ("0/7", "0"),
        (r"\frac{1}{2}", "1/2"), (r"\dfrac{3}{4}", "3/4"), (r"\tfrac{3}{4}", "3/4"), (r"-\frac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"), (r"-\frac{-1}{-2}", "-1/2"), (r"\frac12", "1/2"), (r"\frac 1{10}", "1/10"),
        (r"\frac{270}7", "270/7"), (r"\frac{12}{5,\!525}", "12/5525"), (r"1,\!000,\! 000", "1000000"),
        ("10{,}000", "10000"), ("-$5", "-5"), (r"-\$0.50", "-1/2"), ("- $5", "-5"),
        ("1 234", "1234"), ("12 345 678.5", "24691357/2"), (r"1\,234", "1234"), (r"1\ 234", "1234"),
        ("3 × 10⁵", "300000"), ("1\u00a0234\u00a0567", "1234567"), ("1\u202f234", "1234"), ("1'234", "1234"),
        ("1_234", "1234"), ("2 2/3", "8/3"), ("-2 1/2", "-5/2"), ("1,000 1/2", "2001/2"), (r"3\frac{1}{4}", "13/4"),
        (r"3 \times 10^5", "300000"), (r"-1.5\cdot10^{-2}", "-3/200"), ("2*10^3", "2000"), ("2 x 10^3", "2000"),
        ("10^6", "1000000"), ("10^{-2}", "1/100"), ("-10^2", "-100"),
        ("9" * 1000, "9" * 1000), ("1e9999", "1e9999"), ("1e-9999", "1e-9999"),  # limits are inclusive
        (r"6 \frac15", "31/5"), (r"6\,\frac15", "31/5"), ("10⁻²", "1/100"), ("2·10^3", "2000"),
    ],
)  # fmt: skip
def test_a_number_alone(text, value):
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", " 5", "-", ".", "-.", "e5", "1,2", "12,34", "1234,567", "0,123", "1,234,56", "1 2", "-  5", "--5",
        "5..", "5kg", "x5", "50%", "$5", "3/0", "3/0.0", r"\frac{3}{0}", "1/2/3", "12/25/2024", "3/-4", "3:4", "(5)",
        "1.2.3", "inf", "-inf", "nan", "infinity", "five", "\u0665", "\uff15", "\u00bd", "5\u00b2", "0x10", "1 23",
        r"\frac{x}{2}", "2 1/0", r"\frac{1.5}{2}", "1e99999", "1e-00001", "10^99999", "2^10", "5!", r"2\sqrt{3}",
        "9" * 1001, "1/" + "9" * 1001, "." + "0" * 1001, "9" * 1001 + " 1/2",
    ],
)  # fmt: skip
def test_not_one_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("100-50", "100 50"), ("x-5", "5"), ("(2)-5", "2 5"), ("é-5", "5"), ("3 -5", "3 -5"), ("3 - 5", "3 5"),
        ("5--3", "5 -3"), ("=-5", "-5"), ("3+4", "3 4"), ("2020-05-10", "2020 5 10"), ("-$5 and $-6", "-5 -6"),
        ("-€5", "-5"), ("1,2", "1 2"), ("12,34", "12 34"), ("1234,567", "1234 567"), ("1,2345", "1 2345"),
        ("1,234,56", "1234 56"), ("0,123", "0 123"), ("1.2.3", "1.2 3"), ("is.5", "5"), ("...5", "5"),
        ("12/25/2024", "12 25 2024"), ("6/3/2", "6 3 2"), ("6/3,000/2", "6 3000 2"),
        ("3/0 4", "4"), ("1e99999 4", "4"), ("9" * 1001 + " 4", "4"),
        ("5kg x6 7%", "5 6 7"), ("1e5x", "100000"), ("5e", "5"), ("5e-", "5"), ("5eggs", "5"), ("\u0665 5", "5"),
        ("5\u0665", "5"), ("no number", ""),
        # A sign with a blank, where nothing is subtracted from.
        ("x = - 5", "-5"), ("(- 5)", "-5"), (r"\boxed{- 5}", "-5"), ("**- 5**", "-5"), ("a\n- 5\n- 6", "5 6"),
        # Whole or none: mixed numbers, thousands, powers, roots and other factors.
        ("2 1/2", "5/2"), (r"2\frac{1}{2}", "5/2"), ("1.5 1/2", "1.5 1/2"), ("4 12/25/2024", "4 12 25 2024"),
        ("100 200 3", "100 200 3"), ("5 20 100", "5 20 100"), ("in 2020 100", "2020 100"), ("1,234 567", "1234 567"),
        ("12 100-dollar bills", "12 100"), ("3 500ml", "3 500"), ("1~100", "1 100"),
        ("x^2 + 5 = 30", "5 30"), ("x^{2y}", ""), ("2**10", ""), ("2\u00bd", ""), ("110^6", ""), ("10^n", ""),
        (r"90^\circ 5^{\text{th}} 6 cm^2", "90 5 6"), ("1101_2", ""), (r"\pm 5", ""), ("5! = 120", "120"),
        (r"\sqrt{16} = 4", "4"), (r"\sqrt[3]{8}", ""), (r"2 \cdot \sqrt{3}", ""), ("2√3", ""), ("sqrt(16) is 4", "4"),
        (r"2\pi", ""), (r"3\pi/4", ""), ("9π", ""), (r"\log_2 8 = 3", "3"), (r"5 \times \frac{1}{2}", "5 1/2"),
        (r"\frac{x}{2}", ""), (r"\frac{1}{\sqrt{3}}", ""), (r"\frac{3\pi}{4}", ""), (r"\frac123", "1/2 3"),
        (r"3 \times 10^5 m", "300000"), (r"3 \times 10", "3 10"), ("2 * 3", "2 3"),
    ],
)  # fmt: skip
def test_numbers_in_a_text(text, values):
    assert [*find_numbers(text)][::-1] == [Fraction(value) for value in values.split()]


@pytest.mark.parametrize(
    ("completion", "value", "formatted"),
    [
        # The format, and what keeps it.
        ("2+3=5\n#### 5", 5, True), ("####5", 5, True), ("#### \t 5 \t", 5, True), ("#### 5.", 5, True),
        ("#### -5", -5, True), (f"####{MINUS}5", -5, True), ("#### +5", 5, True), ("#### .5.", Fraction(1, 2), True),
        ("#### 1,234.50", Fraction(2469, 2), True), ("#### 3/4", Fraction(3, 4), True), ("#### 1e3", 1000, True),
        (r"#### \frac{1}{2}", Fraction(1, 2), True), ("#### 5\nAnd 6 is wrong", 5, True), ("so #### 5", 5, True),
        # Line ends of every kind.
        ("#### 5\r\n6", 5, True), ("#### 5\r6", 5, True), ("#### 5\u20286", 5, True), ("#### 5\u20296", 5, True),
        ("#### 5\x856", 5, True), ("#### 5\x0b6", 5, True), ("#### 5\x0c6", 5, True),
        # The value survives what loses the format.
        ("#### 5 apples", 5, False), ("#### 5kg", 5, False), ("#### $5", 5, False), ("#### -$5", -5, False),
        ("#### $-5", -5, False), (r"#### -\$5", -5, False), ("#### £5", 5, False), ("#### 50%", 50, False),
        (r"#### 50\%", 50, False), (r"#### \boxed{42}", 42, False), (r"#### $\boxed{-42}$", -42, False),
        ("#### **42**", 42, False), ("#### < 42 >", 42, False), ("#### <42>", 42, False), ("#### (42)", 42, False),
        ("#### x = 5", 5, False), ("#### The answer is 5.", 5, False), ("#### 100-50", None, False),
        ("#### 5 6", 5, False), ("#### 1,2", 1, False), ("#### 5 ..", 5, False), ("#### - 5", -5, True),
        ("#### \u20135", -5, True), ("#### x = - 5", -5, False), ("#### 2 2/3", Fraction(8, 3), True),
        (r"#### $3\frac{1}{4}$", Fraction(13, 4), False), (r"#### \boxed{3 \times 10^5}", 300_000, False),
        ("#### 1 234 apples", 1234, False), ("#### It is 42!", 42, False), ("#### 6 x 7 = 42", 42, False),
        ("#### m+n = 256+37 = 293", 293, False), ("#### $12 + $25 + $25 = $62 a day", 62, False),
        ("#### 2*7 + 3*6 = 14 + 18 = 32", 32, False), ("#### 5 apples + 3 apples = 8 apples", 8, False),
        (r"#### 6 \times 7 = -42", -42, False), ("#### 42 (x = 7)", 42, False), ("#### 5 = x", 5, False),
        ("#### 5 (as 2+3 = 5, not 6)", 5, False), ("#### 3 + 4 = x", None, False), ("#### 8 - 5", None, False),
        ("#### 1/3 = 0.33", Fraction(1, 3), False), ("#### 5² = 25", 25, False),
        ("#### 5\u00a0", 5, False), ("#### 5 ####", 5, False),
        # A formula has its value, behind `=`, or none; never its first number, nor one from another line.
        ("5\n#### 5 - 3", None, False), ("#### 3x = 12", 12, False), ("#### 3:45", None, False),
        ("#### 3x", None, False), ("#### 5*7", None, False), (r"#### 6 \times 7", None, False),
        ("#### 2x + 3 = 11, so x = 4", 11, False), ("#### x + 3 = 10", 10, False), ("#### x + 3", None, False),
        ("#### 100-50 = 50", 50, False), ("#### 5 -3", None, False), ("#### 5--3", None, False),
        ("#### 10 / 4", None, False), ("#### 60/5/2", None, False), ("#### 2020-05-10", None, False),
        ("#### (5+3)*2", None, False), ("#### 2(3+4) = 14", 14, False), ("#### $5 - $3", None, False),
        ("#### $5$ - $3$", None, False), (r"#### \boxed{5 - 3}", None, False), ("#### **5** + **3**", None, False),
        ("#### 5 apples + 3 apples", None, False), ("#### 5 m^2 + 3 m^2", None, False),
        ("#### 6 times 7 = 42", 42, False), ("#### 5 ± 2", None, False), (r"#### 5 + \frac{1}{2}", None, False),
        ("#### 3 + \\sqrt{4}", None, False), ("#### 2^5 - 3", None, False), ("#### 3t = 12", 12, False),
        ("#### 1 + 1 = 2 = 4/2", 2, False), ("#### 2:1", None, False), ("#### 3 - x", None, False),
        # No formulas: units, words, dashes between words, lists.
        ("#### 60 km/h", 60, False), ("#### $5/hour", 5, False), ("#### 5 m/s", 5, False), ("#### 20 N-m", 20, False),
        ("#### Answer - 5", 5, False), ("#### Answer: 5", 5, False), ("#### 5 - that is all", 5, False),
        ("#### 5 - a good one", 5, False), ("#### 5-year plan", 5, False), ("#### 5 (6 - 1)", 5, False),
        ("#### x=-5", -5, False), ("#### the answer is **5**", 5, False), ("#### 5, 6", 5, False),
        # No number on the marker's line, or no marker: the last number anywhere.
        ("It is 7.\n####", 7, False), ("It is 7.\n#### none", 7, False), ("7\n####\n8", 8, False),
        ("1 then 2", 2, False), ("100-50", 50, False), ("##### 5 and 6", 6, False), ("### 5 and 6", 6, False),
        ("7\n#### 3/0", 7, False), ("7\n#### 1e99999", 7, False), ("7\n#### " + "9" * 1001, 7, False),
        ("7\n#### inf", 7, False), ("7\n#### nan", 7, False), ("7\n#### \u0665", 7, False), ("7 then 3/0", 7, False),
        ("7\n#### 5!", 7, False), ("7\n#### 2\\sqrt{3}", 7, False), (r"$\boxed{2\sqrt{3}}$", None, False),
        ("It is **42!**", 42, False), ("It is 42! So", 42, False), ("$5!$", None, False),
        # Several markers: the last counts.
        ("#### 5\n#### 6", 6, True), ("#### 5 #### 6", 6, True), ("#### 5\n#### 6 apples", 6, False),
        ("#### 5\n##### 6", 5, True), ("#### 5\n####", 5, False), ("8\n#### 5 ####\n####", 5, False),
        ("#### 42\n\n#### Explanation\nSince 6*7", 42, False), ("#### 5 apples\n#### none", 5, False),
        # After thoughts, of which the last is closed; R1's template opens the first itself.
        ("<think>5 or 6\n#### 6</think>\n\n#### 7", 7, True), ("<think>#### 6</think>It is 7.", 7, False),
        ("<think>\n\n</think>\n\n#### 7", 7, True), ("a</think>b</think>7", 7, False), ("7<think>", None, False),
        ("<think>so\n#### 6", None, False), ("<think>a</think>\n#### 7\n<think>", None, False),
        ("<think>6</think>", None, False), ("#### 5\n</think>", None, False), ("<think>a</think>think> 7", 7, False),
        # Nothing to find.
        ("", None, False), ("####", None, False), ("no idea", None, False), ("#### 3/0", None, False),
    ],
)  # fmt: skip
def test_completions(completion, value, formatted):
    assert extract_answer(completion) == value
    assert matches_format(completion) is formatted


def test_first_marker():
    assert extract_answer("#### 5 apples\n#### 6", marker="first") == 5
    assert not matches_format("#### 5 apples\n#### 6", marker="first")
    assert matches_format("#### 5\n#### 6 apples", marker="first")
    assert extract_answer("3\n####\n#### 6\n7", marker="first") == 6  # the first with a number on its line
    assert not matches_format("#### 5 #### 6", marker="first")


@pytest.mark.parametrize(
    ("completion", "gold", "found"),
    [
        ("first 18, then 20\n#### 20", 18, True), ("first 18, then 20\n#### 20", 19, False),
        ("0.333333", Fraction(1, 3), True), ("0.33333", Fraction(1, 3), False), ("1/3", Fraction(1, 3), True),
        ("1.000001", 1, True), ("1.0000010000000000000001", 1, False), ("0.999999", 1, True),
        ("100-50", 50, True), ("100-50", -50, False), ("118", 18, False), ("", 0, False), ("-0", 0, True),
        ("1e-7", 0, True), ("1e-6", 0, True), ("1.1e-6", 0, False), ("1e9999", 1, False), ("-1e9999", 1, False),
        ("1e-9999", 1, False), ("1e-9999", 0, True), ("1e-9999", Fraction(1, 10**6), True),
        ("-1e-9999", Fraction(1, 10**6), False),
        ("1e6", 10**6, True), ("12e-1", Fraction(6, 5), True), ("9e-7", Fraction(19, 10**7), True),
    ],
)  # fmt: skip
def test_contains_answer(completion, gold, found):
    assert contains_answer(completion, gold) is found


LONG = 100_000
HOSTILE = [
    "1", "#", "-", ".", "/", "{", "\\", "$", " ", "\n", "\u2028", MINUS, "1,", "1,111,", r"1,\! ", "1{,}", "1.", ".1",
    "1/", "1/2/", "1/0 ", "1e", "1e-", "1e9999 ", "1e-9999 ", "1e99999 ", "0e9999 ", "-$", r"\frac{", r"\frac{1}{",
    r"\frac{ 1 }{ 2 }", r"\frac ", "#### ", "####\n", "##### ", "#### 3/0\n", "- ", "= - ", "1 ", "1 111 ", "1 1/",
    "10^", "10^{", r"1 \times ", "^", "^{", r"\sqrt", r"\sqrt{", r"\sqrt{}", r"\sqrt{a{b{c", r"\sqrt[3]", "1\u03c0",
    "1!", "! ", "1+", "1 a + ", "1_{", r"1\frac", r"\frac{x}{y", "{}", "1**2", "1\u00b2", "\u2013",
    "#### 1+1=", "1+1=", "1 a - ", "(1)*",
]  # fmt: skip
HOSTILE = {unit: unit * (LONG // len(unit)) for unit in HOSTILE} | {
    "distinct integers": " ".join(map(str, range(16_000))),
    "distinct exponents": " ".join(f"{n}e{n % 9999}" for n in range(8_000)),
    "distinct small ones": " ".join(f"{n}e-{n % 9999}" for n in range(8_000)),
    "longest numbers": ("9" * 1000 + "/" + "7" * 1000 + " ") * 50,
    "blanks in an argument": r"\frac{" + " " * LONG,
    "blanks after the marker": "####" + " " * LONG + "x",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=map(repr, HOSTILE))
def test_hostile_text_takes_linear_time(text):
    """Each takes about 0.04 s of CPU for 100,000 characters; anything quadratic would take a minute."""
    start = time.process_time()
    extract_answer(text)
    matches_format(text)
    contains_answer(text, Fraction(-355, 113))
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("completion", "gold", "correct", "anywhere"),
    [
        ("so\n####  olleh ", "olleh", True, True), ("it is olleh", "olleh", False, True),
        ("olleh", "olleh", True, True),  # without a marker the whole completion counts
        ("#### a\n#### b", "b", True, True), ("#### New \t York\nthere", "New York", True, True),
        ("#### Olleh", "olleh", False, False), ("", "olleh", False, False), ("anything", None, None, None),
        ("#### 3.0000001", 3, True, True), ("3 apples, 4 pears", 3, False, True),
        ("<think>3 or 4</think>\n#### 4", 3, False, True), ("<think>olleh", "olleh", False, True),
        ("<think>or hello</think>\n\nolleh", "olleh", True, True),
    ],
)  # fmt: skip
def test_gold_answers_of_every_kind(completion, gold, correct, anywhere):
    assert is_correct(completion, gold) is correct
    assert contains_answer(completion, gold) is anywhere
