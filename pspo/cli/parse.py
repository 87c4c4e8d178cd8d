"""Turn a command's switches and YAML files into a configuration, and a user's error into one line on stderr.

Every field of a configuration class is a switch (``--rollout.temperature 0.6``); YAML files (``--config file.yaml``)
hold the same fields by section. A later switch or file overrides an earlier one: `put_words` and `put_all` collect the
values by switch, and `build` reads each value by its switch's type with `pspo.cli.values`.
"""

import difflib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pspo.cli.values import Typed, as_list, load_yaml, read, read_typed, to_yaml, yaml_value
from pspo.config import TrainConfig, find_switches, switches_with
from pspo.endings import user_errors
from pspo.files import read_object
from pspo.model.find import find_default_lr
from pspo.tasks.datasets import holdout_share

C = TypeVar("C")
Settings = dict[str, Any]  # a configuration as YAML has it: sections of plain values, and `DERIVED`
Changes = dict[str, tuple[Any, Any]]  # values (old, new) by switch
DERIVED = "derived"  # names the switches left open, whose values follow from other switches
METHODS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """Return the configuration, and its settings as YAML has them; a user's error is one line and exit code 2."""
    with user_errors(prog):
        return make_config(config_class, prog, sys.argv[1:] if args is None else args, {})


def make_config(config_class: type[C], prog: str, words: Sequence[str], given: Settings) -> tuple[C, Settings]:
    """Like `parse`, with ``given`` settings over the words; ValueError for errors. --help and --print_config exit."""
    switches = find_switches(config_class)
    pairs = split_words(["--help", *words[1:]] if list(words[:1]) == ["-h"] else words)
    flags = dict(pairs)
    if "help" in flags:
        print_help(config_class, prog, flags["help"] or "")
        raise SystemExit(0)
    values: dict[str, Any] = {}
    put_words(values, [pair for pair in pairs if pair[0] != "print_config"], switches)
    put_all(values, given, switches)
    for name in values:
        if name not in switches:
            meant = [switch for switch in switches if f".{name}." in f".{switch}."]
            meant += difflib.get_close_matches(name, switches)
            raise ValueError(f"unrecognized arguments: --{name}" + (f"; did you mean --{meant[0]}?" if meant else ""))
    config = build(config_class, values)
    unresolved = yaml_value(config)  # with null where a default depends on other switches
    if "print_config" in flags:
        print(to_yaml(unresolved), end="")
        raise SystemExit(0)
    config = resolve(config)
    settings = yaml_value(config)
    if isinstance(config, TrainConfig):
        settings["algorithm"]["correction"] = yaml_value(config.correction)
    changes = differences(unresolved, settings)
    return config, settings | {DERIVED: sorted(switch for switch, (old, _) in changes.items() if old is None)}


def resolve(config: C) -> C:
    """Fill in what files decide: the model's learning rate, and the share held out for a test."""
    if isinstance(config, TrainConfig) and config.optimizer.lr is None:
        config = replace(config, optimizer=replace(config.optimizer, lr=find_default_lr(config.model)))
    data = getattr(config, "data", None)
    if data is None:
        return config
    run = config.run
    path = Path(data.path or "")
    if data.path and path.exists():
        data = replace(data, path=os.path.abspath(path))  # the same data from any folder
        if data.name == "file" and getattr(run, "test_limit", 0):
            data = replace(data, holdout=holdout_share(path, data.holdout))
            if data.holdout is None:  # nothing to test on
                run = replace(run, test_limit=0)
    return replace(config, data=replace(data, holdout=data.holdout or 0.0), run=run)


def default_of(part: Field) -> Any:
    """A switch's default, as YAML has it; None if the switch must be given."""
    default = part.default if part.default_factory is MISSING else part.default_factory()
    return None if default is MISSING else yaml_value(default)


def build(config_class: type[C], values: dict[str, Any], prefix: str = "") -> C:
    """Build the configuration from values by switch; ValueError names a switch whose value is unfit or missing."""
    parts = {}
    for part in fields(config_class):
        switch = f"{prefix}{part.name}"
        if is_dataclass(part.type):
            parts[part.name] = build(part.type, values, f"{switch}.")
        elif switch in values:
            parts[part.name] = read(part.type, values[switch], switch)
        elif part.default is part.default_factory is MISSING:
            raise ValueError(f"--{switch} must be given")
    return config_class(**parts)


