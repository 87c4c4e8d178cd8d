"""Sums that are too hard for a tiny model without the calculator of ``examples/calculator.py``: "What is 847 - 63?"."""

import random
from collections.abc import Iterator
from fractions import Fraction

from pspo.tasks.arithmetic import APPLY, WORDS, split_of
from pspo.tasks.problem import Problem


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split ("train", "validation", "test") without end, the same for the same seed."""
    rng = random.Random(f"{split} {seed}")
    while True:
        op = rng.choice("+-")
        a = rng.randint(200, 899)
        b = rng.randint(11, 99)
        prompt = f"What is {a} {op} {b}?"
        value = APPLY[op](a, b)
        if split_of(prompt) == split:
            yield Problem(prompt, Fraction(value), source="sums", category=WORDS[op], solution=f"#### {value}")
