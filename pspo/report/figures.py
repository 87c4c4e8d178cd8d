"""The pictures of `pspo.report`: SVG, transparent, in colours that read on white and on dark pages.

A method has one colour, its settings shades of it. The same numbers give the same bytes.
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
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pspo.report.runs import COLOURS, OTHERS_COLOUR
from pspo.report.tables import SEEDS_FOR_AN_INTERVAL, over_seeds

DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
SHARED = 6  # rows that share the axes of a panel
GREY = "#7d7d7d"
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


def styles(rows: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each row {row: method}: shades of the method's colour, from dark to light."""
    found, methods = {}, list(COLOURS)
    for method in dict.fromkeys(rows.values()):
        own, colour = [row for row in rows if rows[row] == method], COLOURS.get(method, OTHERS_COLOUR)
        first = methods.index(method) if method in COLOURS else 0
        for i, row in enumerate(own):
            shade = 0.45 * (2 * i / (len(own) - 1) - 1) if len(own) > 1 else 0.0
            mixed = [(1 - abs(shade)) * part + max(shade, 0) for part in to_rgb(colour)]
            found[row] = {"color": to_hex(mixed), "ls": DASHES[(first + i) % len(DASHES)]}
    return found


def draw_curves(curves: pd.DataFrame, x_label: str, path: Path, marker: str = "") -> list[Path]:
    """Draw means over seeds with their 95% intervals from rows of panel, row, method, seed, x and y; returns the files.

    Up to `SHARED` rows share the axes of a panel, all panels in one file. More are small multiples, a file for each
    panel: every row has axes of its own, and the others are grey behind it.
    """
    style = styles(dict(zip(curves["row"], curves["method"], strict=True)))
    rows, panels = list(style), dict(list(curves.groupby("panel", sort=False)))
    few = len(rows) <= SHARED
    if few:
        pictures = {"": [(panel, of_panel, rows) for panel, of_panel in panels.items()]} if rows else {}
        columns, height = min(2, len(panels)), 1.9
    else:
        pictures = {panel: [(row, of_panel, [row]) for row in rows] for panel, of_panel in panels.items()}
        columns, height = 4, 1.2
    files = [path.with_stem(re.sub(r"[^\w.+]+", "-", f"{path.stem} {title}".strip())) for title in pictures]
    for file, (title, cells) in zip(files, pictures.items(), strict=True):
        lines = math.ceil(len(cells) / columns)
        with picture(file, (4 if few else 2.2) * columns + few, (height + 0.5) * lines + 0.4, x_label) as figure:
            figure.suptitle(title)
            grid = figure.subplots(lines, columns, sharex=not few, sharey=not few, squeeze=False).flat
            for axes in grid[len(cells) :]:
                axes.set_axis_off()
            for axes, (name, of_panel, own) in zip(grid, cells, strict=False):
                means = _means(of_panel)
                axes.set(title=_wrapped(name), ylim=_span(of_panel["y"], *means.values()))
                for row, of_row in means.items():
                    if row in own:
                        _draw_row(axes, of_panel[of_panel["row"] == row], of_row, style[row], marker)
                    else:
                        axes.plot(of_row["column"], of_row["mean"], color=GREY, alpha=0.4, linewidth=0.7, zorder=1)
            if few:
                handles = in_order([line for axes in grid[:1] for line in axes.get_lines()])
                figure.legend(handles=handles, loc="outside right center", labelcolor="linecolor", frameon=False)
    return files


def _means(of_panel: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By row, its means over seeds at each x, which is their `column`."""
    means = over_seeds(of_panel.rename(columns={"x": "column", "y": "value"})).sort_values("column", kind="stable")
    return dict(list(means.groupby("row", sort=False)))


def _draw_row(axes: Axes, of_row: pd.DataFrame, means: pd.DataFrame, style: dict[str, Any], marker: str) -> None:
    """Draw the mean in a band where three seeds or more have a value; if they never do, a thin line for each seed."""
    banded, style = means[means["seeds"] >= SEEDS_FOR_AN_INTERVAL], style | {"label": _wrapped(of_row["row"].iloc[0])}
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


def name_curves(axes: Axes) -> None:
    """Name the curves right of the axes, in their colours and in the order in which they end."""
    handles = in_order(axes.get_lines())
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), labelcolor="linecolor", frameon=False)


def in_order(lines: Sequence[Line2D]) -> list[Line2D]:
    """One line of each name, in the order in which they end."""
    named = {line.get_label(): line for line in lines if not line.get_label().startswith("_")}
    return sorted(named.values(), key=lambda line: -line.get_ydata()[-1])


def _wrapped(name: str) -> str:
    return textwrap.fill(name, 28)


def _span(values: pd.Series, *means: pd.DataFrame) -> tuple[float, float]:
    """Limits of a y axis: the values, the intervals that are drawn, and a margin."""
    bands = [of[["low", "high"]][of["seeds"] >= SEEDS_FOR_AN_INTERVAL] for of in means]
    low, high = (getattr(pd.concat([values, *(of[side] for of in bands)]), end)()
                 for side, end in (("low", "min"), ("high", "max")))  # fmt: skip
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin
