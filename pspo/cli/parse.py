"""Commands: switches and YAML files become a configuration, user errors one line on stderr.

Every field of a configuration class is a switch (``--rollout.temperature 0.6``); YAML files (``--config file.yaml``)
hold the same fields by section. What is given later overrides. `pspo.cli.values` says what a value means.
"""

import argparse
import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pspo.cli.files import Settings, argument_text, read_yaml, to_yaml
from pspo.cli.values import METHODS, Word, as_list, load_word, plain_setting, read
from pspo.config import find_switches, switches_with
from pspo.model.find import find_default_lr
from pspo.run.endings import user_errors
from pspo.tasks.datasets import has_text_answers, holdout_share
from pspo.tasks.files import local_path

C = TypeVar("C")
HINTS = {  # of names that other trainers give to a switch
    "batch_size": "--rollout.prompts, --rollout.group_size, or for memory --optimizer.microbatch_tokens",
    "num_generations": "--rollout.group_size",
    "lora": "--model.lora.rank 16",
    "device": "CUDA_VISIBLE_DEVICES before the command: a GPU is used where torch finds one",
    "clip": "--algorithm.surrogate.epsilon 0.2, of a surrogate that clips",
    "learning_rate": "--optimizer.lr",
}


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """Read switches and YAML files; returns the configuration, and the settings of all its fields as YAML has them.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    with user_errors(prog, once=True):
        return make_config(config_class, prog, sys.argv[1:] if args is None else args, {})


def make_config(config_class: type[C], prog: str, words: Sequence[str], given: Settings) -> tuple[C, Settings]:
    """`parse` words, and nested settings over them; raises ValueError. Prints and exits for --help, --print_config."""
    pairs = split_words(words)
    if "help" in dict(pairs):
        print_help(config_class, prog, dict(pairs)["help"] or "")
        raise SystemExit(0)
    switches = find_switches(config_class)
    settings = default_settings(config_class)
    put_words(settings, pairs, switches)
    put_all(settings, given, switches)
    values = {}
    for switch, part in switches.items():
        if switch not in settings:
            raise ValueError(f"--{switch} must be given")
        values[switch] = read(part.type, settings[switch], switch)
    config = resolve(build(config_class, {switch: value.made for switch, value in values.items()}))
    plain = {switch: value.plain for switch, value in values.items()}
    resolved = dict(plain)
    for switch in switches:
        value = attrgetter(switch)(config)
        if not any(map(callable, value if isinstance(value, list) else [value])):  # classes stay import paths
            resolved[switch] = value
    if resolved.get("algorithm.correction", "") is None:
        resolved["algorithm.correction"] = config.algorithm.effective_correction
    if "print_config" in dict(pairs):  # with null where a default depends on other switches
        depending = [switch for switch, value in resolved.items() if plain[switch] is None and value is not None]
        unset = ", ".join(f"{switch} {argument_text(resolved[switch])}" for switch in depending)
        print(to_yaml(nested(plain)), end=f"# null stands for: {unset}\n" if unset else "")
        raise SystemExit(0)
    return config, nested(resolved)


def resolve(config: C) -> C:
    """The configuration with what files decide: a model's learning rate, the kind of answers, the share for a test."""
    if hasattr(config, "optimizer") and config.optimizer.lr is None:
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


def build(config_class: type[C], values: Settings, prefix: str = "") -> C:
    """The configuration of values by switch."""
    parts = {}
    for part in fields(config_class):
        switch = f"{prefix}{part.name}"
        if is_dataclass(part.type):
            parts[part.name] = build(part.type, values, f"{switch}.")
        elif switch in values:
            parts[part.name] = values[switch]
    return config_class(**parts)


def nested(values: Settings) -> Settings:
    """Values by switch, in sections."""
    settings: Settings = {}
    for switch, value in values.items():
        *names, last = switch.split(".")
        section = settings
        for name in names:
            section = section.setdefault(name, {})
        section[last] = value
    return settings


def default_settings(config_class: type) -> Settings:
    """The defaults by switch."""
    settings = {}
    for switch, part in find_switches(config_class).items():
        if part.default is not MISSING:
            settings[switch] = part.default
        elif part.default_factory is not MISSING:
            settings[switch] = plain_setting(part.default_factory())
    return settings


