"""How many problems of results/smollm2 a rule without a model solves: the baseline of its pages.

python -m examples.expressions runs/asdiv-one-step
python scripts/keyword_rule.py runs/asdiv-one-step/test.jsonl results/smollm2/asdiv.parquet

The rule adds two of the problem's numbers, the first or the last two, if it has one of `KEYWORDS`; else it subtracts
the smaller from the larger. The study's 35 planned runs are compared with it over runs and problems.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd

from pspo.files import read_jsonl
from pspo_lab.power import estimate

KEYWORDS = re.compile("altogether|in all|total|now", re.IGNORECASE)
UNITS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEENS = ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
VALUES = {word: n for n, word in enumerate(UNITS + TEENS, 1)} | {word: 10 * n for n, word in enumerate(TENS, 2)}
WORDS = rf"(?:{'|'.join(TENS)})(?:[ -](?:{'|'.join(UNITS)}))?|{'|'.join(UNITS + TEENS)}"
NUMBERS = re.compile(rf"\d[\d,]*(?:\.\d+)?|\.\d+|\b(?:{WORDS})\b", re.IGNORECASE)


def value(text: str) -> Fraction:
    """Value of a match of `NUMBERS`."""
    if text[0].isalpha():
        return Fraction(sum(VALUES[word] for word in re.split("[ -]", text.lower())))
    return Fraction(text.replace(",", ""))


def solves(prompt: str, answer: str, chosen: slice) -> float:
    """1 if the rule's answer from the ``chosen`` numbers is the gold answer, else 0."""
    numbers = [value(text) for text in NUMBERS.findall(prompt)][chosen]
    if len(numbers) < 2:
        return 0.0
    result = sum(numbers) if KEYWORDS.search(prompt) else abs(numbers[0] - numbers[1])
    return float(result == Fraction(answer))


def main() -> None:
    problems = read_jsonl(Path(sys.argv[1]))
    answers = pd.read_parquet(sys.argv[2]).query("method.notna() and experiment != 'smollm2-clip'")
    runs = answers.pivot_table("reward", ["experiment", "method", "epochs", "seed"], "problem")
    for name, chosen in (("first", slice(2)), ("last", slice(-2, None))):
        right = np.array([solves(problem["prompt"], problem["answer"], chosen) for problem in problems])
        found = estimate(100 * (runs.to_numpy() - right))
        low, high = found.interval()
        gain = f"{found.mean:+.1f} points [{low:+.1f}, {high:+.1f}]"
        print(f"the {name} two numbers: {100 * right.mean():.1f}%; the runs solve {gain} more")


if __name__ == "__main__":
    main()
