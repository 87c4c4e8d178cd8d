r"""Sources of problems: published data sets and how their rows are read, a user's own, and generated ones.

Numeric gold answers are read strictly, by `parse_gold`; problems without one (`x=5`, `(1,2)`, `3 (apples); 4 (pears)`,
`10\text{ inches}`) are left out and counted.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pspo.tasks import arithmetic, calculator, letters
from pspo.tasks.answers import parse_number
from pspo.tasks.files import Row
from pspo.tasks.problem import AnswerKind, Problem

Gold = tuple[str, dict[str, str]]  # text of the gold answer, "" without one; and further attributes of `Problem`


@dataclass(frozen=True)
class Source:
    """Data set: how to read one of its rows, and where the hub has it."""

    prompt: tuple[str, ...]  # columns
    read_gold: Callable[[Row, AnswerKind], Gold]
    hub_id: str = ""
    revision: str | None = None  # of the hub's, so that everybody has the same problems
    configs: tuple[str | None, ...] = ()
    splits: dict[str, str] | None = None  # the hub's names by ours; None goes by their words
    train_size: int | None = None  # rows of the published train split to train on; the rest is validation
    skip: str = ""  # local files with this in their path hold the same problems in another form


def parse_gold(text: str) -> Fraction | None:
    r"""Return the value of a gold answer that is one number by the grammar of `answers.py`, else None.

    A currency sign before it (`$`, `\$`) and `%`, `\%`, `^\circ`, `^{\circ}` or a degree sign after it are dropped, as
    they are in a model's answer: 25% is 25.
    """
    text = re.sub(r"^\\?[$£€¥₹]\s*", "", text.strip())
    return parse_number(re.sub(r"\s*(?:\\?%|°|\^\\circ|\^\{\\circ\})$", "", text))


def boxed(solution: str) -> list[str]:
    r"""Return the contents of each outermost `\boxed{...}`, in order; "" for a last one that is never closed."""
    contents = []
    end = 0
    while (start := solution.find(r"\boxed{", end)) >= 0:
        start += len(r"\boxed{")
        depth = 1
        end = start
        while depth and end < len(solution):
            depth += {"{": 1, "}": -1}.get(solution[end], 0)
            end += 1
        contents.append("" if depth else solution[start : end - 1])
    return contents


def _gsm8k(row: Row, kind: AnswerKind) -> Gold:
    answer = row.text("answer")
    return answer.rpartition("####")[2], {"solution": answer}


def _math(row: Row, kind: AnswerKind) -> Gold:
    solution = row.text("solution")
    boxes = boxed(solution)
    gold = boxes[-1] if boxes else ""
    if kind == "number":
        several = len({parse_gold(box) for box in boxes} - {None}) > 1  # "-2 and 1" is no number,
        listed = "separated by commas" in row.text("problem") and "," in gold  # and 70,110 is two then
        gold = "" if several or listed else gold
    return gold, {"category": row.optional("type"), "level": row.optional("level"), "solution": solution}


def _svamp(row: Row, kind: AnswerKind) -> Gold:
    category = row.optional("Type").replace("Common-Divison", "Common-Division")  # one of the 1,000 is misspelt
    return row.text("Answer"), {"category": category}


def _asdiv(row: Row, kind: AnswerKind) -> Gold:
    answer = re.sub(r"\s*\([^()]*\)$", "", row.text("answer"))  # 9 (apples)
    return answer, {"category": row.optional("solution_type"), "level": row.optional("grade")}


def user_source(name: str, columns: dict[str, str], hub: dict[str, Any]) -> Source:
    """A user's own file, or a data set of the hub that `SOURCES` does not name."""

    def read_gold(row: Row, kind: AnswerKind) -> Gold:
        gold = "" if kind == "none" else row.text(columns["answer"])
        return gold, {"category": row.optional("category"), "level": row.optional("level")}

    return Source((columns["prompt"],), read_gold, hub_id=name, configs=(hub.get("config"),), splits=hub.get("splits"))


GSM8K = "740312add88f781978c0658806c59bc2815b9866"  # revisions
MATH = "21a5633873b6a120296cce3e2df9d5550074f4a3"
SVAMP = "5e0bf1e5e7c0e9c4bc39180d224f41f3f801b7ef"
ASDIV = "8f95807222d87b4c688c3c22a6ba2801e1fa03e2"
_MATH_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
                  "prealgebra", "precalculus")  # fmt: skip

SOURCES = {
    "gsm8k": Source(("question",), _gsm8k, "openai/gsm8k", GSM8K, ("main",), train_size=7000, skip="socratic"),
    "math": Source(("problem",), _math, "EleutherAI/hendrycks_math", MATH, _MATH_SUBJECTS),
    "svamp": Source(("Body", "Question"), _svamp, "ChilleD/SVAMP", SVAMP, ("default",)),
    "asdiv": Source(("body", "question"), _asdiv, "EleutherAI/asdiv", ASDIV, ("asdiv",), {"test": "validation"}),
}

GENERATED: dict[str, Callable[[str, int], Iterator[Problem]]] = {  # endless problems of a split, by a seed
    "arithmetic": arithmetic.problems,
    "letters": letters.problems,
    "sums": calculator.problems,
}
NAMES = (*SOURCES, *GENERATED, "file")


def default_answer_kind(name: str) -> AnswerKind:
    """Return the kind of a source's gold answers if --data.answer_kind is unset."""
    return "text" if name == "letters" else "number"
