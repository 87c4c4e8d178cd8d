r"""Load problems with exact numeric answers, from the Hugging Face hub, from local files, or generated.

| name         | hub id, where no path is given        | the gold answer is                                 |
|--------------|---------------------------------------|----------------------------------------------------|
| `gsm8k`      | `openai/gsm8k` (main)                 | what follows `####`                                |
| `math`       | `EleutherAI/hendrycks_math` (all)     | in the last `\boxed{}`; no other number in another |
| `svamp`      | `ChilleD/SVAMP` (1,000 as 700 + 300)  | `Answer`                                           |
| `asdiv`      | `EleutherAI/asdiv`                    | `Answer` before its unit in parentheses            |
| `file`       | none: a path is needed                | the answer column                                  |
| `arithmetic` | none: made by `pspo.tasks.arithmetic` | always there                                       |

`gsm8k+math` mixes sources. **Gold answers** are read strictly: the whole of one, less a currency sign before it and
a `%` or degree sign after it, must be one number of the grammar in `answers.py`. Problems with any other (`x=5`,
`(1,2)`, `2:3`, `3 (apples); 4 (pears)`, `10\text{ inches}`, `1101_2`, `2\frac{1}{2}`) are left out and counted.

**Splits** are train, validation and test. The split of a local file is the one word of train / validation / valid /
val / dev / test in its name, or in its path below the folder given; **without such a word it is test**, so that what
was not named for training is never trained on. Where nothing is named validation, a part of train, shuffled by the
seed, is held out: all but 7,000 of GSM8K (473), otherwise 5% and at most 500. The part is taken before non-numeric
answers are left out, so that it does not depend on `fractions`.

Of a source that has one split alone (ASDiv, SVAMP's own file) ``holdout`` makes two: a problem is test if the hash of
its words and the seed says so. Problems of the same words are on one side, within a source and across sources.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path

from pspo.tasks import arithmetic
from pspo.tasks.answers import parse_number
from pspo.tasks.files import READERS, Row, file_rows
from pspo.tasks.problem import Problem

SPLITS = ("train", "validation", "test")
GSM8K_TRAIN = 7000
PRINTABLE = 10**4000  # Python turns longer numbers into text no more
ARITHMETIC_SIZES = {"train": 10_000, "validation": 500, "test": 500}

_SPLIT_WORDS = {word: word for word in SPLITS} | dict.fromkeys(("valid", "val", "dev"), "validation")

Reader = Callable[[Row], tuple[str, str, dict[str, str]]]  # a row's prompt, the gold answer's text, further fields


@dataclass(frozen=True)
class Source:
    """How to read one published data set."""

    problem: Reader
    hub_id: str
    configs: tuple[str, ...]
    hub_splits: dict[str, str]  # ours -> the hub's
    skip: str = ""  # local files with this in their name are another form of the same problems


def _gsm8k(row: Row) -> tuple[str, str, dict[str, str]]:
    answer = row.text("answer")
    return row.text("question"), answer.rpartition("####")[2], {"solution": answer}


def _math(row: Row) -> tuple[str, str, dict[str, str]]:
    solution = row.text("solution")
    boxes = boxed(solution)
    # Boxes with different numbers ("-2 and 1") are several answers, of which the last alone is not the answer.
    gold = boxes[-1] if len({parse_gold(box) for box in boxes} - {None}) == 1 else ""
    if "separated by commas" in row.text("problem") and "," in gold:
        gold = ""  # 70,110 is two answers then
    fields = {"category": row.optional("type"), "level": row.optional("level"), "solution": solution}
    return row.text("problem"), gold, fields


def _svamp(row: Row) -> tuple[str, str, dict[str, str]]:
    # One of the 1,000 is of type "Common-Divison"; a breakdown should not give it a line of its own.
    kind = row.optional("Type").replace("Common-Divison", "Common-Division")
    return f"{row.text('Body')} {row.text('Question')}", row.text("Answer"), {"category": kind}


def _asdiv(row: Row) -> tuple[str, str, dict[str, str]]:
    fields = {"category": row.optional("solution_type"), "level": row.optional("grade")}
    answer = re.sub(r"\s*\([^()]*\)$", "", row.text("answer"))  # 9 (apples)
    return f"{row.text('body')} {row.text('question')}", answer, fields


_MATH_SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory",
                  "prealgebra", "precalculus")  # fmt: skip
_TRAIN_TEST = {"train": "train", "test": "test"}
SOURCES = {
    "gsm8k": Source(_gsm8k, "openai/gsm8k", ("main",), _TRAIN_TEST, skip="socratic"),
    "math": Source(_math, "EleutherAI/hendrycks_math", _MATH_SUBJECTS, _TRAIN_TEST),
    "svamp": Source(_svamp, "ChilleD/SVAMP", ("default",), _TRAIN_TEST),
    "asdiv": Source(_asdiv, "EleutherAI/asdiv", ("asdiv",), {"test": "validation"}),  # all 2,305 are its "validation"
}
NAMES = (*SOURCES, "file", "arithmetic")


def load_problems(
    name: str,
    split: str,
    path: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    fractions: bool = True,
    holdout: float = 0.0,
) -> list[Problem]:
    """The problems of one split that have a numeric answer.

    Train and held-out validation come shuffled by the seed, and so do train and validation of a mixture; all else
    keeps its order, a mixture's test one source after the other. Prints how many were left out, if any.

    Args:
        name: gsm8k, math, svamp, asdiv, file (your own), arithmetic, or several joined by `+`.
        split: train, validation or test.
        path: a local .jsonl, .json, .parquet, .csv or .xml (ASDiv) file in the source's own format, or a folder of
            them, or a folder with a sub-folder of the source's name (needed for a mixture). None: from the hub.
        limit: at most so many problems, the first (of a test split in its own order, which may be by subject, or one
            source after the other); of arithmetic exactly so many (default 10,000 for train, else 500).
        seed: of the shuffles, and of arithmetic.
        prompt_column, answer_column: for `file`. Its columns `category` and `level` are taken along if there.
        fractions: False leaves out answers written as fractions, unless they are integers.
        holdout: of a source with a single split, the share that is test while the rest is train; 0: none is held out.

    Raises:
        ValueError: anything wrong with arguments, files or hub, naming the file, the line or column, and the fix.
    """
    names = name.split("+")
    if unknown := [part for part in names if part not in NAMES]:
        raise ValueError(f"--data.name {unknown[0]!r} is unknown; choose from {', '.join(NAMES)}, or join some by '+'")
    if len(set(names)) < len(names):
        raise ValueError(f"data name {name!r} repeats a source; name each once")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or null for all problems, not {limit}")
    if name == "arithmetic" and path is not None:
        raise ValueError("arithmetic is generated and takes no path; for data of your own set --data.name file")

    problems: list[Problem] = []
    for part in names:
        if part == "arithmetic":
            problems += islice(arithmetic.problems(split, seed), limit or ARITHMETIC_SIZES[split])
            continue
        to_problem = _own_columns(prompt_column, answer_column) if part == "file" else SOURCES[part].problem
        source_path = _source_path(part, path, mixture=len(names) > 1)
        rows = _split_rows(part, split, source_path, seed, holdout, lambda row, read=to_problem: read(row)[0])
        problems += _numeric(part, split, rows, to_problem, fractions)
    if len(names) > 1 and split != "test":
        random.Random(seed).shuffle(problems)
    return problems[:limit]


def _source_path(name: str, path: str | Path | None, mixture: bool) -> Path | None:
    if path is None:
        if name == "file":
            raise ValueError("data name 'file' needs --data.path: your .jsonl, .json, .parquet or .csv file or folder")
        return None
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path} does not exist; check --data.path")
    if (path / name).is_dir():
        return path / name
    if mixture:
        raise ValueError(f"{path} has no folder {name!r}; a mixture's --data.path holds one folder per source")
    return path


def _own_columns(prompt_column: str, answer_column: str) -> Reader:
    def read(row: Row) -> tuple[str, str, dict[str, str]]:
        fields = {field: row.optional(field) for field in ("category", "level")}
        return row.text(prompt_column), row.text(answer_column), fields

    return read


def _split_rows(
    name: str, split: str, path: Path | None, seed: int, holdout: float, prompt: Callable[[Row], str]
) -> list[Row]:
    """The rows of one split, after making two of a single one, and validation of a part of train if there is none."""
    if path is None:
        published = {ours: partial(_hub_rows, name, theirs) for ours, theirs in SOURCES[name].hub_splits.items()}
    else:
        files = _files_by_split(path, SOURCES[name].skip if name in SOURCES else "")
        published = {ours: partial(file_rows, paths) for ours, paths in files.items()}
    if len(published) == 1 and holdout > 0:
        sides: dict[bool, list[Row]] = {True: [], False: []}
        for row in next(iter(published.values()))():
            sides[_is_held_out(prompt(row), seed, holdout)].append(row)
        if not all(sides.values()):
            side = "train" if sides[True] else "test"
            raise ValueError(f"{path or SOURCES[name].hub_id}: --data.holdout {holdout} leaves no {side} problem")
        published = {"test": lambda: sides[True], "train": lambda: sides[False]}
    if split in published and split != "train":
        return published[split]()
    if split == "test" or "train" not in published:
        raise ValueError(
            f"{path or SOURCES[name].hub_id} has no {split} split for {name}, only {' and '.join(sorted(published))}; "
            f"a file counts as the split that its name says ({split}.jsonl), and as test if it says none; "
            "--data.holdout 0.3 makes train and test of a single split"
            + ("; to train without a test, --run.test_limit 0" if split == "test" else "")
        )
    rows = published["train"]()
    random.Random(seed).shuffle(rows)
    if "validation" in published:
        return rows
    if len(rows) < 2:
        raise ValueError(f"{rows[0].where}: one problem cannot be both train and validation; add more")
    held_out = max(1, min(500, len(rows) // 20))
    if name == "gsm8k" and len(rows) > GSM8K_TRAIN:
        held_out = len(rows) - GSM8K_TRAIN
    return rows[:-held_out] if split == "train" else rows[-held_out:]


def _is_held_out(prompt: str, seed: int, share: float) -> bool:
    """By the hash of the prompt's words, without case and punctuation."""
    words = " ".join(re.findall(r"\w+", prompt.lower()))
    return int.from_bytes(hashlib.sha256(f"{seed} {words}".encode()).digest()[:8]) < share * 2**64


def _numeric(
    name: str,
    split: str,
    rows: list[Row],
    to_problem: Reader,
    fractions: bool,
) -> list[Problem]:
    """The rows as problems, without those whose gold answer is not one number."""
    problems = []
    for row in rows:
        prompt, gold, fields = to_problem(row)
        answer = parse_gold(gold)
        written_as_fraction = "/" in gold or "frac" in gold
        if answer is not None and (fractions or not written_as_fraction or answer.denominator == 1):
            problems.append(Problem(prompt, answer, name, **fields))
    kind = "a numeric answer" if fractions else "a numeric answer that is not a fraction"
    if not problems:
        raise ValueError(
            f"{rows[0].where} and on: none of {len(rows):,} problems has {kind}, such as 42, 1,234.5 or 3/4"
        )
    if len(problems) < len(rows):
        print(f"{name} {split}: {len(problems):,} of {len(rows):,} problems have {kind}")
    return problems


def parse_gold(text: str) -> Fraction | None:
    r"""The value of a gold answer that is one number, or None.

    A currency sign before it (`$`, `\$`) and `%`, `\%`, `^\circ`, `^{\circ}` or a degree sign after it are dropped, as
    they are in a model's answer: 25% is 25.
    """
    text = re.sub(r"^\\?[$£€¥₹]\s*", "", text.strip())
    gold = parse_number(re.sub(r"\s*(?:\\?%|°|\^\\circ|\^\{\\circ\})$", "", text))
    too_long = gold is not None and max(abs(gold.numerator), gold.denominator) >= PRINTABLE
    return None if too_long else gold


