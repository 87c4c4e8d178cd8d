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
        received: the signal that asked the run to stop.
        interruptible: context manager; inside, the signal itself raises Stopped, and one that came earlier does so at
            its beginning. Only what may be left at any point goes inside: no communication between ranks.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.interruptible = Interruptible(self)

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.received = None

    def receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in self.previous:
            signal.signal(other, signal.default_int_handler)
        line = f"\n{self.received.name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
        if self.interruptible.is_entered:
            raise Stopped


class Interruptible:
    """A block that a signal stops at once, see `StopSignals`."""

    def __init__(self, signals: StopSignals) -> None:
        self.signals = signals
        self.is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True
        if self.signals.received is not None:
            self.is_entered = False
            raise Stopped

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_entered = False
        if kind is None and self.signals.received is not None:  # raised where nothing can be, such as a __del__
            raise Stopped
