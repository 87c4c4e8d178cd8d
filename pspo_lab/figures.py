"""Pictures of runs: SVG, dark text on white, also on dark pages.

A method has one colour, its settings shades of it. The same numbers give the same bytes.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from pspo.cli.terminal import one_line
from pspo_lab import tables
from pspo_lab.runs import Runs
from pspo_lab.settings import ARGUMENT, SEED, methods, setting_numbers

# A method has one colour in every picture, on white and on dark: Okabe & Ito's (2008) for the paper's six, and Tol's.
COLOURS = {"Clip": "#E69F00", "NoClip": "#0072B2", "P3O": "#009E73", "PSPO": "#D55E00", "SAPO": "#CC79A7",
           "TOPR": "#56B4E9", "REINFORCE": "#AA3377", "CISPO": "#44AA99", "GSPO": "#999933", "GMPO": "#B2182B",
           "VESPO": "#6C63B5", "DPPO": "#B58900"}  # fmt: skip
OWN_COLOURS = ("#8E6FD1", "#5B8C2A", "#0F8B9D", "#C2559A", "#D9534F", "#B07A3A", "#8C8C8C")  # of losses of others
DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
SHARED = 6  # settings that share the axes of a panel
GREY_POINTS = 40  # of a curve behind others
INK, GREY = "#333333", "#7d7d7d"  # text and axes; curves behind others
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "figure.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",
    "text.parse_math": False,  # names of others have dollars
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
}


def method_colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each method: a fixed one for those of `pspo.losses`, for others the next of their own."""
    own = sorted(set(names) - COLOURS.keys())
    return COLOURS | {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}


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
    row_styles = {}
    colours = method_colours(rows.values())
    order = list(colours)
    for method in dict.fromkeys(rows.values()):
        settings = [row for row in rows if rows[row] == method]
        colour = colours[method]
        first = order.index(method)
        for i, row in enumerate(settings):
            shade = 0.45 * (2 * i / (len(settings) - 1) - 1) if len(settings) > 1 else 0.0
            mixed = [(1 - abs(shade)) * part + max(shade, 0) for part in to_rgb(colour)]
            row_styles[row] = {"color": to_hex(mixed), "ls": DASHES[(first + i) % len(DASHES)]}
    return row_styles


def draw_task(runs: Runs, finished: Runs, label: pd.Series, prefix: str) -> list[Path]:
    """Draw the curves, the diagnostics, and the ablation of every argument of a surrogate; returns the files."""
    about = pd.DataFrame({"row": label, "method": methods(runs.configs), "seed": runs.configs[SEED]})
    x_label = "optimizer step; means over a tenth of the run"
    rewards = {"training reward": "reward", "validation reward": "validation_reward"}
    diagnostics = {name: name for name in tables.DIAGNOSTICS}
    files = draw_curves(curve_points(runs, rewards).join(about, on="run"), x_label, Path(f"{prefix}curves.svg"))
    points = curve_points(runs, diagnostics).join(about, on="run")
    files += draw_curves(points, x_label, Path(f"{prefix}diagnostics.svg"))

    configs = finished.configs
    numbers = tables.compared(finished)
    numbers = numbers.assign(panel=numbers["column"], y=numbers["value"] * numbers["column"].map(tables.scale))
    numbers = numbers[["run", "panel", "y"]]
    for switch in [name for name in configs if name.startswith(ARGUMENT)]:
        name = switch.removeprefix(ARGUMENT)
        values = pd.to_numeric(configs[switch], errors="coerce").dropna()
        others = setting_numbers(configs, ignore=[switch])
        values = values[values.groupby(others).transform("nunique") > 1]
        for method, x in values.groupby(methods(configs)):
            line = {run: label[run].replace(f"{name}={configs.loc[run, switch]}", name) for run in x.index}
            points = numbers[numbers["run"].isin(x.index)].join(about.assign(row=pd.Series(line), x=x), on="run")
            path = Path(f"{prefix}{tables.file_name(f'{method}-{name}')}.svg")
            files += draw_curves(points.sort_values("x"), name, path, marker="o")
    return files


def curve_points(runs: Runs, metrics: dict[str, str]) -> pd.DataFrame:
    """Rows of panel, run, x and y of smoothed metrics by panel; the untrained model's are at step 0."""
    untrained = runs.untrained().set_index("run")
    parts = [pd.DataFrame(columns=["panel", "run"])]
    for panel, metric in metrics.items():
        values = runs.metrics.reindex(columns=["run", "step", metric]).dropna()
        for run, rollouts in values.groupby("run", sort=False):
            y = tables.smoothed(rollouts[metric])
            points = dict(zip(rollouts["step"].iloc[len(rollouts) - len(y) :], y, strict=True))
            if run in untrained.index and metric in untrained:
                points = {0: untrained.loc[run, metric]} | points
            parts.append(pd.DataFrame({"panel": panel, "run": run, "x": points.keys(), "y": points.values()}))
    return pd.concat(parts)


