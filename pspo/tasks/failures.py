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
    """Format an error with its traceback; in no code of the user's, those that say what is wrong by their message."""
    if not user_frames(error) and isinstance(error, UserCodeError | WorkerError | TimeoutError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def show_failures(failures: dict[str, Exception], shown: dict[str, str]) -> None:
    """Show failures of rewards that are not in ``shown`` on stderr; ``shown`` gets each in one line."""
    for name, error in failures.items():
        if name not in shown:
            shown[name] = traceback.format_exception_only(error)[-1].strip()
            tqdm.write(f"reward {name} failed (shown once):\n{user_traceback(error)}", file=sys.stderr)
