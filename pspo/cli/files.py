"""The files of a run: JSON lines, JSON and YAML, written whole or not at all."""

import contextlib
import fcntl
import hashlib
import inspect
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from pspo import __version__

Settings = dict[str, Any]  # a configuration as YAML has it: sections of plain values

DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)  # which damaged content raises
MAPPINGS = {"data.chat_template", "data.columns", "data.hub", "optimizer.options"}  # switches whose value is a mapping


def flat(config: Settings, prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by switch: {"run.seed": 0}."""
    values = {}
    for name, value in config.items():
        nested = isinstance(value, dict) and f"{prefix}{name}" not in MAPPINGS
        values |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return values


def differences(old: Settings, new: Settings) -> dict[str, tuple[Any, Any]]:
    """By switch, the values (old, new) that differ between two nested configurations.

    Switches that ``old`` does not know are left out: a later version added them, with a default that changes nothing.
    """
    old, new = flat(old), flat(new)
    pairs = {name: (value, new.get(name)) for name, value in old.items()}
    # a run's own number is what `auto` stands for; NaN != NaN
    return {name: (a, b) for name, (a, b) in pairs.items() if a != b != "auto" and repr(a) != repr(b)}


def as_setting(value: Any) -> str | dict[str, Any]:
    """A function, or a surrogate or reward, as configurations name it: its import path, and its arguments.

    The path is the shorter one of a room that offers the name, as the commands write it: pspo.losses.Clip.
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    room, name = named.__module__.rpartition(".")[0], named.__qualname__
    offered = getattr(sys.modules.get(room), name, None) is named
    path = f"{room if offered else named.__module__}.{name}"
    arguments = {} if named is value else kept_arguments(value)
    return {"class_path": path, "init_args": arguments} if arguments else path


def kept_arguments(value: Any) -> dict[str, Any]:
    """The arguments that an object was made with, as far as it keeps them under their names, as dataclasses do."""
    if is_dataclass(value):
        return asdict(value)
    return {name: getattr(value, name) for name in inspect.signature(type(value)).parameters if hasattr(value, name)}


def as_argument(value: Any) -> str:
    """A switch's value as a command takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def to_jsonl(records: Iterable[dict[str, Any]]) -> str:
    """One line per record; NaN and infinities become null, because JSON has none, dates and the like text."""
    records = (
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        for record in records
    )
    return "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)


def append_jsonl(path: Path, *records: dict[str, Any]) -> None:
    append_text(path, to_jsonl(records))


def append_text(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, without a last line that was cut off by a kill; none if there is no file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_parse(path, line, json.loads) for line in lines]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of `read_jsonl`; ValueError if one has no step."""
    records = read_jsonl(path)
    if not all(type(record.get("step")) is int and 0 <= record["step"] < 2**63 for record in records):
        raise ValueError(f"{path} is damaged (a record without a step); choose another folder")
    return records


def describe_changes(run: Path, besides: Collection[str] = ()) -> str:
    """The changes of a run on its way, from its ``changes.jsonl``; "" if there were none besides these switches."""
    return ", ".join(
        ("forked" if change["switch"] == "run.fork_from" else "{switch} {old} -> {new}".format_map(change))
        + f" at step {change['step']}"
        for change in read_jsonl(run / "changes.jsonl")
        if change["switch"] not in besides
    )


def read_json(path: Path) -> dict[str, Any]:
    return _parse(path, path.read_bytes(), json.loads)


def read_config(path: Path) -> Settings:
    """The nested configuration in a YAML file."""
    return _parse(path, path.read_bytes(), yaml.safe_load)


def _parse(path: Path, content: bytes, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """The object that (a line of) a file holds; raises ValueError if it is damaged."""
    try:
        parsed = parse(content)
    except (ValueError, yaml.YAMLError, *DAMAGE) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another folder") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} is damaged (not an object); choose another folder")
    return parsed


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ValueError, naming the file, for what its content raises where it is not what a run writes."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); choose another folder") from error


def lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed, in child processes too; False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


class _Dumper(yaml.SafeDumper):
    """Quote text that jsonargparse would read as a number, such as 1e3."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_.]+[eE][-+]?\d+$"), list("-+.0123456789")
)


_Dumper.add_multi_representer(float, yaml.SafeDumper.represent_float)  # of a subclass, too


def to_yaml(config: Settings) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def environment(device: str, processes: int) -> dict[str, Any]:
    """Versions, commit and device behind a run's numbers."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "jsonargparse")
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
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        described = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def code_of(settings: Settings) -> dict[str, str]:
    """SHA-256 of the file of each imported module, ours excluded, whose members a configuration names."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in own_modules(settings)}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


def own_modules(settings: Settings) -> list[str]:
    """Modules, ours excluded, whose members a configuration names, if what has a dot in it is an import path."""
    modules = set(re.findall(r"[:-] ([A-Za-z_][\w.]*)\.\w+$", to_yaml(settings), re.MULTILINE))
    return sorted(name for name in modules if name.partition(".")[0] != "pspo")


def changed_code(run: Path, settings: Settings) -> list[str]:
    """The modules that have changed since the last start of a run."""
    started = (read_jsonl(run / "starts.jsonl") or [{}])[-1].get("code", {})
    return [name for name, digest in code_of(settings).items() if started.get(name, digest) != digest]
