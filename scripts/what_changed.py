"""Compare two greedy evaluations of the same problems, problem by problem: what did training change?

    python scripts/what_changed.py before/completions.jsonl after/completions.jsonl

Prints how many problems are solved now and how many no longer, by the reward's rule and with the gold value anywhere;
and of the first equation `a op b = c` in each answer: how many are computed right (c is the value of a op b), how many
have the gold answer as the value of a op b (the right operation on the right numbers), and how many both.
"""

import argparse
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
EQUATION = re.compile(rf"(?<![\d.,]){NUMBER} *([-+*/]) *\$? *{NUMBER} *= *\$? *(-?{NUMBER[1:]}")


def first_equation(text: str) -> re.Match[str] | None:
    """The first `a op b = c`; the end of a longer one, such as 2 + 3 + 4 = 9, does not count."""
    for match in EQUATION.finditer(text):
        if not text[: match.start()].rstrip(" $").endswith(("+", "-", "*", "/")):
            return match
    return None


def value(a: Fraction, operation: str, b: Fraction) -> Fraction | None:
    if operation == "/":
        return a / b if b else None
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def about_equations(records: list[dict[str, Any]]) -> str:
    found = [(first_equation(record["completion"]), Fraction(record["gold"])) for record in records]
    computed, meant, both = 0, 0, 0
    for match, gold in found:
        if match:
            a, b, c = (Fraction(match[i].replace(",", "")) for i in (1, 3, 4))
            true = value(a, match[2], b)
            computed, meant, both = computed + (true == c), meant + (true == gold), both + (true == c == gold)
    n = sum(match is not None for match, _ in found)
    return (
        f"{n} answers with an equation; first one computed right {computed}, its value is the gold {meant}, both {both}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="completions.jsonl of pspo.evaluate")
    parser.add_argument("after", type=Path, help="of the same problems")
    args = parser.parse_args()
    before, after = ([json.loads(line) for line in file.open(encoding="utf-8")] for file in (args.before, args.after))
    before, after = (sorted(records, key=lambda record: record["problem"]) for records in (before, after))
    single = all(len({record["problem"] for record in records}) == len(records) for records in (before, after))
    if not single or [record["prompt"] for record in before] != [record["prompt"] for record in after]:
        parser.error(f"{args.before} and {args.after} are not of the same problems, one answer each")
    for key in ("correct", "contains_gold"):
        pairs = [(old[key], new[key]) for old, new in zip(before, after, strict=True)]
        print(f"{key}, {len(pairs)} problems: {pairs.count((False, True))} now, {pairs.count((True, False))} no longer")
    print(f"before: {about_equations(before)}")
    print(f"after:  {about_equations(after)}")


if __name__ == "__main__":
    main()
