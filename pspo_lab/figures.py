"""Pictures of runs: SVG, dark text on white, also on dark pages. The same numbers give the same bytes."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from pspo.terminal import one_line
from pspo_lab.runs import Runs
from pspo_lab.settings import methods
from pspo_lab.tables import mean_over_seeds, smoothed

# A method has one colour in every picture, on white and on dark: Okabe & Ito's (2008) for the paper's six, and Tol's.
COLOURS = {"Clip": "#E69F00", "NoClip": "#0072B2", "P3O": "#009E73", "PSPO": "#D55E00", "SAPO": "#CC79A7",
           "TOPR": "#56B4E9", "REINFORCE": "#AA3377", "CISPO": "#44AA99", "GSPO": "#999933", "GMPO": "#B2182B",
           "VESPO": "#6C63B5", "DPPO": "#B58900", "SPO": "#1B7F3B", "DRO": "#B15928", "CEGPPO": "#3366AA",
           "ASPO": "#C43C6B"}  # fmt: skip
OWN_COLOURS = ("#8E6FD1", "#5B8C2A", "#0F8B9D", "#C2559A", "#D9534F", "#B07A3A", "#8C8C8C")  # for other losses
DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
INK = "#333333"  # text and axes
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",
    "text.parse_math": False,  # names may have dollars
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
}


def method_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each method: fixed for a loss of `pspo.losses`, else the next of `OWN_COLOURS`."""
    own = sorted(set(names) - COLOURS.keys())
    return COLOURS | {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}


def styles(rows: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return colour and dashes of the rows {row: method}: a method has one colour, its settings differ in dashes."""
    colours = method_colours(rows.values())
    order = list(colours)
    settings: Counter[str] = Counter()
    row_styles = {}
    for row, method in rows.items():
        dashes = DASHES[(order.index(method) + settings[method]) % len(DASHES)]
        row_styles[row] = {"color": colours[method], "ls": dashes}
        settings[method] += 1
    return row_styles


@contextmanager
def picture(path: Path, width: float, height: float, x_label: str) -> Iterator[Figure]:
    """Yield a figure of this size in inches, and save it at the end."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.supxlabel(one_line(x_label), fontsize=8)
        yield figure
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def draw_curves(runs: Runs, path: Path) -> None:
    """Draw the rewards of each setting: the mean over seeds and, from three seeds on, the 95% interval as a band."""
    style = styles({runs.labels[run]: method for run, method in methods(runs.configs).items()})
    metrics = {"reward": "training reward", "validation_reward": "validation reward"}
    height = max(2.4, 0.2 * len(style)) + 0.4  # for the panels or a longer legend
    with picture(path, 10, height, "optimizer step; means over a tenth of the run") as figure:
        handles = {}
        for axes, (metric, title) in zip(figure.subplots(1, 2), metrics.items(), strict=True):
            axes.set_title(title)
            for row, curve in curves(runs, metric).groupby("row", sort=False):
                marker = "o" if len(curve) == 1 else ""  # a line of one point cannot be seen
                (handles[row],) = axes.plot(curve["step"], curve["mean"], marker=marker, **style[row])
                colour = style[row]["color"]
                axes.fill_between(curve["step"], curve["low"], curve["high"], alpha=0.12, linewidth=0, color=colour)
        names = [textwrap.fill(one_line(row), 28) for row in handles]
        figure.legend(handles.values(), names, loc="outside right center")


def curves(runs: Runs, metric: str) -> pd.DataFrame:
    """Return row (a setting), step, mean, low and high of a smoothed metric, at the steps that all its seeds have."""
    parts = [pd.DataFrame(columns=["row", "step", "value"])]
    for run, label in runs.labels.items():
        values = run.rollouts().reindex(columns=["step", metric]).dropna().set_index("step")[metric]
        if len(values):
            smooth = smoothed(values.sort_index())
            parts.append(pd.DataFrame({"row": label, "step": smooth.index, "value": smooth}))
    cells = mean_over_seeds(pd.concat(parts).astype({"value": float}), by=["row", "step"]).sort_values("step")
    return cells[cells["seeds"] == cells.groupby("row")["seeds"].transform("max")]
