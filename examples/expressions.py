"""Reward of word problems that are answered by an expression such as 12 - 4, and not by its value.

pspo train --config configs/smollm2/train.yaml
"""

import ast
import operator
from fractions import Fraction

from pspo.tasks import Problem

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.expr) -> Fraction:
    """Exact value of numbers joined by + - * / and brackets; ValueError for anything else."""
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
        case ast.Constant(number) if type(number) in (int, float):
            return Fraction(str(number))
    raise ValueError("not an expression of numbers")


def solves(completions: list[str], problems: list[Problem], **kwargs: object) -> list[float]:
    """1 where the whole completion is an expression whose value is the gold answer, else 0."""
    rewards = []
    for text, problem in zip(completions, problems, strict=True):
        try:
            rewards.append(float(value(ast.parse(text.strip(), mode="eval").body) == problem.answer))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            rewards.append(0.0)
    return rewards
