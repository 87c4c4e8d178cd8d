"""Rewards: functions of completions and whatever else they ask for by the names of their parameters.

A reward of your own is a function or a subclass of `Reward`, named by its import path: --reward.functions
'[my_rewards.brevity]'. It is called with the keyword arguments that its signature names, of those in `input_names`;
``**kwargs`` takes all. docs/guide/rewards.md explains each. A plain function gets, as in TRL, completions as chats of
one message where the prompt is a chat.

It returns one finite number per completion, as a list, tuple, array or tensor; None is "not mine": the function is left
out of that completion's sum. ``async def`` functions are awaited.
"""

import asyncio
import contextlib
import inspect
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal

from pspo.tasks.answers import TOLERANCE, Marker, extract_answer, matches_format, parse_number
from pspo.tasks.failures import RewardError, report_failure
from pspo.tasks.problem import Problem
from pspo.tasks.workers import worker_pool

OnError = Literal["raise", "none"]
ATTRIBUTES = ("answer", "source", "category", "level", "solution")  # of `Problem`, that rewards may ask for by name
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
MAX_REWARD = 1e15  # above it gradient norms overflow in float32


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


@cache
def exact_decimal(tolerance: float) -> Fraction:
    """Return the decimal as written: str(1e-6) is "1e-06", whereas Fraction(1e-6) is slightly below 1/10**6."""
    value = parse_number(str(tolerance))
    if value is None or value < 0:
        raise ValueError(f"tolerance must be a number of at least 0 such as 1e-6, not {tolerance!r}")
    return value


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
        exact_decimal(self.tolerance)
        if not 0 <= self.format_bonus <= 1:
            raise ValueError(f"format_bonus must lie in [0, 1], not {self.format_bonus!r}; the paper's is 0.05")
        if self.marker not in ("last", "first"):
            raise ValueError(f"marker must be 'last' or 'first', not {self.marker!r}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        tolerance = exact_decimal(self.tolerance)
        values = []
        for completion, problem in zip(completions, problems, strict=True):
            gold = problem.answer
            if not isinstance(gold, int | Fraction):
                raise RewardError(f"MathReward needs numeric answers, not {gold!r}; ExactMatch compares texts")
            value = math_reward(
                completion, gold, tolerance=tolerance, format_bonus=self.format_bonus, marker=self.marker
            )
            values.append(value)
        return values


@dataclass(frozen=True)
class FormatReward(Reward):
    """1 if the completion gives its answer in the format `#### <number>`, else 0."""

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        return [float(matches_format(completion)) for completion in completions]


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
    inputs = {"completions": [], "problems": problems, "completion_ids": [], "truncated": [], "step": 0}
    for function in functions:
        reward_arguments(function, inputs | {"max_completion_tokens": 0})


def reward_arguments(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that a function's signature names; ValueError if there is none for a parameter without default.

    Args:
        inputs: those of `total_rewards`, by name; `derived_input` makes further ones of them when they are asked for.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {}
    for name in [*parameters, *(input_names(inputs) if takes_all else ())]:
        if name in inputs:
            arguments[name] = inputs[name]
        elif name in input_names(inputs):
            arguments[name] = derived_input(name, inputs)
        elif parameters[name].default is inspect.Parameter.empty and parameters[name].kind not in VARIADIC:
            names = ", ".join(sorted(input_names(inputs)))
            raise RewardError(f"reward {reward_name(function)} asks for {name!r}; there is only {names}")
    if "completions" in arguments and not isinstance(function, Reward):
        pairs = zip(inputs["completions"], inputs["problems"], strict=False)  # no completions in `check_rewards`
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if isinstance(problem.prompt, list) else text
            for text, problem in pairs
        ]
    return arguments


def input_names(inputs: dict[str, Any]) -> list[str]:
    """Names of everything that rewards may ask for; lists have one entry per completion."""
    names = [*inputs, "prompts", "trainer_state", "log_metric", "log_extra"]
    if "completion_ids" in inputs:
        names.append("completion_tokens")
    columns = {name for problem in inputs["problems"] for name in problem.fields}
    return [*names, *columns.difference(names), *set(ATTRIBUTES).difference(names, columns)]


def derived_input(name: str, inputs: dict[str, Any]) -> Any:
    """An input that is made of others: counts of tokens, TRL's trainer state, columns and attributes of problems."""
    problems = inputs["problems"]
    if name == "prompts":
        return [problem.prompt for problem in problems]
    if name == "completion_tokens" and "completion_ids" in inputs:
        return [len(ids) for ids in inputs["completion_ids"]]
    if name == "trainer_state":
        return SimpleNamespace(global_step=inputs.get("step", 0))
    if name in ("log_metric", "log_extra"):
        return None  # `call_reward` has the functions
    if any(name in problem.fields for problem in problems):
        return [problem.fields.get(name) for problem in problems]
    return [getattr(problem, name) for problem in problems]


def call_reward(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Call a reward, here or in a worker process; returns its values, as plain numbers, and what it logged.

    What it raises is an Exception, and the current folder stays the trainer's.
    """
    logs: dict[str, Any] = {}

    def log_metric(name: str, value: float) -> None:
        logs[name] = float(value)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        values = [value.item() if hasattr(value, "item") else value for value in values]
        logs[column] = [value if isinstance(value, float | int | str | None) else str(value) for value in values]

    loggers = {"log_metric": log_metric, "log_extra": log_extra}
    arguments = {name: loggers.get(name, value) for name, value in arguments.items()}
    try:
        with contextlib.chdir("."):
            values = function(**arguments)
            if inspect.iscoroutine(values):
                values = await_result(values)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {error!r}"
        raise RewardError(f"reward {reward_name(function)} {what}") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward {reward_name(function)} returned {values!r}; it must return a list of numbers")
    return [value.item() if hasattr(value, "item") else value for value in values], logs


def checked_values(
    name: str,
    rows: range,
    result: tuple[list[Any], dict[str, Any]],
    on_error: OnError,
    logged: dict[str, list[Any]],
) -> list[float | None]:
    """Values of `call_reward` for some rows of a batch; what the reward logged is added to ``logged``.

    Raises ValueError unless there is one finite number or None of each row; with ``on_error`` "none" another value is
    NaN, and shown.
    """
    values, logs = result
    for key, value in logs.items():
        column = value if isinstance(value, list) else [value] * len(rows)
        if len(column) != len(rows):
            what = f"logged {len(column)} values of {key!r} for {len(rows)} completions"
            raise RewardError(f"reward {name} {what}")
        batch_column = logged.setdefault(key, [])
        batch_column += [None] * (rows.stop - len(batch_column))
        batch_column[rows.start : rows.stop] = column
    if len(values) != len(rows):
        raise RewardError(f"reward {name} returned {len(values)} values for {len(rows)} completions")
    checked: list[float | None] = []
    for i, value in zip(rows, values, strict=True):
        if value is None:
            checked.append(None)
        elif isinstance(value, Real) and math.isfinite(value):
            checked.append(float(value))
        else:
            what = f"returned {value!r} for completion {i}; it must be a finite number or None"
            error = ValueError(f"reward {name} {what}")
            if on_error == "raise":
                raise error
            report_failure(name, error)
            checked.append(math.nan)
    return checked


def guarded_values(
    function: Callable[..., Any],
    name: str,
    arguments: dict[str, Any],
    batch_size: int,
    timeout: float,
    on_error: OnError,
    workers: int,
    logged: dict[str, list[Any]],
) -> list[float | None]:
    """Value of each completion, of a reward with a time limit, with worker processes, or that may fail.

    The batch goes to the function in parts, one for each worker. With ``on_error`` "none", a part that fails is scored
    again, completion by completion, unless it took too long; what fails alone is NaN.
    """
    values: list[float | None] = [math.nan] * batch_size
    n_parts = workers or 1
    ends = sorted({batch_size * i // n_parts for i in range(n_parts + 1)})
    parts = [range(start, end) for start, end in pairwise(ends)]
    late = TimeoutError(f"reward {name} took longer than --reward.timeout {timeout:g} seconds")
    while parts:
        retries = []
        calls = [
            {
                key: value[part.start : part.stop] if isinstance(value, list) else value
                for key, value in arguments.items()
            }
            for part in parts
        ]
        if workers:
            results = worker_pool(workers).map(call_reward, [(function, call) for call in calls], timeout, late)
        else:
            results = [call_in_time(function, call, timeout, late) for call in calls]
        for part, result in zip(parts, results, strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                values[part.start : part.stop] = checked_values(name, part, result, on_error, logged)
            except Exception as error:  # a user's code may raise anything
                if on_error == "raise":
                    raise
                report_failure(name, error)
                if len(part) > 1 and not isinstance(error, TimeoutError):
                    retries += [range(i, i + 1) for i in part]
        parts = retries
    return values


def call_in_time(
    function: Callable[..., Any], arguments: dict[str, Any], timeout: float, late: TimeoutError
) -> tuple[list[Any], dict[str, Any]] | Exception:
    """Result of `call_reward`, or what it raises: ``late`` after so many seconds, if not 0.

    By SIGALRM, so in the main thread only.
    """

    def expire(*_: object) -> None:
        raise late

    try:
        if not timeout:
            return call_reward(function, arguments)
        previous = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            return call_reward(function, arguments)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    except Exception as error:  # a user's code may raise anything
        return error


def await_result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run an asynchronous reward to its end, also in a notebook, which has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


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
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions) or not functions:
        raise ValueError(f"{len(functions)} rewards but {len(weights)} weights: give at least one, and as many of each")
    if len(completions) != len(problems):
        raise ValueError(f"{len(completions)} completions but {len(problems)} problems: pass one for each completion")
    inputs = {
        "completions": completions,
        "problems": problems,
        "completion_ids": completion_ids,
        "truncated": truncated,
        "step": step,
        "max_completion_tokens": max_completion_tokens,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    logged = {} if logged is None else logged

    values: dict[str, list[float | None]] = {}  # by function
    names: list[str] = []
    for function in functions:
        name = reward_name(function)
        names.append(name)
        if name in values:
            name = f"{name}_{names.count(name)}"
        arguments = reward_arguments(function, inputs)
        if workers or timeout or on_error == "none":
            values[name] = guarded_values(function, name, arguments, len(problems), timeout, on_error, workers, logged)
        else:
            whole = range(len(problems))
            values[name] = checked_values(name, whole, call_reward(function, arguments), on_error, logged)
    for column in logged.values():
        column += [None] * (len(problems) - len(column))
    if environment_rewards is not None:
        values["environment"] = environment_rewards
        weights.append(1.0)

    totals = []
    for i, row in enumerate(zip(*values.values(), strict=True)):
        terms = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        total = sum(terms) if terms else math.nan
        if abs(total) > MAX_REWARD:  # NaN is not
            listed = ", ".join(f"{name} {value}" for name, value in zip(values, row, strict=True))
            raise RewardError(f"rewards of completion {i} ({listed}) add up to {total:g}: scale them")
        totals.append(total)
    return totals, {name: [math.nan if v is None else v for v in column] for name, column in values.items()}