def boxed(solution: str) -> list[str]:
    r"""What each outermost `\boxed{...}` holds, in order; "" for a last one that is never closed."""
    contents, end = [], 0
    while (start := solution.find(r"\boxed{", end)) >= 0:
        start += len(r"\boxed{")
        depth, end = 1, start
        while depth and end < len(solution):
            depth += {"{": 1, "}": -1}.get(solution[end], 0)
            end += 1
        contents.append("" if depth else solution[start : end - 1])
    return contents


def _hub_rows(name: str, hub_split: str) -> list[Row]:
    import datasets  # takes seconds, and is needed only here

    hub_id, rows = SOURCES[name].hub_id, []
    for config in SOURCES[name].configs:
        try:
            table = datasets.load_dataset(hub_id, config, split=hub_split)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"cannot load {name} from the hub: {reason}; pass a local copy by --data.path") from error
        rows += [Row(f"{hub_id} {config} {hub_split} record {n}", record) for n, record in enumerate(table, 1)]
    return rows


def _files_by_split(path: Path, skip: str) -> dict[str, list[Path]]:
    """The data files at path, by the split that their names say; all are test if none says one."""
    if path.is_file():
        return {_split_of(path.name) or "test": [path]}
    found: dict[str | None, list[Path]] = {}
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.suffix in READERS and not hidden and not (skip and skip in str(inside)):
            found.setdefault(_split_of(str(inside)), []).append(file)
    if not found:
        raise ValueError(f"{path} holds no {', '.join(READERS)} file; check --data.path")
    unnamed = found.pop(None, [])
    found = found or {"test": unnamed}
    for split, files in found.items():
        if len({file.suffix for file in files}) > 1:
            raise ValueError(f"{path} holds {split} in several formats ({files[0].name}, {files[-1].name}); keep one")
    return found


def _split_of(name: str) -> str | None:
    words = re.split("[^a-z]+", name.lower())
    splits = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else None
