"""The files of a user's own classes and functions, as a run was started with them."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pspo.records.files import read_jsonl


def code_of(resolved: str) -> dict[str, str]:
    """SHA-256 of the file by module, of the imported modules, none of ours, that a configuration (YAML) names."""
    named = {text.rpartition(".")[0] for text in _texts(yaml.safe_load(resolved))}
    modules = {
        name: sys.modules[name] for name in sorted(named & sys.modules.keys()) if name.partition(".")[0] != "pspo"
    }
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


def changed_code(run: Path, resolved: str) -> list[str]:
    """The modules that have changed since the last start of a run."""
    started = (read_jsonl(run / "starts.jsonl") or [{}])[-1].get("code", {})
    return [name for name, digest in code_of(resolved).items() if started.get(name, digest) != digest]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(part)
