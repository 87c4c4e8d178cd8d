"""Values of switches: what a text means, by the type that a switch has.

A text is taken as it was typed where the type is a text: from a command, from YAML with or without quotes, and from
Python. Other types read it: as a number, a truth value, null, the import path of a class or function, or, in a command,
as YAML's lists and mappings.

Where a list is due, one item may stand alone. In a command, a list of texts is a whole list in brackets of items in
quotes, such as ["a", "b"]; anything else is one text: [END].
"""

import difflib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import yaml

from pspo.cli.files import Unquoted, load_yaml, scalar, untyped
from pspo.cli.terminal import one_line

METHODS = {file.stem: file for file in sorted((Path(__file__).parents[1] / "assets" / "methods").glob("*.yaml"))}
NUMBERS = {bool: "true or false", int: "a whole number", float: "a number"}
LISTS = {list: list, Sequence: list, Iterable: list, tuple: tuple, set: set}


class Word(str):
    """A word of a command, which its type reads."""


class Value(NamedTuple):
    """A value as config.yaml has it, and as the configuration does: import path and arguments, and the object."""

    plain: Any
    made: Any


def read(kind: Any, given: Any, switch: str) -> Value:
    """A value of this type; raises ValueError, naming the switch, for one that it does not take."""
    kind = object if kind is Any else kind  # which is a class, too
    origin = get_origin(kind) or kind
    parts = get_args(kind)
    if origin in (Union, types.UnionType):
        return read_union(parts, given, switch)
    if origin in LISTS:
        kinds = cycle([part for part in parts if part is not ...] or [Any])
        items = [read(next(kinds), item, switch) for item in as_list(kind, given, switch)]
        return Value([item.plain for item in items], LISTS[origin](item.made for item in items))
    if kind is str:
        if not isinstance(given, str) or is_null(given):
            raise ValueError(f"--{switch} must be a text, got {given!r}: write it in quotes")
        return same(str(given))
    if origin is Literal:
        value = scalar(given) if isinstance(given, str) and given not in parts else given
        if value not in parts:
            raise ValueError(f"--{switch} must be one of {', '.join(map(str, parts))}, got {given}")
        return same(parts[parts.index(value)])
    if kind in NUMBERS:
        return read_number(kind, given, switch)
    is_plugin = origin is Callable or inspect.isabstract(kind)
    if inspect.isclass(origin) and not (is_plugin or is_dataclass(kind) or origin in (dict, Mapping, object)):
        text = str(given) if isinstance(given, str) else given  # of which a Path or a Fraction is made
        return Value(text, call(kind, [text], {}, switch))
    if isinstance(given, Word):
        given = load_word(given, switch)
    if not isinstance(given, Mapping) and (is_dataclass(kind) or origin in (dict, Mapping)):
        raise ValueError(f"--{switch} must be a mapping such as {{name: value}}, got {given!r}")
    if is_plugin or (is_dataclass(kind) and "class_path" in given):
        return read_class(origin, given, switch)
    if is_dataclass(kind):
        return make(kind, given, switch)
    if isinstance(given, Mapping):
        return read_items(dict.fromkeys(given, (*parts, Any, Any)[1]), given, switch)
    return same(untyped(given))


def same(value: Any) -> Value:
    return Value(value, value)


def is_null(given: Any) -> bool:
    """True if nothing is given, as by null without quotes in YAML."""
    return given is None or (isinstance(given, Unquoted) and scalar(given) is None)


def load_word(word: str, switch: str) -> Any:
    """A word as YAML; raises ValueError if it is none."""
    try:
        return load_yaml(word)
    except yaml.YAMLError as error:
        raise ValueError(f"--{switch} {word}: {one_line(str(error))}") from error


def read_union(parts: tuple[Any, ...], given: Any, switch: str) -> Value:
    """The value of the first type that takes it, a text last; if none does, its error, or the first one's."""
    takes_text = str in parts or list[str] in parts
    unset = isinstance(given, Word) and not takes_text and scalar(given) is None
    if types.NoneType in parts and (is_null(given) or unset):
        return same(None)
    errors = []
    for part in sorted(parts, key=lambda part: part is str):
        value = given
        if str in parts and isinstance(given, str) and get_origin(part) in (dict, list):
            value = structure(given) if isinstance(given, Word) else None
            if not isinstance(value, get_origin(part)):
                continue
        if part is not types.NoneType:
            try:
                return read(part, value, switch)
            except ValueError as error:
                errors.append(error)
    raise errors[-1 if str in parts else 0]


def structure(word: str) -> Any:
    """The mapping, or the list of items in quotes, that a word is; None for a text."""
    with suppress(yaml.YAMLError):
        value = load_yaml(word) if word[:1] in ("{", "[") else None
        if isinstance(value, dict) or (isinstance(value, list) and all(type(item) is str for item in value)):
            return value
    return None


def as_list(kind: Any, given: Any, switch: str) -> list[Any]:
    """The items of a list, of which one may stand alone."""
    if isinstance(given, Word) and list[str] in (kind, *get_args(kind)):
        items = structure(given)
        if isinstance(items, list):
            return items
        return [given] if given else []
    if isinstance(given, Word):  # brackets may be left out
        given = load_word(given if given.startswith("[") else f"[{given}]", switch)
    if isinstance(given, list | tuple | set):
        return list(given)
    return [given]


