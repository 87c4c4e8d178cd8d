"""Text of others, such as names and switches of runs, in Markdown, LaTeX, spreadsheets and file names.

It is shown, and does nothing. pandas escapes LaTeX; matplotlib reads no mathematics (``text.parse_math``).
"""

import html
import re
import zlib
from collections.abc import Callable

import pandas as pd

from pspo.cli.escape import one_line

MARKDOWN = re.compile(
    r"[\\`|~$]|\*(?=\S)|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])"  # code, cells, mathematics, emphasis, links; no word_s
    r"|^[#*=\[]|^[-+](?=[\s-]|$)|^\d+[.)](?=\s|$)"  # at the start headings, lines, lists; no -1.5
)


def escape_markdown(text: str) -> str:
    """Text as a line of Markdown shows it."""
    text = html.escape(one_line(text), quote=False)
    return MARKDOWN.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text)


def escape_cell(text: str) -> str:
    """Text for a cell of a spreadsheet, which would compute what looks like a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def file_name(text: str) -> str:
    """Text as a file's name; a long one is cut, and ends in its CRC-32."""
    name = re.sub(r"[^\w.+]+", "-", text)
    return name if len(name.encode()) <= 100 else f"{name[:40]}-{zlib.crc32(name.encode()):08x}"


def markdown_table(texts: pd.DataFrame, escape: Callable[[str], str] = escape_markdown) -> str:
    """A table of texts as aligned Markdown; the index is the first column."""
    rows = [["", *texts.columns]]
    rows += [[row, *cells] for row, *cells in texts.itertuples()]
    rows = [[escape(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def latex_table(texts: pd.DataFrame) -> str:
    """A table of texts as a LaTeX tabular."""
    texts = texts.rename(index=one_line, columns=one_line).rename_axis(None)
    return texts.to_latex(escape=True, column_format="l" + "r" * len(texts.columns))
