"""Environment: what answers the model's turns, where an episode has several."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pspo.tasks.problem import Messages, Problem


class Environment(Protocol):
    """One object for each row of a rollout, made with the init_args of its switch alone; `pspo.tasks.calculator.Calculator` is an example.

    Model output is hostile: an environment must not run what the model writes. What it raises ends the training.

    With an attribute ``tools``, functions or JSON schemas, the chat template shows these to the model, and ``step``
    gets the calls, [(name, arguments), ...], as its second argument. An attribute ``role`` says whose turns the
    observations are: "user" without it, "tool" for a tool's answers. An attribute ``max_turns`` limits the turns of the
    model in an episode, 4 without it.
    """

    def reset(self, problem: Problem) -> str | Messages:
        """Begin an episode; returns the prompt, always the same one for a problem: the rows of a group start alike."""

    def step(self, text: str, *calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, float, bool]:
        """Answer a turn of the model's: text for the user's next turn, a reward, and true if the episode is over."""


MakeEnvironment = Callable[[], Environment]


def import_path(path: str) -> Any:
    """Import a class or function."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def import_for(switch: str, path: str, rule: str) -> Any:
    """Import the class or function that a switch names; raises ValueError with the rule if there is none."""
    try:
        return import_path(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--{switch} {path} cannot be imported ({error}): {rule}") from error


def import_spec(switch: str, spec: str | dict[str, Any], rule: str) -> tuple[Any, dict[str, Any]]:
    """Import what a switch names by its import path, or by {class_path, init_args}; returns it and its arguments."""
    if isinstance(spec, str):
        return import_for(switch, spec, rule), {}
    if "class_path" not in spec or spec.keys() - {"class_path", "init_args"}:
        raise ValueError(f"--{switch} {spec} must have a class_path, and may have init_args: {rule}")
    return import_for(switch, spec["class_path"], rule), spec.get("init_args") or {}


def load_environment(spec: str | dict[str, Any] | None) -> MakeEnvironment | None:
    """Import a class, or a function that makes environments; raises ValueError if there is none."""
    if spec is None:
        return None
    rule = "give the import path of a class, such as pspo.tasks.calculator.Calculator"
    environment, init_args = import_spec("rollout.environment", spec, rule)
    name = spec if isinstance(spec, str) else spec["class_path"]
    make_environment = partial(environment, **init_args) if init_args else environment
    try:
        example = make_environment()
    except TypeError as error:
        rule = "must be a class, or a function that makes an environment, and take no arguments but its init_args"
        raise ValueError(f"--rollout.environment {name} {rule} ({error})") from error
    if not (hasattr(example, "reset") and hasattr(example, "step")):
        raise ValueError(f"--rollout.environment {name} must make objects with the methods reset and step")
    return make_environment
