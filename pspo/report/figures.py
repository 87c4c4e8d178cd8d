"""The pictures of `pspo.report`, each written as PNG and SVG.

Transparent, with axes and text in a mid grey, so that they read on white and on dark pages alike; colours of Okabe &
Ito (2008), which colour-blind readers tell apart, each with dashes of its own. The same input
gives the same bytes.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip, Surrogate
from pspo.report.runs import t_interval

COLOURS = ("#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C")
DASHES = ((0, (3.5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (11, 3)))
GREY = "#7d7d7d"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color"), GREY),
    **dict.fromkeys(("xtick.color", "ytick.color", "legend.labelcolor"), GREY),
}
SEEDS_FOR_AN_INTERVAL = 3

Curve = tuple[Sequence[float], Sequence[float]]  # x and y of one seed


@dataclass(frozen=True)
class Panel:
    """One pair of axes: by label, one curve a seed.

    Args:
        title: what is drawn.
        curves: curves of one label's seeds. Labels with one first word, the method, share a colour.
        same_y: share the y axis of the panel before.
    """

    title: str
    curves: dict[str, list[Curve]]
    same_y: bool = False


def draw_curves(panels: Sequence[Panel], x_label: str, columns: int, files: str, marker: str = "") -> list[Path]:
    """One curve a label, the mean over seeds in a band of its 95% t-interval wherever three seeds or more have a value;
    labels of fewer seeds have a thin line a seed. The y axis spans the seeds' values; a band may be wider.

    Args:
        files: path of the pictures, without suffix.
        marker: of the points, as matplotlib names it; where there is one, every seed has its dots, too.

    Returns:
        The files written.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    with _picture(files, width=3.3 * columns, height=2.5 * rows) as (figure, written):
        looks = _looks(label for panel in panels for label in panel.curves)
        axes: Axes | None = None
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, i + 1, sharey=axes if panel.same_y else None)
            axes.set(title=panel.title, xlabel=x_label)
            for label, curves in panel.curves.items():
                look = looks[label] | {"label": label, "marker": marker, "ms": 4}
                points = [(x, values) for x, values in _by_x(curves) if len(values) >= SEEDS_FOR_AN_INTERVAL]
                if points:
                    x = [x for x, _ in points]
                    low, high = zip(*(t_interval(values) for _, values in points), strict=True)
                    axes.plot(x, [np.mean(values) for _, values in points], **look)
                    shade = min(0.2, 0.6 / len(looks))  # many bands on each other must not hide the lines
                    axes.fill_between(x, low, high, alpha=shade, linewidth=0, color=look["color"])
                for curve in curves:
                    if not points:
                        axes.plot(*curve, linewidth=0.9, **look)
                    elif marker:
                        axes.plot(*curve, ".", color=look["color"], alpha=0.6)
            axes.set_ylim(_span(panels[i - panel.same_y : i + 1]))
        _legend(figure)
    return written


FIGURE1 = {
    "Clip, ε = 0.2": Clip(epsilon=0.2),
    "NoClip": NoClip(),
    "P3O, τ = 4": P3O(tau=4.0),
    "PSPO, α = 0.2": PSPO(alpha=0.2),
    "SAPO, τ = 1 and 3": SAPO(tau_pos=1.0, tau_neg=3.0),
    "TOPR": TOPR(),
}


