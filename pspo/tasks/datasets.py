"""Load problems: from the Hugging Face hub, from local files, or generated.

The split of a file, or of a hub set's, is the one word of `SPLIT_WORDS` in its name, or in that of the nearest folder
with one. Those without are test if no other has one, else ignored: nothing is trained on by accident. Without a split
validation, part of train is held out: all but 7,000 of GSM8K, else 5%, at most 500; the same words are on one side.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pspo.tasks import files
from pspo.tasks.arithmetic import SPLITS
from pspo.tasks.problem import AnswerKind, Problem, content_text
from pspo.tasks.sources import GENERATED, NAMES, SOURCES, Source, default_answer_kind, find_source, parse_gold

SPLIT_WORDS = {"testing": "test"} | {word: word for word in SPLITS}
SPLIT_WORDS |= dict.fromkeys(("training", "pretrain", "pretraining"), "train")
SPLIT_WORDS |= dict.fromkeys(("valid", "val", "dev"), "validation")
GENERATED_SIZES = {"train": 10_000, "validation": 500, "test": 500}  # without a limit
ENOUGH_TO_HOLD_OUT = 50  # problems
FEW = 0.1  # of the answers are of another kind than the others


class Part(NamedTuple):
    """A file, or a split of the hub."""

    name: str
    place: str  # for messages
    records: Iterable[files.Record]


def group_by_split(parts: list[Part], splits: dict[str, str]) -> dict[str, list[Part]]:
    """Parts by the one split that their names say, by ``splits`` or by a word; those that say none are left out."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        for name in reversed(Path(part.name).parts):  # the file's own before its folders'
            words = [name] if name in splits else re.split("[^a-z]+", name.lower())
            said = {split for split in map((SPLIT_WORDS | splits).get, words) if split}
            if said:
                break
        if len(said) == 1:
            groups.setdefault(said.pop(), []).append(part)
    return groups


def local_parts(path: Path, skip: str = "") -> list[Part]:
    """A file; or the files of a folder by their place, hidden ones and those with ``skip`` in their path left out.

    Of a folder by `Dataset.save_to_disk` these are the tables, without caches of later operations.
    """
    if path.is_file() and files.file_format(path):
        return [Part(path.name, str(path), files.read_records(path))]
    tables = [file for file in path.rglob("*.arrow") if not file.name.startswith("cache-")]
    parts = []
    for file in sorted(tables or path.rglob("*")):
        place = file.relative_to(path)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if files.file_format(file) and not is_hidden and not (skip and skip in str(place)):
            parts.append(Part(str(place), str(file), files.read_records(file)))
    if not parts:
        raise ValueError(f"{path} holds no {', '.join(files.READERS)} file; check --data.path")
    return parts


def has_text_answers(path: Path, column: str) -> bool:
    """True if few of the first 1,000 gold answers of a local file or folder are numbers."""
    records = (record for part in local_parts(path) for record in part.records)
    texts = (files.column_text(record, column, is_optional=True) for record in records)
    golds = [parse_gold(text) for text in islice(filter(None, texts), 1000)]
    return golds.count(None) > (1 - FEW) * len(golds)


def holdout_share(path: Path, holdout: float | None) -> float | None:
    """Share of local problems that becomes test: unset a fifth of a single split of 50 or more; None without a test."""
    parts = local_parts(path)
    groups = group_by_split(parts, {})
    if holdout is None and groups.keys() <= {"train"}:
        records = (record for part in groups.get("train", parts) for record in part.records)
        if len(list(islice(records, ENOUGH_TO_HOLD_OUT))) == ENOUGH_TO_HOLD_OUT:
            return 0.2
    has_test = holdout or not groups or "test" in groups
    return holdout or 0.0 if has_test else None


def hub_parts(source: Source) -> list[Part]:
    """Splits of a data set of the hub, all its configurations together."""
    import datasets  # slow to import

    parts = []
    for config in source.configs:
        try:
            tables = datasets.load_dataset(source.hub_id, config, revision=source.revision)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            fix = "check --data.name and --data.hub, or load local files with --data.path"
            raise ValueError(f"cannot load {source.hub_id} from the hub: {error!r}; {fix}") from error
        for split, table in tables.items():
            place = " ".join(filter(None, (source.hub_id, config, split)))
            rows = files.table_records(table.with_format("arrow")[:])  # an image is bytes, no object of this process
            parts.append(Part(split, place, rows))
    return parts


def prompt_words(problem: Problem) -> str:
    """The prompt's words, without case and punctuation: by these two prompts are the same problem."""
    chat = problem.prompt
    text = chat if isinstance(chat, str) else " ".join(map(content_text, chat))
    return " ".join(re.findall(r"\w+", text.lower())) or text


