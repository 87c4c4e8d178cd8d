"""Progress of a long loop: a bar on a terminal, plain lines in a log, nothing if that is asked for."""

import os
import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS = 5.0  # at least, between two lines


class Bar(tqdm):
    """Progress bar on a terminal; elsewhere a line every few seconds. ``quiet`` and TQDM_DISABLE=1 hide both."""

    def __init__(self, *args: Any, quiet: bool = False, **options: Any) -> None:
        quiet = quiet or os.environ.get("TQDM_DISABLE", "0") not in ("", "0")
        self.in_lines = not quiet and not sys.stderr.isatty()
        self.what, self.printed = options.get("desc"), time.monotonic()
        super().__init__(*args, disable=quiet or self.in_lines, **options)

    def advance(self, n: int = 1, status: str = "", always: bool = False) -> None:
        """Count ``n`` more and show ``status``, beside the bar or in a line if one is due, or ``always``."""
        if not self.disable:
            self.set_postfix_str(status, refresh=False)
            self.update(n)
        elif self.in_lines:
            self.n += n
            if always or time.monotonic() - self.printed >= SECONDS:
                print(f"{self.what} {self.n}/{self.total}  {status}".rstrip(), file=sys.stderr, flush=True)
                self.printed = time.monotonic()
