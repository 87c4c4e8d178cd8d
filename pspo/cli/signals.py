"""Stopping a run by signal."""

import os
import signal
from types import FrameType

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal and saved; the same command resumes
EXIT_INTERRUPTED = 130  # stopped at once


class Stopped(Exception):
    """A run that a signal stopped, after saving."""


class StopSignals:
    """SIGTERM and SIGINT: the first asks the run to stop after its rollout, the second raises KeyboardInterrupt."""

    received: signal.Signals | None = None

    def __enter__(self) -> "StopSignals":
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in self.previous:
            signal.signal(other, signal.default_int_handler)
        line = f"\n{self.received.name}: stopping after this rollout, then saving; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
