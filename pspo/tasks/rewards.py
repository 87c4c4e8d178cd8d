"""Score completions by reward functions, which get the inputs that their parameters name.

A reward of your own is a function or a subclass of `Reward`, named by its import path. Its parameters name what it gets
of `all_inputs`. It returns one finite number per completion, None for "not mine". docs/guide/rewards.md has the rest.
"""

import asyncio
import inspect
import itertools
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from pspo.errors import RewardError
from pspo.tasks.answers import TOLERANCE, Marker, extract_answer, matches_format
from pspo.tasks.problem import Problem
from pspo.tasks.workers import worker_pool

ATTRIBUTES = ("answer", "source", "category", "level", "solution")  # of `Problem`, that rewards may ask for by name
LARGEST = 1e15  # of a reward: advantages are float32, whose largest number is 3.4e38, and some square rewards

OnError = Literal["raise", "none"]
Columns = dict[str, list[Any]]  # what rewards log, by name
Result = tuple[list[float | None], Columns]


class Reward(ABC):
    """Base class of all rewards; not a dataclass: subclasses choose."""

    compares_answers = False  # True for one that compares a completion's answer with the gold one, as accuracy does

    @abstractmethod
    def __call__(self, completions: list[str], *args: Any, **kwargs: Any) -> Sequence[float | None]:
        """Return one number per completion; the parameters' names say what it is called with."""

    def check_problems(self, problems: Sequence[Problem]) -> None:  # noqa: B027
        """Raise RewardError if a problem cannot be scored; called before anything is trained."""


def math_reward(
    completion: str,
    gold: int | Fraction,
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
    """`math_reward` against each problem's answer: 0, 0.05 or 1."""

    tolerance: float = 1e-6  # taken as a decimal: exactly that
    format_bonus: float = 0.05  # of a wrong answer in the right format, in [0, 1]
    marker: Marker = "last"  # which `####` counts of several, "last" or "first"
    compares_answers = True

    def __post_init__(self) -> None:
        if not 0 <= float(self.tolerance) < math.inf:
            raise ValueError(f"tolerance must be a number of at least 0 such as 1e-6, not {self.tolerance!r}")
        if not 0 <= self.format_bonus <= 1:
            raise ValueError(f"format_bonus must lie in [0, 1], not {self.format_bonus!r}; the paper's is 0.05")

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not isinstance(problem.answer, int | Fraction):
                what = f"MathReward needs numeric answers, not {problem.answer!r}"
                raise RewardError(f"{what}; ExactMatch compares texts")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        tolerance = Fraction(str(self.tolerance))  # as written: Fraction(1e-6) is slightly below 1/10**6
        pairs = zip(completions, problems, strict=True)
        return [math_reward(text, p.answer, tolerance, self.format_bonus, self.marker) for text, p in pairs]


@dataclass(frozen=True)
class FormatReward(Reward):
    """1 if the completion gives its answer in the format `#### <number>`, else 0."""

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float]:
        return [float(matches_format(completion)) for completion in completions]


class Scores(NamedTuple):
    """Rewards of n completions, NaN for none; of two functions or columns of one name the second is `name_2`."""

    totals: list[float]  # n weighted sums
    by_function: dict[str, list[float]]  # n values of each
    logged: Columns  # n values of each, None for what a function did not log
    failures: dict[str, Exception]  # the first of each function, under on_error "none"


def all_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Everything that rewards may ask for, by name; ``inputs`` override columns of the data of the same name."""
    problems = inputs["problems"]
    derived: dict[str, Any] = {"prompts": [problem.prompt for problem in problems]}
    for name in dict.fromkeys(name for problem in problems for name in problem.fields):
        derived[name] = [problem.fields.get(name) for problem in problems]
    for name in ATTRIBUTES:  # of the sources of a mixture, some have such a column
        values = [problem.fields.get(name) for problem in problems]
        derived[name] = [getattr(p, name) if v is None else v for p, v in zip(problems, values, strict=True)]
    derived["trainer_state"] = SimpleNamespace(global_step=inputs.get("step", 0))
    return derived | {"log_metric": None, "log_extra": None} | inputs  # `call_reward` makes these two


def reward_arguments(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Those of `all_inputs` that a function's signature names; one that is no `Reward` gets chats, as TRL's do."""
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
    """True if a reward compares with the gold answer; a user's function that asks for it does, if it is a number."""
    if any(isinstance(function, Reward) and function.compares_answers for function in functions):
        return answer is not None
    is_number = isinstance(answer, int | Fraction)
    return is_number and any("answer" in inspect.signature(function).parameters for function in functions)


