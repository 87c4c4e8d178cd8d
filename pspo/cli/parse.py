"""Command line: switches and YAML files into a configuration, user errors into one line on stderr.

jsonargparse turns every field of a configuration class into a switch (``--rollout.temperature 0.6``), reads YAML files
(``--config file.yaml``) and accepts classes by name or import path (``--algorithm.surrogate Clip``). Words and keys are
read once before: unknown ones are refused with what was perhaps meant, and values may be written more freely.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace, get_loader, set_dumper

from pspo import distributed as dist
from pspo.cli.escape import one_line, tolerate_output
from pspo.cli.files import Settings, as_argument, flat, own_modules, to_yaml
from pspo.config import require
from pspo.model import is_out_of_memory
from pspo.tasks.environment import import_path

C = TypeVar("C")
USAGE = "%(prog)s [--config FILE] [--SECTION.FIELD VALUE ...]"
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping",
         Callable: "a function", NoneType: "null"}  # fmt: skip
IMPORTED = ("algorithm.surrogate", "algorithm.terms", "algorithm.advantages", "algorithm.aggregation",
            "algorithm.correction", "reward.functions", "rollout.engine", "rollout.environment", "eval.environment")  # fmt: skip
PRESETS = Path(__file__).parents[1] / "assets" / "methods"
set_dumper("yaml", to_yaml)


class Switch(NamedTuple):
    """Type of a field, and its line of help."""

    hint: Any
    help: str


Switches = dict[str, Switch]


def parse(config_class: type[C], prog: str, args: Sequence[str] | None = None) -> tuple[C, Settings]:
    """Read switches and YAML files; returns the configuration, and the settings of all its fields as YAML has them.

    Exits with code 2 and one line on stderr if a field is unknown, ill-typed or out of range.
    """
    tolerate_output()
    with user_errors(prog, once=True):
        return read_config(config_class, prog, args)


def read_config(config_class: type[C], prog: str, args: Sequence[str] | Settings | None = None) -> tuple[C, Settings]:
    """Read switches and YAML files as `parse` does, or a nested dict over its "config" file; raises ValueError."""
    parser, switches = make_parser(config_class, prog)
    files: dict[str, str] = {}  # by switch, the file that set it
    if isinstance(args, dict):
        file, own = args.get("config"), {name: value for name, value in args.items() if name != "config"}
        words = [*read_words(["--config", file] if file else [], switches, {}), config_word(own, switches)]
    else:
        words = read_words(sys.argv[1:] if args is None else args, switches, files)
    try:
        namespace = parser.parse_args(words)
        parser.validate(namespace, skip_unset=False)  # parse_args itself lets a file set any field to null
        values = parser.instantiate(namespace)
        config = config_class(**{part.name: values[part.name] for part in fields(config_class)})
    except (ArgumentError, OverflowError, TypeError, ValueError) as error:
        message = sentence(str(error), switches)
        if isinstance(error, ValueError) and not message.startswith("--"):
            message = class_error(namespace, switches) or message
        switch = re.match(r"--([\w.]+)", message)
        file = files.get(leaf_of(switch[1], files)) if switch else None
        raise ValueError(f"--config {file}: {message}" if file else message) from error
    for name in first_fields(switches):
        for key in [key for key, value in vars(namespace[name]).items() if value is None]:
            namespace[f"{name}.{key}"] = getattr(getattr(config, name), key)  # a default that depends on the model
    only_printed = namespace.pop("print_config", False)
    resolved = parser.dump(namespace, skip_unset=False)
    if only_printed:
        print(resolved, end="")
        raise SystemExit(0)
    return config, yaml.safe_load(resolved)


@functools.cache
def make_parser(config_class: type, prog: str) -> tuple[ArgumentParser, Switches]:
    """The parser of a configuration class, and its switches."""
    switches = leaf_switches(config_class)
    usage = USAGE if any("." in name for name in switches) else None
    description = (config_class.__doc__ or "").partition("\n")[0]
    options = {"exit_on_error": False, "allow_abbrev": False, "print_config": None, "formatter_class": Help}
    parser = ArgumentParser(prog, usage, description, **options)
    presets = ", ".join(sorted(file.stem for file in PRESETS.glob("*"))) if "algorithm.surrogate" in switches else ""
    config_help = f"YAML file{f', or {presets}' * bool(presets)}; later switches override it"
    parser.add_argument("--config", action=ActionConfigFile, metavar="FILE", help=config_help)
    print_help = "print the configuration as YAML and exit"
    parser.add_argument("--print_config", action="store_true", help=print_help)  # jsonargparse's: before defaults
    parser.add_class_arguments(config_class)
    return parser, switches


def leaf_switches(config_class: type, prefix: str = "") -> Switches:
    """The fields of a configuration class and of its sections."""
    texts = {
        part.arg_name: part.description or "" for part in docstring_parser.parse(config_class.__doc__ or "").params
    }
    switches = {}
    for name, hint in get_type_hints(config_class).items():
        nested = leaf_switches(hint, f"{prefix}{name}.") if is_dataclass(hint) else {}
        switches |= nested or {f"{prefix}{name}": Switch(hint, texts.get(name, ""))}
    return switches


class Help(argparse.HelpFormatter):
    """Show a switch, its one-line text and its default, and no section as a switch of its own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38)

    def add_argument(self, action: argparse.Action) -> None:
        shown, default = copy.copy(action), action.default
        if default not in (None, argparse.SUPPRESS) and action.nargs != 0 and len(str(default)) < 40:
            shown.help = f"{action.help} (default: {default})"
        if action.nargs != 0 and action.metavar is None:
            shown.metavar = "VALUE"
        if not str(action.help).startswith("Path to a configuration file"):  # `--rollout FILE`
            super().add_argument(shown)


