"""Progress of a long loop: a bar on a terminal, and lines, in a log alone; nothing if that is asked for."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = (10.0, 300.0)  # between two lines, at the beginning and at most; in between a twentieth of the time so far
FORMAT = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


def is_hidden(quiet: bool) -> bool:
    """True if progress is not to be shown: ``quiet``, or TQDM_DISABLE=1."""
    return quiet or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")


def print_timed(text: str, quiet: bool = False) -> None:
    """Print a line with the time of day, above any bar."""
    if not is_hidden(quiet):
        tqdm.write(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr)


class Bar(tqdm):
    """Progress bar on a terminal, with lines of history above it; elsewhere the lines alone."""

    def __init__(self, *args: Any, quiet: bool = False, **options: Any) -> None:
        self.quiet = quiet
        self.name = options.get("desc")
        self.first = options.get("initial", 0)
        self.started = time.monotonic()
        self.printed = 0.0  # seconds after the start
        is_disabled = is_hidden(quiet) or not sys.stderr.isatty()
        super().__init__(*args, disable=is_disabled, dynamic_ncols=True, bar_format=FORMAT, **options)

    def advance(self, n: int = 1, status: str = "", always: bool = False) -> None:
        """Count ``n`` more; show ``status`` in a line if one is due, or ``always``, its first part next to a bar."""
        seconds = time.monotonic() - self.started
        times = ""  # a bar has its own
        if self.disable:
            self.n += n
            left = seconds / max(self.n - self.first, 1) * (self.total - self.n)  # at the speed so far
            times = f"{self.format_interval(seconds)} elapsed, {self.format_interval(left)} left"
        else:
            self.set_postfix_str(status.partition("  ")[0], refresh=False)
            self.update(n)
        shortest, longest = SECONDS
        if always or seconds - self.printed >= min(max(shortest, seconds / 20), longest):
            self.printed = seconds
            parts = [f"{self.name} {self.n}/{self.total}", times, status]
            print_timed("  ".join(part for part in parts if part), self.quiet)
