"""Failures of a user's own code: what is shown of them."""

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

FIRST_FAILURES: dict[str, str] = {}  # of each reward that failed in this process: the first error, in one line
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_NOT_USER_CODE = (*_PATHS, "<frozen", str(Path(__file__).parents[1]))  # beginnings of file names


class RewardError(ValueError):
    """A reward that cannot be called, or what it returned; the text says all."""


class WorkerError(Exception):
    """An error in a worker process; its text is the traceback there."""


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of an error's traceback that are neither pspo's, nor Python's, nor of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_USER_CODE)]


def user_traceback(error: BaseException) -> str:
    """Format an error with the user's own frames alone, and the file and line where a library raised it."""
    frames = user_frames(error)
    if isinstance(error, WorkerError | RewardError | TimeoutError) and not frames:
        return str(error)
    if not frames:
        return "".join(traceback.format_exception(error)).rstrip()
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)]
    if frames[-1] != innermost:
        lines.append(f"  raised in {innermost.filename}, line {innermost.lineno}\n")
    if error.__cause__ is not None:
        lines.insert(0, f"{user_traceback(error.__cause__)}\n\nthe cause of:\n\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


@contextlib.contextmanager
def end_forks() -> Iterator[None]:
    """End a process that the user's code has forked in the block: two trainers would write one folder."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(1)


def report_failure(name: str, error: Exception) -> None:
    """Show the first failure of a reward on stderr, and keep it in `FIRST_FAILURES`."""
    if name not in FIRST_FAILURES:
        FIRST_FAILURES[name] = traceback.format_exception_only(error)[-1].strip()
        tqdm.write(f"reward {name} failed (shown once):\n{user_traceback(error)}", file=sys.stderr)
