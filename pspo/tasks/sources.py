"""Sources of problems: published data sets and how their rows are read, a user's own, and generated ones."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from pspo.tasks.answers import MAX_DIGITS, parse_number
from pspo.tasks.arithmetic import draw_letters, draw_story, draw_sum, generate
from pspo.tasks.files import Record, column_text
from pspo.tasks.problem import AnswerKind, Problem


@dataclass(frozen=True)
class Source:
    """Data set: how to read one of its records, and where the hub has it; or a generator of problems."""

    name: str
    prompt: tuple[str, ...] = ()  # columns
    answer: str = ""  # column
    hub_id: str = ""
    revision: str | None = None  # of the hub's, so that everybody has the same problems
    configs: tuple[str | None, ...] = ()
    splits: dict[str, str] = field(default_factory=dict)  # ours by the hub's names; without any they go by their words
    train_size: int | None = None  # rows of the published train split to train on; the rest is validation
    skip: str = ""  # local files with this in their path hold the same problems in another form
    category: str = "category"  # and further columns of attributes of `Problem`
    level: str = "level"
    solution: str = ""
    read_gold: Callable[[str, Record, AnswerKind], str] = lambda text, record, kind: text  # of the answer's text
    answer_kind: AnswerKind = "number"  # unless --data.answer_kind says another
    generate: Callable[[str, int], Iterator[Problem]] | None = None  # endless problems of a split, by a seed


def parse_gold(text: str) -> Fraction | None:
    r"""Return the value of a gold answer that is one number, else None, such as of `x=5` and `(1,2)`.

    A currency sign before it (`$`, `\$`) and `%`, `\%`, `^\circ`, `^{\circ}` or a degree sign after it are dropped.
    """
    text = re.sub(r"^\$([^$]+)\$$", r"\1", text.strip())  # as TRL's data have it
    text = re.sub(r"^\\?[$£€¥₹]\s*", "", text.strip())
    number = parse_number(re.sub(r"\s*(?:\\?%|°|\^\\circ|\^\{\\circ\})$", "", text))
    is_long = number is not None and max(abs(number.numerator), number.denominator) >= 10**MAX_DIGITS  # 1e5000
    return None if is_long else number


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


def _math_gold(solution: str, record: Record, kind: AnswerKind) -> str:
    boxes = boxed(solution) or [""]
    if kind == "number":
        several = len({parse_gold(box) for box in boxes} - {None}) > 1  # "-2 and 1" is no number,
        listed = "separated by commas" in column_text(record, "problem") and "," in boxes[-1]  # and 70,110 is two then
        if several or listed:
            return ""
    return boxes[-1]


_MATH_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
                  "prealgebra", "precalculus")  # fmt: skip

SOURCES = {source.name: source for source in (
    Source("gsm8k", ("question",), "answer", "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", ("main",),
           train_size=7000, skip="socratic", solution="answer",
           read_gold=lambda text, record, kind: text.rpartition("####")[2]),
    Source("math", ("problem",), "solution", "EleutherAI/hendrycks_math", "21a5633873b6a120296cce3e2df9d5550074f4a3",
           _MATH_SUBJECTS, category="type", solution="solution", read_gold=_math_gold),
    Source("svamp", ("Body", "Question"), "Answer", "ChilleD/SVAMP", "5e0bf1e5e7c0e9c4bc39180d224f41f3f801b7ef",
           ("default",), category="Type"),
    Source("asdiv", ("body", "question"), "answer", "EleutherAI/asdiv", "8f95807222d87b4c688c3c22a6ba2801e1fa03e2",
           ("asdiv",), {"validation": "test"}, category="solution_type", level="grade",
           read_gold=lambda text, record, kind: re.sub(r"\s*\([^()]*\)$", "", text)),  # 9 (apples)
    Source("arithmetic", generate=partial(generate, draw_story)),
    Source("letters", generate=partial(generate, draw_letters), answer_kind="text"),
    Source("sums", generate=partial(generate, draw_sum)),
)}  # fmt: skip
NAMES = (*SOURCES, "file")


def own_source(name: str, columns: dict[str, str], hub: dict[str, Any]) -> Source:
    """A user's file, or a data set of the hub."""
    prompt = (columns.get("prompt", "prompt"),)
    answer = columns.get("answer", "answer")
    splits = {theirs: ours for ours, theirs in hub.get("splits", {}).items()}
    return Source(name, prompt, answer, name, hub.get("revision"), (hub.get("config"),), splits)


def find_sources(name: str, columns: dict[str, str], hub: dict[str, Any], has_path: bool) -> list[Source]:
    """The sources that --data.name joins by +; ValueError for unknown ones, and for what they have no use for."""
    names = name.split("+")
    if hub.keys() - {"revision"} and all(part in NAMES for part in names):
        what = f"configuration and splits are of hub ids (organisation/name), and not of {name}"
        raise ValueError(f"--data.hub: {what}: leave them out")
    if "file" in names and not has_path:
        raise ValueError("--data.name file needs --data.path: a file or folder of yours")
    sources = []
    for part in names:
        if part in SOURCES:
            sources.append(replace(SOURCES[part], revision=hub.get("revision", SOURCES[part].revision)))
        elif part == "file" or ("/" in part and not Path(part).exists()):
            sources.append(own_source(part, columns, hub))
        else:
            raise ValueError(
                f"--data.name {part!r} is unknown; choose from {', '.join(NAMES)} or a hub id (organisation/name), "
                "or join some by +; for a local file or folder set --data.name file and --data.path"
            )
    if has_path and all(source.generate is not None for source in sources):
        raise ValueError(f"{name} is generated and takes no path; for your own data set --data.name file")
    return sources


def default_answer_kind(name: str) -> AnswerKind:
    """Return the kind of a source's gold answers if --data.answer_kind is unset."""
    return SOURCES[name].answer_kind if name in SOURCES else "number"
