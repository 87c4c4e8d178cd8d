"""Text of others, such as names and switches of runs, on its way out: it is shown, and does nothing.

Of TeX pandas escapes what `one_line` leaves, matplotlib reads no mathematics (``text.parse_math``) and escapes SVG.
"""

import html
import os
import re
import sys

MARKDOWN = re.compile(
    r"[\\`|~$]|\*(?=\S)|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])"  # code, cells, mathematics, emphasis, links; no word_s
    r"|^[#*=\[]|^[-+](?=[\s-]|$)|^\d+[.)](?=\s|$)"  # at the start headings, lines, lists; no -1.5
)


def one_line(text: str) -> str:
    """Text in one line, for a terminal: characters that are not printable as Python escapes them."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """Text for a terminal, such as a command, whose lines stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def in_markdown(text: str) -> str:
    """Text as a line of Markdown shows it."""
    text = html.escape(one_line(text), quote=False)
    return MARKDOWN.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text)


def tolerate_output() -> None:
    """Let printing never raise: a character that the encoding of stdout lacks is escaped, a closed stdout takes all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process lives)
    if hasattr(sys.stdout, "reconfigure"):  # not a notebook's
        sys.stdout.reconfigure(errors="backslashreplace")
