"""Draw the paper's Figure 1, and every loss's gradient weight, into docs/figures: ``python docs/draw_surrogates.py``.

Over the importance ratio, by autograd. Needs ``pip install -e '.[docs]'``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pspo.losses import (
    ASPO,
    CEGPPO,
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    P3O,
    PSPO,
    REINFORCE,
    SAPO,
    SPO,
    TOPR,
    VESPO,
    Clip,
    NoClip,
    Surrogate,
)  # fmt: skip
from pspo_lab.view_command import COLOURS

FIGURE1 = {
    "Clip, ε = 0.2": Clip(epsilon=0.2),
    "NoClip": NoClip(),
    "P3O, τ = 4": P3O(tau=4.0),
    "PSPO, α = 0.2": PSPO(alpha=0.2),
    "SAPO, τ = 1 and 3": SAPO(tau_pos=1.0, tau_neg=3.0),
    "TOPR": TOPR(),
}
WEIGHTS = {  # with numbers that show the form within the picture
    "NoClip": NoClip(),
    "PSPO, α = 0.4": PSPO(0.4),
    "Clip, ε = 0.2": Clip(),
    "P3O, τ = 4": P3O(),
    "SAPO, τ = 1 and 3": SAPO(),
    "TOPR": TOPR(),
    "REINFORCE": REINFORCE(),
    "CISPO, ε_high = 1": CISPO(epsilon_high=1.0),
    "GSPO, ε = 0.2": GSPO(0.2, 0.2),
    "GMPO, ε = 0.4": GMPO(),
    "VESPO": VESPO(),
    "DPPO, ε = 0.15": DPPO(),
    "SPO, ε = 0.5": SPO(0.5),
    "DRO, τ = 0.5": DRO(0.5),
    "CEGPPO, ε = 0.2": CEGPPO(),
    "ASPO, ε = 0.2, δ = 3": ASPO(),
}
DASHES = ((0, (5, 1.5)), (0, (1, 1)), "-.", "-", (0, (4, 1.5, 1, 1.5, 1, 1.5)), (0, (9, 3)))
STYLES = {name: {"color": colour, "ls": DASHES[i % len(DASHES)]} for i, (name, colour) in enumerate(COLOURS.items())}
INK = "#333333"  # text and axes
RC = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pspo",  # the same numbers give the same bytes
    "text.parse_math": False,
    **dict.fromkeys(("axes.edgecolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def picture(path: Path, width: float, height: float, x_label: str) -> Iterator[Figure]:
    """Yield a figure of this size in inches, dark text on white, and save it at the end."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.supxlabel(x_label, fontsize=8)
        yield figure
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def surrogate_and_slope(
    surrogate: Surrogate, ratio: Tensor, advantage: float, old_prob: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One token's part in the objective J (minus its loss), and dJ/dr by autograd, at each importance ratio.

    Every ratio is a completion of one token, so dJ/dr = (dJ/dlogprob) / r, and a stop-gradient in the loss holds. J is
    up to a constant, which no gradient sees: it is A at r = 1.

    Args:
        ratio: (N,) float64, above 0.
        advantage: A.
        old_prob: of the token under the old policy; DPPO depends on it.

    Returns:
        J(r) - J(1) + A and dJ/dr, each (N,).
    """
    ratios = torch.cat([ratio.new_ones(1), ratio])[:, None]  # (N + 1, 1), r = 1 first
    logprobs = (ratios * old_prob).log().requires_grad_()
    old_logprobs, advantages = torch.full_like(ratios, old_prob).log(), torch.full_like(ratios, advantage)
    objective = -surrogate(logprobs, old_logprobs, advantages, torch.ones_like(logprobs, dtype=torch.bool))[:, 0]
    (weights,) = torch.autograd.grad(objective.sum(), logprobs)  # dJ/dlogprob
    objective = objective.detach()
    return objective[1:] - objective[0] + advantage, weights[1:, 0] / ratio


def draw_surrogates(path: Path) -> None:
    """Draw the paper's Figure 1: J and dJ/dr of its six surrogates, for both signs of A."""
    ratio = torch.arange(0.0025, 2, 0.005, dtype=torch.float64)  # none of them on a kink
    with picture(path, 8.8, 4.6, "importance ratio r") as figure:
        for column, advantage in enumerate((1.0, -1.0)):
            limits = ((-0.15, 2.15), (-0.1, 2.15)) if advantage > 0 else ((-2.15, 0.15), (-1.25, 0.1))
            names = ("surrogate J(r)", "gradient dJ/dr")
            for row, (name, ylim) in enumerate(zip(names, limits, strict=True)):
                axes = figure.add_subplot(2, 2, 1 + column + 2 * row, xlim=(0, 2), ylim=ylim)
                axes.set(title=f"{name}, A = {advantage:g}")
                for label, surrogate in FIGURE1.items():
                    style = STYLES[type(surrogate).__name__]
                    axes.plot(ratio, surrogate_and_slope(surrogate, ratio, advantage)[row], label=label, **style)
                if advantage < 0:
                    handles = sorted(axes.get_lines(), key=lambda line: -line.get_ydata()[-1])
                    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_weights(path: Path) -> None:
    """Draw each loss's gradient weight, (dJ/dlogprob) / A, for both signs of A; dotted that of NoClip, r."""
    ratio = torch.arange(0.0025, 3, 0.005, dtype=torch.float64)
    with picture(path, 8.8, 7.6, "importance ratio r, of a completion of one token that had probability 0.3") as figure:
        for i, (label, surrogate) in enumerate(WEIGHTS.items()):
            axes = figure.add_subplot(4, 4, i + 1, xlim=(0, 3), ylim=(-1.1, 3.1))
            axes.set(title=label)
            if i % 4 == 0:
                axes.set(ylabel="gradient weight")
            axes.axhline(0, color="#7d7d7d", linewidth=0.6)
            axes.plot(ratio, ratio, ":", color="#7d7d7d")
            for advantage, dashes in ((1.0, "-"), (-1.0, "--")):
                weight = surrogate_and_slope(surrogate, ratio, advantage, old_prob=0.3)[1] * ratio / advantage
                axes.plot(
                    ratio, weight, dashes, color="#0072B2" if advantage > 0 else "#B2182B", label=f"A = {advantage:g}"
                )
            if i == 0:
                axes.legend(loc="lower right")


if __name__ == "__main__":
    figures = Path(__file__).parent / "figures"
    draw_surrogates(figures / "surrogates.svg")
    draw_weights(figures / "weights.svg")
