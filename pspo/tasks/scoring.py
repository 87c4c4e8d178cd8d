"""Score completions: call reward functions with the inputs that their parameters name, and sum up what they return."""

import asyncio
import contextlib
import inspect
import itertools
import math
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from pspo.errors import UserCodeError, function_name, user_traceback
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward
from pspo.tasks.workers import worker_pool

ATTRIBUTES = ("answer", "source", "category", "level", "solution")  # attributes of `Problem` that rewards may ask for
LARGEST = 1e15  # largest reward: advantages are float32, at most 3.4e38, and some of them square rewards

OnError = Literal["raise", "none"]
Columns = dict[str, list[Any]]  # what rewards log, by name


@dataclass(frozen=True)
class Scoring:
    """The functions to call, and how: `pspo.config.RewardConfig` without the switches."""

    functions: list[Callable[..., Any]]
    weights: list[float] | None = None
    timeout: float = 0.0
    on_error: OnError = "raise"
    workers: int = 0  # processes that call the functions: a call that hangs can be killed only there

    @cached_property
    def names(self) -> list[str]:
        """The functions' names in metrics and messages; the second of two of one name is `name_2`."""
        names: list[str] = []
        for function in self.functions:
            names.append(unique_name(function_name(function), names))
        return names


class Result(NamedTuple):
    """What one call of a reward returns and logs."""

    values: list[float | None]
    logged: Columns


class Scores(NamedTuple):
    """Rewards of n completions, NaN for none; the second of two functions or columns of one name is `name_2`."""

    totals: list[float]  # n weighted sums
    by_function: dict[str, list[float]]  # n values of each
    logged: Columns  # n values of each, None for what a function did not log
    failures: dict[str, Exception]  # each function's first error, under on_error "none"


def all_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Everything that rewards may ask for, by name; ``inputs`` override columns of the data of the same name."""
    problems = inputs["problems"]
    derived: dict[str, Any] = {"prompts": [problem.prompt for problem in problems]}
    for name in dict.fromkeys(name for problem in problems for name in problem.fields):
        derived[name] = [problem.fields.get(name) for problem in problems]
    for name in ATTRIBUTES:  # some sources of a mixture have such a column
        values = [problem.fields.get(name) for problem in problems]
        derived[name] = [getattr(p, name) if v is None else v for p, v in zip(problems, values, strict=True)]
    derived["trainer_state"] = SimpleNamespace(global_step=inputs.get("step", 0))
    return derived | {"log_metric": None, "log_extra": None} | inputs  # `call_reward` makes these two


def reward_arguments(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The `all_inputs` that a function's signature names; a function that is no `Reward` gets chats, as in TRL."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in inputs.items() if takes_all or name in parameters}
    if "completions" in arguments and not isinstance(function, Reward):
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if isinstance(problem.prompt, list) else text
            for text, problem in zip(inputs["completions"], inputs["problems"], strict=True)
        ]
    return arguments


def judges(functions: Sequence[Callable[..., Any]], answer: Any) -> bool:
    """True if a reward compares with the gold answer; a user's function does if it asks for a numeric ``answer``."""
    kinds = {function.compares_answers for function in functions if isinstance(function, Reward)}
    if True in kinds:
        return answer is not None
    if not isinstance(answer, int | Fraction):
        return False
    return "numbers" in kinds or any("answer" in inspect.signature(function).parameters for function in functions)


def check_rewards(scoring: Scoring, problems: Sequence[Problem]) -> None:
    """Raise UserCodeError if a reward has a parameter that no input fills, or cannot score these problems' answers."""
    drawn = dict.fromkeys(("completion_ids", "completion_tokens", "truncated", "step", "max_completion_tokens"))
    inputs = all_inputs({"completions": [""], "problems": problems[:1]} | drawn)
    for name, function in zip(scoring.names, scoring.functions, strict=True):
        if isinstance(function, Reward):
            function.check_problems(problems)
        try:
            inspect.signature(function).bind(**reward_arguments(function, inputs))
        except TypeError as error:
            known = ", ".join(sorted(inputs))
            raise UserCodeError(f"reward {name}: {error}; rewards can ask only for {known}") from error


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The one event loop of all async rewards, in a thread: a module's semaphores and clients stay usable."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # what a reward raises ends `run_forever`, too
                loop.run_forever()

    threading.Thread(target=run, name="async rewards", daemon=True).start()  # does not keep the process from exiting
    return loop


