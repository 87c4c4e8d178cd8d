"""Rewards: functions of completions and whatever else they ask for by the names of their parameters.

A reward of your own is a function or a subclass of `Reward`, named by its import path: --reward.functions
'[my_rewards.brevity]'. It is called with the keyword arguments that its signature names, of those in `all_inputs`;
``**kwargs`` takes all. docs/guide/rewards.md explains each. A plain function gets, as in TRL, completions as chats of
one message where the prompt is a chat.

It returns one finite number per completion, as a list, tuple, array or tensor; None is "not mine": the function is left
out of that completion's sum. ``async def`` functions are awaited.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

from pspo.tasks.answers import TOLERANCE, Marker, extract_answer, matches_format, parse_number
from pspo.tasks.calls import OnError, call_reward, checked_values, guarded_values, reward_name
from pspo.tasks.failures import RewardError
from pspo.tasks.problem import Problem

ATTRIBUTES = ("answer", "source", "category", "level", "solution")  # of `Problem`, that rewards may ask for by name
MAX_REWARD = 1e15  # above it gradient norms overflow in float32
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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


def all_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Everything that rewards may ask for, by name; lists have one entry per completion.

    Args:
        inputs: what `total_rewards` was given; it comes before columns of the data of the same names.
    """
    problems = inputs["problems"]
    columns = dict.fromkeys(name for problem in problems for name in problem.fields)
    derived: dict[str, Any] = {name: [getattr(problem, name) for problem in problems] for name in ATTRIBUTES}
    derived |= {name: [problem.fields.get(name) for problem in problems] for name in columns}
    derived["prompts"] = [problem.prompt for problem in problems]
    if "completion_ids" in inputs:
        derived["completion_tokens"] = [len(ids) for ids in inputs["completion_ids"]]
    derived["trainer_state"] = SimpleNamespace(global_step=inputs.get("step", 0))
    return derived | {"log_metric": None, "log_extra": None} | inputs  # `call_reward` has the functions


def reward_arguments(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that a function's signature names; ValueError if there is none for a parameter without default."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_all or not inputs.keys() >= parameters.keys():
        inputs = all_inputs(inputs)
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind not in VARIADIC
        if required and name not in inputs:
            names = ", ".join(sorted(inputs))
            raise RewardError(f"reward {reward_name(function)} asks for {name!r}; there is only {names}")
    arguments = {name: value for name, value in inputs.items() if takes_all or name in parameters}
    if "completions" in arguments and not isinstance(function, Reward):
        pairs = zip(inputs["completions"], inputs["problems"], strict=False)  # no completions in `check_rewards`
        arguments["completions"] = [
            [{"role": "assistant", "content": text}] if isinstance(problem.prompt, list) else text
            for text, problem in pairs
        ]
    return arguments


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
