"""Errors of a user's own code, without our frames."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

from tqdm import tqdm

from pspo.errors import UserCodeError, WorkerError

_PACKAGES = [Path(__file__).parents[2] / name for name in ("pspo", "pspo_lab", "pspo_vllm", "pspo_bridge")]
_FOLDERS = [*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *_PACKAGES]
_NOT_USER_CODE = (*(f"{folder}{os.sep}" for folder in _FOLDERS), "<frozen")  # prefixes of file names


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Frames of an error's traceback that are neither pspo's, nor Python's, nor of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_NOT_USER_CODE)]


def user_traceback(error: BaseException) -> str:
    """Format an error with the user's own frames alone, and the file and line where a library raised it."""
    frames = user_frames(error)
    if not frames and isinstance(error, UserCodeError | WorkerError | TimeoutError):
        return str(error)
    if not frames:
        whole = "".join(traceback.format_exception(error)).rstrip()
        return whole if isinstance(error, ValueError) else f"raised in no code of yours:\n{whole}"  # those say the fix
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)]
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    if frames[-1] != innermost:
        lines.append(f"  raised in {innermost.filename}, line {innermost.lineno}\n")
    if error.__cause__ is not None:
        lines.insert(0, f"{user_traceback(error.__cause__)}\n\nthe cause of:\n\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def show_failures(failures: dict[str, Exception], shown: dict[str, str]) -> None:
    """Show failures of rewards that are not in ``shown`` on stderr; ``shown`` gets each in one line."""
    for name, error in failures.items():
        if name not in shown:
            shown[name] = traceback.format_exception_only(error)[-1].strip()
            tqdm.write(f"reward {name} failed (shown once):\n{user_traceback(error)}", file=sys.stderr)
