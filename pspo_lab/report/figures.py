"""The pictures of `pspo_lab.report`: SVG, dark text on white, also on dark pages.

A method has one colour, its settings shades of it. The same numbers give the same bytes.
"""

import math
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

from pspo.cli.escape import in_file_name, one_line
from pspo_lab.report.runs import ARGUMENT, COLOURS, OTHERS_COLOUR, SEED, Runs, methods, settings, untrained
from pspo_lab.report.tables import DIAGNOSTICS, SEEDS_FOR_AN_INTERVAL, compared, over_seeds, scale, smoothed

DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
SHARED = 6  # rows that share the axes of a panel
INK, GREY = "#333333", "#7d7d7d"  # text and axes; curves behind others
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",
    "text.parse_math": False,  # names of others have dollars
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def picture(path: Path, width: float, height: float, x_label: str) -> Iterator[Figure]:
    """A figure of this size in inches, saved at the end."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.supxlabel(one_line(x_label), fontsize=8)
        yield figure
        figure.savefig(path, facecolor="white", metadata={"Date": None})


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


def draw_task(runs: Runs, finished: Runs, label: pd.Series, prefix: str) -> list[Path]:
    """Draw the curves, the diagnostics, and the ablation of every argument of a surrogate; returns the files."""
    about = pd.DataFrame({"row": label, "method": methods(runs.configs), "seed": runs.configs[SEED]})
    begin = untrained(runs).set_index("run")

    def curves(metrics: dict[str, str]) -> pd.DataFrame:  # by panel
        parts = [pd.DataFrame(columns=["panel", "run"])]
        for panel, metric in metrics.items():
            values = runs.metrics.reindex(columns=["run", "step", metric]).dropna()
            for run, of_run in values.groupby("run", sort=False):
                y = smoothed(of_run[metric])
                points = dict(zip(of_run["step"].iloc[len(of_run) - len(y) :], y, strict=True))
                if run in begin.index and metric in begin:
                    points = {0: begin.loc[run, metric]} | points
                parts.append(pd.DataFrame({"panel": panel, "run": run, "x": points.keys(), "y": points.values()}))
        return pd.concat(parts).join(about, on="run")

    x_label = "optimizer step; means over a tenth of the run"
    rewards = {"training reward": "reward", "validation reward": "validation_reward"}
    pictures = draw_curves(curves(rewards), x_label, Path(f"{prefix}curves.svg"))
    pictures += draw_curves(curves({name: name for name in DIAGNOSTICS}), x_label, Path(f"{prefix}diagnostics.svg"))

    numbers, configs = compared(finished), finished.configs
    numbers = numbers.assign(panel=numbers["column"], y=numbers["value"] * numbers["column"].map(scale))
    numbers = numbers[["run", "panel", "y"]]
    for switch in [name for name in configs if name.startswith(ARGUMENT)]:
        name = switch.removeprefix(ARGUMENT)
        values = pd.to_numeric(configs[switch], errors="coerce").dropna()
        values = values[values.groupby(settings(configs, besides=[switch])).transform("nunique") > 1]
        for method, x in values.groupby(methods(configs)):
            line = {run: label[run].replace(f"{name}={configs.loc[run, switch]}", name) for run in x.index}
            points = numbers[numbers["run"].isin(x.index)].join(about.assign(row=pd.Series(line), x=x), on="run")
            path = Path(f"{prefix}{in_file_name(f'{method}-{name}')}.svg")
            pictures += draw_curves(points.sort_values("x"), name, path, marker="o")
    return pictures


def draw_curves(curves: pd.DataFrame, x_label: str, path: Path, marker: str = "") -> list[Path]:
    """Draw means over seeds with their 95% intervals from rows of panel, row, method, seed, x and y; returns the files.

    Up to `SHARED` rows share the axes of a panel, all panels in one file. More are small multiples, a file for each
    panel: every row has axes of its own, and the others are grey behind it.
    """
    style = styles(dict(zip(curves["row"], curves["method"], strict=True)))
    rows, panels, few = list(style), list(curves.groupby("panel", sort=False)), len(style) <= SHARED
    if few:
        pictures = {"": [(panel, of_panel, rows) for panel, of_panel in panels]} if rows else {}
        columns, width, height = min(2, len(panels)), 4, 1.9
    else:
        pictures = {panel: [(row, of_panel, [row]) for row in rows] for panel, of_panel in panels}
        columns, width, height = 4, 2.2, 1.2
    files = []
    for title, cells in pictures.items():
        lines = math.ceil(len(cells) / columns)
        files.append(path.with_stem(in_file_name(f"{path.stem} {title}".strip())))
        with picture(files[-1], width * columns + few, (height + 0.5) * lines + 0.4, x_label) as figure:
            figure.suptitle(one_line(title))
            grid = figure.subplots(lines, columns, sharex=not few, sharey=not few, squeeze=False).flat
            for axes in grid[len(cells) :]:
                axes.set_axis_off()
            for axes, (name, of_panel, own) in zip(grid, cells, strict=False):
                means = over_seeds(of_panel.rename(columns={"x": "column", "y": "value"}))
                means = means.sort_values("column", kind="stable")
                axes.set(title=_wrapped(name), ylim=_span(of_panel["y"], means))
                for row, of_row in means.groupby("row", sort=False):
                    if row in own:
                        _draw_row(axes, of_panel[of_panel["row"] == row], of_row, marker, style[row])
                    else:
                        axes.plot(of_row["column"], of_row["mean"], color=GREY, alpha=0.4, linewidth=0.7, zorder=1)
            if few:
                handles = in_order(grid[0].get_lines())
                figure.legend(handles=handles, loc="outside right center")
    return files


def _draw_row(axes: Axes, of_row: pd.DataFrame, means: pd.DataFrame, marker: str, style: dict[str, Any]) -> None:
    """Draw the mean in a band where three seeds or more have a value; if they never do, a thin line for each seed."""
    banded = means[means["seeds"] >= SEEDS_FOR_AN_INTERVAL]
    x, color, label = banded["column"], style["color"], _wrapped(of_row["row"].iloc[0])
    if len(banded):
        axes.plot(x, banded["mean"], marker=marker, markersize=4, label=label, **style)
        axes.fill_between(x, banded["low"], banded["high"], alpha=0.12, linewidth=0, color=color)
    for _, of_seed in of_row.groupby("seed"):
        if banded.empty:
            seen = "o" if len(of_seed) == 1 else marker  # a line of one point is not there
            axes.plot(of_seed["x"], of_seed["y"], marker=seen, markersize=4, linewidth=0.9, label=label, **style)
        elif marker:
            axes.plot(of_seed["x"], of_seed["y"], ".", markersize=4, alpha=0.6, color=color)


def _wrapped(name: str) -> str:
    return textwrap.fill(one_line(name), 28)


def in_order(lines: Sequence[Line2D]) -> list[Line2D]:
    """One line of each name, in the order in which they end."""
    named = {line.get_label(): line for line in lines if not line.get_label().startswith("_child")}
    return sorted(named.values(), key=lambda line: -line.get_ydata()[-1])


def _span(values: pd.Series, means: pd.DataFrame) -> tuple[float, float]:
    """Limits of a y axis: the values, the intervals that are drawn, and a margin."""
    banded = means[means["seeds"] >= SEEDS_FOR_AN_INTERVAL]
    shown = pd.concat([values, banded["low"], banded["high"]])
    margin = 0.05 * (shown.max() - shown.min()) or 0.05
    return shown.min() - margin, shown.max() + margin
