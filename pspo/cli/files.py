"""The files of a run: JSON lines, JSON and YAML, written whole or not at all."""

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any, ClassVar

import yaml

from pspo import __version__
from pspo.tasks.files import plain

Settings = dict[str, Any]  # a configuration as YAML has it: sections of plain values, and `DERIVED`
Changes = dict[str, tuple[Any, Any]]  # values (old, new) by switch

DERIVED = "derived"  # the switches that were left open, whose values follow from the others
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)  # which damaged content raises


def flat(config: Settings, whole: Collection[str] | None = None, prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by switch: {"run.seed": 0}; ``whole`` ones, by default mappings, stay."""
    from pspo.config import switches_with  # slow to import: torch

    whole = switches_with("mapping") if whole is None else whole
    values = {}
    for name, value in config.items():
        switch = f"{prefix}{name}"
        if isinstance(value, dict) and switch not in whole:
            values |= flat(value, whole, f"{switch}.")
        elif switch != DERIVED:
            values[switch] = value
    return values


def differences(old: Settings, new: Settings) -> Changes:
    """By switch, the values (old, new) that differ between two nested configurations."""
    old_values = flat(old)
    new_values = flat(new)
    pairs = {name: (old_values.get(name), new_values.get(name)) for name in old_values | new_values}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def require_same(folder: Path, settings: Settings, may_differ: Callable[[str, Any, Any], bool], fix: str) -> Changes:
    """The `differences` from the configuration in a folder; ValueError for those (switch, old, new) that may not be."""
    changes = differences(read_config(folder / "config.yaml"), settings)
    refused = []
    for name, (old, new) in changes.items():
        if not may_differ(name, old, new):
            refused.append(f"--{name.removesuffix('.class_path')} was {old!r}, is {new!r}")
    if refused:
        raise ValueError(f"--run.output_dir {folder} holds another experiment ({'; '.join(refused)}): {fix}")
    return changes


def argument_text(value: Any) -> str:
    """A switch's value as a command takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def to_jsonl(records: Iterable[dict[str, Any]]) -> str:
    """One line per record; NaN and infinities become null, because JSON has none, dates and the like text."""
    return "".join(json.dumps(plain(record), ensure_ascii=False, default=str) + "\n" for record in records)


def append_jsonl(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(to_jsonl(records))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, without a last line that was cut off by a kill; none if there is no file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_parse(path, line, json.loads) for line in lines]


def read_json(path: Path) -> dict[str, Any]:
    return _parse(path, path.read_bytes(), json.loads)


def read_config(path: Path) -> Settings:
    """A nested configuration as it was written into a run's folder."""
    return untyped(read_yaml(path))


def read_yaml(path: Path) -> Settings:
    """A YAML file as `load_yaml` has it."""
    return _parse(path, path.read_bytes(), lambda content: load_yaml(content.decode("utf-8-sig")))


@contextlib.contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Raise ValueError, naming the file, where its content is not of the form that was written."""
    try:
        yield
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _parse(path: Path, content: bytes, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """The object that (a line of) a file holds; raises ValueError if it is damaged."""
    with named_damage(path):
        parsed = parse(content)
        if not isinstance(parsed, dict):
            raise ValueError("not an object")
        return parsed


def is_run(folder: Path) -> bool:
    """True if a run has begun in the folder; an evaluation has a config.yaml, too, but nothing else of a run."""
    others = (".lock", "metrics.jsonl", "checkpoints/step-*/manifest.json")  # a copy of a run may lack the first
    return (folder / "config.yaml").exists() and any(any(folder.glob(name)) for name in others)


def check_new_folder(folder: Path) -> None:
    """Raise ValueError for a run's new folder that holds something else; ``data`` is written before the run begins."""
    if not is_run(folder) and any(path.name != "data" for path in folder.glob("[!.]*")):
        raise ValueError(f"--run.output_dir {folder} already holds something, but no run; choose a new folder")


def lock_folder(folder: Path, switch: str = "--run.output_dir") -> IO[Any]:
    """Lock a folder until the returned file is closed, in child processes too; ValueError if another process has it."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{switch} {folder} is in use by another process: wait, or choose another folder") from None
    return file


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(plain(record), indent=2, ensure_ascii=False) + "\n")


class Unquoted(str):
    """Text without quotes in YAML: a type says what it means, or without one `scalar`."""


class _Loader(yaml.SafeLoader):
    """Read null, lists, mappings and texts, which are `Unquoted` without quotes; refuse a key that stands twice."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # merges of mappings

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                raise yaml.YAMLError(f"{key.value} stands twice, the second time in line {key.start_mark.line + 1}")
        return {str(name): value for name, value in super().construct_mapping(node, deep).items()}

    def construct_text(self, node: yaml.ScalarNode) -> str | None:
        if node.style is not None:
            return node.value
        return None if scalar(node.value) is None else Unquoted(node.value)


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


def load_yaml(text: str) -> Any:
    """A YAML text as `_Loader` has it; raises YAMLError."""
    return yaml.load(text, _Loader)


CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False, ".nan": math.nan, ".inf": math.inf,
             "-.inf": -math.inf}  # fmt: skip


def scalar(text: str) -> Any:
    """Text without quotes by YAML's rules: null, a truth value, a number such as 1e-6, or else the text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if re.match(r"[-+.]*[0-9]", text):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return str(text)


def untyped(value: Any) -> Any:
    """A value of `load_yaml` where no type says what its texts mean."""
    if isinstance(value, dict):
        return {name: untyped(part) for name, part in value.items()}
    if isinstance(value, list):
        return [untyped(part) for part in value]
    return scalar(value) if isinstance(value, Unquoted) else value


class _Dumper(yaml.SafeDumper):
    """Write text that `scalar` would read as something else in quotes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if scalar(text) == text else "'")


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(config: Settings) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def environment(device: str, processes: int) -> dict[str, Any]:
    """Versions, commit and device behind a run's numbers."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
    return {
        "packages": {"pspo": __version__} | {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "commit": _commit(),
        "processes": processes,
    }


def _commit() -> str | None:
    """The source tree's commit, with "-dirty" if it was changed; None for an installed package, or without git."""
    source = Path(__file__).parents[2]
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    if not (source / ".git").exists() or shutil.which("git") is None:
        return None
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
