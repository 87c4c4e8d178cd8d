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
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from pspo.cli.terminal import one_line
from pspo_lab import tables
from pspo_lab.runs import Runs
from pspo_lab.settings import SEED, methods

# A method has one colour in every picture, on white and on dark: Okabe & Ito's (2008) for the paper's six, and Tol's.
COLOURS = {"Clip": "#E69F00", "NoClip": "#0072B2", "P3O": "#009E73", "PSPO": "#D55E00", "SAPO": "#CC79A7",
           "TOPR": "#56B4E9", "REINFORCE": "#AA3377", "CISPO": "#44AA99", "GSPO": "#999933", "GMPO": "#B2182B",
           "VESPO": "#6C63B5", "DPPO": "#B58900", "SPO": "#1B7F3B", "DRO": "#B15928", "CEGPPO": "#3366AA",
           "ASPO": "#C43C6B"}  # fmt: skip
OWN_COLOURS = ("#8E6FD1", "#5B8C2A", "#0F8B9D", "#C2559A", "#D9534F", "#B07A3A", "#8C8C8C")  # of losses of others
DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
INK, GREY = "#333333", "#7d7d7d"  # text and axes; lines of reference
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


def draw_task(runs: Runs, label: pd.Series, prefix: str) -> list[Path]:
    """Draw the rewards and the off-policy diagnostics of a task's runs; returns the files."""
    about = pd.DataFrame({"row": label, "method": methods(runs.configs), "seed": runs.configs[SEED]})
    rewards = {"training reward": "reward", "validation reward": "validation_reward"}
    files = []
    for name, metrics in (("curves", rewards), ("diagnostics", {name: name for name in tables.DIAGNOSTICS})):
        points = curve_points(runs, metrics).join(about, on="run")
        if len(points):
            files.append(Path(f"{prefix}{name}.svg"))
            draw_curves(points, files[-1])
    return files


def curve_points(runs: Runs, metrics: dict[str, str]) -> pd.DataFrame:
    """Rows of column (a name of ``metrics``), run, x (the step) and value (smoothed); the untrained model is step 0."""
    untrained = runs.untrained().set_index("run")
    parts = [pd.DataFrame(columns=["column", "run", "x", "value"])]
    for column, metric in metrics.items():
        values = runs.metrics.reindex(columns=["run", "step", metric]).dropna()
        for run, rollouts in values.groupby("run", sort=False):
            smooth = tables.smoothed(rollouts[metric])
            points = dict(zip(rollouts["step"].iloc[len(rollouts) - len(smooth) :], smooth, strict=True))
            if run in untrained.index and metric in untrained:
                points = {0: untrained.loc[run, metric]} | points
            parts.append(pd.DataFrame({"column": column, "run": run, "x": points.keys(), "value": points.values()}))
    return pd.concat(parts).astype({"x": float, "value": float})


def draw_curves(points: pd.DataFrame, path: Path) -> None:
    """Draw a panel for each column, from rows of `curve_points` with their row (a setting), method and seed.

    The mean over seeds in a band, its 95% interval; a thin line for each seed where fewer than three have values.
    """
    style = styles(dict(zip(points["row"], points["method"], strict=True)))
    means = tables.mean_over_seeds(points, by=["row", "column", "x"]).sort_values("x", kind="stable")
    panels = points["column"].unique()
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    height = max(2.4 * lines, 0.2 * len(style)) + 0.4  # of the panels, or the legend
    with picture(path, 4 * columns + 2, height, "optimizer step; means over a tenth of the run") as figure:
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles = {}
        for axes, panel in zip(grid, panels, strict=False):
            axes.set_title(panel)
            for row in style:
                seeds = points[(points["column"] == panel) & (points["row"] == row)]
                curve = means[(means["column"] == panel) & (means["row"] == row)]
                banded = curve[curve["seeds"] >= tables.SEEDS_FOR_AN_INTERVAL]
                if len(banded):
                    handles[row] = axes.plot(banded["x"], banded["mean"], **style[row])[0]
                    axes.fill_between(
                        banded["x"], banded["low"], banded["high"], alpha=0.12, linewidth=0, color=style[row]["color"]
                    )
                    continue
                for _, seed in seeds.groupby("seed"):
                    marker = "o" if len(seed) == 1 else ""  # a line of one point cannot be seen
                    line = axes.plot(seed["x"], seed["value"], marker=marker, linewidth=0.9, **style[row])
                    handles[row] = line[0]
        names = [textwrap.fill(one_line(row), 28) for row in handles]
        figure.legend(handles.values(), names, loc="outside right center")
