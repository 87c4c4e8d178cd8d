"""Text of others, such as names and paths, on its way to a terminal: it is shown, and does nothing."""

import os
import sys


def one_line(text: str) -> str:
    """Text in one line: white space becomes blanks, and characters that are not printable as Python escapes them."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Text whose lines stay, such as a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def tolerate_output() -> None:
    """Let printing never raise: a character that the encoding of stdout lacks is escaped, a closed stdout takes all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process lives)
    if hasattr(sys.stdout, "reconfigure"):  # not a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")