def split_words(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """A command's switches without dashes, each with its value or None."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.removesuffix(".class_path").replace(".init_args.", ".")  # config.yaml's names for a class
            pairs.append((name, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    return pairs


def put_words(values: dict[str, Any], pairs: Sequence[tuple[str, str | None]], switches: dict[str, Field]) -> None:
    """Override ``values`` by a command's switches and files, in order."""
    for i, (name, text) in enumerate(pairs):
        owner = next((owner for owner in switches if f"{name}.".startswith(f"{owner}.")), None)
        if text is None and (name == "config" or (owner and (owner != name or switches[name].type is not bool))):
            raise ValueError(f"--{name} needs a value; one that begins with -- is given as --{name}=VALUE")
        if owner and any(earlier.startswith(f"{name}.") for earlier, _ in pairs[:i]):
            raise ValueError(f"--{name} must stand before its arguments")
        if name == "config":
            own = Path(text).expanduser()
            put_all(values, read_object(own if own.is_file() else METHODS.get(text.lower(), own), load_yaml), switches)
        elif owner in (name, None):  # an unknown switch is refused by `make_config`
            values[name] = Typed("true" if text is None else text)
        else:
            old = values[owner] if owner in values else default_of(switches[owner])
            old = read_typed(switches[owner].type, old, owner) if isinstance(old, Typed) else old
            names = name.removeprefix(f"{owner}.").split(".")
            is_mapping = owner in switches_with("mapping")
            if is_mapping and isinstance(old, str):
                raise ValueError(f"--{owner} is {old}, which takes no --{name}: give one of the two")
            values[owner] = with_item(old, names if is_mapping else ["init_args", *names], Typed(text))


def put_all(values: dict[str, Any], given: Settings, switches: dict[str, Field]) -> None:
    """Override ``values`` by a nested configuration; switches in its `DERIVED` are left open."""
    values.update(flat(given, switches))
    values.update({str(switch): None for switch in as_list(given.get(DERIVED))})


def with_item(old: Any, names: Sequence[str], text: Typed) -> Any:
    """Put a text into a value under nested names, in a list's last item; a class given by name gets arguments."""
    if not names:
        return text
    if isinstance(old, list) and old:
        return [*old[:-1], with_item(old[-1], names, text)]
    first, *others = names
    if not isinstance(old, dict):
        old = {"class_path": old} if first == "init_args" and isinstance(old, str) else {}
    return old | {first: with_item(old.get(first), others, text)}


def print_help(config_class: type, prog: str, topic: str) -> None:
    """Print the basic switches (all, if none is basic), or those of a section, or with topic "all" every switch."""
    methods = f" or {', '.join(METHODS)}" if config_class is TrainConfig else ""
    print(f"usage: {prog} [--config FILE{methods}] [--SWITCH VALUE ...] [--print_config] [--help all or a section]")
    print(f"\n{config_class.__doc__}\n")
    switches = find_switches(config_class)
    basic = [switch for switch, part in switches.items() if "basic" in part.metadata["facts"]]
    for switch in basic if basic and not topic else switches:
        if topic == "all" or switch.startswith(topic):
            text = switches[switch].metadata["text"]
            default = argument_text(default_of(switches[switch]))
            if default != "null" and len(default) < 40:
                text += f" (default: {default})"
            print(textwrap.fill(text, 110, initial_indent=f"  --{switch:<30} ", subsequent_indent=" " * 35))


# --- settings: reading them, listing them by switch, comparing them


def read_config(path: Path) -> Settings:
    """The nested configuration in a run's config.yaml; ValueError if it is damaged."""
    return read(dict, read_object(path, load_yaml), "")


def flat(config: Settings, whole: Collection[str] | None = None, prefix: str = "") -> dict[str, Any]:
    """Values by switch, {"run.seed": 0}, of a nested configuration; ``whole`` switches, by default mappings, stay."""
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
    """The values (old, new), by switch, that differ between two nested configurations."""
    old_values = flat(old)
    new_values = flat(new)
    pairs = {name: (old_values.get(name), new_values.get(name)) for name in old_values | new_values}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def require_same(folder: Path, settings: Settings, may_differ: Callable[[str, Any, Any], bool], fix: str) -> Changes:
    """The `differences` from the configuration in a folder; ValueError if one is not allowed by ``may_differ``."""
    changes = differences(read_config(folder / "config.yaml"), settings)
    refused = []
    for name, (old, new) in changes.items():
        if not may_differ(name, old, new):
            refused.append(f"--{name.removesuffix('.class_path')} was {old!r}, is {new!r}")
    if refused:
        raise ValueError(f"--run.output_dir {folder} holds another experiment ({'; '.join(refused)}): {fix}")
    return changes


def argument_text(value: Any) -> str:
    """A switch's value as the text that a command takes."""
    return value if isinstance(value, str) else json.dumps(value)