# Words and keys, before parsing


def read_words(words: Sequence[str], switches: Switches, files: dict[str, str]) -> list[str]:
    """Words as the parser takes them, each with its value; ValueError for what is no switch, or lacks a value.

    ``files`` gets the file that set each switch last.
    """
    firsts, read, rest = first_fields(switches), [], deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.lstrip("-").partition("=")
        leaf = leaf_of(name.removesuffix("+"), switches)  # --x+ appends to a list
        if word in ("-h", "--help", "--print_config") or name.endswith(".help"):
            read += [word, *([rest.popleft()] if name.endswith(".help") and rest else [])]
            continue
        if not word.startswith("-"):
            stray = " ".join([word, *(rest.popleft() for _ in range(len(rest)) if not rest[0].startswith("--"))])
            raise ValueError(f"{stray} belongs to no switch: files follow --config, lists are written '[a, b]'")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.popleft()
        elif not equals and leaf and switches[leaf].hint is bool:
            value = "true"
        elif not equals and (leaf or name == "config"):
            raise ValueError(f"--{name} needs a value")
        if name == "config":
            content = read_file(value)
            say_imports(value, content)
            try:
                read.append(config_word(content, switches))
            except ValueError as error:
                raise ValueError(f"--config {value}: {error}") from error
            files |= {leaf_of(key, switches) or key: value for key in flat(content)}
        elif name in firsts:
            raise ValueError(f"--{name} is a section; did you mean --{firsts[name]}?")
        elif leaf is None:
            raise ValueError(f"{word.partition('=')[0]} is unknown{suggestion(name, switches, '--')}")
        else:
            files.pop(leaf, None)
            value = as_argument(normal(value, switches[leaf].hint, leaf)) if name == leaf else value
            read.append(f"--{name}={value}")
    return read


def config_word(content: Settings, switches: Switches) -> str:
    """The --config word of a file's or dict's content; ValueError for a key that is no switch."""
    firsts = first_fields(switches)
    for key in flat(content):
        if leaf_of(key, switches) is None and key not in firsts:
            raise ValueError(f"{key} is unknown{suggestion(key, switches)}")
    for key in firsts:  # of text the parser would make a file's content
        require(isinstance(content.get(key, {}), dict), key, "must be a mapping of fields", content.get(key))

    def as_typed(value: Any, name: str) -> Any:
        if name in switches:
            return normal(value, switches[name].hint, name)
        if not isinstance(value, dict):
            return value
        return {key: as_typed(part, f"{name}.{key}".lstrip(".")) for key, part in value.items()}

    return f"--config={to_yaml(as_typed(content, ''))}"


