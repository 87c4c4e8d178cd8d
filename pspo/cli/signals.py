"""Stopping a run by signal."""

import os
import signal
from types import FrameType

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes
EXIT_INTERRUPTED = 130  # stopped at once


class Stopped(BaseException):
    """A run that a signal stopped; saved, unless in its first test or validation.

    Not an Exception: raised in the middle of a forward pass, no handler of a library may take it for a failure.
    """


class StopSignals:
    """SIGTERM and SIGINT: the first asks the run to stop, the second raises KeyboardInterrupt.

    Attributes:
        error: Stopped, once a signal has asked the run to stop.
        is_drawing: set by samplers; the first signal then raises the error itself.
    """

    def __init__(self) -> None:
        self.error: Stopped | None = None
        self.is_drawing = False

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.error = None

    def receive(self, number: int, _: FrameType | None) -> None:
        self.error = Stopped()
        for other in self.previous:
            signal.signal(other, signal.default_int_handler)
        name = signal.Signals(number).name
        line = f"\n{name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
        if self.is_drawing:
            raise self.error
