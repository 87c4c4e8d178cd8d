"""The paper's Figure 1, and each loss against NoClip: surrogate and gradient over the importance ratio, by autograd."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from pspo import losses
from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, NoClip, Surrogate
from pspo.report.figures import LINE, STYLES, name_ends, picture

FIGURE1 = {
    "Clip, ε = 0.2": Clip(epsilon=0.2),
    "NoClip": NoClip(),
    "P3O, τ = 4": P3O(tau=4.0),
    "PSPO, α = 0.2": PSPO(alpha=0.2),
    "SAPO, τ = 1 and 3": SAPO(tau_pos=1.0, tau_neg=3.0),
    "TOPR": TOPR(),
}


def surrogate_and_slope(surrogate: Surrogate, ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """One token's part in the objective J (minus its loss), and dJ/dr by autograd, at each importance ratio.

    Every ratio is a completion of one token with old log-prob 0 and log-prob log r, so dJ/dr = (dJ/dlogprob) / r, and a
    stop-gradient in the loss holds. J is up to a constant, which no gradient sees: it is A at r = 1.

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


def draw_surrogates(folder: Path) -> list[Path]:
    """Draw surrogates.svg, the paper's Figure 1, and every loss at its defaults beside NoClip; returns the files."""
    pictures = {"surrogates": FIGURE1}
    for name, loss in vars(losses).items():
        if isinstance(loss, type) and issubclass(loss, Surrogate) and loss is not Surrogate:
            values = {field.name: field.default for field in fields(loss) if field.default is not None}
            label = ", ".join([name, *(f"{field}={value}" for field, value in values.items())])
            pictures[name.lower()] = {"NoClip": NoClip(), label: loss()}
    return [_draw(surrogates, folder / f"{name}.svg") for name, surrogates in pictures.items()]


def _draw(surrogates: dict[str, Surrogate], path: Path) -> Path:
    ratio = torch.arange(0.0025, 2, 0.005, dtype=torch.float64)  # none of them on a kink
    known = [type(surrogate) for surrogate in FIGURE1.values()]
    with picture(path, 8.8, 4.6, "importance ratio r") as figure:
        for column, advantage in enumerate((1.0, -1.0)):
            limits = ((-0.15, 2.15), (-0.1, 2.15)) if advantage > 0 else ((-2.15, 0.15), (-1.25, 0.1))
            names = ("surrogate J(r)", "gradient dJ/dr")
            for row, (name, ylim) in enumerate(zip(names, limits, strict=True)):
                axes = figure.add_subplot(2, 2, 1 + column + 2 * row, xlim=(0, 2), ylim=ylim)
                axes.set(title=f"{name}, A = {advantage:g}")
                ends = []
                for label, surrogate in surrogates.items():
                    style = STYLES[known.index(type(surrogate)) if type(surrogate) in known else -1]
                    y = surrogate_and_slope(surrogate, ratio, advantage)[row]
                    axes.plot(ratio, y, **style)
                    ends.append((label, 2.0, float(y[-1]), style["color"]))
                name_ends(axes, ends, LINE / 1.7)
    return path
