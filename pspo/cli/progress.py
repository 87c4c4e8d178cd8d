"""Progress of a long loop: a bar on a terminal, plain lines in a log, nothing if that is asked for."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 5.0  # at least, between two lines
FORMAT = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class Bar(tqdm):
    """Progress bar on a terminal, with a line of history above it every twentieth; elsewhere a line every few seconds.

    ``quiet`` and TQDM_DISABLE=1 hide both.
    """

    def __init__(self, *args: Any, quiet: bool = False, **options: Any) -> None:
        quiet = quiet or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        self.in_lines = not quiet and not sys.stderr.isatty()
        self.lines = sys.stdout if "ipykernel" in sys.modules else sys.stderr  # a notebook paints the latter red
        self.what, self.first = options.get("desc"), options.get("initial", 0)
        self.started = self.printed = time.monotonic()
        options = {"dynamic_ncols": True, "bar_format": FORMAT} | options
        super().__init__(*args, disable=quiet or self.in_lines, **options)

    def advance(self, n: int = 1, status: str = "", always: bool = False) -> None:
        """Count ``n`` more; show ``status`` in a line if one is due, or ``always``, its first part next to a bar."""
        if not self.disable:
            before, every = self.n, max(1, (self.total or 0) / 20)
            self.set_postfix_str(status.partition("  ")[0], refresh=False)
            self.update(n)
            if status and (always or before // every < self.n // every):
                self.write(f"{self.what} {self.n}/{self.total}  {status}", file=sys.stderr)
        elif self.in_lines:
            self.n += n
            if always or time.monotonic() - self.printed >= SECONDS:
                line = f"{self.what} {self.n}/{self.total}  {status or self.left()}"
                print(line.rstrip(), file=self.lines, flush=True)
                self.printed = time.monotonic()

    def left(self) -> str:
        """Such as "04:10 left", at the speed so far; "" at the end."""
        done, to_do = self.n - self.first, (self.total or 0) - self.n
        seconds = (time.monotonic() - self.started) * to_do / max(done, 1)
        return f"{self.format_interval(seconds)} left" if to_do > 0 else ""
