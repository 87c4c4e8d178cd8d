r"""Load problems: from the Hugging Face hub, from local files, or generated.

`SOURCES` are the published data sets, `GENERATED` those made here; `file` is your own, and `organisation/name` any data
set of the hub; `gsm8k+math` mixes sources. Numeric gold answers are read strictly, by `parse_gold`; problems without
one (`x=5`, `(1,2)`, `3 (apples); 4 (pears)`, `10\text{ inches}`, `2\frac{1}{2}`) are left out and counted.

The split of a local file or a hub set's split is the one word of train, validation (valid, val, dev) or test in its
name, for a file the path below the given folder. Those without such a word are test if no other has one, and ignored
otherwise: nothing is trained on by accident. If no split is named validation, part of train is held out: all but 7,000
of GSM8K, otherwise 5% and at most 500.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pspo.tasks import arithmetic, calculator, letters
from pspo.tasks.answers import MAX_DIGITS, parse_number
from pspo.tasks.arithmetic import SPLITS
from pspo.tasks.files import READERS, Row, data_files, file_rows, is_saved
from pspo.tasks.problem import AnswerKind, Problem

T = TypeVar("T")
_SPLIT_WORDS = {word: word for word in SPLITS} | dict.fromkeys(("valid", "val", "dev"), "validation")
_MATH_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
                  "prealgebra", "precalculus")  # fmt: skip

Gold = tuple[str, dict[str, str]]  # text of the gold answer, "" without one; and further attributes of `Problem`


@dataclass(frozen=True)
class Source:
    """Data set: how to read one of its rows, and where the hub has it."""

    prompt: tuple[str, ...]  # columns
    read: Callable[[Row, AnswerKind], Gold]
    hub_id: str = ""
    revision: str | None = None  # of the hub's, so that everybody has the same problems
    configs: tuple[str | None, ...] = ()
    splits: dict[str, str] | None = None  # the hub's names by ours; None goes by their words
    train_size: int | None = None  # rows of the published train split to train on; the rest is validation
    skip: str = ""  # local files with this in their path hold the same problems in another form


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


def _own(row: Row, kind: AnswerKind, answer_column: str, on_hub: bool) -> Gold:
    required = kind == "number" and not on_hub  # a record of a file can be mended, one of the hub is left out
    gold = "" if kind == "none" else row.text(answer_column, required)
    return gold, {name: row.optional(name) for name in ("category", "level")}


GSM8K, MATH = "740312add88f781978c0658806c59bc2815b9866", "21a5633873b6a120296cce3e2df9d5550074f4a3"  # revisions
SVAMP, ASDIV = "5e0bf1e5e7c0e9c4bc39180d224f41f3f801b7ef", "8f95807222d87b4c688c3c22a6ba2801e1fa03e2"

SOURCES = {
    "gsm8k": Source(("question",), _gsm8k, "openai/gsm8k", GSM8K, ("main",), train_size=7000, skip="socratic"),
    "math": Source(("problem",), _math, "EleutherAI/hendrycks_math", MATH, _MATH_SUBJECTS),
    "svamp": Source(("Body", "Question"), _svamp, "ChilleD/SVAMP", SVAMP, ("default",)),
    "asdiv": Source(("body", "question"), _asdiv, "EleutherAI/asdiv", ASDIV, ("asdiv",), {"test": "validation"}),
}


@dataclass(frozen=True)
class Generated:
    """Endless problems of a split, by a seed."""

    problems: Callable[[str, int], Iterator[Problem]]
    answer_kind: AnswerKind = "number"
    sizes: dict[str, int] = field(default_factory=lambda: {"train": 10_000, "validation": 500, "test": 500})


GENERATED = {
    "arithmetic": Generated(arithmetic.problems),
    "letters": Generated(letters.problems, "text"),
    "sums": Generated(calculator.problems),
}
NAMES = (*SOURCES, *GENERATED, "file")


def own_kind(name: str) -> AnswerKind:
    """Return the kind of a source's gold answers if --data.answer_kind is unset."""
    return GENERATED[name].answer_kind if name in GENERATED else "number"