def read_file(path: str) -> Settings:
    """The content of a YAML file of sections, or of a preset; ValueError if it cannot be read."""
    try:
        text = (preset(path) or Path(path)).read_text(encoding="utf-8")
        yaml.compose(text, Loader=UniqueKeys)
        content = get_loader("yaml")(text)  # to which 1e-5 is a number
        json.dumps(content, skipkeys=True, default=str)  # raises ValueError for an anchor inside itself
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"--config {path}, line {error.problem_mark.line + 1}: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "strerror", None)
        raise ValueError(f"--config {path} cannot be read: {what or error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold sections with fields, as configs/tiny.yaml does")
    return content


def preset(name: str) -> Path | None:
    """The file of a method that is a loss with other settings, such as GRPO; in any case and punctuation."""
    files = {file.stem.replace("-", ""): file for file in PRESETS.glob("*.yaml")}
    return None if Path(name).exists() else files.get(re.sub(r"\W|_", "", name.lower()))


def say_imports(file: str, content: Settings) -> None:
    """Say on stderr which modules that are not ours a file imports, before they run."""
    paths = {switch: value for switch, value in flat(content).items() if leaf_of(switch, IMPORTED)}
    if (modules := own_modules(paths)) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"--config {one_line(file)} imports {', '.join(modules)}: code that runs", file=sys.stderr)


