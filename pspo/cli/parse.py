"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and makes objects of classes by import path (``--algorithm.surrogate pspo.losses.Clip``). Here
is what it lacks: methods as names of files, switches without a value, lists of one value, classes that begin with their
own defaults, and short help.
"""

import argparse
import copy
import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, get_loader, set_dumper, set_loader

from pspo.cli.files import Settings, argument_text, check_yaml, read_config, to_yaml
from pspo.cli.terminal import one_line
from pspo.config import find_switches, switches_with
from pspo.model.find import find_default_lr
from pspo.run.endings import user_errors
from pspo.tasks.datasets import has_text_answers, holdout_share
from pspo.tasks.files import local_path

C = TypeVar("C")
METHODS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}
HINTS = {  # of names that other trainers give to a switch
    "batch_size": "--rollout.prompts, --rollout.group_size, or for memory --optimizer.microbatch_tokens",
    "num_generations": "--rollout.group_size",
    "lora": "--model.lora.rank 16",
    "device": "CUDA_VISIBLE_DEVICES before the command: a GPU is used where torch finds one",
    "clip": "--algorithm.surrogate.epsilon 0.2, of a surrogate that clips",
    "learning_rate": "--optimizer.lr",
}
load_yaml = get_loader("yaml")


def load_checked(text: str) -> Any:
    """A YAML value or file as jsonargparse reads it, once `check_yaml` has found no fault."""
    check_yaml(text)
    return load_yaml(text)


set_loader("yaml", load_checked, exceptions=(yaml.YAMLError,))
set_dumper("yaml", to_yaml)


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """Read switches and YAML files; returns the configuration, and the settings of all its fields as YAML has them.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    with user_errors(prog, once=True):
        return make_config(config_class, prog, sys.argv[1:] if args is None else args, {})


def make_config(config_class: type[C], prog: str, words: Sequence[str], given: Settings) -> tuple[C, Settings]:
    """`parse` words, and nested settings over them; raises ValueError. Prints and exits for --print_config."""
    parser, defaults = make_parser(config_class, prog)
    switches = {name: part.type for name, part in find_switches(config_class).items()}
    topics = [*words[1:], ""]
    for word, topic in zip(words, topics, strict=False):
        if word in ("-h", "--help"):
            print_help(parser, topic, find_switches(config_class))
            raise SystemExit(0)
    settings = copy.deepcopy(defaults)  # by switch
    read_words([word for word in words if word != "--print_config"], switches, settings)
    put_all(settings, given, switches)
    try:
        namespace = parser.parse_object(Namespace(settings))
        namespace.pop("config")
        namespace.pop("print_config")
        parser.validate(namespace, skip_unset=False)
        values = parser.instantiate(namespace)
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise ValueError(short_message(error, switches)) from error
    config = resolve(config_class(**{part.name: values[part.name] for part in fields(config_class)}))
    depending = {switch: attrgetter(switch)(config) for switch in switches if namespace[switch] is None}
    if "--print_config" in words:  # with null where a default depends on other switches, as in a command with this file
        unset = [f"{switch} {argument_text(value)}" for switch, value in depending.items() if value is not None]
        text = parser.dump(namespace, skip_unset=False, skip_validation=True)
        print(text, end=f"# null stands for: {', '.join(unset)}\n" if unset else "")
        raise SystemExit(0)
    for switch in switches:
        value = attrgetter(switch)(config)
        if not any(map(callable, value if isinstance(value, list) else [value])):  # classes stay import paths
            namespace[switch] = value
    return config, yaml.safe_load(parser.dump(namespace, skip_unset=False, skip_validation=True))


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