def load_problems(
    name: str,
    split: str,
    path: str | Path | None = None,
    *,
    limit: int | None = None,
    sample: bool = True,
    seed: int = 0,
    answer_kind: AnswerKind | None = None,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    config: str | None = None,
    revision: str | None = None,
    splits: dict[str, str] | None = None,
    fractions: bool = True,
    holdout: float = 0.0,
    deduplicate: bool = False,
) -> list[Problem]:
    """Load the problems of one split that have an answer of the kind asked for; print how many were left out, if any.

    Train, a validation split made of it, and both of a mixture are shuffled by the seed; everything else keeps its
    order, a mixture's test split one source after the other. The parameters are `pspo.config.DataConfig`'s. Besides:

    Args:
        split: train, validation or test.
        path: in a source's own format; mixtures need a folder with one folder per source.
        limit: of a generated source, how many problems to generate; None for 10,000 of train, 500 of the others.
        prompt_column, answer_column: `category` and `level` are read besides, if present. Prompts are text or lists of
            turns {"role": ..., "content": ...}. All other columns are `Problem.fields`.
        fractions: keep answers that are written as fractions, integers aside.
        deduplicate: train has each prompt once, and none that is in the validation or test split.
        holdout: a hash of a problem's words and the seed decides: problems of the same words are on one side.
    """
    names = name.split("+")
    if unknown := [part for part in names if part not in NAMES and ("/" not in part or Path(part).exists())]:
        raise ValueError(
            f"--data.name {unknown[0]!r} is unknown; choose from {', '.join(NAMES)} or a hub id (organisation/name), "
            "or join some by +; for a local file or folder set --data.name file and --data.path"
        )
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    if revision is not None and (path is not None or len(names) > 1 or name in GENERATED):
        raise ValueError("--data.revision is that of a single data set of the hub: unset it")
    if name in GENERATED and path is not None:
        raise ValueError(f"{name} is generated and takes no path; for your own data set --data.name file")

    problems, held_out = [], []
    for part in names:
        kind = answer_kind or own_kind(part)
        if part in GENERATED:
            made = islice(GENERATED[part].problems(split, seed), limit or GENERATED[part].sizes[split])
            drafts, where = [replace(problem, answer=str(problem.answer)) for problem in made], part
        else:
            read = partial(_own, answer_column=answer_column, on_hub=path is None)
            source = SOURCES.get(part) or Source((prompt_column,), read, part, None, (config,), splits)
            source = replace(source, revision=revision or source.revision)
            place = _source_path(part, path, mixture=len(names) > 1)
            make = partial(_draft, source=source, name=part, kind=kind)
            read = partial(_split, source, make, path=place, seed=seed, holdout=holdout)
            drafts, where = read(split), place or source.hub_id
            if deduplicate and split == "train":
                held_out += [*read("validation"), *read("test", required=False)]
        problems += _with_answers(drafts, kind, part, split, fractions, where)
    if len(names) > 1 and split != "test":
        random.Random(seed).shuffle(problems)
    if deduplicate and split == "train":
        problems = without_duplicates(problems, held_out)
        if not problems:
            raise ValueError(f"--data.deduplicate: every training prompt of {name} is in its validation or test split")
    if split == "test" and sample and limit and limit < len(problems):
        problems = [problems[i] for i in sorted(random.Random(seed).sample(range(len(problems)), limit))]
    return problems[:limit]


def without_duplicates(problems: Iterable[Problem], held_out: Iterable[Problem] = ()) -> list[Problem]:
    """Leave out problems whose prompts have come before, or are held out."""
    seen, kept = {repr(problem.prompt) for problem in held_out}, []
    for problem in problems:
        if (prompt := repr(problem.prompt)) not in seen:
            seen.add(prompt)
            kept.append(problem)
    return kept


