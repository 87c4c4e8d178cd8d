"""Switches and configuration files: forgiving in how a value is written, refused in one sentence.

The sentence names the switch as the user types it: `Refused` carries it through jsonargparse's own errors.
"""

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace
from jsonargparse._typehints import ActionTypeHint
from jsonargparse._util import NestedArg, import_object
from jsonargparse.typing import PositiveInt

from pspo.records.files import flat

KINDS = {int: "an integer", PositiveInt: "an integer above 0", float: "a number", bool: "true or false", str: "text",
         dict: "a mapping", Callable: "a function", NoneType: "null"}  # fmt: skip


class Refused(TypeError):
    """A value is refused; ``switch`` is relative to the class whose parameter it is, "" for the class itself."""

    def __init__(self, rule: str, switch: str = "") -> None:
        super().__init__(f"--{switch} {rule}")
        self.rule, self.switch = rule, switch


class Parser(ArgumentParser):
    """Parser of which every switch is a `Switch`; jsonargparse makes another one for the parameters of a class."""

    def add_class_arguments(self, *args: Any, **options: Any) -> list[str]:
        names = super().add_class_arguments(*args, **options)
        for action in self._actions:
            if type(action) is ActionTypeHint:
                action.__class__ = Switch
        return names

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if unknown := re.search(r"(?:unrecognized arguments: --|ption ')([\w.]+)", message):
            has = ", ".join(action.dest for action in self._actions if isinstance(action, Switch))
            raise Refused(f"is unknown; choose from {has}" if has else "is unknown; there are none", unknown[1]) from ex
        super().error(message, ex)


class Switch(ActionTypeHint):
    """Switch that converts its value first, and refuses what still does not fit."""

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        try:
            return super()._check_type(convert(value, self._typehint), append, cfg, mode)
        except (TypeError, ValueError) as error:
            inner: BaseException | None = error
            while inner and not isinstance(inner, Refused):
                inner = inner.__cause__
            if inner:
                raise Refused(inner.rule, f"{self.dest}.{inner.switch}".rstrip(".")) from error
            value = value.val if isinstance(value, NestedArg) else value
            got = "null" if value is None else repr(value)
            if isinstance(value, int | float) and str in alternatives(self._typehint):
                got += " without quotes"
            raise Refused(f"must be {describe(self._typehint)}, got {got}", self.dest) from error

    def instantiate_classes(self, value: Any) -> Any:
        try:
            return super().instantiate_classes(value)
        except (TypeError, ValueError) as error:  # of a class of the user's
            first = error.__cause__ if str(error).startswith("Does not validate") else None  # of a union's types
            raise ValueError(f"--{self.dest}: {first or error}") from error


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


def alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def convert(value: Any, hint: Any) -> Any:
    """The value as its type wants it: a list of one value, 100 for 1e2, a class by name in any case."""
    if isinstance(value, NestedArg) or value is None or value == "null":
        return value
    loaded = value
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(yaml.YAMLError):
            loaded = yaml.safe_load(value)
    for option in alternatives(hint):
        if get_origin(option) is list and not (isinstance(loaded, str) and str in alternatives(hint)):
            return [convert(item, *get_args(option)) for item in (loaded if isinstance(loaded, list) else [loaded])]
        if option in (int, PositiveInt) and isinstance(value, str | float):
            with contextlib.suppress(ValueError):
                number = float(value)
                return int(number) if number.is_integer() and abs(number) < 2**53 else value
        if inspect.isabstract(option) and option is not Callable:
            return resolve(loaded, option)
    return value


