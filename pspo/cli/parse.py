"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and makes objects of classes by import path (``--algorithm.surrogate pspo.losses.Clip``). Here
is what it lacks: methods as names of files, switches without a value, lists of one value, classes that begin with their
own defaults, and short help.
"""

import argparse
import contextlib
import copy
import difflib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, get_loader, set_dumper, set_loader

from pspo import distributed as dist
from pspo.cli.files import Settings, argument_text, check_yaml, flat, read_config, to_yaml
from pspo.cli.terminal import one_line, tolerate_output
from pspo.config import PATHS
from pspo.losses import Surrogate
from pspo.model import is_out_of_memory
from pspo.tasks.files import local_path

C = TypeVar("C")
METHODS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}
BASIC = {  # switches of --help; --help all has all of them
    "config", "print_config", "model.name_or_path", "model.lora.rank", "data.name", "data.path", "data.columns",
    "data.holdout", "data.limit", "reward.functions", "reward.weights", "rollout.prompts", "rollout.group_size",
    "rollout.max_completion_tokens", "rollout.temperature", "algorithm.surrogate", "algorithm.epochs",
    "algorithm.advantages", "algorithm.beta", "optimizer.lr", "run.output_dir", "run.seed", "run.max_steps",
    "run.validate_every", "run.test_limit", "eval.split", "eval.temperatures", "eval.samples",
    "eval.max_completion_tokens",
}  # fmt: skip
HINTS = {  # of names that other trainers give to a switch
    "batch_size": "--rollout.prompts, --rollout.group_size, or for memory --optimizer.microbatch_tokens",
    "num_generations": "--rollout.group_size",
    "lora": "--model.lora.rank 16",
    "device": "CUDA_VISIBLE_DEVICES before the command: a GPU is used where torch finds one",
    "clip": "--algorithm.surrogate.epsilon 0.2, of a surrogate that clips",
    "learning_rate": "--optimizer.lr",
}
WITHOUT_ARGUMENTS = {  # a value of each switch that may name a class
    "algorithm.surrogate": next(
        cls.__name__ for cls in Surrogate.__subclasses__() if not inspect.signature(cls).parameters
    ),
    "algorithm.aggregation": "dapo",
    "algorithm.advantages": "none",
    "algorithm.correction": "none",
    "algorithm.terms": "[]",
    "reward.functions": "[]",
    "rollout.engine": "null",
    "rollout.environment": "null",
    "eval.environment": "null",
}
SECTIONS_OF_CLASSES = {name.partition(".")[0] for name in WITHOUT_ARGUMENTS}
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
    tolerate_output()
    with user_errors(prog, once=True):
        return make_config(config_class, prog, sys.argv[1:] if args is None else args, {})


def make_config(config_class: type[C], prog: str, words: Sequence[str], settings: Settings) -> tuple[C, Settings]:
    """`parse` words, and nested settings over them; raises ValueError. Prints and exits for --print_config."""
    parser = make_parser(config_class, prog)
    switches = switch_types(config_class)
    topics = [*words[1:], ""]
    for word, topic in zip(words, topics, strict=False):
        if word in ("-h", "--help"):
            print_help(parser, topic, switches)
            raise SystemExit(0)
    try:
        namespace = parser.parse_args([*prepare_words(words, switches), *resets(settings, switches)])
        if settings:
            namespace = parser.parse_object(settings, namespace)
        only_print = namespace.pop("print_config", False)
        namespace.pop("config", None)
        parser.validate(namespace, skip_unset=False)  # parse_args itself lets a file set any field to null
        values = parser.instantiate(namespace)
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise ValueError(short_message(error, switches)) from error
    config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
    depending = {switch: attrgetter(switch)(config) for switch in switches if namespace[switch] is None}
    if only_print:  # with null where a default depends on other switches: it does so, too, in a command with this file
        defaults = [f"{switch} {argument_text(value)}" for switch, value in depending.items() if value is not None]
        given = parser.dump(namespace, skip_unset=False, skip_validation=True)
        print(given, end=f"# null stands for: {', '.join(defaults)}\n" if defaults else "")
        raise SystemExit(0)
    for switch in switches.keys() & {*depending, *PATHS, "data.name"}:  # depend on other switches, or on ~
        namespace[switch] = attrgetter(switch)(config)
    return config, yaml.safe_load(parser.dump(namespace, skip_unset=False, skip_validation=True))


@functools.cache
def make_parser(config_class: type, prog: str) -> ArgumentParser:
    """The parser of a configuration class."""
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
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help=names)
    # jsonargparse's own would print before defaults that depend on other switches are filled in
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_class_arguments(config_class)
    return parser


def print_help(parser: ArgumentParser, topic: str, switches: dict[str, Any]) -> None:
    """Print the texts of all switches, of a section's, or without a topic of the basic ones."""
    sections = dict.fromkeys(switch.partition(".")[0] for switch in switches)
    shown = {*switches, "config", "print_config"}
    if topic in sections:
        shown = {switch for switch in switches if switch.startswith(f"{topic}.")}
    elif topic != "all" and len(switches) > len(BASIC):
        shown = BASIC | {switch for switch in switches if switch.startswith("plan.")}
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


