"""Stopping a run by signal."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar

from torch import nn

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes
EXIT_INTERRUPTED = 130  # stopped at once


class Stopped(Exception):
    """A run that a signal stopped; saved, unless in its first test or validation."""


class StopSignals:
    """SIGTERM and SIGINT: the first asks the run to stop, the second raises KeyboardInterrupt."""

    received: ClassVar[signal.Signals | None] = None  # in this process

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        StopSignals.received = None

    def receive(self, number: int, _: FrameType | None) -> None:
        StopSignals.received = signal.Signals(number)
        for other in self.previous:
            signal.signal(other, signal.default_int_handler)
        line = f"\n{self.received.name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print


@contextlib.contextmanager
def interruptible(model: nn.Module, between_passes: bool = True) -> Iterator[None]:
    """Raise Stopped in a block that draws, if a signal has come: before the model's next pass, or only at the end."""

    def check(*_: object) -> None:
        if StopSignals.received is not None:
            raise Stopped

    hook = model.register_forward_pre_hook(check, prepend=True) if between_passes else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
    check()
