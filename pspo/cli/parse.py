"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and makes objects of classes by import path (``--algorithm.surrogate pspo.losses.Clip``). Here
is what it lacks: methods as names of files, lists of one value, short help, and short messages.
"""

import argparse
import contextlib
import copy
import difflib
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, set_dumper

from pspo import distributed as dist
from pspo.cli.escape import one_line, tolerate_output
from pspo.cli.files import Settings, to_yaml
from pspo.model import is_out_of_memory
from pspo.tasks.environment import import_path

C = TypeVar("C")
USAGE = "%(prog)s [--config FILE] [--SECTION.FIELD VALUE ...]"
PRESETS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}
set_dumper("yaml", to_yaml)


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """Read switches and YAML files; returns the configuration, and the settings of all its fields as YAML has them.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    tolerate_output()
    words = sys.argv[1:] if args is None else args
    with user_errors(prog, once=True):
        parser = make_parser(config_class, prog)
        switches = switch_types(config_class)
        with parser_errors(switches):
            namespace = parser.parse_args(prepare_words(words, switches))
        return make_config(config_class, parser, namespace)


def parse_settings(config_class: type[C], settings: Settings, file: str | Path | None = None) -> tuple[C, Settings]:
    """The configuration of nested settings over a YAML file or preset, as `parse` returns it; raises ValueError."""
    parser = make_parser(config_class, "pspo")
    words = [] if file is None else ["--config", str(file)]
    switches = switch_types(config_class)
    with parser_errors(switches):
        base = parser.parse_args(prepare_words(words, switches))
        namespace = parser.parse_object(settings, namespace=base)
    return make_config(config_class, parser, namespace)


def make_config(config_class: type[C], parser: ArgumentParser, namespace: Namespace) -> tuple[C, Settings]:
    """Make the configuration, and the settings in which it is written; prints them and exits for --print_config."""
    only_print = namespace.pop("print_config", False)
    namespace.pop("config", None)
    with parser_errors(switch_types(config_class)):
        parser.validate(namespace, skip_unset=False)  # parse_args itself lets a file set any field to null
    try:
        values = parser.instantiate(namespace)
    except (TypeError, ValueError) as error:
        raise ValueError(class_error(namespace, switch_types(config_class)) or str(error)) from error
    config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
    for switch in switch_types(config_class):
        if namespace[switch] is None:  # perhaps a default that depends on other switches
            namespace[switch] = attrgetter(switch)(config)
    resolved = parser.dump(namespace, skip_unset=False)
    if only_print:
        print(resolved, end="")
        raise SystemExit(0)
    return config, yaml.safe_load(resolved)


@functools.cache
def make_parser(config_class: type, prog: str) -> ArgumentParser:
    """The parser of a configuration class."""
    has_sections = any("." in switch for switch in switch_types(config_class))
    parser = ArgumentParser(
        prog,
        USAGE if has_sections else None,
        (config_class.__doc__ or "").partition("\n")[0],
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
        formatter_class=Help,
    )
    names = f"YAML file, or {', '.join(PRESETS)}; later switches override it"
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help=names)
    # jsonargparse's own would print before defaults that depend on other switches are filled in
    parser.add_argument("--print_config", action="store_true", help="print the configuration as YAML and exit")
    parser.add_class_arguments(config_class)
    return parser


class Help(argparse.HelpFormatter):
    """Show a switch, its text and its default, and no section as a switch."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)

    def add_argument(self, action: argparse.Action) -> None:
        if str(action.help).startswith("Path to a configuration file"):  # such as `--rollout FILE`
            return
        action = copy.copy(action)
        if action.default not in (None, argparse.SUPPRESS) and action.nargs != 0 and len(str(action.default)) < 40:
            action.help = f"{action.help} (default: {action.default})"
        if action.nargs != 0 and action.metavar is None:
            action.metavar = "VALUE"
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
    """Words with a preset's path for its name, one value of a list in brackets, and true for a switch without value."""
    prepared = []
    switch = ""  # whose value a word is
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        switch_part, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if word.startswith("--"):
            switch = switch_part.removeprefix("--")
            if not equals:
                is_flag = switches.get(switch) is bool and following.startswith("--")
                prepared.append(f"{word}=true" if is_flag else word)
                continue
        if switch == "config" and not Path(value).exists():
            value = str(PRESETS.get(value.lower(), value))
        elif get_origin(switches.get(switch)) is list and not value.startswith("["):
            value = f"[{value}]"
        prepared.append(f"{switch_part}{equals}{value}")
    return prepared


@contextlib.contextmanager
def parser_errors(switches: dict[str, Any]) -> Iterator[None]:
    """Turn jsonargparse's errors into ValueError of one line that names the switch."""
    try:
        yield
    except (ArgumentError, TypeError) as error:
        message = one_line(str(error))
        message = re.sub(r'Parser key "([\w.]+)": ?', r"--\1: ", message)
        message = re.sub(r"Does not validate against any of the Union subtypes Subtypes: .* Errors: - ", "", message)
        message = re.sub(r" Given value type: <class '\w+'> Given value: ", ", got ", message)
        message = message.replace("Expected a dot import path string:", "no known class, and no import path:")
        message = re.sub(r"Group '([\w.]+)' does not accept option '(.*)'", r"unrecognized arguments: --\1.\2", message)
        message = re.sub(r"Option '([\w.]+)' is not accepted$", r"unrecognized arguments: --\1", message)
        if unknown := re.match(r"unrecognized arguments: --([\w.-]+)", message):
            name = unknown[1].rpartition(".")[2].replace("-", "_")
            close = [switch for switch in switches if switch.rpartition(".")[2] == name]
            close += difflib.get_close_matches(unknown[1], switches, 1, 0.8)
            if close:
                message += f"; did you mean --{close[0]}?"
        raise ValueError(message) from error


def class_error(namespace: Namespace, switches: dict[str, Any]) -> str | None:
    """The error of a class that refuses its arguments, after the switch that names it; None if all can be made."""
    for switch in switches:
        value = namespace[switch]
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Namespace) and "class_path" in part:
                arguments = part.get("init_args") or Namespace()
                try:
                    import_path(part.class_path)(**vars(arguments))
                except (TypeError, ValueError) as error:
                    return f"--{switch}: {error}"
    return None


@contextlib.contextmanager
def user_errors(prog: str, once: bool = False) -> Iterator[None]:
    """Turn ValueError and OSError, errors of the user, into one line on stderr and exit code 2.

    Of several processes each prints its own; with ``once`` only the first of each machine.
    """
    try:
        yield
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