def switch_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """The type of every switch, such as {"run.seed": int}."""
    types = {}
    for name, hint in get_type_hints(config_class).items():
        if is_dataclass(hint):
            types |= switch_types(hint, f"{prefix}{name}.")
        else:
            types[f"{prefix}{name}"] = hint
    return types


def prepare_words(words: Sequence[str], switches: dict[str, Any]) -> list[str]:
    """Words with a method's file for its name, one value of a list in brackets, true for a switch without value, and
    `resets` before a class.

    Reads YAML files once, for their errors: jsonargparse names no file, and takes the last of two values of a key.
    """
    pairs: list[tuple[str, str | None]] = []
    for word in words:
        if word.startswith("--"):
            switch, equals, value = word.partition("=")
            pairs.append((switch, value if equals else None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], word)
        else:
            pairs.append((word, None))
    prepared = []
    named: set[str] = set()  # switches whose class a word has named since the last file
    early: dict[str, str] = {}  # an argument of a class that none has named
    for switch, value in pairs:
        name = switch.removeprefix("--")
        kind = switches.get(name)
        owner = next((part for part in WITHOUT_ARGUMENTS if f"{name}.".startswith(f"{part}.")), None)
        if switch == "--config" and value is not None:
            value = config_file(value)
            named.clear()
            early.clear()
            if Path(value).is_file():
                prepared += resets(read_config(Path(value)), switches)
        elif owner and name not in (owner, f"{owner}.class_path"):
            if owner not in named:
                early[owner] = name
        elif value is not None and (owner or name in SECTIONS_OF_CLASSES):
            if owner in early:
                raise ValueError(f"--{early[owner]} stands before --{owner} {value}: name the class first")
            named.add(owner or name)
            with contextlib.suppress(yaml.YAMLError):  # which jsonargparse will name
                prepared += resets({name: load_checked(value)}, switches)
        if kind is bool and value is None:
            value = "true"
        elif get_origin(kind) is list and value is not None and not value.startswith("["):
            is_text = kind == list[str] and value and value[0] not in "\"'"
            value = json.dumps([value]) if is_text else f"[{value}]"  # a text may be white space
        prepared.append(switch if value is None else f"{switch}={value}")
    return prepared


def resets(settings: Settings, switches: dict[str, Any]) -> list[str]:
    """Words that empty the switches of classes which settings name: jsonargparse would hand a class the arguments of
    the one before it that have the same names.
    """
    named = {name.removesuffix(".class_path") for name in flat(settings)}
    return [f"--{name}={value}" for name, value in WITHOUT_ARGUMENTS.items() if name in named and name in switches]


def config_file(name: str) -> str:
    """The path of a YAML file or method; ValueError if the file is damaged."""
    file = local_path(name)
    if not file.exists():
        file = METHODS.get(name.lower(), file)
    if not file.exists():
        raise ValueError(f"--config {name}: there is no such file, nor such a method; methods: {', '.join(METHODS)}")
    if file.is_file():
        read_config(file)
    return str(file)


def short_message(error: Exception, switches: dict[str, Any]) -> str:
    """An error of jsonargparse in one line; of a union's errors the first, for an unknown switch a similar one."""
    message = one_line(str(error))
    message = re.sub(r"Does not validate against any of the Union .*? Errors: - (.*?) - .*", r"\1", message)
    if unknown := re.match(r"unrecognized arguments: --([\w.-]+)", message):
        similar = [switch for switch in switches if switch.endswith(f".{unknown[1]}")]
        similar += difflib.get_close_matches(unknown[1], switches)
        if unknown[1] in HINTS:
            message += f"; here {HINTS[unknown[1]]}"
        elif similar:
            message += f"; did you mean --{similar[0]}?"
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


@contextlib.contextmanager
def user_errors(prog: str, once: bool = False) -> Iterator[None]:
    """Turn ValueError and OSError, errors of the user, into one line on stderr and exit code 2.

    Of several processes each prints its own; with ``once`` only the first of each machine.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has ended
        raise
    except (ValueError, OSError) as error:
        if not (once and dist.launched_by_torchrun()) or os.environ["LOCAL_RANK"] == "0":
            print(f"{prog}: error: {one_line(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None


@contextlib.contextmanager
def memory_errors(prog: str, advice: str) -> Iterator[None]:
    """Print running out of memory as two lines, the second of them advice, and exit with code 1."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        print(f"\n{prog}: out of memory: {reason}\n{advice}", file=sys.stderr)
        raise SystemExit(1) from None
