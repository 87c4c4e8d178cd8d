"""Values of switches: turn a given value into the type of its switch, and a value into YAML again.

What is typed in a command, or in YAML without quotes, is read by the type of its switch:

    typed         text           list of texts    number    mapping or text    any value
    0.6           "0.6"          ["0.6"]          0.6       "0.6"              0.6
    null          "null"         ["null"]         None      "null"             None
    [END]         "[END]"        ["[END]"]        error     "[END]"            ["END"]
    ["a", "b"]    as typed       ["a", "b"]       error     as typed           ["a", "b"]
    {a: 1}        "{a: 1}"       ["{a: 1}"]       error     {"a": 1}           {"a": 1}

None stands where the type allows it. An only item of a list needs no brackets. A file unsets a text by null.
"""

import builtins
import contextlib
import inspect
import math
import pathlib
import pkgutil
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import yaml

from pspo.terminal import one_line

NUMBERS = {bool: (bool, "true or false"), int: (Integral, "a whole number"), float: (Real, "a number")}
CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False, ".nan": math.nan, ".inf": math.inf,
             "-.inf": -math.inf}  # fmt: skip


class Typed(str):
    """A text as typed, in a command or without quotes in YAML; the type of its switch decides what it means."""


class _Loader(yaml.SafeLoader):
    """Read null, lists, mappings and texts (`Typed` if without quotes); refuse a key that stands twice."""

    yaml_implicit_resolvers: ClassVar = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}  # << merges mappings

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                raise yaml.YAMLError(f"{key.value} stands twice, the second time in line {key.start_mark.line + 1}")
        return {str(name): value for name, value in super().construct_mapping(node, deep).items()}

    def construct_text(self, node: yaml.ScalarNode) -> str | None:
        if node.style is not None:
            return node.value
        return None if scalar(node.value) is None else Typed(node.value)


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


def load_yaml(text: str | bytes) -> Any:
    """Read a YAML text by `_Loader`; ValueError if it is not valid."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(one_line(str(error))) from error


def scalar(text: str) -> Any:
    """What a text without quotes means in YAML: null, a truth value, a number such as 1e-6, or else the text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if re.match(r"[-+.]*[0-9]", text):
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return str(text)


class _Dumper(yaml.SafeDumper):
    """Write in quotes any text that `scalar` would not read as a text, or YAML as another."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if scalar(text) == text and "\x85" not in text else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def to_yaml(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read(kind: Any, given: Any, switch: str) -> Any:
    """Read what was given as a value of type ``kind``; ValueError names the switch if the type does not take it."""
    if isinstance(given, Typed):
        given = read_typed(kind, given, switch)
    parts = get_args(kind)
    match get_origin(kind) or kind:
        case typing.Union | types.UnionType:
            return read_union(parts, given, switch)
        case builtins.list | builtins.tuple | abc.Sequence:
            return [read(parts[0] if parts else Any, item, switch) for item in as_list(given)]
        case builtins.dict:
            items = as_mapping(given, switch).items()
            return {str(name): read(parts[1] if parts else Any, item, f"{switch}.{name}") for name, item in items}
        case builtins.str | pathlib.Path:
            if not isinstance(given, str):
                raise ValueError(f"--{switch} must be a text, got {given!r}: write it in quotes")
            return kind(given)
        case builtins.bool | builtins.int | builtins.float:
            accepted, name = NUMBERS[kind]
            value = scalar(given) if isinstance(given, str) else given
            if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"--{switch} must be {name}, got {given}")
            return kind(value)
        case typing.Literal:
            choices = {str(choice): choice for choice in parts}
            if str(given) not in choices:
                raise ValueError(f"--{switch} must be one of {', '.join(choices)}, got {given}")
            return choices[str(given)]
        case base if inspect.isabstract(base):
            return read_class(base, given, switch)
        case _ if is_dataclass(kind):
            return make(kind, as_mapping(given, switch), switch)
        case _ if isinstance(given, Mapping | list):
            return read(dict if isinstance(given, Mapping) else list, given, switch)
        case _:
            return scalar(given) if isinstance(given, Typed) else given


def read_typed(kind: Any, text: Typed, switch: str) -> Any:
    """Read what was typed, by the module's table: as YAML, but a type that takes texts gets the text, unless brackets
    make it a list or a mapping that the type takes, too.
    """
    kinds = (kind, *get_args(kind))
    if not any(part in (str, pathlib.Path, list[str]) for part in kinds):
        try:
            return load_yaml(text)
        except ValueError as error:
            raise ValueError(f"--{switch} {text}: {error}") from error
    if {"[": list, "{": dict}.get(text[:1], str) in map(get_origin, kinds):
        with contextlib.suppress(ValueError):  # a text such as [qk]_proj is no list
            value = load_yaml(text)
            if isinstance(value, dict) or not any(isinstance(item, Typed) for item in value):  # as [END] has one
                return value
    return str(text)


def as_list(given: Any) -> list[Any]:
    """The items of a list; an only item may stand alone."""
    if isinstance(given, list | tuple):
        return list(given)
    return [] if given is None or given == "" else [given]


def as_mapping(given: Any, switch: str) -> Mapping[Any, Any]:
    if isinstance(given, Mapping):
        return given
    raise ValueError(f"--{switch} must be a mapping such as {{name: value}}, got {given!r}")


def read_union(kinds: tuple[Any, ...], given: Any, switch: str) -> Any:
    """Read by the first type that takes the value, trying text late and lists last; else raise one type's error."""
    if given is None and types.NoneType in kinds:
        return None
    errors = []
    for kind in sorted(kinds, key=lambda kind: (get_origin(kind) is list, kind is str)):
        if kind is not types.NoneType:
            try:
                return read(kind, given, switch)
            except ValueError as error:
                errors.append(error)
    path = given.get("class_path") if isinstance(given, Mapping) else given
    is_path = isinstance(path, str) and re.search(r"[a-z_]\w*\.[a-z_]", path, re.IGNORECASE)  # of a class or function
    raise errors[-1 if str in kinds or is_path else 0]


