"""Folders that appear whole or not at all: written under another name, synced, then renamed.

A checkpoint is such a folder, ``checkpoints/step-000042``, with a manifest of every file's size and SHA-256.
"""

import contextlib
import hashlib
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.files import read_json, write_json
from pspo.errors import RunFailed
from pspo.model.load import write_model
from pspo.terminal import one_line

TORCH_WRITE_ERRORS = ("inline_container", "iostream")  # words of the RuntimeError of `torch.save` (2.13) on a full disk


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise RunFailed if a file or folder cannot be written (disk full), and remove what is half there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in TORCH_WRITE_ERRORS):
            raise
        remove_leftovers(path.parent, path.name)
        free = shutil.disk_usage(path.parent if path.parent.exists() else Path()).free / 2**30
        raise RunFailed(f"cannot write {path} ({free:.2f} GiB free): {error}") from error


def temporary_path(folder: Path, suffix: str) -> Path:
    """The name of a folder that is not whole yet (new) or to be replaced (old)."""
    return folder.with_name(f".{folder.name}.{suffix}")


def remove_leftovers(parent: Path, name: str = "*") -> None:
    """Finish or undo interrupted saves of a name, by default of all, in a folder."""
    for leftover in parent.glob(f".{name}.tmp"):  # of `write_text`
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
        temporary = temporary_path(folder, "new")
        replaced = temporary_path(folder, "old")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        rights = temporary.stat().st_mode & 0o666  # of the umask: safetensors are the owner's alone
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


def save_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, validation: Any = None
) -> None:
    """Save a model, with its validation if there is one, replacing ``folder`` at once; RunFailed if that fails."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, weights)
            if validation is not None:
                write_json(temporary / "validation.json", validation)
                write_manifest(temporary)

    dist.run_on_main(save)


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
    """Remove the checkpoints of steps after ``last``, and all but the newest ``keep`` of the others."""
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
    """Name the first file of a checkpoint that is not what was saved; None if all are."""
    try:
        files = read_json(folder / "manifest.json")
    except (OSError, ValueError) as error:
        return f"{folder} is damaged: manifest.json ({one_line(str(error))})"
    for name, saved in files.items():
        if not (folder / name).is_file() or describe_file(folder / name) != saved:
            return f"{folder} is damaged: {name} is not what was saved"
    return None


def first_undamaged(folders: list[Path]) -> Path | None:
    """The first undamaged checkpoint; damaged ones before it are named."""
    for folder in folders:
        damage = find_damage(folder)
        if damage is None:
            return folder
        print(f"{damage}; skipped", file=sys.stderr)
    return None
