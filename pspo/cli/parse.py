"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and accepts classes by name or import path (``--algorithm.surrogate Clip``).
"""

import argparse
import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentError, DefaultHelpFormatter, Namespace, set_dumper

from pspo.cli.switches import Parser, check_names, leaf_of
from pspo.config import require
from pspo.model import is_out_of_memory
from pspo.records.files import to_yaml

C = TypeVar("C")
USAGE = "%(prog)s [--config FILE] [--SECTION.FIELD VALUE ...]"
set_dumper("yaml", to_yaml)


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, str]:
    """Read switches and YAML files; returns the configuration and the YAML text of all its fields, runnable as it is.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    with user_errors(prog, once=True):
        return read_config(config_class, prog, args)


def read_config(config_class: type[C], prog: str, args: Sequence[str] | dict[str, Any] | None = None) -> tuple[C, str]:
    """Read switches and YAML files as `parse` does, or a nested dict; raises ValueError."""
    parser, sections = make_parser(config_class, prog)
    words = sys.argv[1:] if args is None else args
    files = check_names(parser, words)
    try:
        namespace = parser.parse_object(words) if isinstance(words, dict) else parser.parse_args(words)
        parser.validate(namespace, skip_unset=False)  # parse_args itself lets a file set any field to null
        for name in sections:
            require(isinstance(namespace[name], Namespace), name, "must be a mapping of fields", namespace[name])
        values = parser.instantiate(namespace)
        config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
    except (ArgumentError, TypeError, ValueError) as error:
        raise ValueError(_sentence(str(error), files)) from error
    for name in sections:
        for key in [key for key, value in vars(namespace[name]).items() if value is None]:
            namespace[f"{name}.{key}"] = getattr(getattr(config, name), key)  # a default that depends on the model
    only_printed = namespace.pop("print_config", False)
    resolved = parser.dump(namespace, skip_unset=False)
    if only_printed:
        print(resolved, end="")
        raise SystemExit(0)
    return config, resolved


@functools.cache
def make_parser(config_class: type, prog: str) -> tuple[Parser, list[str]]:
    """The parser of a configuration class, and its sections' names."""
    hints = get_type_hints(config_class)
    sections = [part.name for part in fields(config_class) if is_dataclass(hints[part.name])]
    description = (config_class.__doc__ or "").partition("\n")[0]
    options = {"exit_on_error": False, "allow_abbrev": False, "print_config": None, "formatter_class": _Help}
    parser = Parser(prog, USAGE if sections else None, description, **options)
    config_help = "YAML file; later switches override it"
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help=config_help)
    print_help = "print the configuration as YAML and exit"
    parser.add_argument("--print_config", action="store_true", help=print_help)  # jsonargparse's: before defaults
    parser.add_class_arguments(config_class)
    for action in parser._actions:
        if action.dest in (*sections, "model.lora"):
            action.help = argparse.SUPPRESS  # `--rollout FILE`: works, and need not be listed
        elif getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # the bare switch means true
    return parser, sections


def _sentence(message: str, files: dict[str, str]) -> str:
    """Our own message, with the file that the value came from; argparse's in the same words."""
    if words := re.match("unrecognized arguments: (.*)", message):
        return f"{words[1]} belongs to no switch: files follow --config, lists are written '[a, b]'"
    message = re.sub(r"argument (--\S+): expected one argument", r"\1 needs a value", message)
    switch = re.match(r"--([\w.]+)", message)
    file = files.get(leaf_of(switch[1], files)) if switch else None
    return f"--config {file}: {message}" if file else message


class _Help(DefaultHelpFormatter):
    """Show a switch, its one-line text and its default, without jsonargparse's types."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "VALUE"

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        shown = default not in (None, argparse.SUPPRESS) and len(str(default)) < 40  # no prompts, no nested classes
        return f"{action.help} (default: {default})" if shown else action.help or ""


@contextlib.contextmanager
def user_errors(prog: str, once: bool = False) -> Iterator[None]:
    """Turn ValueError and OSError, errors of the user, into one line on stderr and exit code 2.

    Of several processes each prints its own; with ``once`` only the first of each machine.
    """
    try:
        yield
    except (ArgumentError, ValueError, OSError) as error:
        if not once or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0":
            print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
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