def check_rewards(functions: Sequence[Callable[..., Any]], problems: Sequence[Problem]) -> None:
    """Raise RewardError if a reward asks for something that there is not, or cannot score these problems' answers."""
    columns = dict.fromkeys(name for problem in problems for name in problem.fields)
    for problem in problems:  # every batch has every column
        problem.fields.update(columns | problem.fields)
    inputs: dict[str, Any] = {"completions": [""], "completion_ids": [[]], "problems": problems[:1]}
    inputs |= dict.fromkeys(("completion_tokens", "truncated", "step", "max_completion_tokens"))
    inputs = all_inputs(inputs)
    for function in functions:
        if isinstance(function, Reward):
            function.check_problems(problems)
        signature = inspect.signature(function)
        arguments = reward_arguments(function, inputs)
        try:
            signature.bind(**arguments)
        except TypeError as error:
            names = ", ".join(sorted(inputs))
            raise RewardError(f"reward {reward_name(function)}: {error}; there is only {names}") from error


def reward_name(function: Callable[..., Any]) -> str:
    """Name of a reward in metrics and messages: the function's, or the object's class."""
    return getattr(function, "__name__", type(function).__name__)


@cache
def async_runner() -> tuple[ThreadPoolExecutor, asyncio.Runner]:
    """A thread, and the one event loop of this process's async rewards: a module's semaphores and clients last."""
    return ThreadPoolExecutor(1, "async rewards"), asyncio.Runner()


