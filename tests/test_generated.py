"""The generated tasks: reproducible, split without overlap, and right by an independent reading."""

import itertools
import re
from fractions import Fraction

import pytest

from examples.calculator import calculate
from pspo.tasks.answers import extract_answer, is_correct, matches_format
from pspo.tasks.arithmetic import MAX_NUMBER, split_of
from pspo.tasks.datasets import SOURCES, SPLITS
from pspo.tasks.problem import Problem

FIRST = {  # of test: a change of wording, of the order of draws or of a hash changes every published number
    "arithmetic": Problem(
        "Mia has 7 packs with 2 pencils each. She loses 12. Jack has 9 times as many pencils. "
        "How many pencils does Jack have?",
        Fraction(18), source="arithmetic", category="multiply, subtract, multiply", level="3 steps",
        solution="7 * 2 = 14\n14 - 12 = 2\n2 * 9 = 18\n#### 18",
    ),
    "letters": Problem("Sort the letters of 'zace'.", "acez",
                       source="letters", category="sort", level="4 letters", solution="#### acez"),
}  # fmt: skip

every_split = pytest.mark.parametrize("split", SPLITS)


def take(task, split, n=300, seed=0):
    return list(itertools.islice(SOURCES[task].generate(split, seed), n))


def word_of(problem):
    return re.search("'([a-z]+)'", problem.prompt).group(1)


@pytest.mark.parametrize("task", FIRST)
def test_the_first_problem_is_this(task):
    assert take(task, "test", 1) == [FIRST[task]]


@pytest.mark.parametrize("task", ["arithmetic", "letters", "sums"])
def test_a_seed_decides_the_problems_and_no_split_shares_one(task):
    assert take(task, "train", 50, seed=3) == take(task, "train", 50, seed=3) != take(task, "train", 50, seed=4)
    shown = word_of if task == "letters" else lambda problem: problem.prompt
    texts = {split: {shown(p) for p in take(task, split)} for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not texts[a] & texts[b]
    assert all(split_of(text) == split for split in SPLITS for text in texts[split])


def solve(prompt: str) -> int:
    """Answer a problem from its text alone, sharing nothing with the generator but the English words."""
    signs = dict.fromkeys(["buys", "finds", "wins", "gets", "borrows"], 1)
    signs |= dict.fromkeys(["sells", "loses", "breaks", "gives", "lends"], -1)
    opening, *events = re.split(r"(?<=[.?]) ", prompt)
    value = 1
    for number in re.findall(r"\d+", opening):
        value *= int(number)
    for sentence in events:
        numbers = [int(n) for n in re.findall(r"\d+", sentence)]
        if not numbers:  # the question
            continue
        (n,) = numbers
        verb = sentence.removeprefix("Then ").split()[1]
        if verb in signs:
            value += signs[verb] * n
        elif "times as many" in sentence:
            value *= n
        elif "equally" in sentence:
            assert value % n == 0
            value //= n
        else:
            value += n if re.search(r"\d+ more", sentence) else -n
    return value


@every_split
def test_answers_of_arithmetic_agree_with_the_text_and_with_every_step(split):
    words = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for p in take("arithmetic", split):
        *steps, last = p.solution.split("\n")
        ops, value = [], None
        for step in steps:
            a, op, b, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            assert value in (None, int(a)), "each step starts from the result of the one before"
            assert op != "/" or int(a) % int(b) == 0
            value = apply[op](int(a), int(b))
            assert value == int(result)
            assert 1 <= value <= MAX_NUMBER
            assert 2 <= int(b) <= MAX_NUMBER
            ops.append(words[op])
        assert last == f"#### {value}"
        assert p.answer == value == solve(p.prompt)
        assert isinstance(p.answer, Fraction)
        level = {1: "1 step", 2: "2 steps", 3: "3 steps"}[len(steps)]
        assert (p.source, p.category, p.level) == ("arithmetic", ", ".join(ops), level)
        assert extract_answer(p.solution) == p.answer
        assert matches_format(p.solution)


@every_split
def test_answers_about_letters_and_of_sums_agree_with_the_text(split):
    for p in take("letters", split):
        word = word_of(p)
        backwards = "backwards" in p.prompt or "right to left" in p.prompt
        assert p.answer == "".join(reversed(word) if backwards else sorted(word))
        assert (p.category, p.level) == ("reverse" if backwards else "sort", f"{len(word)} letters")
        assert 3 <= len(word) <= 6
        assert p.solution == f"#### {p.answer}"
        assert is_correct(p.solution, p.answer)
    for p in take("sums", split):
        expression = p.prompt.removeprefix("What is ").removesuffix("?")
        assert p.answer == eval(expression)
        assert calculate(expression) == str(p.answer)
        assert p.solution == f"#### {p.answer}"