def read_number(kind: type, given: Any, switch: str) -> Value:
    value = scalar(given) if isinstance(given, str) else given
    accepted = (int, float) if kind is float else kind
    if isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)):
        with suppress(OverflowError):
            return same(kind(value))
    raise ValueError(f"--{switch} must be {NUMBERS[kind]}, got {given}")


def read_items(kinds: Mapping[str, Any], given: Mapping[str, Any], switch: str) -> Value:
    """Named values, each of its type."""
    items = {str(name): read(kinds[name], item, f"{switch}.{name}") for name, item in given.items()}
    plain = {name: item.plain for name, item in items.items()}
    return Value(plain, {name: item.made for name, item in items.items()})


def make(kind: Callable, given: Mapping[str, Any], switch: str) -> Value:
    """The arguments of a class, with those at their defaults, and its object; ValueError for arguments unfit for it."""
    parameters = inspect.signature(kind).parameters
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise ValueError(f"--{switch} {kind.__name__}: {error}; it takes {', '.join(parameters) or 'none'}") from error
    try:
        hints = get_type_hints(kind.__init__)
    except NameError:  # a type that is imported for type checkers alone
        hints = {}
    values = read_items({name: hints.get(name, Any) for name in given}, given, switch)
    plain = {}
    for name, part in parameters.items():
        if name in given:
            plain[name] = values.plain[name]
        elif isinstance(part.default, str | int | float | list | tuple | dict | None):
            plain[name] = plain_setting(part.default)
    return Value(plain | values.plain, call(kind, [], values.made, switch))


def call(kind: type, arguments: list[Any], named: dict[str, Any], switch: str) -> Any:
    """An object of a class; ValueError, naming the switch, for arguments that it refuses."""
    try:
        return kind(*arguments, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--{switch} {kind.__name__}: {error}") from error


def read_class(base: Any, given: Any, switch: str) -> Value:
    """An object of a class, or a function, that is named by its import path or, of pspo's classes, by its name."""
    spec = {"class_path": given} if isinstance(given, str) else given
    is_spec = isinstance(spec, Mapping) and spec.keys() <= {"class_path", "init_args"} and "class_path" in spec
    if not is_spec or not isinstance(spec["class_path"], str):
        raise ValueError(f"--{switch} must be the name or import path of a class or function, got {given!r}")
    path = str(spec["class_path"])
    arguments = spec.get("init_args") or {}
    found = class_names(base).get(path) or find_object(path, base, switch)
    if not inspect.isclass(found):
        if not callable(found) or base is not Callable or arguments:
            raise ValueError(f"--{switch}: {path} is no {getattr(base, '__name__', 'class')} that takes arguments")
        return Value(path, found)
    is_callable = any("__call__" in vars(part) for part in found.__mro__)
    if not (is_callable if base is Callable else issubclass(found, base)):
        raise ValueError(f"--{switch}: {path} is no {getattr(base, '__name__', 'class of functions')}")
    value = make(found, arguments, switch)
    plain = {"class_path": import_path(found)}
    return Value(plain | {"init_args": value.plain} if value.plain else plain, value.made)


def find_object(path: str, base: Any, switch: str) -> Any:
    """What an import path names; ValueError, with a name that may be meant, if there is nothing."""
    if "." not in path:
        names = class_names(base)
        message = f"--{switch} {path}: no such class; choose from {', '.join(names)}, or give an import path"
        similar = difflib.get_close_matches(path, names, n=1)
        if path.lower() in METHODS:
            similar = [f"--config {path.lower()}"]
        raise ValueError(f"{message}; did you mean {similar[0]}?" if similar else message)
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--{switch} {path}: {error}") from error


def class_names(base: Any) -> dict[str, type]:
    """The classes of pspo that a switch of this type takes, by name."""
    found = {}
    for part in base.__subclasses__() if inspect.isabstract(base) or inspect.isclass(base) else ():
        found |= class_names(part)
        if part.__module__.startswith("pspo.") and not inspect.isabstract(part):
            found[part.__name__] = part
    return dict(sorted(found.items()))


def import_path(value: Any) -> str:
    """The import path of a function or class, from the package where that offers it, such as pspo.losses.Clip."""
    module = value.__module__
    package = module.rpartition(".")[0]
    if getattr(sys.modules.get(package), value.__qualname__, None) is value:
        module = package
    return f"{module}.{value.__qualname__}"


def plain_setting(value: Any) -> Any:
    """A setting as YAML writes it: objects become import paths and arguments."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain_setting(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_setting(part) for part in value]
    if callable(value):  # a function, a class, a surrogate or a reward
        return import_spec(value)
    return str(value) if isinstance(value, Path) else value


def import_spec(value: Any) -> str | dict[str, Any]:
    """The import path of a function or class, or of an object's class, with its arguments, which it must keep by name.

    Raises ValueError for what config.yaml could not make again.
    """
    is_object = not hasattr(value, "__qualname__")
    kind = type(value) if is_object else value
    if "<" in kind.__qualname__:  # a lambda or inside a function
        raise ValueError(f"{value!r} has no name that config.yaml could hold: define it at the top of a module")
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items() if is_object else ():
        if hasattr(value, name):
            arguments[name] = plain_setting(getattr(value, name))
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{kind.__name__} does not keep its argument {name}: make it a dataclass")
    return {"class_path": import_path(kind), "init_args": arguments} if arguments else import_path(kind)