def split_words(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """The switches of a command, without their dashes, each with its value if it has one."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        waits = bool(pairs) and pairs[-1][1] is None
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            pairs.append((name, value if equals else None))
        elif waits and pairs[-1][0] != "print_config":
            pairs[-1] = (pairs[-1][0], word)
        elif word == "-h":
            pairs.append(("help", None))
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    return pairs


def put_words(settings: Settings, pairs: Sequence[tuple[str, str | None]], switches: dict[str, Field]) -> None:
    """Put the switches and files of a command over settings, in order."""
    arguments: dict[str, str] = {}  # by class switch, its last argument since the last file
    for name, text in pairs:
        switch = name.removesuffix("+")
        owner = owner_of(switch, switches)
        if name == "print_config":
            continue
        if text is None and (owner != name or switches[name].type is not bool):
            raise ValueError(f"argument --{name}: expected one argument" if owner else unknown_switch(name, switches))
        word = Word("true" if text is None else text)
        if name == "config":
            put_all(settings, read_yaml(config_file(text)), switches)
            arguments.clear()
        elif any(other.startswith(f"{switch}.") for other in switches):  # a section
            path = local_path(text)
            is_file = text[:1] != "{" and path.exists() and not path.is_dir()  # or a pipe
            put_all(settings, {switch: read_yaml(path) if is_file else load_word(word, switch)}, switches)
        elif owner is None:
            raise ValueError(unknown_switch(f"{name}={text}", switches))
        elif switch == owner:
            if owner in arguments:
                raise ValueError(f"--{arguments[owner]} stands before --{owner} {text}: name the class first")
            kind = switches[owner].type
            value = as_list(kind, word, owner) if get_origin(kind) is list else word
            if name.endswith("+"):
                value = [*as_list(kind, settings[owner] or [], owner), *as_list(kind, word, owner)]
            put(settings, owner, [], value)
        else:
            argument = switch.removeprefix(f"{owner}.")
            if argument != "class_path":
                arguments[owner] = name
            put(settings, owner, argument.split("."), word)


def owner_of(name: str, switches: dict[str, Field]) -> str | None:
    """The switch of this name, or that names a class with an argument of this name; None if there is none."""
    return next((switch for switch in switches if f"{name}.".startswith(f"{switch}.")), None)


def put_all(settings: Settings, given: Settings, switches: dict[str, Field], prefix: str = "") -> None:
    """Put the values of a nested configuration over settings; ValueError for a switch that there is not."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        owner = owner_of(key, switches)
        if owner:
            put(settings, owner, key.removeprefix(owner).split(".")[1:], value)
        elif not any(switch.startswith(f"{key}.") for switch in switches):
            raise ValueError(unknown_switch(key, switches))
        elif not isinstance(value, dict):
            raise ValueError(f"--{key} must be a mapping of its switches, or a file with one, got {value!r}")
        else:
            put_all(settings, value, switches, f"{key}.")


def put(settings: Settings, owner: str, names: Sequence[str], value: Any) -> None:
    """Set a switch; or below it an argument of its class (of a list's last class), or an item of its mapping.

    A class that is named begins with its own defaults: it takes over no argument of the one before it.
    """
    if isinstance(value, dict) and value.keys() == {"init_args"}:
        names = ["init_args"]
        value = value["init_args"]
    if names in ([], ["class_path"]):
        settings[owner] = value
        return
    old = settings.get(owner)
    if owner in switches_with("mapping"):
        settings[owner] = below(old, names, value)
        return
    *others, last = old if isinstance(old, list) and old else [old]
    spec = {"class_path": last} if isinstance(last, str) else last or {}
    spec = below(spec, ["init_args", *names] if names[0] != "init_args" else names, value)
    settings[owner] = [*others, spec] if isinstance(old, list) else spec


def below(mapping: Any, names: Sequence[str], value: Any) -> Any:
    """The mapping with a value at these names, one below the other."""
    mapping = mapping if isinstance(mapping, dict) else {}
    if not names:
        return mapping | value if isinstance(value, dict) else value
    first, *others = names
    return mapping | {first: below(mapping.get(first), others, value)}


def config_file(name: str) -> Path:
    """The path of a YAML file or method; ValueError if there is none."""
    file = local_path(name)
    if not file.exists():
        file = METHODS.get(name.lower(), file)
    if not file.exists():
        raise ValueError(f"--config {name}: there is no such file, nor such a method; methods: {', '.join(METHODS)}")
    return file


def unknown_switch(name: str, switches: dict[str, Field]) -> str:
    """A line on a switch that there is not, with the one that may be meant."""
    message = f"unrecognized arguments: --{name}"
    name = name.partition("=")[0]
    similar = [switch for switch in switches if switch.endswith(f".{name}")]
    similar += difflib.get_close_matches(name, switches)
    if name in HINTS:
        message += f"; here {HINTS[name]}"
    elif similar:
        message += f"; did you mean --{similar[0]}?"
    return message


def print_help(config_class: type, prog: str, topic: str) -> None:
    """Print the texts of all switches, of a section's, or without a topic of the basic ones."""
    switches = find_switches(config_class)
    sections = dict.fromkeys(switch.partition(".")[0] for switch in switches)
    epilog = None
    shown = set(switches)
    if topic in sections:
        shown = {switch for switch in switches if switch.startswith(f"{topic}.")}
    elif topic != "all":
        basic = {switch for switch, part in switches.items() if "basic" in part.metadata.get("facts", ())}
        brief = {switch.rpartition(".")[0] for switch in basic}  # other sections are shown whole
        shown = basic | {switch for switch in switches if switch.rpartition(".")[0] not in brief}
        epilog = f"--help all shows all {len(switches)} switches, --help SECTION those of: {' '.join(sections)}"
    parser = argparse.ArgumentParser(
        prog,
        "%(prog)s [--config FILE] [--SWITCH VALUE ...]",
        config_class.__doc__.partition("\n")[0],
        epilog,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30, width=110),
    )
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    names = f"YAML file, or {', '.join(METHODS)}; later switches override it"
    parser.add_argument("--config", metavar="FILE", help=names)
    defaults = default_settings(config_class)
    groups = {}
    for switch, text in switch_texts(config_class).items():
        section = switch.rpartition(".")[0]
        if switch in shown:
            groups.setdefault(section, parser.add_argument_group(section) if section else parser)
            default = argument_text(defaults.get(switch))
            if default != "null" and len(default) < 40:
                text = f"{text} (default: {default})"
            groups[section].add_argument(f"--{switch}", metavar="VALUE", help=text.replace("%", "%%"))
    parser.print_help()


def switch_texts(config_class: type, prefix: str = "") -> dict[str, str]:
    """What the docstrings say of each switch."""
    texts = {}
    documented = dict(re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", inspect.getdoc(config_class), re.MULTILINE))
    for part in fields(config_class):
        if is_dataclass(part.type):
            texts |= switch_texts(part.type, f"{prefix}{part.name}.")
        elif part.init:
            texts[f"{prefix}{part.name}"] = " ".join(documented[part.name].split())
    return texts