def surrogate_and_slope(surrogate: Surrogate, ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """What one token adds to the objective J (minus its loss), and dJ/dr by autograd, at each importance ratio.

    Every ratio is a completion of one token with old log-prob 0 and log-prob log r, so dJ/dr = (dJ/dlogprob) / r, and a
    stop-gradient in the loss holds. J is drawn up to a constant, which no gradient sees: it is A at r = 1. That moves
    P3O and SAPO, whose sigmoid is not r at r = 1, and TOPR, whose J is w A log r; the others are drawn as they are.
    Where TOPR's weight w moves with r (A < 0, r < 1), the slope of its drawn J is not its gradient, which takes w as
    constant.

    Args:
        ratio: (N,) float64, above 0.
        advantage: A.

    Returns:
        J(r) - J(1) + A and dJ/dr, each (N,).
    """
    logprobs = torch.cat([ratio.new_ones(1), ratio]).log()[:, None].requires_grad_()  # (N + 1, 1), r = 1 first
    old_logprobs, advantages = torch.zeros_like(logprobs), torch.full_like(logprobs, advantage)
    objective = -surrogate(logprobs, old_logprobs, advantages, torch.ones_like(logprobs, dtype=torch.bool))[:, 0]
    (weights,) = torch.autograd.grad(objective.sum(), logprobs)  # dJ/dlogprob
    objective = objective.detach()
    return objective[1:] - objective[0] + advantage, weights[1:, 0] / ratio


def draw_surrogates(files: str) -> list[Path]:
    """The paper's Figure 1, of all six methods: surrogate and gradient against r for A = 1 and A = -1."""
    ratio = torch.arange(0.0025, 2, 0.005, dtype=torch.float64)  # none of them on a kink
    with _picture(files, width=7.2, height=5) as (figure, written):
        for column, advantage in enumerate((1.0, -1.0)):
            surrogate_axes = figure.add_subplot(2, 2, 1 + column, title=f"A {'>' if advantage > 0 else '<'} 0")
            slope_axes = figure.add_subplot(2, 2, 3 + column, xlabel="importance ratio r")
            for label, look in _looks(FIGURE1).items():
                value, slope = surrogate_and_slope(FIGURE1[label], ratio, advantage)
                surrogate_axes.plot(ratio, value, label=label, **look)
                slope_axes.plot(ratio, slope, **look)
            surrogate_axes.set(xlim=(0, 2), ylim=(-0.15, 2.15) if advantage > 0 else (-2.15, 0.15))
            slope_axes.set(xlim=(0, 2), ylim=(-0.1, 2.15) if advantage > 0 else (-1.25, 0.1))
            if column == 0:
                surrogate_axes.set_ylabel("surrogate J(r)")
                slope_axes.set_ylabel("gradient dJ/dr")
        _legend(figure)
    return written


def _looks(labels: Iterable[str]) -> dict[str, dict[str, object]]:
    """Colour by method, the same in all pictures for the methods of Figure 1; dashes by label."""

    def method(label: str) -> str:
        return re.split(r"\W", label)[0]

    labels = list(dict.fromkeys(labels))
    methods = list(dict.fromkeys(map(method, [*FIGURE1, *labels])))
    looks = {}
    for label in labels:
        i = methods.index(method(label))
        earlier = sum(method(other) == method(label) for other in looks)
        looks[label] = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[(i + earlier) % len(DASHES)]}
    return looks


def _by_x(curves: list[Curve]) -> list[tuple[float, list[float]]]:
    """The seeds' values at every x that any of them has."""
    values_at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in zip(*curve, strict=True):
            values_at.setdefault(x, []).append(y)
    return sorted(values_at.items())


def _span(panels: Iterable[Panel]) -> tuple[float, float]:
    """Limits of a y axis: the seeds' values and a margin."""
    values = [y for panel in panels for curves in panel.curves.values() for _, ys in curves for y in ys] or [0, 1]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    return min(values) - margin, max(values) + margin


def _legend(figure: Figure) -> None:
    """One legend below all panels, each label once; the figure grows by its height."""
    pairs = (axes.get_legend_handles_labels() for axes in figure.axes)
    handles = {label: handle for pair in pairs for handle, label in zip(*pair, strict=True)}
    room = int(figure.get_figwidth() * 14)  # about 14 characters to the inch, 8 of them for the line
    columns = max(1, room // (max(map(len, handles), default=1) + 8))
    labels = [textwrap.fill(label, room - 8) for label in handles]
    lines = math.ceil(len(labels) / columns) * max((label.count("\n") + 1 for label in labels), default=0)
    figure.set_figheight(figure.get_figheight() + 0.2 * lines + 0.1)
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=columns, handlelength=3.2)


@contextmanager
def _picture(files: str, width: float, height: float) -> Iterator[tuple[Figure, list[Path]]]:
    """A figure to draw on, saved at the end; the list then holds the files written."""
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, written
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            path = Path(files + suffix)
            figure.savefig(path, transparent=True, dpi=120, metadata=metadata)
            written.append(path)