def finite_number(value: Any) -> float | None:
    """A number, of numpy or torch too, as a float; None if it is none, not finite, or too large."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # of several numbers
            return None
    return float(value) if isinstance(value, Real) and abs(value) <= LARGEST else None


def plain_value(value: Any) -> str | float | bool | None:
    """A value that a checkpoint and a table hold; any other is its text."""
    value = value.item() if hasattr(value, "item") else value
    is_plain = type(value) in (str, float, bool, type(None)) or (type(value) is int and abs(value) <= LARGEST)
    return value if is_plain else str(value)


def call_reward(function: Callable[..., Any], arguments: dict[str, Any], n: int) -> Result:
    """Values of n completions, and what the function logs; RewardError unless there are n finite numbers or None."""
    name = reward_name(function)
    columns: Columns = {}
    loggers = {
        "log_metric": lambda key, value: columns.update({str(key): [float(value)] * n}),
        "log_extra": lambda key, column: columns.update({str(key): [plain_value(value) for value in column]}),
    }
    arguments = arguments | {key: logger for key, logger in loggers.items() if key in arguments}
    try:
        values = function(**arguments)
        if inspect.iscoroutine(values):
            thread, runner = async_runner()
            values = thread.submit(runner.run, values).result()
    except SystemExit as error:
        async_runner.cache_clear()  # the loop that was left still holds it
        raise RewardError(f"reward {name} called sys.exit({error.code!r})") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward {name} returned {reprlib.repr(values)}; it must return a list of numbers")
    for what, column in {"returned": values, **columns}.items():
        if len(column) != n:
            raise RewardError(f"reward {name}: {what}: {len(column)} values for {n} completions")
    numbers = [finite_number(value) for value in values]
    for i, value in enumerate(values):
        if numbers[i] is None and value is not None:
            what = f"returned {reprlib.repr(value)} for completion {i}; it must be None or a number up to {LARGEST:g}"
            raise RewardError(f"reward {name} {what}")
    return numbers, columns


def attempt_reward(function: Callable[..., Any], arguments: dict[str, Any], n: int) -> Result | Exception:
    """`call_reward`; what it raises in place of its result."""
    try:
        return call_reward(function, arguments, n)
    except Exception as error:  # a user's code may raise anything
        return error


def guarded_values(
    function: Callable[..., Any], arguments: dict[str, Any], n: int, group_size: int, reward: Any
) -> tuple[list[float | None], Columns, Exception | None]:
    """n values of a reward that may hang or fail, what it logs, and the first error under on_error "none".

    Worker processes get a group at a time. Without them it is called once, and if that fails, group by group. A group
    whose call fails is unknown (NaN).
    """
    in_workers = reward.workers > 0 or reward.timeout > 0  # what hangs can be killed in a process of its own only
    if not in_workers:
        result = attempt_reward(function, arguments, n)
        if isinstance(result, tuple):
            return *result, None
        if reward.on_error == "raise":
            raise result
    groups = [slice(start, start + group_size) for start in range(0, n, group_size)]
    calls = []
    for rows in groups:  # what is no list is for all
        inputs = {key: value[rows] if isinstance(value, list) else value for key, value in arguments.items()}
        calls.append((function, inputs, group_size))
    if in_workers:
        results = worker_pool(max(reward.workers, 1)).map(call_reward, calls, reward.timeout)
    else:
        results = [attempt_reward(*call) for call in calls]
    first_error = next((result for result in results if isinstance(result, Exception)), None)
    if first_error is not None and reward.on_error == "raise":
        is_late = isinstance(first_error, TimeoutError)
        raise TimeoutError(f"reward {reward_name(function)} {first_error}") if is_late else first_error
    values: list[float | None] = [math.nan] * n
    logged: Columns = {}
    for group, result in zip(groups, results, strict=True):
        if isinstance(result, tuple):
            values[group], columns = result
            for key, column in columns.items():
                logged.setdefault(key, [None] * n)[group] = column
    return values, logged, first_error


def unique_name(name: str, taken: Collection[str]) -> str:
    names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


def total_rewards(
    reward: Any,  # `pspo.config.RewardConfig`
    completions: list[str],
    problems: list[Problem],
    environment_rewards: list[float] | None = None,
    group_size: int = 1,
    **inputs: Any,
) -> Scores:
    """Score completions by a weighted sum of functions.

    Completions of one prompt are ``group_size`` neighbours: one call of a function that may fail. Values of
    ``environment_rewards`` are one more function's; ``inputs`` is what else functions may ask for by name.
    """
    inputs = all_inputs({"completions": completions, "problems": problems} | inputs)
    is_guarded = reward.on_error == "none" or reward.workers > 0 or reward.timeout > 0
    weights = list(reward.weights or [1.0] * len(reward.functions))
    values: dict[str, list[float | None]] = {}  # by function
    logged: Columns = {}
    failures: dict[str, Exception] = {}
    for function in reward.functions:
        name = reward_name(function)
        arguments = reward_arguments(function, inputs)
        if is_guarded or not type(function).__module__.startswith("pspo."):
            result, columns, error = guarded_values(function, arguments, len(problems), group_size, reward)
            logged |= {unique_name(key, logged): column for key, column in columns.items()}
            if error is not None:
                failures.setdefault(name, error)
        else:
            result = function(**arguments)
        if name in values:
            name = unique_name(name, values)
        values[name] = result
    if environment_rewards is not None:
        values[unique_name("environment", values)] = environment_rewards
        weights.append(1.0)
    if not values:  # a distillation without rewards
        return Scores([0.0] * len(completions), {}, {}, {})

    totals = []
    for row in zip(*values.values(), strict=True):
        terms = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        totals.append(sum(terms) if terms else math.nan)
    by_function = {name: [math.nan if v is None else v for v in column] for name, column in values.items()}
    return Scores(totals, by_function, logged, failures)
