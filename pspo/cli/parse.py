"""Commands: switches and YAML files become a configuration, user errors one line on stderr.

Every field of a configuration class is a switch (``--rollout.temperature 0.6``); YAML files (``--config file.yaml``)
hold the same fields by section. What is given later overrides: `put_words` and `put_all` collect values by switch, of
which `build` reads each by its type, as `pspo.cli.values` says.
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
from pspo.files import named_damage
from pspo.model.find import find_default_lr
from pspo.tasks.datasets import has_text_answers, holdout_share
from pspo.tasks.files import local_path

C = TypeVar("C")
Settings = dict[str, Any]  # a configuration as YAML has it: sections of plain values, and `DERIVED`
Changes = dict[str, tuple[Any, Any]]  # values (old, new) by switch
DERIVED = "derived"  # the switches that were left open, whose values follow from the others
METHODS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """The configuration of switches and YAML files, and as YAML has it; a user's error is one line and exit code 2."""
    with user_errors(prog):
        return make_config(config_class, prog, sys.argv[1:] if args is None else args, {})


def make_config(config_class: type[C], prog: str, words: Sequence[str], given: Settings) -> tuple[C, Settings]:
    """`parse` words, and nested settings over them; raises ValueError. Prints and exits for --help, --print_config."""
    switches = find_switches(config_class)
    pairs = split_words(words, switches)
    flags = dict(pairs)
    if "help" in flags:
        print_help(config_class, prog, flags["help"] or "")
        raise SystemExit(0)
    values: dict[str, Any] = {}
    put_words(values, [pair for pair in pairs if pair[0] != "print_config"], switches)
    put_all(values, given, switches)
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
    """The configuration with what files decide: a model's learning rate, the kind of answers, the share for a test."""
    if isinstance(config, TrainConfig) and config.optimizer.lr is None:
        config = replace(config, optimizer=replace(config.optimizer, lr=find_default_lr(config.model)))
    data = getattr(config, "data", None)
    if data is None:
        return config
    run = config.run
    path = Path(data.path or "")
    if data.name == "file" and data.path and path.exists():
        data = replace(data, path=os.path.abspath(path))  # the same data from any folder
        if data.answer_kind is None and has_text_answers(path, data.columns["answer"]):
            data = replace(data, answer_kind="text")
        if getattr(run, "test_limit", 0):
            data = replace(data, holdout=holdout_share(path, data.holdout))
            if data.holdout is None:  # nothing to test on
                run = replace(run, test_limit=0)
    return replace(config, data=replace(data, holdout=data.holdout or 0.0), run=run)


def default_of(part: Field) -> Any:
    """A switch's default, as YAML has it; None if it must be given."""
    default = part.default if part.default_factory is MISSING else part.default_factory()
    return None if default is MISSING else yaml_value(default)


def build(config_class: type[C], values: dict[str, Any], prefix: str = "") -> C:
    """The configuration of values by switch; ValueError, naming the switch, for one that is unfit or missing."""
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


def split_words(words: Sequence[str], switches: dict[str, Field]) -> list[tuple[str, str | None]]:
    """The switches of a command, without their dashes, each with its value if it has one; -h may be a text's value."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        last, value = pairs[-1] if pairs else ("", "")
        is_open = value is None and not (word == "-h" and last in switches and switches[last].type is bool)
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.removesuffix(".class_path").replace(".init_args.", ".")  # as config.yaml has a class
            pairs.append((name, value if equals else None))
        elif is_open:
            pairs[-1] = (last, word)
        elif word == "-h":
            pairs.append(("help", None))
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    return pairs


def put_words(values: dict[str, Any], pairs: Sequence[tuple[str, str | None]], switches: dict[str, Field]) -> None:
    """Put the switches and files of a command over values by switch, in order."""
    for i, (name, text) in enumerate(pairs):
        owner = next((owner for owner in switches if f"{name}.".startswith(f"{owner}.")), None)
        if owner is None and name != "config":
            raise ValueError(unknown_switch(name, switches))
        if text is None and (owner != name or switches[name].type is not bool):
            raise ValueError(f"--{name} needs a value; one that begins with -- is given as --{name}=VALUE")
        if any(earlier.startswith(f"{name}.") for earlier, _ in pairs[:i]):
            raise ValueError(f"--{name} must stand before its arguments")
        if name == "config":
            path = local_path(text)
            put_all(values, read_yaml(path if path.exists() else METHODS.get(text.lower(), path)), switches)
        elif name == owner:
            values[owner] = Typed("true" if text is None else text)
        else:
            old = values[owner] if owner in values else default_of(switches[owner])
            old = read_typed(switches[owner].type, old, owner) if isinstance(old, Typed) else old
            names = name.removeprefix(f"{owner}.").split(".")
            is_mapping = owner in switches_with("mapping")
            values[owner] = with_item(old, names if is_mapping else ["init_args", *names], Typed(text))


def put_all(values: dict[str, Any], given: Settings, switches: dict[str, Field]) -> None:
    """Put a nested configuration over values by switch; what a run's config.yaml has derived is left open."""
    values.update(flat(given, switches))
    values.update({str(switch): None for switch in as_list(given.get(DERIVED))})
    for name in values:
        if name not in switches:
            raise ValueError(unknown_switch(name, switches))


def with_item(old: Any, names: Sequence[str], text: Typed) -> Any:
    """A value with a text below these names, of a list in its last item; a class that stands alone gets arguments."""
    if not names:
        return text
    if isinstance(old, list) and old:
        return [*old[:-1], with_item(old[-1], names, text)]
    first, *others = names
    if not isinstance(old, dict):
        old = {"class_path": old} if first == "init_args" and isinstance(old, str) else {}
    return old | {first: with_item(old.get(first), others, text)}


def unknown_switch(name: str, switches: dict[str, Field]) -> str:
    """A line on a switch that there is not, with the one that may be meant."""
    meant = [switch for switch in switches if f".{name}." in f".{switch}."] + difflib.get_close_matches(name, switches)
    hint = f"; did you mean --{meant[0]}?" if meant else ""
    return f"unrecognized arguments: --{name}{hint}"


def print_help(config_class: type, prog: str, topic: str) -> None:
    """Print what each basic switch is, or each if none is basic; or each of a section, or of all."""
    switches = find_switches(config_class)
    methods = f", or {', '.join(METHODS)}" if config_class is TrainConfig else ""
    texts = {
        "print_config": "print the configuration as YAML and exit",
        "config": f"YAML file{methods}; later switches override it",
        "help": "this text; all, or a section such as data, shows more",
    }
    basic = [switch for switch, part in switches.items() if "basic" in part.metadata["facts"]]
    for switch in basic if basic and not topic else switches:
        part = switches[switch]
        default = argument_text(default_of(part))
        is_said = default != "null" and len(default) < 40
        texts[switch] = part.metadata["text"] + (f" (default: {default})" if is_said else "")
    print(f"usage: {prog} [--config FILE] [--SWITCH VALUE ...]\n\n{config_class.__doc__}\n")
    for switch, text in texts.items():
        if topic == "all" or switch.startswith(topic):
            print(textwrap.fill(text, 110, initial_indent=f"  --{switch:<30} ", subsequent_indent=" " * 35))


# --- settings: read, by switch, and compared


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


def flat(config: Settings, whole: Collection[str] | None = None, prefix: str = "") -> dict[str, Any]:
    """The values of a nested configuration by switch: {"run.seed": 0}; ``whole`` ones, by default mappings, stay."""
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
