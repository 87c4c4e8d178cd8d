"""How a run ends: what is raised, saved and said.

| event | exception | saved | message | exit code |
|---|---|---|---|---|
| the last step is taken | none | final model, summary | the results | 0 |
| first SIGTERM or Ctrl-C | Stopped | the snapshot | stopped; how to go on | 75 |
| second one; in an evaluation the first | KeyboardInterrupt; Stopped | nothing more | the same; none | 130 |
| a reward, environment, advantage, callback or draw raises | UserCodeFailed | the snapshot | frames; how to go on | 1 |
| a surrogate or term raises, or returns no loss of every token | UserCodeFailed | as below | the same | 1 |
| an engine fails | EngineError, then RunFailed | the snapshot | its line; how to go on | 1 |
| ten skipped steps in a row, weights not finite, a full disk | RunFailed | nothing more | the cause and a fix | 1 |
| a wrong switch, file or model, before the first rollout | ValueError, OSError | nothing | one line, with the fix | 2 |
| out of memory, with the fewest rows and tokens, too | RuntimeError | nothing more | the traceback | 1 |
| another rank is lost, a fault of pspo in a step of several ranks | any other | nothing more | the traceback | 1 |
| any other fault of pspo | UserCodeFailed | as below | the traceback; how to go on | 1 |

The snapshot holds the parts' states when they last matched the weights, at the beginning of a rollout or validation: an
unfinished rollout is drawn again. A run that has taken no step saves no snapshot. When an update fails, a process by
itself saves the snapshot if the update has taken no step; several ranks save nothing more. "Nothing more" means that
earlier checkpoints stay. From Python the exceptions are raised, without exit codes.
"""

import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_PACKAGES = [Path(__file__).parents[1] / name for name in ("pspo", "pspo_lab", "pspo_vllm", "pspo_bridge")]
_FOLDERS = [*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *_PACKAGES]
_NOT_USER_CODE = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<frozen")  # prefixes of file names


class Stopped(BaseException):
    """A signal has stopped the run. It is no Exception, which a library might catch in a forward pass."""


class RunFailed(RuntimeError):
    """The run cannot continue; everything that was saved is still there."""


class UserCodeFailed(RunFailed):
    """Code of a user, or of pspo, has failed; the text is the traceback with the user's frames."""


class EngineError(RuntimeError):
    """An engine has failed; the text is one line."""


class UserCodeError(ValueError):
    """A user's reward, environment, loss or worker has failed as the text explains; no traceback is needed."""


def function_name(function: Any) -> str:
    """Name of a function, or of an instance's class, in messages and metrics; a name stays as it is."""
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of an error's traceback that are neither pspo's, nor Python's, nor of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_USER_CODE)]


def user_traceback(error: BaseException) -> str:
    """Format an error with the user's own frames alone, and the file and line where a library raised it."""
    frames = user_frames(error)
    if not frames and isinstance(error, UserCodeError | TimeoutError):
        return str(error)
    if not frames:
        whole = "".join(traceback.format_exception(error)).rstrip()
        return whole if isinstance(error, ValueError) else f"raised in no code of yours:\n{whole}"  # it says the fix
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)]
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    if frames[-1] != innermost:
        lines.append(f"  raised in {innermost.filename}, line {innermost.lineno}\n")
    if error.__cause__ is not None:
        lines.insert(0, f"{user_traceback(error.__cause__)}\n\nthe cause of:\n\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
