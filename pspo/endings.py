"""How a run ends: what is raised, saved and said.

| event | exception | saved | message | exit code |
|---|---|---|---|---|
| the last step is taken | none | final model, summary | the results | 0 |
| first SIGTERM or Ctrl-C | Stopped | the snapshot | stopped; how to go on | 75 |
| second one; in an evaluation the first | KeyboardInterrupt; Stopped | nothing more | stopped; how to go on | 130 |
| a reward, environment or advantage raises | UserCodeFailed | the snapshot | the user's frames; how to go on | 1 |
| a surrogate or term raises, or returns no loss of every token | UserCodeFailed | nothing more | the same | 1 |
| an engine fails | EngineError, then RunFailed | nothing more | its line; how to go on | 1 |
| ten skipped steps in a row, weights not finite, a full disk | RunFailed | nothing more | the cause and a fix | 1 |
| a wrong switch, file or model, before the first rollout | ValueError, OSError | nothing | one line, with the fix | 2 |
| out of memory, with the fewest rows and tokens, too | RuntimeError | nothing more | switches to lower | 1 |
| another rank is lost, a fault of pspo | any other | nothing more | the traceback | 1 |

The snapshot holds the parts' states when they last matched the weights, at the beginning of a rollout or validation:
what was being drawn is drawn again. A run without a step saves none. "Nothing more": earlier checkpoints stay. From
Python the exceptions are raised, without exit codes.
"""

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
    """Raise what the block raises on any rank, on all of them: Stopped, EngineError or UserCodeFailed."""
    failure = None
    try:
        yield
    except (Exception, SystemExit, Stopped) as error:  # a user's code may raise anything
        if isinstance(error, RunFailed) or is_out_of_memory(error):  # the first is raised on all ranks
            raise
        failure = error
    if failure is not None or dist.world_size() > 1:
        raise_first(failure)


def raise_first(failure: BaseException | None) -> None:
    """Raise, of what has failed on any rank, the first one; nothing if none has."""
    is_known = failure is None or isinstance(failure, Stopped | EngineError)
    reasons = dist.gather_objects(failure if is_known else UserCodeFailed(user_traceback(failure)))
    for reason in sorted(filter(None, reasons), key=lambda reason: not isinstance(reason, Stopped)):  # a stop first
        raise type(reason)(*reason.args) from failure


@contextlib.contextmanager
def save_at_end(run: Any) -> Iterator[None]:
    """Save a `Run` that ends early in the block, and say how to go on."""
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
        raise RunFailed(f"the engine failed: {error}; {checkpointer.describe_newest()}") from error
    except UserCodeFailed as error:
        checkpointer.save_interrupted()
        raise UserCodeFailed(f"{error}\n\n{checkpointer.describe_newest()}") from error.__cause__
    except Exception as error:  # in an update, whose surrogate may be a user's
        if isinstance(error, RunFailed) or not (isinstance(error, UserCodeError) or user_frames(error)):
            raise
        raise UserCodeFailed(f"{user_traceback(error)}\n\n{checkpointer.describe_newest()}") from error


@contextlib.contextmanager
def exit_codes(prog: str, memory_advice: str, stopped: int = EXIT_STOPPED) -> Iterator[None]:
    """End a command by the code of what it raises, by ``stopped`` at a first signal."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as error:
        raise SystemExit(stopped if isinstance(error, Stopped) else EXIT_INTERRUPTED) from None
    except RunFailed as error:
        if dist.is_main():
            print(f"\n{prog}: {error}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        print(f"\n{prog}: out of memory: {reason}\n{memory_advice}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


@contextlib.contextmanager
def user_errors(prog: str, once: bool = False) -> Iterator[None]:
    """Turn ValueError and OSError, errors of the user, into one line and exit code 2; ``once``: the first rank's."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not (once and dist.launched_by_torchrun()) or os.environ["LOCAL_RANK"] == "0":
            print(f"{prog}: error: {one_line(str(error))}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
