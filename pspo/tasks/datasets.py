"""Load problems: from the Hugging Face hub, from local files, or generated.

The one word of `SPLIT_WORDS` in the name of a file or hub split, or of the nearest folder with such a word, decides its
split. If no name has such a word, all is test; otherwise files without one are ignored: nothing is trained on by
accident. Without a validation split, part of train is held out: all but 7,000 of GSM8K, else 5%, at most 500; prompts
of the same words stay together.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pspo.tasks import files
from pspo.tasks.answers import boxed, parse_gold
from pspo.tasks.arithmetic import draw_letters, draw_story, draw_sum, generate
from pspo.tasks.problem import AnswerKind, Problem, content_text

SPLITS = ("train", "validation", "test")
SPLIT_WORDS = {"testing": "test"} | {word: word for word in SPLITS}
SPLIT_WORDS |= dict.fromkeys(("training", "pretrain", "pretraining"), "train")
SPLIT_WORDS |= dict.fromkeys(("valid", "val", "dev"), "validation")
GENERATED_SIZES = {"train": 10_000, "validation": 500, "test": 500}  # without a limit
ENOUGH_TO_HOLD_OUT = 50  # problems
FEW = 0.1  # share of answers that may be of another kind than the rest


@dataclass(frozen=True)
class DataSpec:
    """Which problems to load: `pspo.config.DataConfig` without the switches."""

    name: str  # the sources' names, joined by +
    path: str | Path | None = None  # local file or folder; a mixture's has one folder per source
    hub: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    seed: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    answer_kind: AnswerKind | None = None
    holdout: float | None = None


@dataclass(frozen=True)
class Source:
    """A data set: how one of its records is read, and where the hub has the set; or a generator of problems."""

    name: str
    prompt: tuple[str, ...] = ()  # columns
    answer: str = ""  # column
    hub_id: str = ""
    revision: str | None = None  # commit on the hub, so that everybody has the same problems
    configs: tuple[str | None, ...] = ()
    splits: dict[str, str] = field(default_factory=dict)  # our names of splits by the hub's; if empty, words decide
    train_size: int | None = None  # rows of the published train split to train on; the rest is validation
    skip: str = ""  # local files with this in their path hold the same problems in another form
    category: str = "category"  # this column and the next two become attributes of `Problem`
    level: str = "level"
    solution: str = ""
    read_gold: Callable[[str, files.Record, AnswerKind], str] = lambda text, record, kind: text  # of the answer's text
    answer_kind: AnswerKind = "number"  # unless --data.answer_kind says another
    generate: Callable[[str, int], Iterator[Problem]] | None = None  # endless problems of a split, by a seed


def _math_gold(solution: str, record: files.Record, kind: AnswerKind) -> str:
    boxes = boxed(solution) or [""]
    if kind == "number":
        several = len({parse_gold(box) for box in boxes} - {None}) > 1  # "-2 and 1" is no number;
        listed = "separated by commas" in str(record.get("problem")) and "," in boxes[-1]  # here 70,110 is two
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


def find_sources(data: DataSpec) -> list[Source]:
    """The sources that --data.name joins by +; ValueError for unknown sources and settings that they cannot use."""
    names = data.name.split("+")
    if data.hub.keys() - {"revision"} and all(part in NAMES for part in names):
        raise ValueError(f"--data.hub: only hub ids (owner/name) have configurations and splits, not {data.name}")
    if any(name != column for name, column in data.columns.items()) and all(part in SOURCES for part in names):
        raise ValueError(f"--data.columns: only files of yours and hub ids have columns to choose, not {data.name}")
    if "file" in names and data.path is None:
        raise ValueError("--data.name file needs --data.path: a file or folder of yours")
    columns = {"prompt": "prompt", "answer": "answer"} | data.columns
    splits = {theirs: ours for ours, theirs in data.hub.get("splits", {}).items()}
    own = Source("", (columns["prompt"],), columns["answer"], configs=(data.hub.get("config"),), splits=splits)
    sources = []
    for part in names:
        if part in SOURCES:
            source = SOURCES[part]
        elif part == "file" or ("/" in part and not Path(part).exists()):
            source = replace(own, name=part, hub_id=part)
        else:
            known = f"{', '.join(NAMES)}, a hub id (organisation/name), or several joined by +"
            raise ValueError(f"--data.name {part!r} is not {known}; --data.path is for a file or folder of yours")
        revision = data.hub.get("revision", source.revision)
        sources.append(replace(source, revision=revision, answer_kind=data.answer_kind or source.answer_kind))
    if data.path is not None and all(source.generate is not None for source in sources):
        raise ValueError(f"{data.name} is generated and takes no path; for your own data set --data.name file")
    return sources


class Part(NamedTuple):
    """A file, or a split of the hub."""

    name: str
    place: str  # for messages
    records: Iterable[files.Record]


def group_by_split(parts: list[Part], splits: dict[str, str]) -> dict[str, list[Part]]:
    """Parts by the one split that their names give, by ``splits`` or a word; others are left out."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        said = set()
        for name in reversed(Path(part.name).parts):  # the file's name before its folders'
            words = [name] if name in splits else re.split("[^a-z]+", name.lower())
            said = {split for split in map((SPLIT_WORDS | splits).get, words) if split}
            if said:
                break
        if len(said) == 1:
            groups.setdefault(said.pop(), []).append(part)
    return groups


