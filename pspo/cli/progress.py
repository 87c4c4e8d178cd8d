"""Progress of a long loop: a bar on a terminal, and lines, in a log alone; nothing if that is asked for."""

import os
import shutil
import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = (10.0, 300.0)  # between two lines, at the beginning and at most; in between a twentieth of the time so far
FORMAT = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


def is_hidden(quiet: bool) -> bool:
    """True if progress is not to be shown: ``quiet``, or TQDM_DISABLE=1."""
    return quiet or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")


def say(text: str, quiet: bool = False) -> None:
    """Print a line with the time of day, above any bar; a terminal gets those of its parts that fit."""
    line = f"{time.strftime('%H:%M:%S')}  {text}"
    if sys.stderr.isatty() and len(line) > (columns := shutil.get_terminal_size().columns):
        line = line[: columns + 1].rpartition("  ")[0]
    if not is_hidden(quiet):
        tqdm.write(line, file=sys.stdout if "ipykernel" in sys.modules else sys.stderr)  # red in a notebook


class Bar(tqdm):
    """Progress bar on a terminal, with lines of history above it; elsewhere the lines alone."""

    def __init__(self, *args: Any, quiet: bool = False, **options: Any) -> None:
        self.quiet = quiet
        self.is_log = not sys.stderr.isatty()
        self.name = options.get("desc")
        self.first = options.get("initial", 0)
        self.started = time.monotonic()
        self.printed = 0.0  # seconds after the start
        options = {"dynamic_ncols": True, "bar_format": FORMAT} | options
        super().__init__(*args, disable=is_hidden(quiet) or self.is_log, **options)

    def advance(self, n: int = 1, status: str = "", always: bool = False) -> None:
        """Count ``n`` more; show ``status`` in a line if one is due, or ``always``, its first part next to a bar."""
        if self.disable:
            self.n += n
        else:
            self.set_postfix_str(status.partition("  ")[0], refresh=False)
            self.update(n)
        seconds = time.monotonic() - self.started
        shortest, longest = SECONDS
        if always or seconds - self.printed >= min(max(shortest, seconds / 20), longest):
            self.printed = seconds
            times = self.times(seconds) if self.is_log else ""  # a bar has its own
            if status or times:
                say("  ".join(filter(None, (f"{self.name} {self.n}/{self.total}", times, status))), self.quiet)

    def times(self, seconds: float) -> str:
        """Such as "12:10 elapsed, 04:10 left", at the speed so far."""
        elapsed = f"{self.format_interval(seconds)} elapsed"
        remaining = (self.total or self.n) - self.n
        if remaining <= 0:
            return elapsed
        per_item = seconds / max(self.n - self.first, 1)
        return f"{elapsed}, {self.format_interval(per_item * remaining)} left"
