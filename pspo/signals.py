"""SIGTERM and Ctrl-C: what they do to a run, to its forks and to the processes that it starts."""

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
PREVIOUS_HANDLERS: list[dict[int, Any]] = []  # that were replaced in this process, the outermost first


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def replace_handlers(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGTERM and SIGINT in this process, but not in its forks; nothing in a thread, where Python forbids it."""
    if threading.current_thread() is threading.main_thread():
        PREVIOUS_HANDLERS.append({number: signal.signal(number, handler) for number in SIGNALS})


class StopSignals:
    """SIGTERM and SIGINT in a `with` block: the first asks the run to stop, the second raises KeyboardInterrupt.

    Attributes:
        error: Stopped, once a signal has asked the run to stop.
        is_drawing: True while a rollout is drawn, which the first signal may interrupt at once.
    """

    def __init__(self) -> None:
        self.error: Stopped | None = None
        self.is_drawing = False

    def __enter__(self) -> None:
        replace_handlers(self.receive)

    def __exit__(self, *_: object) -> None:
        self.error = None
        if threading.current_thread() is threading.main_thread():
            for number, handler in PREVIOUS_HANDLERS.pop().items():
                signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        self.error = Stopped()
        for other in SIGNALS:
            signal.signal(other, signal.default_int_handler)
        name = signal.Signals(number).name
        line = f"\n{name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
        if self.is_drawing:
            raise self.error


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def restore_in_child() -> None:
    """Give a fork the handlers from before `replace_handlers`, so that a `multiprocessing.Pool` works.

    It ignores the first Ctrl-C, which a terminal sends to both.
    """
    if PREVIOUS_HANDLERS:
        previous = PREVIOUS_HANDLERS[0]
        PREVIOUS_HANDLERS.clear()
        signal.signal(signal.SIGTERM, previous[signal.SIGTERM])
        signal.signal(signal.SIGINT, lambda number, _: signal.signal(number, previous[number]))
    unblock()


def before_fork() -> None:
    """Block the signals, so that one sent to a child waits until the child has its own handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


os.register_at_fork(before=before_fork, after_in_parent=unblock, after_in_child=restore_in_child)