def _source_path(name: str, path: str | Path | None, mixture: bool) -> Path | None:
    """Return the file or folder of one source."""
    if path is None:
        if name == "file":
            raise ValueError("data name 'file' needs --data.path: your .jsonl, .json, .parquet or .csv file or folder")
        return None
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path} does not exist; check --data.path")
    if path.is_file() and path.suffix not in READERS:
        raise ValueError(f"{path} is none of {', '.join(READERS)}; check --data.path")
    if mixture and not (path / name).is_dir():
        raise ValueError(f"{path} has no folder {name!r}; a mixture's --data.path holds one folder per source")
    return path / name if (path / name).is_dir() else path


def _draft(row: Row, source: Source, name: str, kind: AnswerKind) -> Problem:
    """Make a problem of a row, its answer still as text."""
    gold, attributes = source.read(row, kind)
    return Problem(row.prompt(source.prompt), gold.strip(), row.fields(source.prompt), name, **attributes)


def _split(
    source: Source,
    make: Callable[[Row], Problem],
    split: str,
    path: Path | None,
    seed: int,
    holdout: float,
    required: bool = True,
) -> list[Problem]:
    """Read one split; divide a single split by `holdout`, and train into train and validation, as needed.

    One that does not exist is empty, if it is not required.
    """
    if path is None:
        load = _hub_rows(source)
    else:
        load = {ours: partial(file_rows, files) for ours, files in _files_by_split(path, source.skip).items()}
    divide = len(load) == 1 and holdout > 0
    if divide:
        load = dict.fromkeys(("train", "test"), *load.values())
    published = "train" if split == "validation" and split not in load else split
    if published not in load and not required:
        return []
    if published not in load:
        name = f"name a file {split}.jsonl" if path else "name it with --data.splits"
        raise ValueError(
            f"{path or source.hub_id} has no {split} split, only {' and '.join(sorted(load))}; {name}, or divide a "
            "single split with --data.holdout 0.3"
            + ("; --run.test_limit 0 trains without a test" if split == "test" else "")
        )
    drafts = [make(row) for row in load[published]()]
    if divide:
        drafts = [draft for draft in drafts if _is_held_out(draft, seed, holdout) == (split == "test")]
    if published != "train":
        return drafts
    random.Random(seed).shuffle(drafts)
    if "validation" in load:
        return drafts
    if len(drafts) < 2:
        raise ValueError(
            f"{path or source.hub_id} has too few problems to train on: {len(drafts)}, one of which is held out for "
            "validation; add some, or name a file validation.jsonl"
        )
    held_out = max(1, min(500, len(drafts) // 20))
    if source.train_size and len(drafts) > source.train_size:
        held_out = len(drafts) - source.train_size
    return drafts[:-held_out] if split == "train" else drafts[-held_out:]


def _is_held_out(problem: Problem, seed: int, share: float) -> bool:
    """Decide by the hash of the prompt's words, without case and punctuation."""
    chat = problem.prompt
    text = chat if isinstance(chat, str) else " ".join(turn["content"] for turn in chat)
    words = " ".join(re.findall(r"\w+", text.lower()))
    return int.from_bytes(hashlib.sha256(f"{seed} {words}".encode()).digest()[:8]) < share * 2**64


def _with_answers(
    drafts: list[Problem], kind: AnswerKind, name: str, split: str, fractions: bool, where: Path | str
) -> list[Problem]:
    """Turn gold answers from text into the kind asked for; leave out problems that have none, and print how many."""
    if not drafts:
        raise ValueError(f"{where}: too few problems for a {split} split; add some, or change --data.holdout")
    if kind == "none":
        return [replace(draft, answer=None) for draft in drafts]
    if kind == "text":
        problems, what, fix = [draft for draft in drafts if draft.answer], "an answer", "check --data.answer_column"
    else:
        answers = [_number(draft.answer, fractions) for draft in drafts]
        pairs = zip(drafts, answers, strict=True)
        problems = [replace(draft, answer=answer) for draft, answer in pairs if answer is not None]
        what = "a numeric answer" if fractions else "a numeric answer that is not a fraction"
        fix = "such as 42, 1,234.5 or 3/4; for answers of another kind set --data.answer_kind text, or none"
    if not problems:
        raise ValueError(f"{where}: none of {len(drafts):,} {split} problems has {what}; {fix}")
    if len(problems) < len(drafts):
        print(f"{name} {split}: {len(problems):,} of {len(drafts):,} problems have {what}")
    return problems


def _number(gold: str, fractions: bool) -> Fraction | None:
    answer = parse_gold(gold)
    if answer is not None and max(abs(answer.numerator), answer.denominator) >= 10**MAX_DIGITS:  # 1e5000
        return None
    as_fraction = answer is not None and answer.denominator > 1 and ("/" in gold or "frac" in gold)
    return None if as_fraction and not fractions else answer


def parse_gold(text: str) -> Fraction | None:
    r"""Return the value of a gold answer that is one number by the grammar of `answers.py`, else None.

    A currency sign before it (`$`, `\$`) and `%`, `\%`, `^\circ`, `^{\circ}` or a degree sign after it are dropped, as
    they are in a model's answer: 25% is 25.
    """
    text = re.sub(r"^\\?[$£€¥₹]\s*", "", text.strip())
    return parse_number(re.sub(r"\s*(?:\\?%|°|\^\\circ|\^\{\\circ\})$", "", text))


def boxed(solution: str) -> list[str]:
    r"""Return the contents of each outermost `\boxed{...}`, in order; "" for a last one that is never closed."""
    contents, end = [], 0
    while (start := solution.find(r"\boxed{", end)) >= 0:
        start += len(r"\boxed{")
        depth, end = 1, start
        while depth and end < len(solution):
            depth += {"{": 1, "}": -1}.get(solution[end], 0)
            end += 1
        contents.append("" if depth else solution[start : end - 1])
    return contents


def _hub_rows(source: Source) -> dict[str, Callable[[], list[Row]]]:
    """Load a data set of the hub; return, by split, what makes its rows."""
    import datasets  # slow to import

    try:
        tables = {config: datasets.load_dataset(source.hub_id, config, revision=source.revision)
                  for config in source.configs}  # fmt: skip
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        fix = "check --data.name, --data.config and --data.revision, or load local files with --data.path"
        raise ValueError(f"cannot load {source.hub_id} from the hub: {error!r}; {fix}") from error
    names = list(next(iter(tables.values())))
    splits = {ours: [theirs] for ours, theirs in (source.splits or {}).items()} or _by_split({n: n for n in names})
    if unknown := {name for theirs in splits.values() for name in theirs} - {*names}:
        raise ValueError(f"{source.hub_id} has no {unknown.pop()} split, only {', '.join(names)}; check --data.splits")

    def rows(theirs: list[str]) -> list[Row]:
        return [
            Row(" ".join(filter(None, (source.hub_id, config, split, f"record {number}"))), record)
            for config, table in tables.items()
            for split in theirs
            for number, record in enumerate(table[split], 1)
        ]

    return {ours: partial(rows, theirs) for ours, theirs in splits.items()}


def _files_by_split(path: Path, skip: str) -> dict[str, list[Path]]:
    """Find the data files at path, by the split that their names say; all are test if none says one."""
    if path.is_file() or is_saved(path):
        return _by_split({path.name: path})
    hidden = re.compile(rf"(^|/)\.{f'|{skip}' if skip else ''}")
    files = {str(file.relative_to(path)): file for file in data_files(path)}
    by_split = _by_split({inside: file for inside, file in files.items() if not hidden.search(inside)})
    for split, paths in by_split.items():
        if not paths:
            raise ValueError(f"{path} holds no {', '.join(READERS)} file; check --data.path")
        if len({file.suffix for file in paths}) > 1:
            raise ValueError(f"{path} holds {split} in several formats ({paths[0].name}, {paths[-1].name}); keep one")
    return by_split


def _by_split(items: dict[str, T]) -> dict[str, list[T]]:
    """Group by the one split that each name says; all are test if no name says one."""
    by_split: dict[str | None, list[T]] = {}
    for name, item in items.items():
        splits = {_SPLIT_WORDS[word] for word in re.split("[^a-z]+", name.lower()) if word in _SPLIT_WORDS}
        by_split.setdefault(splits.pop() if len(splits) == 1 else None, []).append(item)
    unnamed = by_split.pop(None, [])
    return by_split or {"test": unnamed}