def table_parts(tables: dict[str, Any], place: str) -> list[Part]:
    """Turn tables of `datasets`, by split, into parts; an image stays bytes."""
    rows = {split: files.table_records(table.with_format("arrow")[:]) for split, table in tables.items()}
    return [Part(split, f"{place} {split}", records) for split, records in rows.items()]


def local_parts(path: Path, skip: str = "") -> list[Part]:
    """Parts of a path: a file, what `save_to_disk` wrote, or a folder's files, but no hidden and no ``skip`` files."""
    if path.is_file() and files.file_format(path):
        return [Part(path.name, str(path), files.read_records(path))]
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        import datasets  # slow to import

        tables = datasets.load_from_disk(path)
        return table_parts(tables if isinstance(tables, dict) else {path.name: tables}, str(path))
    parts = []
    for file in sorted(path.rglob("*")):
        place = file.relative_to(path)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if files.file_format(file) and not is_hidden and not (skip and skip in str(place)):
            parts.append(Part(str(place), str(file), files.read_records(file)))
    if not parts:
        raise ValueError(f"{path} holds no {', '.join(files.READERS)} file; check --data.path")
    return parts


def holdout_share(path: Path, holdout: float | None) -> float | None:
    """Share of local problems that becomes test; unset, a fifth of a single split of 50 or more; None if no test."""
    parts = local_parts(path)
    groups = group_by_split(parts, {})
    if holdout is None and groups.keys() <= {"train"}:
        records = (record for part in groups.get("train", parts) for record in part.records)
        if len(list(islice(records, ENOUGH_TO_HOLD_OUT))) == ENOUGH_TO_HOLD_OUT:
            return 0.2
    has_test = holdout or not groups or "test" in groups
    return holdout or 0.0 if has_test else None


def hub_parts(source: Source) -> list[Part]:
    """The splits of a hub data set in all its configurations; only those that the source names, if it names any."""
    import datasets  # slow to import

    parts = []
    for config in source.configs:
        try:
            tables = datasets.load_dataset(source.hub_id, config, revision=source.revision)
            named = {split: tables[split] for split in source.splits or tables}
        except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            fix = "check --data.name and --data.hub, or set --data.path"
            raise ValueError(f"cannot load {source.hub_id} from the hub: {error!r}; {fix}") from error
        parts += table_parts(named, f"{source.hub_id} {config}" if config else source.hub_id)
    return parts


def prompt_words(problem: Problem) -> str:
    """The prompt's words, without case and punctuation: two prompts of equal words are the same problem."""
    chat = problem.prompt
    text = chat if isinstance(chat, str) else " ".join(map(content_text, chat))
    return " ".join(re.findall(r"\w+", text.lower())) or text


