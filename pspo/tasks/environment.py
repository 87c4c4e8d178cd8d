"""Environment: what answers the model's turns, where an episode has several."""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from pspo.tasks.problem import Messages, Problem


class Environment(Protocol):
    """One object for each row of a rollout, made without arguments; `pspo.tasks.calculator.Calculator` is an example.

    Model output is hostile: an environment must not run what the model writes. What it raises ends the training.

    With an attribute ``tools``, functions or JSON schemas, the chat template shows these to the model, and ``step``
    gets the calls, [(name, arguments), ...], as its second argument. An attribute ``role`` says whose turns the
    observations are: "user" without it, "tool" for a tool's answers.
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


def load_environment(path: str | None) -> MakeEnvironment | None:
    """Import a class, or a function that makes environments; raises ValueError if there is none."""
    if path is None:
        return None
    rule = "give the import path of a class, such as pspo.tasks.calculator.Calculator"
    environment = import_for("rollout.environment", path, rule)
    try:
        example = environment()
    except TypeError as error:
        rule = "must be a class, or a function that makes an environment, and take no arguments"
        raise ValueError(f"--rollout.environment {path} {rule} ({error})") from error
    if not (hasattr(example, "reset") and hasattr(example, "step")):
        raise ValueError(f"--rollout.environment {path} must make objects with the methods reset and step")
    return environment
