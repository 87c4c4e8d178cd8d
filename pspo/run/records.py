"""Intervals, timings, and the files that a run writes."""

import contextlib
import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import yaml


def wilson(successes: float, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95% by default (Wilson 1927); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def cluster_bootstrap(values: np.ndarray, resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean of values (n,), one per cluster, resampling the clusters."""
    rng = np.random.default_rng(seed)
    blocks = [min(100, resamples - start) for start in range(0, resamples, 100)]  # all at once would take gigabytes
    means = np.concatenate([values[rng.integers(len(values), size=(b, len(values)))].mean(axis=1) for b in blocks])
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


class Stopwatch:
    """Seconds by phase, for one line of metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held so far: of the GPU's tensors, or of the whole process where there is no GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration as YAML has it, by switch."""
    values = {}
    for name, value in config.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By switch, the values (old, new) that differ between two nested configurations.

    Switches that ``old`` does not know are left out: a later version added them, with a default that changes nothing.
    """
    values = flat(new)
    return {name: (value, values.get(name)) for name, value in flat(old).items() if value != values.get(name)}


def to_jsonl(records: Iterable[dict[str, Any]]) -> str:
    """One line a record; what is not finite becomes null, for JSON knows no NaN."""
    records = (
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        for record in records
    )
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def append_jsonl(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(to_jsonl(records))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file that `append_jsonl` wrote, none if there is no file.

    A last line that was cut short, as by a kill, is cut off the file. Raises ValueError for other damage.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]  # of bytes: splits at ASCII line ends only
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to start again") from error


def read_json(path: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """The record of a file that `write_json` wrote; raises ValueError where it is damaged or lacks one of the names."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another folder") from error
    if not isinstance(record, dict) or not set(names) <= record.keys():
        raise ValueError(f"{path} is damaged (no {', '.join(names) or 'record'}); choose another folder")
    return record


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that a run or an evaluation wrote; raises ValueError where it is damaged."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); choose another folder") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged (no sections); choose another folder")
    return config


def lock(file: IO[Any]) -> bool:
    """Lock an open file, until it and the copies that processes inherited are closed; False where another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_output(folder: Path) -> None:
    """Raise ValueError where the folder could not be made, before anything expensive happens."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        what = "cannot be written to" if existing.is_dir() else "is a file"
        raise ValueError(f"--run.output_dir {folder} cannot be made: {existing} {what}; choose another folder")


def write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: readers never see half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def environment(device: str, processes: int) -> dict[str, Any]:
    """Versions, commit and device: what it takes to say where a number came from."""
    packages = ("pspo", "torch", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "jsonargparse")
    return {
        "packages": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "commit": _commit(),
        "processes": processes,
    }


def _commit() -> str | None:
    """The commit of the source tree that this file is tracked in, "-dirty" appended where it was changed."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        described = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # installed from a package, or no git here


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # pspo itself, run from its source tree