def make(kind: type, given: Mapping[str, Any], switch: str) -> Any:
    """Make an object from arguments, each read by its type; ValueError for arguments that the class does not take."""
    hints = {}
    with contextlib.suppress(NameError):  # a type that is imported for type checkers alone
        hints = get_type_hints(kind.__init__)
    arguments = {name: read(hints.get(name, Any), item, f"{switch}.{name}") for name, item in given.items()}
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        names = ", ".join(inspect.signature(kind).parameters)
        raise ValueError(f"--{switch} {kind.__name__}({names}): {error}") from error


def read_class(base: Any, given: Any, switch: str) -> Any:
    """Make an object of a class, or find a function, by its import path, or a class of pspo by its name."""
    spec = {"class_path": given} if isinstance(given, str) else given
    is_spec = isinstance(spec, Mapping) and spec.keys() <= {"class_path", "init_args"}
    path = spec.get("class_path") if is_spec else None
    if not isinstance(path, str):
        raise ValueError(f"--{switch} must be the name or import path of a class or function, got {given!r}")
    names = class_names(base)
    if path not in names and "." not in path:
        raise ValueError(f"--{switch} {path}: no such class; choose from {', '.join(names)}, or give an import path")
    try:
        found = names.get(path) or pkgutil.resolve_name(path)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"--{switch} {path}: {error}") from error
    arguments = as_mapping(spec.get("init_args") or {}, f"{switch}.init_args")
    is_class = inspect.isclass(found)
    if base is abc.Callable or (is_class and issubclass(found, base)):
        value = make(found, arguments, switch) if is_class else found
        if callable(value) and (is_class or not arguments):
            return value
    raise ValueError(f"--{switch}: {path} is no {base.__name__.lower()} that takes these arguments")


def class_names(base: Any) -> dict[str, type]:
    """The classes of pspo, by name, that a switch of type ``base`` takes."""
    found = {}
    for part in base.__subclasses__():
        found |= class_names(part)
        if part.__module__.startswith("pspo.") and not inspect.isabstract(part):
            found[part.__name__] = part
    return dict(sorted(found.items()))


def yaml_value(value: Any) -> Any:
    """A value as YAML writes it: a section is a mapping, a function its import path, an object its class and arguments.

    ValueError if an object could not be made again from config.yaml.
    """
    if isinstance(value, Mapping):
        return {str(name): yaml_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [yaml_value(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not callable(value):  # a section
        parts = [part.name for part in fields(value) if part.init and part.metadata.get("is_switch", True)]
        return {name: yaml_value(getattr(value, name)) for name in parts}
    if not callable(value):
        return str(value) if isinstance(value, pathlib.Path) else value
    if hasattr(value, "__qualname__"):  # a function
        return import_path(value)
    kind = type(value)
    arguments = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if hasattr(value, name):
            arguments[name] = yaml_value(getattr(value, name))
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{kind.__name__} does not keep its argument {name}: make it a dataclass")
    return {"class_path": import_path(kind)} | ({"init_args": arguments} if arguments else {})


def import_path(named: Any) -> str:
    """The import path of a class or function, through its package if the package offers it: pspo.losses.Clip."""
    is_of_object = inspect.ismethod(named) and not inspect.isclass(named.__self__)
    if is_of_object or "<" in named.__qualname__:  # a lambda, or defined inside a function
        raise ValueError(f"{named!r} has no name that config.yaml could hold: define it at the top of a module")
    package = named.__module__.rpartition(".")[0]
    is_offered = getattr(sys.modules.get(package), named.__qualname__, None) is named
    return f"{package if is_offered else named.__module__}.{named.__qualname__}"
