"""SIGTERM and Ctrl-C: their effects on a run, on its forks and on processes that it starts."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pspo.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends in any way (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def replace_handlers(handler: Callable[[int], None]) -> dict[int, Any]:
    """Handle SIGTERM and SIGINT in this process; returns the old handlers, or {} in a thread, where Python forbids it.

    In a fork, such as a `multiprocessing.Pool` makes, a first Ctrl-C does nothing: the terminal sends it to forks, too.
    """
    process = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            return handler(number)
        signal.signal(number, previous[number])

    if threading.current_thread() is not threading.main_thread():
        return {}
    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    handle.terminate = previous[signal.SIGTERM]
    return previous


class StopSignals:
    """SIGTERM and SIGINT in a `with` block: the first asks the run to stop, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.error: Stopped | None = None  # set once a signal has asked the run to stop
        self.is_drawing = False  # True while a rollout is drawn, which the first signal may interrupt at once

    def __enter__(self) -> None:
        self.previous = replace_handlers(self.receive)

    def __exit__(self, *_: object) -> None:
        self.error = None
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int) -> None:
        self.error = Stopped()
        for other in SIGNALS:
            signal.signal(other, signal.default_int_handler)
        line = f"\n{signal.Signals(number).name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
        if self.is_drawing:
            raise self.error


forking = threading.local()  # mask: the signals that the thread blocked before it forked


def block() -> None:
    forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def restore() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)


def restore_in_child() -> None:
    """Restore SIGTERM's old handler: a Python handler may never run in a fork that waits in C, as a pool's forks do."""
    handler = signal.getsignal(signal.SIGTERM)
    if hasattr(handler, "terminate"):
        signal.signal(signal.SIGTERM, handler.terminate)
    restore()


os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore_in_child)  # so no signal is lost
