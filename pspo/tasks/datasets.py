"""Load problems: from the Hugging Face hub, from local files, or generated.

`pspo.tasks.sources` has the published data sets and those made here; `file` is your own, and `organisation/name` any
data set of the hub; `gsm8k+math` mixes sources.

The split of a local file or a hub set's split is the one word of train, validation (valid, val, dev) or test in its
name, for a file the path below the given folder. Those without such a word are test if no other has one, and ignored
otherwise: nothing is trained on by accident. If no split is named validation, part of train is held out: all but 7,000
of GSM8K, otherwise 5% and at most 500.
"""

import hashlib
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pspo.tasks.answers import MAX_DIGITS
from pspo.tasks.arithmetic import SPLITS
from pspo.tasks.files import READERS, Row, file_rows
from pspo.tasks.problem import AnswerKind, Problem
from pspo.tasks.sources import GENERATED, NAMES, SOURCES, Source, default_answer_kind, parse_gold, user_source

_SPLIT_WORDS = {word: word for word in SPLITS} | dict.fromkeys(("valid", "val", "dev"), "validation")
GENERATED_SIZES = {"train": 10_000, "validation": 500, "test": 500}  # without a limit


def group_by_split(items: dict[str, Any]) -> dict[str, list[Any]]:
    """Group by the one split that each name says; all are test if no name says one."""
    groups: dict[str, list[Any]] = {}
    for name, item in items.items():
        words = re.split("[^a-z]+", name.lower())
        splits = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
        if len(splits) == 1:
            groups.setdefault(splits.pop(), []).append(item)
    return groups or {"test": list(items.values())}


def files_by_split(path: Path, skip: str) -> dict[str, list[Path]]:
    """Find the data files at path, by the split that their names say; all are test if none says one."""
    if path.is_file():
        return group_by_split({path.name: path})
    files = {}
    for file in sorted(path.rglob("*")):
        place = file.relative_to(path)
        hidden = any(part.startswith(".") for part in place.parts)
        if file.suffix in READERS and not hidden and not (skip and skip in str(place)):
            files[str(place)] = file
    if not files:
        raise ValueError(f"{path} holds no {', '.join(READERS)} file; check --data.path")
    return group_by_split(files)


def load_hub(source: Source) -> dict[str | None, Any]:
    """Load a data set of the hub: by configuration, its splits by their names."""
    import datasets  # slow to import

    try:
        return {
            config: datasets.load_dataset(source.hub_id, config, revision=source.revision) for config in source.configs
        }
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        fix = "check --data.name and --data.hub, or load local files with --data.path"
        raise ValueError(f"cannot load {source.hub_id} from the hub: {error!r}; {fix}") from error


def hub_splits(source: Source, tables: dict[str | None, Any]) -> dict[str, list[str]]:
    """The hub's names of splits, by ours."""
    names = list(next(iter(tables.values())))
    if not source.splits:
        return group_by_split({name: name for name in names})
    for name in source.splits.values():
        if name not in names:
            raise ValueError(f"{source.hub_id} has no {name} split, only {', '.join(names)}; check --data.hub")
    return {split: [name] for split, name in source.splits.items()}


def hub_rows(source: Source, tables: dict[str | None, Any], splits: list[str]) -> list[Row]:
    """Rows of some of the hub's splits, of all configurations."""
    rows = []
    for config, table in tables.items():
        for split in splits:
            place = " ".join(filter(None, (source.hub_id, config, split)))
            rows += [Row(f"{place} record {number}", record) for number, record in enumerate(table[split], 1)]
    return rows


def is_held_out(problem: Problem, seed: int, share: float) -> bool:
    """Decide by the hash of the prompt's words, without case and punctuation."""
    chat = problem.prompt
    text = chat if isinstance(chat, str) else " ".join(turn["content"] for turn in chat)
    words = " ".join(re.findall(r"\w+", text.lower()))
    return int.from_bytes(hashlib.sha256(f"{seed} {words}".encode()).digest()[:8]) < share * 2**64


def parse_answers(drafts: list[Problem], kind: AnswerKind) -> list[Problem]:
    """Turn gold answers from text into the kind asked for; leave out problems that have none."""
    if kind == "none":
        return [replace(draft, answer=None) for draft in drafts]
    if kind == "text":
        return [draft for draft in drafts if draft.answer]
    problems = []
    for draft in drafts:
        answer = parse_gold(draft.answer)
        if answer is not None and max(abs(answer.numerator), answer.denominator) < 10**MAX_DIGITS:  # not 1e5000
            problems.append(replace(draft, answer=answer))
    return problems


