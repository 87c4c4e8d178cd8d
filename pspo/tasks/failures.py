"""A user's own code: what is shown of its failures, and what it may not change."""

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

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
        whole = "".join(traceback.format_exception(error)).rstrip()
        return whole if isinstance(error, ValueError) else f"raised in no code of yours:\n{whole}"  # those say the fix
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    lines = ["Traceback (your code):\n", *traceback.format_list(frames)]
    if frames[-1] != innermost:
        lines.append(f"  raised in {innermost.filename}, line {innermost.lineno}\n")
    if error.__cause__ is not None:
        lines.insert(0, f"{user_traceback(error.__cause__)}\n\nthe cause of:\n\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def torch_modes() -> dict[Callable[[Any], Any], Any]:
    """Setters of torch's state in this process or thread, and the present values; none before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    device = torch.get_default_device()
    modes = {
        torch.set_grad_enabled: torch.is_grad_enabled(),
        torch.set_default_dtype: torch.get_default_dtype(),
        torch.set_default_device: None if device.type == "cpu" else device,  # "cpu" would slow every call of torch
        torch.set_flush_denormal: sys.float_info.min / 2 == 0,
        torch.set_deterministic_debug_mode: torch.get_deterministic_debug_mode(),
        torch.set_num_threads: torch.get_num_threads(),
    }
    with contextlib.suppress(RuntimeError):  # after torch.backends.cuda.matmul.fp32_precision = "tf32"
        modes[torch.set_float32_matmul_precision] = torch.get_float32_matmul_precision()
    return modes


@contextlib.contextmanager
def undo_changes() -> Iterator[None]:
    """Restore the current folder and `torch_modes` after a user's code, whose changes end with its call.

    A process that it has forked ends where it would return: it would be a second trainer in one folder.
    """
    before = torch_modes()
    process = os.getpid()
    try:
        with contextlib.chdir("."):
            yield
    finally:
        if os.getpid() != process:
            os._exit(1)
        present = torch_modes()
        for restore, value in before.items():
            if present.get(restore) != value:
                restore(value)


def show_failures(failures: dict[str, Exception], shown: dict[str, str]) -> None:
    """Show failures by reward on stderr, except for rewards in ``shown``, which gets the others' in one line each."""
    for name, error in failures.items():
        if name not in shown:
            shown[name] = traceback.format_exception_only(error)[-1].strip()
            tqdm.write(f"reward {name} failed (shown once):\n{user_traceback(error)}", file=sys.stderr)
