"""The command line: switches and YAML files into a configuration, errors of the user into one line.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and accepts classes by name or import path (``--algorithm.surrogate Clip``).
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from pspo.config import require
from pspo.model import is_out_of_memory

C = TypeVar("C")


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, str]:
    """Read switches and YAML files into a configuration.

    Returns:
        The configuration, and the YAML text of all its fields, runnable as it is.

    Exits with code 2 and one line on stderr where a field is unknown, ill-typed or out of range.
    """
    parser = ArgumentParser(prog=prog, description=config_class.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file; later switches override it")
    parser.add_class_arguments(config_class)
    args = sys.argv[1:] if args is None else list(args)
    with user_errors(prog, once=True):
        for switch, value in pairwise([*args, ""]):
            if switch.partition("=")[0] == "--config":
                _check_yaml(Path(switch.partition("=")[2] or value))
        try:
            namespace = parser.parse_args(args)
        except SyntaxError as error:  # of the module that a class is imported from
            raise ValueError(f"--algorithm.surrogate or --reward.functions: {error}") from error
        except (AttributeError, OverflowError, RecursionError) as error:  # PyYAML's of !!timestamp x, float's of 9...9
            raise ValueError(f"a switch's value cannot be read ({error}): {' '.join(args):.200}") from error
        _refuse_nulls(config_class, namespace)
        try:
            values = parser.instantiate(namespace)
        except (TypeError, ValueError) as error:
            classes = re.findall(r"class_path='([\w.]+)'", repr(namespace))
            own = [name for name in classes if isinstance(error, TypeError) or not name.startswith("pspo.")]
            if not own or str(error).startswith("--"):
                raise
            raise ValueError(f"{' or '.join(own)} refused its arguments: {error}") from error
        config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
        return config, parser.dump(namespace, skip_unset=False)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that is written with a key twice, of which the last would count."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]} comes twice", node.start_mark)
        return node


def _check_yaml(file: Path) -> None:
    """jsonargparse's own messages do not name the file; and one that refers to itself it reads for ever."""
    if file.is_file():
        try:
            content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:  # all of these are PyYAML's
            raise ValueError(f"--config {file} is not a YAML file: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"--config {file} must hold sections such as model, data and run, not {content!r:.40}")
        parts, seen = [(content, 0)], 0
        while parts:
            value, depth = parts.pop()
            seen += 1
            if depth > 20 or seen > 100_000:
                raise ValueError(f"--config {file} is nested too deeply, holds too much or refers to itself")
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            parts += [(part, depth + 1) for part in inner]


def _refuse_nulls(config_class: type, namespace: Namespace, prefix: str = "") -> None:
    """jsonargparse takes null, and anything for a section, where a file says so; ValueError names the field.

    So it does for numbers and texts that nothing behind it can take.
    """
    hints = get_type_hints(config_class)
    for part in fields(config_class):
        value, hint, name = namespace[part.name], hints[part.name], f"{prefix}{part.name}"
        if is_dataclass(hint):
            require(isinstance(value, Namespace), name, "is a section and takes fields of its own", value)
            _refuse_nulls(hint, value, f"{name}.")
        else:
            require(value is not None or type(None) in get_args(hint), name, "must not be null", value)
            require(not isinstance(value, int) or abs(value) < 2**63, name, "must be below 2^63", value)
            odd = isinstance(value, str) and re.search("[\0\ud800-\udfff]", value)
            require(not odd, name, "must be UTF-8 text without NUL", value)


@contextlib.contextmanager
def user_errors(prog: str, once: bool = False) -> Iterator[None]:
    """What goes wrong in here is the user's to mend: ValueError and OSError become one line and exit code 2.

    Of several processes each says what it met with; with ``once`` the first on a machine speaks for all.
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