def validation_prompts(problems: list[Problem], train_size: int | None) -> set[str]:
    """Words of the last prompts, which become validation: all problems of equal words together, until these suffice."""
    missing = max(1, min(500, len(problems) // 20))
    if train_size and len(problems) > train_size:
        missing = len(problems) - train_size
    copies = Counter(map(prompt_words, problems))
    prompts = set()
    while len(copies) > 1 and missing > 0:
        prompt, count = copies.popitem()
        prompts.add(prompt)
        missing -= count
    return prompts


def make_problem(source: Source, record: files.Record) -> Problem:
    """Turn a record into a problem whose gold answer is still text."""
    columns = source.prompt
    if columns == ("prompt",) and "prompt" not in record and "messages" in record:
        columns = ("messages",)
    gold = files.column_text(record, source.answer, is_optional=source.answer_kind == "none")
    return Problem(
        prompt=files.read_prompt(record, columns),
        answer=source.read_gold(gold, record, source.answer_kind).strip(),
        fields={column: files.plain(value) for column, value in record.items() if column not in columns},
        source=source.name,
        category=files.column_text(record, source.category, is_optional=True),
        level=files.column_text(record, source.level, is_optional=True),
        solution=files.column_text(record, source.solution, is_optional=True),
    )


def is_held_out(problem: Problem, data: DataSpec) -> bool:
    """True for about a share ``data.holdout`` of problems, by their words' hash: a larger share only adds problems."""
    digest = hashlib.sha256(f"{data.seed} {prompt_words(problem)}".encode()).digest()
    return int.from_bytes(digest[:8]) < data.holdout * 2**64


def read_split(data: DataSpec, source: Source, split: str, path: Path | None) -> list[Problem]:
    """Read a source's split, gold answers still as text; ``data.holdout`` cuts a single split into train and test."""
    place = path or source.hub_id
    parts = local_parts(path, source.skip) if path else hub_parts(source)
    groups = group_by_split(parts, source.splits) or {"test": parts}
    is_divided = len(groups) == 1 and bool(data.holdout)
    if is_divided:
        (parts,) = groups.values()
        groups = {"test": parts, "train": parts}
    is_cut = "validation" not in groups  # then it is cut from train
    published = "train" if split == "validation" and is_cut else split
    if published not in groups:
        fix = f"name a file {split}.jsonl" if path else "name it in the splits of --data.hub"
        fix += ", or divide a single split with --data.holdout 0.2"
        fix += "; --run.test_limit 0 trains without a test" if split == "test" else ""
        raise ValueError(f"{place} has no {split} split, only {' and '.join(sorted(groups))}; {fix}")

    problems = []
    for part in groups[published]:
        for number, record in enumerate(part.records, 1):
            try:
                problems.append(make_problem(source, record))
            except ValueError as error:
                raise ValueError(f"{part.place} record {number}: {error}") from error
    if is_divided:
        problems = [problem for problem in problems if is_held_out(problem, data) == (split == "test")]
    if split != "test":
        random.Random(data.seed).shuffle(problems)
    if published == "train" and is_cut:
        held_out = validation_prompts(problems, source.train_size)
        problems = [each for each in problems if (prompt_words(each) in held_out) == (split == "validation")]
    if not problems:
        raise ValueError(f"{place}: too few prompts for a {split} split; change --data.holdout or --run.validate_every")
    return problems


def parse_answers(problems: Sequence[Problem], kind: AnswerKind, is_assumed: bool, place: str) -> list[Problem]:
    """Turn gold answers from text into the kind, and drop problems without one; ValueError if those are too many."""
    if kind == "none":
        return [replace(problem, answer=None) for problem in problems]
    texts = [str(problem.answer) for problem in problems]
    golds = [parse_gold(text) if kind == "number" else text or None for text in texts]
    parsed = [replace(problem, answer=gold) for problem, gold in zip(problems, golds, strict=True) if gold is not None]
    what = "a numeric answer" if kind == "number" else "an answer"
    if not parsed:
        fix = "give --data.answer_kind text for texts, none for no answers, or their column by --data.columns"
        raise ValueError(f"{place}: none of {len(problems):,} problems has {what}: {fix}")
    n_texts = sum(map(bool, texts)) - len(parsed)
    if is_assumed and n_texts > FEW * len(parsed):
        counts = f"{len(parsed):,} answers are numbers and {n_texts:,} are not"
        raise ValueError(f"{place}: {counts}: --data.answer_kind text takes all as texts, number leaves texts out")
    if len(parsed) < len(problems):
        print(f"{place}: {len(parsed):,} of {len(problems):,} problems have {what}")
    return parsed


def read_problems(data: DataSpec, split: str) -> list[Problem]:
    """Load the problems of one split that have an answer of the kind asked for; print how many were left out, if any.

    All problems have the same fields, None where one is missing. The seed shuffles train and validation, and draws the
    test's problems under a limit.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; choose from {', '.join(SPLITS)}")
    sources = find_sources(data)
    problems = []
    for source in sources:
        folder = None if data.path is None else Path(data.path).expanduser()
        if folder and (len(sources) > 1 or (folder / source.name).is_dir()):
            folder = folder / source.name
        if source.generate is None:
            drafts = read_split(data, source, split, folder)
        else:
            size = data.limit or GENERATED_SIZES[split]
            if len(sources) > 1:  # the limit is the mixture's
                size = max(size, GENERATED_SIZES[split])
            drafts = [*islice(source.generate(split, data.seed), size)]
        is_assumed = data.answer_kind is None and source.name not in SOURCES
        place = f"{folder or source.hub_id or source.name} {split}"
        problems += parse_answers(drafts, source.answer_kind, is_assumed, place)
    if len(sources) > 1 and split != "test":
        random.Random(data.seed).shuffle(problems)
    if split == "test" and data.limit and data.limit < len(problems):
        sample = random.Random(data.seed).sample(range(len(problems)), data.limit)
        problems = [problems[i] for i in sorted(sample)]
    problems = problems[: data.limit]
    names = dict.fromkeys(name for problem in problems for name in problem.fields)
    return [replace(each, fields=each.fields | {name: each.fields.get(name) for name in names}) for each in problems]


def load_problems(name: str, split: str, path: str | Path | None = None, **options: Any) -> list[Problem]:
    """Load a split's problems; ``options`` are `DataSpec`'s limit, seed, columns, answer_kind, holdout and hub."""
    return read_problems(DataSpec(name, path, **options), split)