@functools.cache
def make_parser(config_class: type, prog: str) -> tuple[ArgumentParser, Settings]:
    """The parser of a configuration class, and the defaults by switch."""
    parser = ArgumentParser(
        prog,
        "%(prog)s [--config FILE] [--SWITCH VALUE ...]",
        (config_class.__doc__ or "").partition("\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        formatter_class=Help,
    )
    names = f"YAML file, or {', '.join(METHODS)}; later switches override it"
    parser.add_argument("--config", metavar="FILE", help=names)
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_class_arguments(config_class)
    defaults: Settings = {}
    put_all(defaults, parser.get_defaults(skip_validation=True).as_dict(), find_switches(config_class))
    # no default class in the parser: a named class would inherit its arguments
    parser.set_defaults({switch: None for switch, value in defaults.items() if "class_path" in str(value)})
    return parser, defaults


def print_help(parser: ArgumentParser, topic: str, switches: dict[str, Any]) -> None:
    """Print the texts of all switches, of a section's, or without a topic of the basic ones."""
    sections = dict.fromkeys(switch.partition(".")[0] for switch in switches)
    shown = {*switches, "config", "print_config"}
    if topic in sections:
        shown = {switch for switch in switches if switch.startswith(f"{topic}.")}
    elif topic != "all":
        basic = {name for name, part in switches.items() if "basic" in part.metadata.get("facts", ())}
        brief = {name.rpartition(".")[0] for name in basic}  # other sections are shown whole
        shown = basic | {name for name in switches if name.rpartition(".")[0] not in brief} | {"config", "print_config"}
        topics = " ".join(sections)
        parser.epilog = f"--help all shows all {len(switches)} switches, --help SECTION those of: {topics}"
    parser.formatter_class = functools.partial(Help, shown=shown)
    parser.print_help()


class Help(argparse.HelpFormatter):
    """Show the chosen switches, each with its text and its default, and no section as a switch."""

    def __init__(self, prog: str, shown: Collection[str] = ()) -> None:
        super().__init__(prog, max_help_position=30, width=110)
        self.shown = shown

    def add_argument(self, action: argparse.Action) -> None:
        if action.option_strings[0].lstrip("-").removesuffix(".help") not in self.shown:
            return
        action = copy.copy(action)
        if action.nargs != 0:
            action.metavar = action.metavar or "VALUE"
            if action.default not in (None, argparse.SUPPRESS) and len(str(action.default)) < 40:
                action.help = f"{action.help} (default: {action.default})"
        action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
        super().add_argument(action)


def read_words(words: Sequence[str], switches: dict[str, Any], settings: Settings) -> None:
    """Put the switches and files of a command over settings, in order."""
    arguments: dict[str, str] = {}  # by class switch, its last argument since the last file
    for name, text in split_words(words):
        key = name.removesuffix("+")
        owner = owner_of(key, switches)
        kind = switches.get(key, Any if "Any" in str(switches.get(owner)) else None)
        is_section = any(switch.startswith(f"{key}.") for switch in switches)
        if not owner and not is_section and name != "config":
            raise ValueError(unknown_switch(name, text, switches))
        if text is None and kind is not bool:
            raise ValueError(f"argument --{name}: expected one argument")
        if name == "config":
            put_all(settings, read_config(config_file(text), load_yaml), switches)
            arguments.clear()
        elif is_section:
            path = local_path(text)
            is_file = text[:1] != "{" and path.exists() and not path.is_dir()  # or a pipe
            part = read_config(path, load_yaml) if is_file else word_value(name, kind, text)
            put_all(settings, {name: part}, switches)
        else:
            value = word_value(name, kind, "true" if text is None else text)
            if name.endswith("+"):
                value = [*(settings[key] or []), *(value if isinstance(value, list) else [value])]
            if key not in (owner, f"{owner}.class_path"):
                arguments[owner] = name
            elif owner in arguments:
                raise ValueError(f"--{arguments[owner]} stands before --{owner} {text}: name the class first")
            put(settings, key, value, owner)


def split_words(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """The switches of a command, without their dashes, each with its value if it has one."""
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            pairs.append((name, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    return pairs


def owner_of(name: str, switches: dict[str, Any]) -> str | None:
    """The switch of this name, or that names a class with an argument of this name; None if there is none."""
    return next((switch for switch in switches if f"{name}.".startswith(f"{switch}.")), None)


def word_value(name: str, kind: Any, text: str) -> Any:
    """The value of a word: lists (a bare value is a list of one) and mappings parsed, other text for jsonargparse."""
    if get_origin(kind) is list and not text.startswith("["):
        if kind == list[str] and text and text[0] not in "\"'":
            return [text]  # which may be white space
        text = f"[{text}]"
    elif get_origin(kind) is not list and kind is not Any and (text[:1] != "{" or kind in (str, str | None)):
        return text
    try:
        return load_checked(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--{name} {text}: {error}") from error


def put_all(settings: Settings, given: Settings, switches: dict[str, Any], prefix: str = "") -> None:
    """Put the values of a nested configuration over settings."""
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and not owner_of(key, switches):
            put_all(settings, value, switches, f"{key}.")
        else:
            put(settings, key, value, owner_of(key, switches) or key)


def put(settings: Settings, name: str, value: Any, owner: str) -> None:
    """Set a switch; or below it an argument of its class (of a list's last class), or an item of its mapping.

    A class that is named begins with its own defaults: it takes over no argument of the one before it.
    """
    argument = name.removeprefix(owner).removeprefix(".")
    if argument == "init_args":
        arguments = value
    elif argument not in ("", "class_path"):
        arguments = {argument.removeprefix("init_args."): value}
    elif isinstance(value, dict) and value.keys() == {"init_args"}:
        arguments = value["init_args"]
    else:
        settings[owner] = value
        return
    old = settings.get(owner)
    if owner in switches_with("mapping"):
        settings[owner] = (old if isinstance(old, dict) else {}) | arguments
        return
    *others, last = old if isinstance(old, list) and old else [old]
    spec = {"class_path": last} if isinstance(last, str) else last or {}
    spec = spec | {"init_args": (spec.get("init_args") or {}) | arguments}
    settings[owner] = [*others, spec] if isinstance(old, list) else spec


def config_file(name: str) -> Path:
    """The path of a YAML file or method; ValueError if there is none."""
    file = local_path(name)
    if not file.exists():
        file = METHODS.get(name.lower(), file)
    if not file.exists():
        raise ValueError(f"--config {name}: there is no such file, nor such a method; methods: {', '.join(METHODS)}")
    return file


def unknown_switch(name: str, text: str | None, switches: dict[str, Any]) -> str:
    """A line on a switch that there is not, with the one that may be meant."""
    message = f"unrecognized arguments: --{name}" + (f"={text}" if text is not None else "")
    similar = [switch for switch in switches if switch.endswith(f".{name}")]
    similar += difflib.get_close_matches(name, switches)
    if name in HINTS:
        message += f"; here {HINTS[name]}"
    elif similar:
        message += f"; did you mean --{similar[0]}?"
    return message


def short_message(error: Exception, switches: dict[str, Any]) -> str:
    """An error of jsonargparse in one line; of a union's errors the first, for an unknown switch a similar one."""
    message = one_line(str(error))
    message = re.sub(r"Does not validate against any of the Union .*? Errors: - (.*?) - .*", r"\1", message)
    if wrong := re.match(r'Parser key "([\w.]+)": Expected a dot import path string: (\w+)$', message):
        switch, name = wrong.groups()
        names = class_names(switches[switch])
        message = f"--{switch} {name}: no such class; choose from {', '.join(names)}, or give an import path"
        similar = difflib.get_close_matches(name, names, n=1)
        if name.lower() in METHODS:
            message += f"; did you mean --config {name.lower()}?"
        elif similar:
            message += f"; did you mean {similar[0]}?"
    return message


def class_names(kind: Any) -> list[str]:
    """Names of the classes of pspo that a switch of this type takes."""
    names = {name for part in get_args(kind) or kind.__subclasses__() for name in class_names(part)}
    if inspect.isclass(kind) and kind.__module__.startswith("pspo.") and not inspect.isabstract(kind):
        names.add(kind.__name__)
    return sorted(names)
