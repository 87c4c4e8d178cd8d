"""Settings: a configuration as YAML has it, its switches, and how two of them differ."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from pspo.cli.values import load_yaml, read, scalar
from pspo.files import named_damage

Settings = dict[str, Any]  # sections of plain values, and `DERIVED`
Changes = dict[str, tuple[Any, Any]]  # values (old, new) by switch

DERIVED = "derived"  # the switches that were left open, whose values follow from the others


def read_yaml(path: Path) -> Settings:
    """A YAML file, with `Typed` texts; ValueError if it is damaged."""
    with named_damage(path):
        settings = load_yaml(path.read_bytes().decode("utf-8-sig"))
        if not isinstance(settings, dict):
            raise ValueError("not an object")
        return settings


def read_config(path: Path) -> Settings:
    """A nested configuration as it was written into a run's folder."""
    return read(dict, read_yaml(path), "")


class _Dumper(yaml.SafeDumper):
    """Write text that `scalar` would read as something else in quotes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if scalar(text) == text else "'")


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(config: Settings) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
