"""Calls of reward functions: here or in worker processes, with time limits, and what they may return."""

import asyncio
import contextlib
import inspect
import math
import signal
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

from pspo.tasks.failures import RewardError, report_failure
from pspo.tasks.workers import worker_pool

OnError = Literal["raise", "none"]
Result = tuple[list[Any], dict[str, Any]]  # what a reward returned, and what it logged


def reward_name(function: Callable[..., Any]) -> str:
    """Name of a reward in metrics and messages: the function's, or the object's class."""
    return getattr(function, "__name__", type(function).__name__)


def await_result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run an asynchronous reward to its end, also in a notebook, which has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def call_reward(function: Callable[..., Any], arguments: dict[str, Any]) -> Result:
    """Call a reward, here or in a worker process; what it raises is an Exception, and the current folder stays."""
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
    name: str, rows: range, result: Result, on_error: OnError, logged: dict[str, list[Any]]
) -> list[float | None]:
    """Values of `call_reward` for some rows of a batch; what the reward logged is added to ``logged``.

    Raises ValueError unless there is one finite number or None of each row; with ``on_error`` "none" another value is
    NaN, and shown.
    """
    values, logs = result
    for key, value in logs.items():
        column = value if isinstance(value, list) else [value] * len(rows)
        if len(column) != len(rows):
            raise RewardError(f"reward {name} logged {len(column)} values of {key!r} for {len(rows)} completions")
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


def call_in_time(
    function: Callable[..., Any], arguments: dict[str, Any], timeout: float, late: TimeoutError
) -> Result | Exception:
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


def slice_rows(arguments: dict[str, Any], rows: range) -> dict[str, Any]:
    """A reward's arguments for some rows of the batch; what is no list is for all."""
    return {
        name: value[rows.start : rows.stop] if isinstance(value, list) else value for name, value in arguments.items()
    }


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
        calls = [slice_rows(arguments, part) for part in parts]
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
