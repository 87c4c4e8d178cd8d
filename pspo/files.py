"""The files of a run: JSON and JSON lines, folders, checkpoints and locks.

Files and folders appear whole or not at all: they are written under another name, synced (folders) and renamed. A
checkpoint is such a folder, ``checkpoints/step-000042``, with a manifest of every file's size and SHA-256.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from pspo import __version__
from pspo.errors import RunFailed
from pspo.tasks.files import plain
from pspo.terminal import one_line

# Errors that damaged content raises.
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, SafetensorError, TypeError, ValueError)
TORCH_WRITE_ERRORS = ("inline_container", "iostream")  # words of the RuntimeError of `torch.save` (2.13) on a full disk


def to_jsonl(records: Iterable[dict[str, Any]]) -> str:
    """One line per record. NaN and infinities, which JSON lacks, become null; dates and the like become text."""
    return "".join(json.dumps(plain(record), ensure_ascii=False, default=str) + "\n" for record in records)


def append_jsonl(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:  # half a surrogate pair: JSON's escape
        file.write(to_jsonl(records))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, without a last line cut off by a kill; [] if there is no file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [read_object(path, text=line) for line in lines]


def read_json(path: Path) -> dict[str, Any]:
    return read_object(path)


def read_object(path: Path, parse: Callable[[bytes], Any] = json.loads, text: bytes | None = None) -> dict[str, Any]:
    """The object in a JSON or YAML file, or in its line ``text``; ValueError if it is damaged."""
    with named_damage(path):
        parsed = parse(path.read_bytes() if text is None else text)
        if not isinstance(parsed, dict):
            raise ValueError("not an object")
        return parsed


@contextlib.contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Raise ValueError, which names the file, if the block finds its content malformed."""
    try:
        yield
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged: {error if isinstance(error, ValueError) else repr(error)}") from error


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(plain(record), indent=2, ensure_ascii=False) + "\n")


# --- folders


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise RunFailed if a file or folder cannot be written (disk full), and remove its incomplete parts."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_WRITE_ERRORS):
            raise
        remove_leftovers(path.parent, path.name)
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path()).free / 2**30
        raise RunFailed(f"cannot write {path} ({free:.2f} GiB free): {error}") from error


def remove_leftovers(parent: Path, name: str = "*") -> None:
    """Finish or undo interrupted saves of ``name`` (by default, of every name) in the folder ``parent``."""
    for leftover in parent.glob(f".{name}.tmp"):  # left by `write_text`
        leftover.unlink()
    for old in parent.glob(f".{name}.old"):
        if not (parent / old.name[1:-4]).exists():  # killed between the two renames
            old.rename(parent / old.name[1:-4])
    for leftover in (*parent.glob(f".{name}.new"), *parent.glob(f".{name}.old")):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` once everything in it is on the disk; rank 0 only."""
    with write_errors(folder):
        temporary = folder.with_name(f".{folder.name}.new")
        replaced = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        rights = temporary.stat().st_mode & 0o666  # the umask's: safetensors makes files that the owner alone can read
        for path in (*temporary.rglob("*"), temporary):
            if path.is_file():
                path.chmod(rights)
            fsync(path)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        fsync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def fsync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def lock_folder(folder: Path, switch: str = "--run.output_dir") -> IO[Any]:
    """Lock a folder, also in child processes, until the returned file is closed; ValueError if it is locked."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{switch} {folder} is in use by another process: wait, or choose another folder") from None
    return file


def is_run(folder: Path) -> bool:
    """True if a run has begun in the folder; an evaluation has a config.yaml, too, but no other file of a run."""
    others = (".lock", "metrics.jsonl", "checkpoints/step-*/manifest.json")  # a copied run may lack .lock
    return (folder / "config.yaml").exists() and any(any(folder.glob(name)) for name in others)


def check_new_folder(folder: Path) -> None:
    """Raise ValueError if a new run's folder holds anything but ``data``, which is written before the run begins."""
    if not is_run(folder) and any(path.name != "data" for path in folder.glob("[!.]*")):
        raise ValueError(f"--run.output_dir {folder} already holds something, but no run; choose a new folder")


# --- checkpoints


def numbered(folder: Path, suffix: str = "") -> list[Path]:
    """Paths named like ``step-000042`` in a folder, newest first."""
    paths = [path for path in folder.glob(f"step-*{suffix}") if path.name[5:].removesuffix(suffix).isdecimal()]
    return sorted(paths, key=step_of, reverse=True)


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    return numbered(run / "checkpoints")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def prune(run: Path, keep: int, last: float = math.inf) -> None:
    """Remove the checkpoints after step ``last``, and of the others all but the newest ``keep``."""
    saved = checkpoints(run)
    later = [folder for folder in saved if step_of(folder) > last]
    for folder in later + saved[len(later) + keep :]:
        shutil.rmtree(folder, ignore_errors=True)


def write_manifest(folder: Path) -> None:
    """Write the size and SHA-256 of every file in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(folder / "manifest.json", {str(path.relative_to(folder)): describe_file(path) for path in paths})


def describe_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(folder: Path) -> str | None:
    """A message on the first file of a checkpoint that is not what was saved; None if all files are."""
    try:
        files = read_json(folder / "manifest.json")
    except (OSError, ValueError) as error:
        return f"{folder} is damaged: manifest.json ({one_line(str(error))})"
    for name, saved in files.items():
        if not (folder / name).is_file() or describe_file(folder / name) != saved:
            return f"{folder} is damaged: {name} is not what was saved"
    return None


def first_undamaged(folders: list[Path]) -> Path | None:
    """The first undamaged checkpoint, None if there is none; prints damage of those before."""
    for folder in folders:
        damage = find_damage(folder)
        if damage is None:
            return folder
        print(f"{damage}; skipped", file=sys.stderr)
    return None


def environment(device: str, processes: int) -> dict[str, Any]:
    """Versions, commit and device behind a run's numbers."""
    packages = ("torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy")
    return {
        "packages": {"pspo": __version__} | {name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "commit": source_commit(),
        "processes": processes,
    }


def source_commit() -> str | None:
    """The source tree's commit, with "-dirty" if it was changed; None for an installed package, or without git."""
    source = Path(__file__).parents[1]
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    if not (source / ".git").exists() or shutil.which("git") is None:
        return None
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
