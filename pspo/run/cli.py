"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and accepts classes by name or import path (``--algorithm.surrogate Clip``).
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

from pspo.config import require
from pspo.model import is_out_of_memory

C = TypeVar("C")
USAGE = "%(prog)s [--config FILE] [--SECTION.FIELD VALUE ...]"
CLASS_SWITCHES = "--algorithm.surrogate or --reward.functions"


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, str]:
    """Read switches and YAML files; returns the configuration and the YAML text of all its fields, runnable as it is.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    with user_errors(prog, once=True):
        return read_config(config_class, prog, args)


def read_config(config_class: type[C], prog: str, args: Sequence[str] | dict[str, Any] | None = None) -> tuple[C, str]:
    """Read switches and YAML files as `parse` does, or a nested dict; raises ValueError."""
    hints = get_type_hints(config_class)
    sections = [part.name for part in fields(config_class) if is_dataclass(hints[part.name])]
    description = (config_class.__doc__ or "").partition("\n")[0]
    parser = ArgumentParser(
        prog, USAGE if sections else None, description, exit_on_error=False, allow_abbrev=False, formatter_class=_Help
    )
    parser.add_argument("--config", action=_ConfigFile, metavar="FILE", help="YAML file; later switches override it")
    parser.add_class_arguments(config_class)
    for action in parser._actions:
        if action.dest in (*sections, "model.lora"):
            action.help = argparse.SUPPRESS  # `--rollout FILE`: works, and need not be listed
        elif "--print_config" in action.option_strings:
            action.help = "print the configuration as YAML and exit"
        elif getattr(action, "_typehint", None) is bool:
            action.nargs, action.const = "?", True  # the bare switch means true

    try:
        namespace = parser.parse_object(args) if isinstance(args, dict) else parser.parse_args(args)
        parser.validate(namespace, skip_unset=False)  # parse_args itself lets a file set any field to null
        for name in sections:
            require(isinstance(namespace[name], Namespace), name, "must be a mapping of fields", namespace[name])
        values = parser.instantiate(namespace)
    except ArgumentError as error:
        raise ValueError(str(error)) from error
    except (SyntaxError, TypeError, ValueError) as error:  # a user's class may raise them, too
        named = str(error).startswith(("--", "Parser key"))
        raise ValueError(f"{error}" if named else f"{CLASS_SWITCHES}: {error}") from error
    config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
    return config, parser.dump(namespace, skip_unset=False)


class _UniqueKeys(yaml.SafeLoader):
    """Refuse a key that comes twice in a mapping; YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]} comes twice", node.start_mark)
        return node


class _ConfigFile(ActionConfigFile):
    """Read a YAML file; errors name the file."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, value: str, option: str | None = None) -> None:
        try:
            if Path(value).is_file():
                yaml.compose(Path(value).read_text(encoding="utf-8"), Loader=_UniqueKeys)
            super().__call__(parser, namespace, value, option)
        except (yaml.YAMLError, ArgumentError, TypeError, ValueError) as error:
            raise ValueError(f"--config {value}: {error}") from error


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
