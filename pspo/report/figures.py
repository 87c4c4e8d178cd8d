"""The pictures of `pspo.report`: SVG, transparent, in colours that read on white and on dark pages.

The colours of curves are Okabe & Ito's (2008), which colour-blind readers tell apart. The same numbers give the same
bytes.
"""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pspo.report.tables import SEEDS_FOR_AN_INTERVAL, over_seeds

COLOURS = ("#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
STYLES = [{"color": colour, "ls": dashes} for colour, dashes in zip(COLOURS, DASHES, strict=True)]
GREY = "#7d7d7d"
LINE = 0.15  # inches, of a line of text
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), GREY),
}


@contextmanager
def picture(path: Path, width: float, height: float, x_label: str) -> Iterator[Figure]:
    """A figure of this size in inches, saved at the end."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.supxlabel(x_label, fontsize=8)
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_curves(curves: pd.DataFrame, x_label: str, path: Path, marker: str = "") -> list[Path]:
    """Draw means over seeds with their 95% intervals, from rows of panel, row, seed, x and y; returns the files.

    Up to six rows have a style each and share the axes of a panel, all panels in one file. More are small multiples,
    a file for each panel: every row has axes of its own, and the others are grey behind it.
    """
    rows, panels = list(dict.fromkeys(curves["row"])), dict(list(curves.groupby("panel", sort=False)))
    few = len(rows) <= len(STYLES)
    if few:
        styles = dict(zip(rows, STYLES, strict=False))
        pictures = {"": [(panel, of_panel, styles) for panel, of_panel in panels.items()]} if rows else {}
        columns, height = min(2, len(panels)), max(1.5, LINE * sum(map(_lines, rows)))
    else:
        pictures = {panel: [(row, of_panel, {row: STYLES[3]}) for row in rows] for panel, of_panel in panels.items()}
        columns, height = 4, 0.8 + LINE * max(map(_lines, rows))
    files = [path.with_stem(re.sub(r"[^\w.+]+", "-", f"{path.stem} {title}".strip())) for title in pictures]
    for file, (title, cells) in zip(files, pictures.items(), strict=True):
        lines = math.ceil(len(cells) / columns)
        with picture(file, (4.4 if few else 2.2) * columns, (height + 0.5) * lines + 0.4, x_label) as figure:
            figure.suptitle(title)
            grid = figure.subplots(lines, columns, sharex=not few, sharey=not few, squeeze=False).flat
            for axes in grid[len(cells) :]:
                axes.set_axis_off()
            for axes, (name, of_panel, styles) in zip(grid, cells, strict=False):
                axes.set(title=_wrapped(name), ylim=_span(of_panel["y"]))
                ends = []
                for row, means in _means(of_panel).items():
                    if row in styles:
                        _draw_row(axes, of_panel[of_panel["row"] == row], means, styles[row], marker)
                        ends.append((row, *means[["column", "mean"]].iloc[-1], styles[row]["color"]))
                    else:
                        axes.plot(means["column"], means["mean"], color=GREY, alpha=0.4, linewidth=0.7, zorder=1)
                if few:
                    name_ends(axes, ends, LINE / height)
    return files


def _means(of_panel: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By row, its means over seeds at each x, which is their `column`."""
    means = over_seeds(of_panel.rename(columns={"x": "column", "y": "value"})).sort_values("column", kind="stable")
    return dict(list(means.groupby("row", sort=False)))


def _draw_row(axes: Axes, of_row: pd.DataFrame, means: pd.DataFrame, style: dict[str, Any], marker: str) -> None:
    """Draw the mean in a band where three seeds or more have a value; if they never do, a thin line for each seed."""
    banded = means[means["seeds"] >= SEEDS_FOR_AN_INTERVAL]
    if len(banded):
        axes.plot(banded["column"], banded["mean"], marker=marker, markersize=4, **style)
        axes.fill_between(
            banded["column"], banded["low"], banded["high"], alpha=0.12, linewidth=0, color=style["color"]
        )
    for _, of_seed in of_row.groupby("seed"):
        if banded.empty:
            axes.plot(of_seed["x"], of_seed["y"], marker=marker, markersize=4, linewidth=0.9, **style)
        elif marker:
            axes.plot(of_seed["x"], of_seed["y"], ".", markersize=4, alpha=0.6, color=style["color"])


def name_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], line: float) -> None:
    """Write names right of the axes, level with the ends of their curves as far as they have room.

    Args:
        ends: name, x and y of its end, colour.
        line: height of a line of text, in heights of the axes.
    """
    low, high = axes.get_ylim()
    ends, tops, top, bottom = sorted(ends, key=lambda end: -end[2]), [], 1 + line, -line
    for name, _, y, _ in ends:  # down from the top
        tops.append(min(top, (y - low) / (high - low) + line * _lines(name) / 2))
        top = tops[-1] - line * _lines(name)
    for i in reversed(range(len(ends))):  # up again where they ran out of room
        tops[i] = bottom = max(tops[i], bottom + line * _lines(ends[i][0]))
    for (name, x, y, colour), top in zip(ends, tops, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)}
        at = {"xytext": (1.05, top), "textcoords": "axes fraction", "va": "top"}
        axes.annotate(_wrapped(name), (x, y), color=colour, arrowprops=leader, **at)


def _wrapped(name: str) -> str:
    return textwrap.fill(name, 28)


def _lines(name: str) -> int:
    return _wrapped(name).count("\n") + 1


def _span(values: pd.Series) -> tuple[float, float]:
    """Limits of a y axis: the values and a margin."""
    margin = 0.05 * (values.max() - values.min()) or 0.05
    return values.min() - margin, values.max() + margin
