"""The protocol of text environments, and the import of a class that a switch names."""

import contextlib
import copy
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from pspo.errors import RewardError
from pspo.tasks.problem import Messages, Problem


class Environment(Protocol):
    """One object for each row of a rollout; ``examples/calculator.py`` has one. It must not run what the model writes.

    It may have ``tools``, functions or JSON schemas that the chat template shows to the model: then ``step`` gets the
    calls, [(name, arguments), ...], as its second argument; ``role`` of the observations' turns: "user", or "tool";
    ``max_turns`` of the model: 4; and a method ``close``, called once after its rollout, also one that fails.
    """

    def reset(self, problem: Problem) -> str | Messages:
        """Begin an episode; returns the prompt, the same in every call for a problem. An object may be reset again."""

    def step(self, text: str, *calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, float, bool]:
        """Answer a turn of the model's: text for the user's next turn, a reward, and true if the episode is over."""


MakeEnvironment = Callable[[], Environment]


def open_environment(make_environment: MakeEnvironment, stack: contextlib.ExitStack) -> Environment:
    """Make an environment, which the stack closes."""
    environment = make_environment()
    if hasattr(environment, "close"):
        stack.callback(environment.close)
    return environment


def reset_environment(environment: Environment, problem: Problem, expected: str | Messages | None) -> str | Messages:
    """Begin an episode; RewardError if its prompt is not the expected one, None for any."""
    prompt = copy.deepcopy(environment.reset(problem))  # a chat may grow in the episode
    if expected not in (None, prompt):
        what = f"{type(environment).__name__}.reset gave two prompts for a problem, {expected!r:.80} and {prompt!r:.80}"
        raise RewardError(f"{what}: it must return the same one for the same problem")
    return prompt


def make_prompts(make_environment: MakeEnvironment, problems: Sequence[Problem]) -> tuple[list[str | Messages], Any]:
    """The environment's prompt of each problem, and its tools."""
    with contextlib.ExitStack() as stack:
        environment = open_environment(make_environment, stack)
        prompts = [reset_environment(environment, problem, None) for problem in problems]
        return prompts, getattr(environment, "tools", None)


def load_class(spec: dict[str, Any] | None, switch: str) -> Callable[[], Any] | None:
    """The class that a switch names as {"class_path": ..., "init_args": {...}}, with these arguments; None for None."""
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
