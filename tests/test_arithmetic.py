"""The arithmetic word problems: reproducible, split without overlap, and right by an independent reading."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest

from pspo.tasks import arithmetic
from pspo.tasks.answers import extract_answer, matches_format
from pspo.tasks.arithmetic import SPLITS, problems, split_of
from pspo.tasks.problem import Problem

N = 1000


def take(split, n=N, seed=0):
    return list(islice(problems(split, seed), n))


def test_the_first_problems_are_these():
    """Pins the stream: a change of wording or of the order of draws changes every published number."""
    assert take("test", 2) == [
        Problem(
            prompt="Mia has 7 packs with 2 pencils each. She loses 12. Jack has 9 times as many pencils. "
            "How many pencils does Jack have?",
            answer=Fraction(18),
            source="arithmetic",
            category="multiply, subtract, multiply",
            level="3 steps",
            solution="7 * 2 = 14\n14 - 12 = 2\n2 * 9 = 18\n#### 18",
        ),
        Problem(
            prompt="Carl has 20 stamps. He breaks 9. Then he gives 8 to Ben. How many stamps does Carl have now?",
            answer=Fraction(3),
            source="arithmetic",
            category="subtract, subtract",
            level="2 steps",
            solution="20 - 9 = 11\n11 - 8 = 3\n#### 3",
        ),
    ]


def test_same_seed_same_problems_and_other_seed_other_problems():
    assert take("train", 50, seed=3) == take("train", 50, seed=3)
    assert take("train", 50, seed=3) != take("train", 50, seed=4)


def test_the_stream_does_not_depend_on_the_hash_seed():
    code = (
        "from itertools import islice; from pspo.tasks.arithmetic import problems;"
        "print([p.prompt for s in ('train', 'test') for p in islice(problems(s, 7), 20)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": h, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for h in ("0", "1")
    }
    assert len(outputs) == 1


def test_splits_share_no_problem_whatever_the_seeds():
    texts = {split: {p.prompt for seed in range(3) for p in take(split, 500, seed)} for split in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not texts[a] & texts[b]
    assert all(split_of(text) == split for split in SPLITS for text in texts[split])


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, validation, test"):
        next(problems("dev"))


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


@pytest.mark.parametrize("split", SPLITS)
def test_answers_agree_with_the_text_and_with_every_step(split):
    words = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
    for p in take(split):
        *steps, last = p.solution.split("\n")
        ops, value = [], None
        for step in steps:
            a, op, b, result = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step).groups()
            assert value in (None, int(a)), "each step starts from the result of the one before"
            assert op != "/" or int(a) % int(b) == 0
            value = apply[op](int(a), int(b))
            assert value == int(result)
            assert 1 <= value <= arithmetic.MAX_NUMBER
            assert 2 <= int(b) <= arithmetic.MAX_NUMBER
            ops.append(words[op])
        assert last == f"#### {value}"
        assert p.answer == value == solve(p.prompt)
        assert isinstance(p.answer, Fraction)
        assert p.category == ", ".join(ops)
        assert p.level == {1: "1 step", 2: "2 steps", 3: "3 steps"}[len(steps)]
        assert p.source == "arithmetic"
        assert extract_answer(p.solution) == p.answer
        assert matches_format(p.solution)


def count_problems() -> dict[int, int]:
    """How many problems there are by number of steps: number chains, times the texts that tell each of them."""
    totals = {1: 0, 2: 0, 3: 0}
    for steps, boxed, last in itertools.product(totals, (False, True), ("", "+", "-", "*", "/")):
        events = steps - boxed - bool(last)
        for middle in itertools.product("+-", repeat=max(events, 0)) if events >= 0 else ():
            chains = dict.fromkeys(range(2, 11 if boxed else 21), 1)  # by the value reached so far
            for op in [*"*" * boxed, *middle, *last]:
                longer = Counter()
                for value, n_chains in chains.items():
                    for n in arithmetic._operands(op, value):
                        longer[arithmetic.APPLY[op](value, n)] += n_chains
                chains = longer
            # 3 of 5 events name no friend. The one who is compared with is one of 11, or of 10 beside the friend.
            compared = last in ("+", "-", "*")
            casts = 3**events * (11 if compared else 1) + (5**events - 3**events) * 11 * (10 if compared else 1)
            texts = 12 * 10 * casts * (4 if boxed else 1) * (1 if last else 4)
            totals[steps] += sum(chains.values()) * texts
    return totals


def test_there_are_as_many_problems_as_the_docstring_says():
    assert count_problems() == {1: 4_406_400, 2: 704_894_160, 3: 77_736_919_200}
    counts = "4.4 million such problems of one step, 705 million of two and 77.7 billion of three"
    assert counts in " ".join(arithmetic.__doc__.split())