def resolve(value: Any, base: type) -> Any:
    """A class or function, named by import path or in any case, alone or with parameters; Refused if there is none."""
    if isinstance(value, dict | Namespace) and "class_path" in value:
        value = value.clone() if isinstance(value, Namespace) else dict(value)
        value["class_path"] = resolve(value["class_path"], base)
    if not isinstance(value, str):
        return value
    if "." not in value:
        known = {cls.__name__.lower(): cls.__name__ for cls in subclasses(base)}
        if value.lower() in known:
            return known[value.lower()]
        close = difflib.get_close_matches(value.lower(), known, 1)
        names = ", ".join(cls.__name__ for cls in subclasses(base) if cls.__module__.startswith("pspo."))
        choice = f"; did you mean {known[close[0]]}?" if close else f": choose from {names}, or an import path"
        raise Refused(f"has no {value!r}{choice}")
    try:
        found = import_object(value)
    except Exception as error:  # a module of the user's raises anything
        lost = isinstance(error, ModuleNotFoundError) and error.name == value.partition(".")[0]
        hint = "; its file must be in the current folder or on PYTHONPATH" if lost else ""
        raise Refused(f"cannot import {value}: {type(error).__name__}: {error}{hint}") from error
    if inspect.isclass(found) and (not issubclass(found, base) or inspect.isabstract(found)):
        raise Refused(f"needs a subclass of {base.__name__} with all its methods, and {value} is none")
    return value


def subclasses(base: type) -> list[type]:
    """All classes below this one that can be made."""
    below = [cls for child in base.__subclasses__() for cls in (child, *subclasses(child))]
    return [cls for cls in below if not inspect.isabstract(cls)]


def check_names(parser: ArgumentParser, words: Sequence[str] | dict[str, Any]) -> dict[str, str]:
    """Raise ValueError for an unknown switch, or key of a file or dict; returns {switch: file} of what files set."""
    switches = {action.dest: action.help or "" for action in parser._actions if isinstance(action, Switch)}
    firsts = {name.partition(".")[0]: name for name in reversed(switches) if "." in name}  # of each section

    def check_keys(keys: Iterable[str], where: str = "") -> None:
        for key in keys:
            if leaf_of(key, switches) is None and key not in firsts:
                raise ValueError(f"{where}{key} is unknown{suggestion(key, switches)}")

    if isinstance(words, dict):
        check_keys(flat(words))
        return {}
    known, files = {option.lstrip("-") for option in parser._option_string_actions}, {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.lstrip("-").partition("=")
        value, leaf = value if equals else following, leaf_of(name, switches)
        if not re.match("--?[A-Za-z]", word):
            continue  # a value
        if name == "config" and value:
            check_keys(keys := keys_of_file(value), f"--config {value}: ")
            files |= {leaf_of(key, switches) or key: value for key in keys}
        elif name in firsts and not Path(value).is_file():
            raise ValueError(f"--{name} is a section; did you mean --{firsts[name]}?")
        elif name not in known and leaf is None:
            raise ValueError(f"{word.partition('=')[0]} is unknown{suggestion(name, switches, '--')}")
        else:
            files.pop(leaf, None)
    return files


def leaf_of(name: str, switches: Iterable[str]) -> str | None:
    """The switch that this is, or a parameter of."""
    return next((switch for switch in switches if f"{name}.".startswith(f"{switch}.")), None)


def keys_of_file(path: str) -> Iterable[str]:
    """The keys of a YAML file, joined by dots; raises ValueError if it cannot be read."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_UniqueKeys) or {}
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"--config {path}, line {error.problem_mark.line + 1}: {error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold sections with fields, as configs/tiny.yaml does")
    return flat(content)


class _UniqueKeys(yaml.SafeLoader):
    """Refuse a key that comes twice in a mapping; YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.composer.ComposerError(None, None, f"{twice[0]} comes twice", node.start_mark)
        return node


def suggestion(name: str, switches: dict[str, str], dashes: str = "") -> str:
    """The switches perhaps meant: of almost the same name, of the same name elsewhere, or with it in their help."""
    name = name.lower().replace("-", "_")
    lasts = {switch: switch.rpartition(".")[2] for switch in switches}
    own = name.rpartition(".")[2]
    close = difflib.get_close_matches(own, lasts.values(), 1, 0.8)
    meant = (
        difflib.get_close_matches(name, switches, 1, 0.85)
        or [switch for switch in switches if lasts[switch] in (close or [own])]
        or [switch for switch, text in switches.items() if own.replace("_", " ") in text]
    )
    return f"; did you mean {' or '.join(dashes + switch for switch in meant[:2])}?" if meant else "; --help lists all"