def read_split(
    source: Source, name: str, kind: AnswerKind, split: str, path: Path | None, seed: int, holdout: float
) -> list[Problem]:
    """Read one split, gold answers still as text.

    A single split is divided by ``holdout``, and train into train and validation where no split is validation.
    """
    if path is None:
        tables = load_hub(source)
        parts = hub_splits(source, tables)
    else:
        parts = files_by_split(path, source.skip)
    divided = len(parts) == 1 and holdout > 0
    splits = ["test", "train"] if divided else sorted(parts)
    published = "train" if split == "validation" and split not in splits else split
    if published not in splits:
        fix = f"name a file {split}.jsonl" if path else "name it in the splits of --data.hub"
        fix += ", or divide a single split with --data.holdout 0.3"
        if split == "test":
            fix += "; --run.test_limit 0 trains without a test"
        raise ValueError(f"{path or source.hub_id} has no {split} split, only {' and '.join(splits)}; {fix}")
    (part,) = parts.values() if divided else [parts[published]]
    rows = hub_rows(source, tables, part) if path is None else file_rows(part)

    drafts = []
    for row in rows:
        gold, attributes = source.read_gold(row, kind)
        fields = row.fields(source.prompt)
        drafts.append(Problem(row.prompt(source.prompt), gold.strip(), fields, name, **attributes))
    if divided:
        drafts = [draft for draft in drafts if is_held_out(draft, seed, holdout) == (split == "test")]
    if published != "train":
        return drafts
    random.Random(seed).shuffle(drafts)
    if "validation" in splits:
        return drafts
    held_out = max(1, min(500, len(drafts) // 20))
    if source.train_size and len(drafts) > source.train_size:
        held_out = len(drafts) - source.train_size
    return drafts[:-held_out] if split == "train" else drafts[-held_out:]


def find_source(name: str, path: str | Path | None, mixture: bool) -> Path | None:
    """Return the local file or folder of one source; None for the hub's."""
    if path is None:
        if name == "file":
            raise ValueError("data name 'file' needs --data.path: your .jsonl, .json, .parquet or .csv file or folder")
        return None
    path = Path(path).expanduser()
    if not path.exists():
        raise ValueError(f"{path} does not exist; check --data.path")
    if path.is_file() and path.suffix not in READERS:
        raise ValueError(f"{path} is none of {', '.join(READERS)}; check --data.path")
    if (path / name).is_dir():
        return path / name
    if mixture:
        raise ValueError(f"{path} has no folder {name!r}; a mixture's --data.path holds one folder per source")
    return path


def check_arguments(name: str, split: str, path: str | Path | None, hub: dict[str, Any]) -> None:
    """Raise ValueError for arguments of `load_problems` that name nothing, or do not fit each other."""
    names = name.split("+")
    for part in names:
        if part not in NAMES and ("/" not in part or Path(part).exists()):
            raise ValueError(
                f"--data.name {part!r} is unknown; choose from {', '.join(NAMES)} or a hub id (organisation/name), "
                "or join some by +; for a local file or folder set --data.name file and --data.path"
            )
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    if "revision" in hub and (path is not None or len(names) > 1 or name in GENERATED):
        raise ValueError("the revision in --data.hub is that of a single data set of the hub: unset it")
    if name in GENERATED and path is not None:
        raise ValueError(f"{name} is generated and takes no path; for your own data set --data.name file")


def load_problems(
    name: str,
    split: str,
    path: str | Path | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    answer_kind: AnswerKind | None = None,
    columns: dict[str, str] | None = None,
    hub: dict[str, Any] | None = None,
    holdout: float = 0.0,
) -> list[Problem]:
    """Load the problems of one split that have an answer of the kind asked for; print how many were left out, if any.

    Train, a validation split made of it, and both of a mixture are shuffled by the seed; everything else keeps its
    order, a mixture's test split one source after the other. The parameters are `pspo.config.DataConfig`'s. Besides:

    Args:
        split: train, validation or test.
        path: in a source's own format; mixtures need a folder with one folder per source.
        limit: of a generated source, how many problems to generate; None for 10,000 of train, 500 of the others. Of a
            test split it takes a sample by the seed.
        columns: of your own data, names of the columns {"prompt": ..., "answer": ...}. `category` and `level` are read
            besides, if present. Prompts are text or lists of turns {"role": ..., "content": ...}. All other columns are
            `Problem.fields`.
        hub: of a data set of the hub, any of its "config", "revision" and "splits", its names by ours.
        holdout: share of a single split that becomes test; problems of the same words are on one side.
    """
    columns = {"prompt": "prompt", "answer": "answer"} | (columns or {})
    hub = hub or {}
    check_arguments(name, split, path, hub)
    names = name.split("+")
    problems = []
    for part in names:
        kind = answer_kind or default_answer_kind(part)
        place: Path | str = part  # for messages
        if part in GENERATED:
            count = limit or GENERATED_SIZES[split]
            generated = islice(GENERATED[part](split, seed), count)
            drafts = [replace(problem, answer=str(problem.answer)) for problem in generated]
        else:
            source = SOURCES.get(part) or user_source(part, columns, hub, on_hub=path is None)
            source = replace(source, revision=hub.get("revision", source.revision))
            source_path = find_source(part, path, mixture=len(names) > 1)
            place = source_path or source.hub_id
            drafts = read_split(source, part, kind, split, source_path, seed, holdout)
        if not drafts:
            raise ValueError(f"{place}: too few problems for a {split} split; add some, or change --data.holdout")
        answered = parse_answers(drafts, kind)
        what = "a numeric answer" if kind == "number" else "an answer"
        if not answered:
            fix = "check --data.columns"
            if kind == "number":
                fix = "such as 42, 1,234.5 or 3/4; for answers of another kind set --data.answer_kind text, or none"
            raise ValueError(f"{place}: none of {len(drafts):,} {split} problems has {what}; {fix}")
        if len(answered) < len(drafts):
            print(f"{part} {split}: {len(answered):,} of {len(drafts):,} problems have {what}")
        problems += answered
    if len(names) > 1 and split != "test":
        random.Random(seed).shuffle(problems)
    if split == "test" and limit and limit < len(problems):
        sample = random.Random(seed).sample(range(len(problems)), limit)
        problems = [problems[i] for i in sorted(sample)]
    return problems[:limit]
