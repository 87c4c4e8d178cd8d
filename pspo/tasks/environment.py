"""The protocol of text environments, and the import of a class that a switch names."""

import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pspo.tasks.problem import Messages, Problem


class Environment(Protocol):
    """One object for each row of a rollout; ``examples/calculator.py`` has one.

    Model output is hostile: an environment must not run what the model writes. What it raises ends the training.

    With an attribute ``tools``, functions or JSON schemas, the chat template shows these to the model, and ``step``
    gets the calls, [(name, arguments), ...], as its second argument. An attribute ``role`` says whose turns the
    observations are: "user" without it, "tool" for a tool's answers. ``max_turns`` limits the model's turns: 4
    without it.
    """

    def reset(self, problem: Problem) -> str | Messages:
        """Begin an episode; returns the prompt, always the same one for a problem: the rows of a group start alike."""

    def step(self, text: str, *calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, float, bool]:
        """Answer a turn of the model's: text for the user's next turn, a reward, and true if the episode is over."""


MakeEnvironment = Callable[[], Environment]


def load_class(spec: dict[str, Any] | None, switch: str) -> Callable[[], Any] | None:
    """Import the class that a switch names as {"class_path": ..., "init_args": {...}}.

    Returns what makes an object, None for None; ValueError if there is no such class, or the arguments do not fit it.
    """
    if spec is None:
        return None
    arguments = spec.get("init_args") or {}
    try:
        cls = pkgutil.resolve_name(spec["class_path"])
        inspect.signature(cls).bind(**arguments)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        rule = "give the import path of a class, or class_path and init_args with its arguments"
        raise ValueError(f"--{switch} {spec} cannot be imported ({error}): {rule}") from error
    return partial(cls, **arguments)
