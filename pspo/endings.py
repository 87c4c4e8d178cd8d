"""How a run ends: `pspo.errors` has the table of what is raised, saved and said."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from pspo import distributed as dist
from pspo.errors import EngineError, RunFailed, Stopped, UserCodeError, UserCodeFailed, user_frames, user_traceback
from pspo.model import is_out_of_memory
from pspo.terminal import one_line

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75  # EX_TEMPFAIL: the same command resumes
EXIT_INTERRUPTED = 130


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Raise on all ranks what the block raises on any, except out of memory: Stopped, EngineError or UserCodeFailed."""
    failure = reason = None
    try:
        yield
    except (Exception, SystemExit, Stopped) as error:  # a user's code may raise anything
        if isinstance(error, RunFailed) or is_out_of_memory(error):  # a RunFailed is raised on all ranks anyway
            raise
        failure = error
        reason = error if isinstance(error, Stopped | EngineError) else UserCodeFailed(user_traceback(error))
    if failure is not None or dist.world_size() > 1:
        reasons = filter(None, dist.gather_objects(reason))
        for reason in sorted(reasons, key=lambda reason: not isinstance(reason, Stopped)):
            raise type(reason)(*reason.args) from failure


@contextlib.contextmanager
def save_at_end(run: Any) -> Iterator[None]:
    """Save a `Run` that ends early in the block, and say how to resume it."""
    checkpointer = run.checkpointer
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        run.recorder.bar.close()
        if isinstance(error, Stopped):
            checkpointer.save_interrupted()
        if dist.is_main():
            print(f"\nstopped; {checkpointer.describe_newest()}", file=sys.stderr)
        raise
    except EngineError as error:
        checkpointer.save_interrupted()
        raise RunFailed(f"the engine failed: {error}; {checkpointer.describe_newest()}") from error
    except UserCodeFailed as error:
        checkpointer.save_interrupted()
        raise UserCodeFailed(f"{error}\n\n{checkpointer.describe_newest()}") from error.__cause__
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        if isinstance(error, RunFailed) or is_out_of_memory(error):
            raise
        if dist.world_size() == 1:
            checkpointer.save_interrupted()
        elif not (isinstance(error, UserCodeError) or user_frames(error)):  # the loss of another rank, say
            raise
        raise UserCodeFailed(f"{user_traceback(error)}\n\n{checkpointer.describe_newest()}") from error


@contextlib.contextmanager
def exit_codes(prog: str, stopped: int = EXIT_STOPPED) -> Iterator[None]:
    """End a command with the exit code of what the block raises; after a first signal, with code ``stopped``."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        raise SystemExit(stopped if isinstance(error, Stopped) else EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if dist.is_main():
            print(f"\n{prog}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


@contextlib.contextmanager
def user_errors(prog: str) -> Iterator[None]:
    """Turn ValueError and OSError, errors of the user, into a line and exit code 2; until ranks join, one prints."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not dist.launched_by_torchrun() or dist.world_size() > 1 or os.environ["LOCAL_RANK"] == "0":
            print(f"{prog}: error: {one_line(str(error))}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