def draw_curves(curves: pd.DataFrame, x_label: str, path: Path, marker: str = "") -> list[Path]:
    """Draw means over seeds with their 95% intervals from rows of panel, row, method, seed, x and y; returns the files.

    Up to `SHARED` rows share the axes of a panel, all panels in one file. More are small multiples, a file for each
    panel: every row has axes to itself, and the others are grey behind it.
    """
    style = styles(dict(zip(curves["row"], curves["method"], strict=True)))
    panels = dict(list(curves.groupby("panel", sort=False)))
    if not style:
        return []
    if len(style) <= SHARED:
        with picture(path, 4 * min(2, len(panels)) + 1, 2.4 * math.ceil(len(panels) / 2) + 0.4, x_label) as figure:
            cells = {name: (name, list(style)) for name in panels}
            grid = draw_grid(figure, panels, cells, style, marker, columns=min(2, len(panels)), share_axes=False)
            handles, names = grid[0].get_legend_handles_labels()
            once = dict(zip(names, handles, strict=True)).values()  # of several seeds
            figure.legend(handles=sorted(once, key=lambda line: -line.get_ydata()[-1]), loc="outside right center")
        return [path]
    files = []
    for name, points in panels.items():
        file = path.with_stem(tables.file_name(f"{path.stem} {name}"))
        with picture(file, 2.2 * 4, 1.7 * math.ceil(len(style) / 4) + 0.4, x_label) as figure:
            figure.suptitle(one_line(name))
            cells = {row: (name, [row]) for row in style}
            draw_grid(figure, {name: points}, cells, style, marker, columns=4, share_axes=True)
        files.append(file)
    return files


def draw_grid(
    figure: Figure,
    panels: dict[str, pd.DataFrame],
    cells: dict[str, tuple[str, list[str]]],
    style: dict[str, dict[str, Any]],
    marker: str,
    columns: int,
    share_axes: bool,
) -> list[Axes]:
    """Draw axes for each cell {title: (panel, rows in colour)}; the other rows are grey."""
    panel_means = {}
    grey = {}
    for panel, points in panels.items():
        means = tables.mean_over_seeds(points.rename(columns={"x": "column", "y": "value"}))
        low, high = (tables.scale(panel) * limit for limit in tables.value_range(panel))
        means = means.assign(low=means["low"].clip(lower=low), high=means["high"].clip(upper=high))
        panel_means[panel] = means.sort_values("column", kind="stable")
        lines = [line[["column", "mean"]].to_numpy(float) for _, line in panel_means[panel].groupby("row", sort=False)]
        grey[panel] = [line[:: math.ceil(len(line) / GREY_POINTS)] for line in lines]
    lines = math.ceil(len(cells) / columns)
    grid = list(figure.subplots(lines, columns, sharex=share_axes, sharey=share_axes, squeeze=False).flat)
    for axes in grid[len(cells) :]:
        axes.set_axis_off()
    for axes, (title, (panel, coloured)) in zip(grid, cells.items(), strict=False):
        points = panels[panel]
        means = panel_means[panel]
        axes.set_title(wrap(title))
        if len(coloured) < means["row"].nunique():
            axes.add_collection(LineCollection(grey[panel], color=GREY, alpha=0.4, linewidth=0.7, zorder=1))
        for row in coloured:
            draw_row(axes, points[points["row"] == row], means[means["row"] == row], marker, style[row])
    return grid


def draw_row(axes: Axes, points: pd.DataFrame, means: pd.DataFrame, marker: str, style: dict[str, Any]) -> None:
    """Draw the mean in a band where three seeds or more have a value; if they never do, a thin line for each seed."""
    banded = means[means["seeds"] >= tables.SEEDS_FOR_AN_INTERVAL]
    label = wrap(points["row"].iloc[0])
    if len(banded):
        x = banded["column"]
        axes.plot(x, banded["mean"], marker=marker, markersize=4, label=label, **style)
        axes.fill_between(x, banded["low"], banded["high"], alpha=0.12, linewidth=0, color=style["color"])
    for _, seed in points.groupby("seed"):
        if banded.empty:
            visible = "o" if len(seed) == 1 else marker  # a line of one point cannot be seen
            axes.plot(seed["x"], seed["y"], marker=visible, markersize=4, linewidth=0.9, label=label, **style)
        elif marker:
            axes.plot(seed["x"], seed["y"], ".", markersize=4, alpha=0.6, color=style["color"])


def wrap(name: str) -> str:
    return textwrap.fill(one_line(name), 28)