class UniqueKeys(yaml.SafeLoader):
    """Refuse a key that comes twice in a mapping; YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]} comes twice", node.start_mark)
        return node


def first_fields(switches: Iterable[str]) -> dict[str, str]:
    """The first switch of each section."""
    return {name.partition(".")[0]: name for name in reversed(list(switches)) if "." in name}


def leaf_of(name: str, switches: Iterable[str]) -> str | None:
    """The switch that this is, or a parameter of."""
    return next((switch for switch in switches if f"{name}.".startswith(f"{switch}.")), None)


def suggestion(name: str, switches: Switches, dashes: str = "") -> str:
    """The switches perhaps meant: of almost the same name, of the same name elsewhere, or with it in their help."""
    name = name.lower().replace("-", "_")
    lasts = {switch: switch.rpartition(".")[2] for switch in switches}
    own = name.rpartition(".")[2]
    close = difflib.get_close_matches(own, lasts.values(), 1, 0.8)
    meant = (
        difflib.get_close_matches(name, switches, 1, 0.85)
        or [switch for switch in switches if lasts[switch] in (close or [own])]
        or [switch for switch in switches if switch.startswith(name.removesuffix(own)) and own in lasts[switch]]
        or [switch for switch, (_, text) in switches.items() if own.replace("_", " ") in text]
    )
    return f"; did you mean {' or '.join(dashes + switch for switch in meant[:2])}?" if meant else "; --help lists all"


def alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def normal(value: Any, hint: Any, switch: str) -> Any:
    """A value as its type wants it: a list of one value, 100 for 1e2, a class by name in any case."""
    loaded, options = value, alternatives(hint)
    if value is None or value == "null":
        return None if NoneType in options else value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(yaml.YAMLError):
            loaded = yaml.safe_load(value)
    for option in options:
        if get_origin(option) is list and (isinstance(loaded, list) or str not in options):
            items = loaded if isinstance(loaded, list) else [loaded]
            return [normal(item, get_args(option)[0], switch) for item in items]
        if option is int and isinstance(value, str | float):
            with contextlib.suppress(ValueError):
                number = float(value)
                return int(number) if number.is_integer() and abs(number) < 2**53 else value
        if inspect.isabstract(option) and option is not Callable:
            return resolve(loaded, option, switch)
        if option is Callable and "." in str(value):
            return resolve(loaded, object, switch)
    return value


def resolve(value: Any, base: type, switch: str) -> Any:
    """A class or function, named by import path or in any case, alone or with parameters; ValueError without one."""
    if isinstance(value, dict) and "class_path" in value:
        return value | {"class_path": resolve(value["class_path"], base, switch)}
    if not isinstance(value, str):
        return value
    if "." not in value:
        known = {cls.__name__.lower(): cls.__name__ for cls in subclasses(base)}
        if value.lower() in known:
            return known[value.lower()]
        if switch == "algorithm.surrogate" and (file := preset(value)):
            raise ValueError(f"--{switch} has no {value!r}: it is a loss with other settings, --config {file.stem}")
        close = difflib.get_close_matches(value.lower(), known, 1)
        names = ", ".join(cls.__name__ for cls in subclasses(base) if cls.__module__.startswith("pspo."))
        choice = f"; did you mean {known[close[0]]}?" if close else f": choose from {names}, or an import path"
        raise ValueError(f"--{switch} has no {value!r}{choice}")
    try:
        target = import_path(value)
    except (Exception, SystemExit) as error:  # a module of the user's raises anything
        lost = isinstance(error, ModuleNotFoundError) and error.name == value.partition(".")[0]
        hint = "; its file must be in the current folder or on PYTHONPATH" if lost else ""
        raise ValueError(f"--{switch} cannot import {value}: {type(error).__name__}: {error}{hint}") from error
    is_other_class = inspect.isclass(target) and (not issubclass(target, base) or inspect.isabstract(target))
    if is_other_class or (switch == "algorithm.surrogate" and not inspect.isclass(target)):
        raise ValueError(f"--{switch} needs a subclass of {base.__name__} with all its methods, and {value} is none")
    return value


def subclasses(base: type) -> list[type]:
    """All classes below this one that can be made."""
    below = [cls for child in base.__subclasses__() for cls in (child, *subclasses(child))]
    return [cls for cls in below if not inspect.isabstract(cls)]


# Errors


def sentence(message: str, switches: Switches) -> str:
    """The parser's error in one sentence that names the switch; our own as it is."""
    keys, path = re.findall(r'Parser key "([\w.]+)"', message), re.search(r"class_path '([\w.]+)'", message)
    if not keys:
        return message
    switch, hints = ".".join(keys), dict(switches)
    if path:
        hints |= {f"{keys[0]}.{name}": Switch(hint, "") for name, hint in get_type_hints(import_path(path[1])).items()}
    if unknown := re.search(r"Option '(\w+)' is not accepted", message):
        has = ", ".join(inspect.signature(import_path(path[1])).parameters) if path else ""
        return f"--{switch}.{unknown[1]} is unknown; " + (f"choose from {has}" if has else "there are none")
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    got = yaml.safe_load(value[1]) if value else None
    without_quotes = " without quotes" * ("type: <class 'int'>" in message or "type: <class 'float'>" in message)
    kind = describe(hints[switch].hint) if switch in hints else "a value that its class takes"
    return f"--{switch} must be {kind}, got {'null' if got is None else repr(got)}{without_quotes}"


def describe(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is Literal:
        return "one of " * (len(get_args(hint)) > 1) + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is list:
        items = [re.sub("^an? ", "", describe(item)) for item in alternatives(get_args(hint)[0])]
        return f"one or more {' or '.join(f'{item}s' for item in items)}"
    if len(alternatives(hint)) > 1:
        return " or ".join(map(describe, alternatives(hint)))
    return KINDS.get(get_origin(hint) or hint) or f"a {getattr(hint, '__name__', hint)}"


def class_error(namespace: Namespace, switches: Switches) -> str | None:
    """What a class of the user's raises when it is made, after its switch; None if all can be made."""
    for switch in switches:
        values = namespace[switch]
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, Namespace) and "class_path" in value:
                try:
                    import_path(value.class_path)(**vars(value.get("init_args", Namespace())))
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
    except (ArgumentError, ValueError, OSError) as error:
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