def validation_prompts(problems: list[Problem], train_size: int | None) -> set[str]:
    """Words of the last prompts, of which validation is made: whole groups of the same until there are enough."""
    missing = max(1, min(500, len(problems) // 20))
    if train_size and len(problems) > train_size:
        missing = len(problems) - train_size
    copies = Counter(map(prompt_words, problems))
    prompts = set()
    while copies and missing > 0:
        prompt, count = copies.popitem()
        prompts.add(prompt)
        missing -= count
    return prompts


def read_problem(source: Source, name: str, kind: AnswerKind, record: files.Record) -> Problem:
    """A problem of a record, its gold answer still as text."""
    columns = source.prompt
    if columns == ("prompt",) and "prompt" not in record and "messages" in record:
        columns = ("messages",)
    gold = ""
    if kind != "none":
        gold = source.read_gold(files.column_text(record, source.answer), record, kind).strip()
    return Problem(
        prompt=files.read_prompt(record, columns),
        answer=gold,
        fields={column: files.plain(value) for column, value in record.items() if column not in columns},
        source=name,
        category=files.column_text(record, source.category, is_optional=True),
        level=files.column_text(record, source.level, is_optional=True),
        solution=files.column_text(record, source.solution, is_optional=True),
    )


def read_split(
    source: Source, name: str, kind: AnswerKind, split: str, path: Path | None, seed: int, holdout: float
) -> list[Problem]:
    """Read one split, gold answers still as text, of a single one its share by ``holdout``."""
    parts = hub_parts(source) if path is None else local_parts(path, source.skip)
    if path is None and source.splits:
        parts = [part for part in parts if part.name in source.splits]
    groups = group_by_split(parts, source.splits)
    if parts and not groups:
        groups = {"test": parts}
    divided = len(groups) == 1 and holdout > 0
    if divided:
        (parts,) = groups.values()
        groups = {"test": parts, "train": parts}
    published = "train" if split == "validation" and split not in groups else split
    if published not in groups:
        fix = f"name a file {split}.jsonl" if path else "name it in the splits of --data.hub"
        fix += ", or divide a single split with --data.holdout 0.2; --run.test_limit 0 trains without a test"
        raise ValueError(f"{path or source.hub_id} has no {split} split, only {' and '.join(sorted(groups))}; {fix}")

    drafts = []
    for part in groups[published]:
        for number, record in enumerate(part.records, 1):
            try:
                drafts.append(read_problem(source, name, kind, record))
            except ValueError as error:
                raise ValueError(f"{part.place} record {number}: {error}") from error
    if divided:
        digests = [hashlib.sha256(f"{seed} {prompt_words(draft)}".encode()).digest() for draft in drafts]
        is_test = [int.from_bytes(digest[:8]) < holdout * 2**64 for digest in digests]
        drafts = [draft for draft, is_held_out in zip(drafts, is_test, strict=True) if is_held_out == (split == "test")]
    if published == "train":
        random.Random(seed).shuffle(drafts)
        if "validation" not in groups:
            held_out = validation_prompts(drafts, source.train_size)
            drafts = [draft for draft in drafts if (prompt_words(draft) in held_out) == (split == "validation")]
    return drafts


def parse_answers(drafts: list[Problem], kind: AnswerKind, name: str, split: str, place: Path | str) -> list[Problem]:
    """Turn gold answers from text into the kind asked for; problems without one are left out, and counted in a line."""
    if kind == "none":
        return [replace(draft, answer=None) for draft in drafts]
    golds = [parse_gold(draft.answer) if kind == "number" else draft.answer or None for draft in drafts]
    pairs = zip(drafts, golds, strict=True)
    problems = [replace(draft, answer=gold) for draft, gold in pairs if gold is not None]
    what = "a numeric answer" if kind == "number" else "an answer"
    if not problems:
        fix = "check --data.columns and --data.answer_kind (number, text or none)"
        raise ValueError(f"{place}: none of {len(drafts):,} {split} problems has {what}; {fix}")
    if len(problems) < len(drafts):
        print(f"{name} {split}: {len(problems):,} of {len(drafts):,} problems have {what}")
    return problems


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

    Train, a validation split made of it, and both of a mixture are shuffled by the seed. Parameters are
    `pspo.config.DataConfig`'s. ``path`` of a mixture has one folder per source; ``limit`` draws of a test by the seed.
    """
    names = name.split("+")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    if name in GENERATED and path is not None:
        raise ValueError(f"{name} is generated and takes no path; for your own data set --data.name file")
    if (hub or {}).keys() - {"revision"} and all(part in NAMES for part in names):
        what = f"configuration and splits are of hub ids (organisation/name), and not of {name}"
        raise ValueError(f"--data.hub: {what}: leave them out")
    problems = []
    for part in names:
        kind = answer_kind or default_answer_kind(part)
        place: Path | str = part  # for messages
        if part in GENERATED:
            size = limit or GENERATED_SIZES[split]
            if len(names) > 1:  # whose limit is of the mixture
                size = max(size, GENERATED_SIZES[split])
            generated = islice(GENERATED[part](split, seed), size)
            drafts = [replace(problem, answer=str(problem.answer)) for problem in generated]
        else:
            source = find_source(part, columns or {}, hub or {})
            if path is None and part == "file":
                raise ValueError("--data.name file needs --data.path: a file or folder of yours")
            source_path = None if path is None else files.local_path(path)
            if source_path and (len(names) > 1 or (source_path / part).is_dir()):
                source_path = source_path / part
            place = source_path or source.hub_id
            drafts = read_split(source, part, kind, split, source_path, seed, holdout)
        if not drafts:
            raise ValueError(f"{place}: too few problems for a {split} split; add some, or change --data.holdout")
        parsed = parse_answers(drafts, kind, part, split, place)
        n_texts = sum(bool(draft.answer) for draft in drafts) - len(parsed)
        if answer_kind is None and part not in (*SOURCES, *GENERATED) and n_texts > FEW * len(parsed):
            counts = f"{len(parsed):,} answers are numbers and {n_texts:,} are not"
            raise ValueError(f"{place}: {counts}: --data.answer_kind number leaves these out, text takes all as texts")
        problems += parsed
    if len(names) > 1 and split != "test":
        random.Random(seed).shuffle(problems)
    if split == "test" and limit and limit < len(problems):
        sample = random.Random(seed).sample(range(len(problems)), limit)
        problems = [problems[i] for i in sorted(sample)]
    return problems[:limit]
