"""Rewards: functions of completions and whatever else they ask for by the names of their parameters.

A reward of your own is a function or a subclass of `Reward`, named by its import path: --reward.functions
'[my_rewards.brevity]'. It is called with the keyword arguments that its signature names, of those in `_inputs`;
``**kwargs`` takes all. docs/guide/rewards.md explains each. A plain function gets, as in TRL, completions as chats of
one message where the prompt is a chat.

It returns one finite number per completion, as a list, tuple, array or tensor; None is "not mine": the function is left
out of that completion's sum. ``async def`` functions are awaited.
"""

import asyncio
import contextlib
import difflib
import inspect
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal

from pspo.tasks.answers import TOLERANCE, Marker, extract_answer, matches_format, parse_number
from pspo.tasks.failures import RewardError, end_forks, note_failure
from pspo.tasks.problem import Problem
from pspo.tasks.workers import worker_pool

OnError = Literal["raise", "none"]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LARGEST = 1e15  # above it gradient norms overflow in float32


class Reward(ABC):
    """Base class of all rewards; not a dataclass, so that jsonargparse accepts any subclass by its import path."""

    @abstractmethod
    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Return one number per completion; the parameters' names say what it is called with (see this module)."""


def math_reward(
    completion: str,
    gold: int | Fraction,
    *,
    tolerance: Fraction = TOLERANCE,
    format_bonus: float = 0.05,
    marker: Marker = "last",
) -> float:
    """Return min(1, [|prediction - gold| <= tolerance] + format_bonus * [format matches]); by default 0, 0.05 or 1.

    The paper's reward. Prediction and format are `extract_answer` and `matches_format`; the comparison is exact.
    """
    prediction = extract_answer(completion, marker)
    if prediction is not None and abs(prediction - gold) <= tolerance:
        return 1.0
    return format_bonus if matches_format(completion, marker) else 0.0


