"""Condense the answers of an evaluation, its completions.jsonl.

    python scripts/answers.py changed before/completions.jsonl after/completions.jsonl

What did training change? Of two greedy evaluations of the same problems: how many problems are solved now and how many
no longer, by the reward's rule and with the gold value anywhere; and of the first equation `a op b = c` in each answer,
how many are computed right (c is the value of a op b), how many have the gold answer as the value of a op b (the right
operation on the right numbers), and how many both.

    python -m pspo.evaluate --eval.split train --run.output_dir before-train ...
    python scripts/answers.py solvable before-train/completions.jsonl problems/train.jsonl
    python -m pspo.train --data.name file --data.path problems ...

Which problems can a model come near to solving? A group of completions that are all wrong teaches nothing and costs as
much as any other. Writes the prompt and answer of each problem of which at least one completion contains the gold value
(the paper's true accuracy), whatever it ended with.
"""

import argparse
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
EQUATION = re.compile(rf"(?<![\d.,]){NUMBER} *([-+*/]) *\$? *{NUMBER} *= *\$? *(-?{NUMBER[1:]}")

Records = list[dict[str, Any]]


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


def count_equations(records: Records) -> str:
    n = computed = meant = both = 0
    for record in records:
        if match := first_equation(record["completion"]):
            a, b, c = (Fraction(match[i].replace(",", "")) for i in (1, 3, 4))
            true, gold = value(a, match[2], b), Fraction(record["gold"])
            n, computed, meant, both = n + 1, computed + (true == c), meant + (true == gold), both + (true == c == gold)
    first = f"first one computed right {computed}, its value is the gold {meant}, both {both}"
    return f"{n} answers with an equation; {first}"


def changed(before: Records, after: Records) -> None:
    """Print what is different after; both must be of the same problems."""
    before, after = (sorted(records, key=lambda record: record["problem"]) for records in (before, after))
    single = all(len({record["problem"] for record in records}) == len(records) for records in (before, after))
    if not single or [record["prompt"] for record in before] != [record["prompt"] for record in after]:
        raise SystemExit("these are not of the same problems, one answer each")
    for key in ("correct", "contains_gold"):
        pairs = [(old[key], new[key]) for old, new in zip(before, after, strict=True)]
        print(f"{key}, {len(pairs)} problems: {pairs.count((False, True))} now, {pairs.count((True, False))} no longer")
    print(f"before: {count_equations(before)}")
    print(f"after:  {count_equations(after)}")


def solvable(records: Records, problems: Path) -> None:
    """Write the problems that were answered with the gold value somewhere."""
    kept = {record["problem"]: record for record in records if record["contains_gold"]}
    problems.parent.mkdir(parents=True, exist_ok=True)
    with problems.open("w", encoding="utf-8") as file:
        for record in kept.values():
            file.write(json.dumps({"prompt": record["prompt"], "answer": record["gold"]}, ensure_ascii=False) + "\n")
    print(f"{len(kept):,} of {len({record['problem'] for record in records}):,} problems: {problems}")


def read(file: Path) -> Records:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("changed", "solvable"))
    parser.add_argument("completions", type=Path, help="completions.jsonl of pspo.evaluate")
    parser.add_argument("other", type=Path, help="changed: the completions.jsonl after; solvable: file to write")
    args = parser.parse_args()
    if args.what == "solvable":
        solvable(read(args.completions), args.other)
    else:
        changed(read(args.completions), read(args.other))


if __name__ == "__main__":
    main()
