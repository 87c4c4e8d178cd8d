"""Word problems that are answered by an expression such as 12 - 4, which a program evaluates.

python -m examples.expressions runs/asdiv-one-step  # from the hub; add data to read data/asdiv/ASDiv.xml
pspo train --config configs/smollm2/train.yaml
"""

import ast
import json
import operator
import re
import sys
from fractions import Fraction
from pathlib import Path

from pspo.tasks import Problem, load_problems

KINDS = ("Addition", "Subtraction", "Sum", "Difference")  # ASDiv's categories of one step
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = re.compile(r"\d[\d.]*(?: ?[-+*/] ?\$?\d[\d.]*)+", re.ASCII)


def value(node: ast.expr) -> Fraction:
    """Exact value of numbers joined by + - * /."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return Fraction(str(node.value))


def solves(completions: list[str], problems: list[Problem], **kwargs: object) -> list[float]:
    """1 where the value of the first expression in a completion is the gold answer, else 0."""
    rewards = []
    for text, problem in zip(completions, problems, strict=True):
        match = EXPRESSION.search(text)
        try:
            right = match and value(ast.parse(match[0].replace("$", ""), mode="eval").body) == problem.answer
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):  # 007 - 1, 1.2.3 + 1, 1 / 0, 1 + 1 + 1 + ...
            right = False
        rewards.append(1.0 if right else 0.0)
    return rewards


def write_problems(folder: str, path: str | None = None) -> None:
    """Write ASDiv's additions and subtractions of one step: 30% to test, 128 to validation, the rest to train."""
    rows = {}
    for split in ("train", "validation", "test"):
        problems = [p for p in load_problems("asdiv", split, path, holdout=0.3) if p.category in KINDS]
        rows[split] = [{"prompt": p.prompt, "answer": str(p.answer), "category": p.category} for p in problems]
    known = rows["train"] + rows["validation"]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", known[128:]), ("validation", known[:128]), ("test", rows["test"])):
        lines = [json.dumps(row) + "\n" for row in chosen]
        Path(folder, f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{len(chosen)} {split} problems")


def write_svamp(file: str, path: str | None = None) -> None:
    """Write the problems of SVAMP that results/smollm2/reliability.md chose."""
    ids = Path("results/smollm2/svamp-ids.txt").read_text(encoding="utf-8").split()
    problems = {problem.fields["ID"]: problem for problem in load_problems("svamp", "test", path)}
    rows = [{"prompt": problems[name].prompt, "answer": str(problems[name].answer)} for name in ids]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write = write_svamp if sys.argv[1].endswith(".jsonl") else write_problems
    write(*sys.argv[1:])