@dataclass(frozen=True)
class MathReward(Reward):
    """`math_reward` against each problem's answer: 0, 0.05 or 1.

    Attributes:
        tolerance: largest |prediction - gold| that is correct; taken as a decimal: 1e-6 is exactly that.
        format_bonus: reward of a wrong answer in the right format, in [0, 1].
        marker: which `####` counts if a completion has several, "last" or "first".
    """

    tolerance: float = 1e-6
    format_bonus: float = 0.05
    marker: Marker = "last"

    def __post_init__(self) -> None:
        _exact(self.tolerance)
        if not 0 <= self.format_bonus <= 1:
            raise ValueError(f"format_bonus must lie in [0, 1], not {self.format_bonus!r}; the paper's is 0.05")
        if self.marker not in ("last", "first"):
            raise ValueError(f"marker must be 'last' or 'first', not {self.marker!r}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        how = {"tolerance": _exact(self.tolerance), "format_bonus": self.format_bonus, "marker": self.marker}
        for answer in (problem.answer for problem in problems):
            if not isinstance(answer, int | Fraction):
                raise RewardError(f"MathReward needs numeric answers, not {answer!r}; ExactMatch compares texts")
        return [math_reward(text, problem.answer, **how) for text, problem in zip(completions, problems, strict=True)]


def _exact(tolerance: float) -> Fraction:
    """Return the decimal as written: str(1e-6) is "1e-06", whereas Fraction(1e-6) is slightly below 1/10**6."""
    value = parse_number(str(tolerance))
    if value is None or value < 0:
        raise ValueError(f"tolerance must be a number of at least 0 such as 1e-6, not {tolerance!r}")
    return value


@dataclass(frozen=True)
class FormatReward(Reward):
    """1 if the completion gives its answer in the format `#### <number>`, else 0."""

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        return [float(matches_format(completion)) for completion in completions]


ATTRIBUTES = ("answer", "source", "category", "level", "solution")  # of `Problem`, that rewards may ask for by name


def total_rewards(
    functions: Sequence[Callable[..., Any]],
    weights: Sequence[float] | None,
    completions: list[str],
    problems: list[Problem],
    timeout: float = 0.0,
    on_error: OnError = "raise",
    workers: int = 0,
    *,
    completion_ids: list[list[int]] | None = None,
    truncated: list[bool] | None = None,
    step: int | None = None,
    max_completion_tokens: int | None = None,
    environment_rewards: list[float] | None = None,
    logged: dict[str, list[Any]] | None = None,
) -> tuple[list[float], dict[str, list[float]]]:
    """Compute the weighted sum of several rewards.

    Args:
        weights: one number per function; None for all 1.
        timeout: seconds each function may take, 0 for no limit; TimeoutError beyond.
        on_error: "raise", or "none": a completion for which a function fails gets NaN from it, and as its total. The
            first failure of each function is shown on stderr and kept in `pspo.tasks.failures.FIRST_FAILURES`.
        workers: processes that share the completions; 0 calls the functions in this one.
        completion_ids, truncated, step, max_completion_tokens: for rewards that ask for them; None if unknown.
        environment_rewards: of each episode in a text environment, added as one more function.
        logged: gets what functions log by TRL's ``log_metric`` and ``log_extra``: by name a value of each completion.

    Returns:
        (B,) totals, NaN where no function gives a value, and by function (`Name`, `Name_2`, ... if a name comes twice)
        (B,) unweighted values, NaN where there is none.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    if len(weights) != len(functions) or not functions:
        raise ValueError(f"{len(functions)} rewards but {len(weights)} weights: give at least one, and as many of each")
    if len(completions) != len(problems):
        raise ValueError(f"{len(completions)} completions but {len(problems)} problems: pass one for each completion")

    given = {"completion_ids": completion_ids, "truncated": truncated, "step": step}
    inputs = _inputs(completions, problems, given | {"max_completion_tokens": max_completion_tokens})
    ends = sorted({len(completions) * i // (workers or 1) for i in range((workers or 1) + 1)})
    parts = [range(start, end) for start, end in pairwise(ends)]
    logged = {} if logged is None else logged
    by_name: dict[str, list[float | None]] = {}
    names = [reward_name(function) for function in functions]
    for i, (name, function) in enumerate(zip(names, functions, strict=True)):
        arguments = _arguments(function, name, inputs)
        name = f"{name}_{names[:i].count(name) + 1}" if name in by_name else name
        evaluation = _Evaluation(function, name, arguments, len(completions), timeout, on_error, workers, logged)
        by_name[name] = evaluation.values(parts)
    if environment_rewards is not None:
        by_name["environment"], weights = environment_rewards, [*weights, 1.0]
    totals = []
    for row in zip(*by_name.values(), strict=True):
        terms = [w * v for w, v in zip(weights, row, strict=True) if v is not None]
        totals.append(sum(terms) if terms else math.nan)
        if abs(totals[-1]) > LARGEST:  # NaN is not
            terms = ", ".join(f"{name} {value}" for name, value in zip(by_name, row, strict=True))
            raise RewardError(f"rewards of completion {len(totals) - 1} ({terms}) add up to {totals[-1]:g}: scale them")
    return totals, {name: [math.nan if v is None else v for v in values] for name, values in by_name.items()}


def reward_name(function: Callable[..., Any]) -> str:
    """Name of a reward in metrics and messages: the function's, or the object's class."""
    return getattr(function, "__name__", type(function).__name__)


def check_rewards(functions: Sequence[Callable[..., Any]], problems: Sequence[Problem]) -> None:
    """Raise ValueError if a reward asks for something that there is not.

    A column that only some of the problems have becomes None in the others, so that every batch has it.
    """
    columns = dict.fromkeys(name for problem in problems for name in problem.fields)
    for problem in problems:
        problem.fields.update(columns | problem.fields)
    inputs = _inputs([], problems, {"completion_ids": [], "truncated": [], "step": 0, "max_completion_tokens": 0})
    for function in functions:
        _arguments(function, reward_name(function), inputs)


def _inputs(completions: list[str], problems: Sequence[Problem], given: dict[str, Any]) -> dict[str, Any]:
    """Everything that rewards may ask for, by name; lists have one entry per completion."""
    columns = dict.fromkeys(name for problem in problems for name in problem.fields)
    inputs: dict[str, Any] = {name: [getattr(problem, name) for problem in problems] for name in ATTRIBUTES}
    inputs |= {name: [problem.fields.get(name) for problem in problems] for name in columns}
    inputs |= {"completions": completions, "problems": problems, "prompts": [problem.prompt for problem in problems]}
    inputs |= {name: value for name, value in given.items() if value is not None}
    if given["completion_ids"] is not None:
        inputs["completion_tokens"] = [len(ids) for ids in given["completion_ids"]]
    state = SimpleNamespace(global_step=given["step"] or 0)
    return inputs | {"trainer_state": state, "log_metric": None, "log_extra": None}  # `_call` has the functions


def _arguments(function: Callable[..., Any], name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that a function's signature names; ValueError if there is none for a parameter without default."""
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        if required and key not in inputs:
            close = difflib.get_close_matches(key, inputs, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise RewardError(f"reward {name} asks for {key!r}; there is only {', '.join(sorted(inputs))}{meant}")
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {key: value for key, value in inputs.items() if takes_all or key in parameters}
    if "completions" in arguments and not isinstance(function, Reward):
        pairs = zip(inputs["completions"], inputs["prompts"], strict=False)  # no completions in `check_rewards`
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text for text, prompt in pairs
        ]
    return arguments


@dataclass(frozen=True)
class _Evaluation:
    """One reward and one batch of completions, which it gets in parts: one for each worker, or the whole."""

    function: Callable[..., Any]
    name: str
    arguments: dict[str, Any]
    batch_size: int
    timeout: float
    on_error: OnError
    workers: int
    logged: dict[str, list[Any]]

    def values(self, parts: list[range]) -> list[float | None]:
        """Value of each completion: None where the function has none, NaN where it failed.

        With ``on_error`` "none", a part that fails is evaluated again one by one, unless it took too long.
        """
        values: list[float | None] = []
        for part, outcome in zip(parts, self.outcomes(parts), strict=True):
            try:
                values += self.checked(part, outcome)
            except Exception as error:  # a user's code may raise anything
                if self.on_error == "raise":
                    raise
                note_failure(self.name, error)
                again = len(part) > 1 and not isinstance(error, TimeoutError)
                values += self.values([range(i, i + 1) for i in part]) if again else [math.nan] * len(part)
        return values

    def outcomes(self, parts: list[range]) -> list[Any]:
        """By part, what `_call` returns, or the exception."""
        too_late = TimeoutError(f"reward {self.name} took longer than --reward.timeout {self.timeout:g} seconds")
        calls = [
            {key: value[part.start : part.stop] if isinstance(value, list) else value
             for key, value in self.arguments.items()}
            for part in parts
        ]  # fmt: skip
        if self.workers:
            return worker_pool(self.workers).map(partial(_call, self.function), calls, self.timeout, too_late)
        outcomes: list[Any] = []
        for call in calls:
            try:
                with _time_limit(self.timeout, too_late) if self.timeout else contextlib.nullcontext():
                    outcomes.append(_call(self.function, **call))
            except Exception as error:  # a user's code may raise anything
                outcomes.append(error)
        return outcomes

    def checked(self, part: range, outcome: Any) -> list[float | None]:
        """What a reward returned for a part, if these are numbers or None; what it logged is added to ``logged``."""
        if isinstance(outcome, Exception):
            raise outcome
        returned, logs = outcome
        for key, value in logs.items():
            column = value if isinstance(value, list) else [value] * len(part)
            if len(column) != len(part):
                what = f"logged {len(column)} values of {key!r} for {len(part)} completions"
                raise RewardError(f"reward {self.name} {what}")
            self.logged.setdefault(key, [None] * self.batch_size)[part.start : part.stop] = column
        if len(returned) != len(part):
            raise RewardError(f"reward {self.name} returned {len(returned)} values for {len(part)} completions")
        values: list[float | None] = []
        for i, value in zip(part, returned, strict=True):
            ok = value is None or (isinstance(value, Real) and math.isfinite(value))
            if not ok:
                what = f"returned {value!r} for completion {i}; it must be a finite number or None"
                error = ValueError(f"reward {self.name} {what}")
                if self.on_error == "raise":
                    raise error
                note_failure(self.name, error)
            values.append(None if value is None else float(value) if ok else math.nan)
        return values


def _call(function: Callable[..., Any], /, **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    """Call a reward, here or in a worker process; returns its values, as plain numbers, and what it logged.

    What it raises is an Exception, and the current folder stays the trainer's. A fork that it has made ends here.
    """
    logs: dict[str, Any] = {}

    def log_metric(name: str, value: float) -> None:
        logs[name] = float(value)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        values = [value.item() if hasattr(value, "item") else value for value in values]
        logs[column] = [value if isinstance(value, float | int | str | None) else str(value) for value in values]

    offered = {"log_metric": log_metric, "log_extra": log_extra}
    try:
        with end_forks(), contextlib.chdir("."):
            values = function(**arguments | {name: offered[name] for name in offered if name in arguments})
            if inspect.isawaitable(values):
                values = _await(values)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {error!r}"
        raise RewardError(f"reward {reward_name(function)} {what}") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward {reward_name(function)} returned {values!r}; it must return a list of numbers")
    return [value.item() if hasattr(value, "item") else value for value in values], logs


def _await(values: Awaitable[Any]) -> Any:
    async def result() -> Any:
        return await values

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result())
    with ThreadPoolExecutor(1) as thread:  # a notebook has a loop of its own
        return thread.submit(asyncio.run, result()).result()


@contextlib.contextmanager
def _time_limit(seconds: float, too_late: TimeoutError) -> Iterator[None]:
    """Raise the error after so many seconds; by SIGALRM, so in the main thread only."""

    def expire(*_: object) -> None:
        raise too_late

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
