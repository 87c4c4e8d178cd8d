"""Problems, the records that every data source is converted to, and the protocol of environments that pose them."""

import contextlib
import copy
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Protocol

from pspo.errors import UserCodeError

Messages = list[dict[str, Any]]  # a chat: [{"role": "user", "content": "..."}, ...]
AnswerKind = Literal["number", "text", "none"]
SYSTEM_PROMPT = (  # the paper's
    "You are a careful math solver. Think through the solution and show the steps. Use English only. "
    "End the response with the final answer only in the format: '#### <final numeric answer only>'"
)


@dataclass(frozen=True)
class Problem:
    """A task for the model, and what its completions are scored against."""

    prompt: str | Messages  # the user turn of the chat; or a whole chat up to where the assistant begins
    answer: Fraction | str | None = None  # gold answer of --data.answer_kind; None for a task without one
    fields: dict[str, Any] = field(default_factory=dict, hash=False)  # other columns by name; rewards may ask for them
    source: str = ""  # data set: gsm8k, math, ...
    category: str = ""  # this and the next two in the source's own form
    level: str = ""
    solution: str = ""

    def record(self) -> dict[str, Any]:
        """Return prompt, gold answer and fields, if any, in JSON's types; others as texts of up to 80 characters."""
        gold = None if self.answer is None else str(self.answer)
        fields = json.loads(json.dumps(self.fields, default=lambda value: f"{value!s:.80}"))
        return {"prompt": self.prompt, "gold": gold} | ({"fields": fields} if fields else {})


def content_text(turn: dict[str, Any]) -> str:
    """The text of a turn, its parts joined, "" if it has none; ValueError for a part that is not text."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'a part of a turn must be {{"type": "text", "text": "..."}}, not of type {kind}')
    return "".join(part["text"] for part in content)


def check_chat(chat: Messages) -> None:
    """Raise ValueError unless the chat is a list of turns, the last of which the assistant can answer."""
    if not isinstance(chat, list):
        raise ValueError(f"a prompt, also an environment's, must be a text or a list of turns, not {chat!r:.80}")
    for number, turn in enumerate(chat, 1):
        is_turn = isinstance(turn, dict) and isinstance(turn.get("role"), str)
        if not is_turn or not (isinstance(turn.get("content"), str) or turn.get("content") or turn.get("tool_calls")):
            raise ValueError(f'turn {number} of the list must be {{"role": "...", "content": "..."}}, not {turn!r:.80}')
        content_text(turn)
    if not chat or chat[-1]["role"] not in ("user", "tool"):
        raise ValueError("a chat must end with a turn of role user or tool")
    check_unicode(chat, "a prompt")


def check_unicode(value: Any, what: str) -> None:
    """Raise ValueError for a text, also inside lists and objects, that no file can hold."""
    if half := re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False, default=str)):
        raise ValueError(f"{what} has half of a surrogate pair, {half[0]!a}: remove it")


class Environment(Protocol):
    """One object for each row of a rollout; ``examples/calculator.py`` has one. It must not run what the model writes.

    It may have ``tools``, functions or JSON schemas that the chat template shows to the model: then ``step`` gets the
    calls, [(name, arguments), ...], as its second argument. It may have ``role``, that of observations' turns ("user"
    or "tool"); ``max_turns`` of the model (4); and ``close()``, called after its rollout, even a failed one.
    """

    def reset(self, problem: Problem) -> str | Messages:
        """Begin an episode; returns the prompt, the same in every call for a problem. An object may be reset again."""

    def step(self, text: str, *calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, float, bool]:
        """Answer a turn of the model; returns the text of the next turn, a reward, and true if the episode is over."""


MakeEnvironment = Callable[[], Environment]


def open_environment(make_environment: MakeEnvironment, stack: contextlib.ExitStack) -> Environment:
    """Make an environment, which the stack closes."""
    environment = make_environment()
    if hasattr(environment, "close"):
        stack.callback(environment.close)
    return environment


def reset_environment(environment: Environment, problem: Problem, expected: str | Messages | None) -> str | Messages:
    """Begin an episode and return its prompt; UserCodeError if that is not ``expected`` (None: any prompt)."""
    prompt = copy.deepcopy(environment.reset(problem))  # a chat may grow in the episode
    if expected not in (None, prompt):
        name = type(environment).__name__
        raise UserCodeError(f"{name}.reset gave two prompts for a problem, {expected!r:.80} and {prompt!r:.80}")
    return prompt


def make_prompts(make_environment: MakeEnvironment, problems: Sequence[Problem]) -> tuple[list[str | Messages], Any]:
    """The environment's prompt of each problem, and its tools."""
    with contextlib.ExitStack() as stack:
        environment = open_environment(make_environment, stack)
        prompts = [reset_environment(environment, problem, None) for problem in problems]
        return prompts, getattr(environment, "tools", None)


def load_class(spec: dict[str, Any] | None, switch: str) -> Callable[[], Any] | None:
    """The class that a switch names as {"class_path": ..., "init_args": {...}}, with these arguments; None if unset."""
    if spec is None:
        return None
    arguments = spec.get("init_args") or {}
    try:
        cls = pkgutil.resolve_name(spec["class_path"])
        inspect.signature(cls).bind(**arguments)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--{switch} {spec} cannot be imported ({error}): name a class and its arguments") from error
    return partial(cls, **arguments)
