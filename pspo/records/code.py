"""The files of a user's own classes and functions, as a run was started with them."""

import hashlib
import re
import sys
from pathlib import Path

from pspo.records.files import Settings, read_jsonl, to_yaml


def code_of(settings: Settings) -> dict[str, str]:
    """SHA-256 of the file of each imported module, ours excluded, whose members a configuration names."""
    modules = re.findall(r"[:-] ([\w.]+)\.\w+$", to_yaml(settings), re.MULTILINE)
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(set(modules))}
    own = {name: file for name, file in files.items() if file and name.partition(".")[0] != "pspo"}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in own.items()}


def changed_code(run: Path, settings: Settings) -> list[str]:
    """The modules that have changed since the last start of a run."""
    started = (read_jsonl(run / "starts.jsonl") or [{}])[-1].get("code", {})
    return [name for name, digest in code_of(settings).items() if started.get(name, digest) != digest]