def finite_number(value: Any, giver: str) -> float:
    """A number, also numpy's or torch's, as a float; UserCodeError, naming ``giver``, unless the number is finite."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise UserCodeError(f"{giver} returned {value!r:.80}; it must be a number up to {LARGEST:g}")
    return number


def plain_value(value: Any) -> str | float | bool | None:
    """A value that checkpoints and tables can hold; any other becomes its text."""
    with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):  # a single number of numpy or torch
        value = value.item()
    is_plain = type(value) in (str, float, bool, type(None)) or (type(value) is int and abs(value) <= LARGEST)
    return value if is_plain else str(value)


def call_reward(name: str, function: Callable[..., Any], arguments: dict[str, Any], n: int) -> Result:
    """A function's n values and what it logs; UserCodeError unless n values come, each a finite number or None."""
    columns: Columns = {}
    loggers = {
        "log_metric": lambda key, value: columns.update({str(key): [float(value)] * n}),
        "log_extra": lambda key, column: columns.update({str(key): [plain_value(value) for value in column]}),
    }
    arguments = arguments | {key: logger for key, logger in loggers.items() if key in arguments}
    try:
        values = function(**arguments)
        if inspect.iscoroutine(values):
            values = asyncio.run_coroutine_threadsafe(values, event_loop()).result()
    except SystemExit as error:
        raise UserCodeError(f"reward {name} called sys.exit({error.code!r})") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise UserCodeError(f"reward {name} returned {values!r:.80}; it must return a list of numbers")
    for what, column in [("returned", values), *columns.items()]:
        if len(column) != n:
            raise UserCodeError(f"reward {name}: {what}: {len(column)} values for {n} completions")
    given = [None if v is None else finite_number(v, f"reward {name} for completion {i}") for i, v in enumerate(values)]
    return Result(given, columns)


def attempt_reward(*call: Any) -> Result | Exception:
    """Return the result of `call_reward`, or the exception that it raises."""
    try:
        return call_reward(*call)
    except Exception as error:  # a user's code may raise anything
        return error


def group_values(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], n: int, group_size: int, scoring: Scoring
) -> tuple[Result, Exception | None]:
    """Do what `reward_values` does by one call for each group, in worker processes if there are any."""
    calls = []
    for start in range(0, n, group_size):
        rows = slice(start, start + group_size)
        inputs = {key: value[rows] if isinstance(value, list) else value for key, value in arguments.items()}
        calls.append((name, function, inputs, group_size))
    if scoring.workers > 0:
        results = worker_pool(scoring.workers).map(call_reward, calls, scoring.timeout)
    else:
        results = [attempt_reward(*call) for call in calls]
    first_error = next((result for result in results if isinstance(result, Exception)), None)
    if first_error is not None and scoring.on_error == "raise":
        is_late = isinstance(first_error, TimeoutError)
        raise TimeoutError(f"reward {name} {first_error}") if is_late else first_error
    whole = Result([math.nan] * n, {})
    for start, result in zip(range(0, n, group_size), results, strict=True):
        if isinstance(result, Result):
            whole.values[start : start + group_size] = result.values
            for key, column in result.logged.items():
                whole.logged.setdefault(key, [None] * n)[start : start + group_size] = column
    return whole, first_error


def reward_values(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], n: int, group_size: int, scoring: Scoring
) -> tuple[Result, Exception | None]:
    """Return n values, and the first error under on_error "none", where a group whose call fails is unknown (NaN).

    The function is called once for all groups; in workers, or after that call has failed, once for each group.
    """
    if scoring.workers == 0:
        try:
            return call_reward(name, function, arguments, n), None
        except Exception:  # a user's code may raise anything
            if scoring.on_error == "raise":
                raise
    return group_values(name, function, arguments, n, group_size, scoring)


def unique_name(name: str, taken: Collection[str]) -> str:
    names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


def total_rewards(
    scoring: Scoring,
    completions: list[str],
    problems: list[Problem],
    environment_rewards: list[float] | None = None,
    group_size: int = 1,
    **inputs: Any,
) -> Scores:
    """Score completions by a weighted sum of functions.

    Each ``group_size`` neighbouring completions are of one prompt: a function that fails, fails for a whole group.
    ``environment_rewards`` count as one more function; ``inputs`` are more inputs that functions may ask for by name.
    """
    inputs = all_inputs({"completions": completions, "problems": problems} | inputs)
    weights = list(scoring.weights or [1.0] * len(scoring.functions))
    values: dict[str, list[float | None]] = {}  # by function
    logged: Columns = {}
    failures: dict[str, Exception] = {}
    for name, function in zip(scoring.names, scoring.functions, strict=True):
        arguments = reward_arguments(function, inputs)
        result, error = reward_values(name, function, arguments, len(problems), group_size, scoring)
        values[name] = result.values
        logged |= {unique_name(key, logged): column for key, column in result.logged.items()}
        if error is not None:
            failures[name] = error
    if environment_rewards is not None:
        values[unique_name("environment", values)] = environment_rewards
        weights.append(1.0)
    totals = []
    for row in range(len(completions)):
        pairs = zip(weights, values.values(), strict=True)
        terms = [weight * column[row] for weight, column in pairs if column[row] is not None]
        totals.append(sum(terms, 0.0) if terms or not values else math.nan)  # 0 in a distillation without rewards
    by_function = {name: [math.nan if v is None else v for v in column] for name, column in values.items()}
    return Scores(totals, by_function, logged, failures)


def show_failures(failures: dict[str, Exception], shown: dict[str, str]) -> None:
    """Print the failures of rewards that are not in ``shown`` yet to stderr, and add each to ``shown`` in one line."""
    for name, error in failures.items():
        if name not in shown:
            shown[name] = traceback.format_exception_only(error)[-1].strip()
            tqdm.write(f"reward {name} failed (shown once):\n{user_traceback(error)}", file=sys.stderr)
