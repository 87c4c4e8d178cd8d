"""Data sets in their makers' own formats: every problem is read, and a solution earns its own problem's reward."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from pspo.tasks import load_problems
from pspo.tasks.answers import boxed, extract_answer

DATA = Path(__file__).parents[2] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"development data not found at {DATA}")
SPLITS = ("train", "validation", "test")


def test_gsm8k():
    splits = [load_problems("gsm8k", split, DATA / "gsm8k") for split in SPLITS]
    assert [len(split) for split in splits] == [7000, 473, 1319]
    problems = [problem for split in splits for problem in split]
    assert len({problem.prompt for problem in problems}) == len(problems)  # none in two splits
    for problem in problems:
        assert problem.answer == int(problem.solution.split("\n")[-1].removeprefix("#### ").replace(",", ""))
        assert extract_answer(problem.solution) == problem.answer


def test_svamp():
    records = json.loads((DATA / "svamp" / "SVAMP.json").read_text())
    problems = load_problems("svamp", "test", DATA)
    assert [problem.answer for problem in problems] == [int(record["Answer"]) for record in records]


def test_asdiv():
    """Of 2,305: 2,036 `9 (apples)`, 48 `9`, 8 fractions. The other 213 are words, times, ratios, several, `-(1/3)`."""
    problems = load_problems("asdiv", "test", DATA)
    assert len(problems) == 2092
    text = (DATA / "asdiv" / "ASDiv.xml").read_text()
    simple = re.findall(r"<Answer>([0-9.]+|[0-9]+/[0-9]+) *(?:\([^();]*\))?</Answer>", text)
    assert [problem.answer for problem in problems] == [Fraction(gold) for gold in simple]  # independent of the reader


def test_math():
    problems = load_problems("math", "test", DATA)
    assert len(problems) == 4001  # checked by reading what was left out; 14 are mixed numbers
    for problem in problems:
        assert extract_answer(f"#### {boxed(problem.solution)[-1]}") == problem.answer
