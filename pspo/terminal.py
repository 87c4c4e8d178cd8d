"""Output on a terminal: untrusted text made safe to print, and the progress of long loops."""

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = (10.0, 300.0)  # least and most between two lines; in between, a twentieth of the elapsed time
FORMAT = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}"


def one_line(text: str) -> str:
    """Text in one line: white space becomes blanks, and characters that are not printable as Python escapes them."""
    text = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clip(text: str, width: int) -> str:
    """Text in one line, without its middle if it is long."""
    text = one_line(text)
    return text if len(text) <= width else f"{text[: width // 2 - 3]} ... {text[-width // 2 + 2 :]}"


def print_timed(text: str, quiet: bool) -> None:
    """Print a line with the time of day, above any bar."""
    if not quiet:
        tqdm.write(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr)


class Bar(tqdm):
    """Progress bar on a terminal, with status lines above it; without a terminal, only the lines."""

    def __init__(self, quiet: bool, **options: Any) -> None:
        self.quiet = quiet
        self.name = options.get("desc")
        self.first = options.get("initial", 0)
        self.restart_clock()
        is_disabled = quiet or not sys.stderr.isatty()
        super().__init__(disable=is_disabled, dynamic_ncols=True, bar_format=FORMAT, **options)

    def restart_clock(self) -> None:
        """Measure the speed and the time left from now on."""
        self.started = time.monotonic()  # never set back, unlike tqdm's clock, whose times are not shown
        self.printed = 0.0  # seconds after the start

    def advance(self, n: int = 1, status: str = "", always: bool = False) -> None:
        """Count ``n`` more; show ``status`` in a line when due or ``always``, and its first part beside the bar."""
        self.n += n
        seconds = time.monotonic() - self.started
        left = seconds / max(self.n - self.first, 1) * (self.total - self.n)  # at the speed so far
        times = f"{self.format_interval(seconds)} elapsed, {self.format_interval(left)} left"
        self.set_postfix_str(", ".join(filter(None, [times, status.partition("  ")[0]])))
        shortest, longest = SECONDS
        if always or seconds - self.printed >= min(max(shortest, seconds / 20), longest):
            self.printed = seconds
            parts = [f"{self.name} {self.n}/{self.total}", times, status]
            print_timed("  ".join(filter(None, parts)), self.quiet)
