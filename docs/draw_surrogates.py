"""Draw the paper's Figure 1, and the losses of other papers, into docs/figures: ``python docs/draw_surrogates.py``.

Surrogate and gradient over the importance ratio, by autograd.
"""

from pathlib import Path

import torch
from torch import Tensor

from pspo.losses import CISPO, DPPO, GMPO, GSPO, P3O, PSPO, REINFORCE, SAPO, TOPR, VESPO, Clip, NoClip, Surrogate
from pspo_lab.figures import picture, styles

FIGURE1 = {
    "Clip, ε = 0.2": Clip(epsilon=0.2),
    "NoClip": NoClip(),
    "P3O, τ = 4": P3O(tau=4.0),
    "PSPO, α = 0.2": PSPO(alpha=0.2),
    "SAPO, τ = 1 and 3": SAPO(tau_pos=1.0, tau_neg=3.0),
    "TOPR": TOPR(),
}
OTHERS = {
    "REINFORCE": REINFORCE(),
    "CISPO, ε_high = 0.5": CISPO(epsilon_high=0.5),
    "GSPO, ε = 0.2": GSPO(0.2, 0.2),
    "GMPO, ε = 0.4": GMPO(),
    "VESPO": VESPO(),
    "DPPO, ε = 0.15": DPPO(),
}
STYLES = styles({type(loss).__name__: type(loss).__name__ for loss in [*FIGURE1.values(), *OTHERS.values()]})


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


def draw_surrogates(folder: Path) -> list[Path]:
    """Draw surrogates.svg, the paper's Figure 1, and others.svg."""
    return [_draw(FIGURE1, folder / "surrogates.svg"), _draw(OTHERS, folder / "others.svg", old_prob=0.5)]


def _draw(surrogates: dict[str, Surrogate], path: Path, old_prob: float = 1.0) -> Path:
    ratio = torch.arange(0.0025, 2, 0.005, dtype=torch.float64)  # none of them on a kink
    with picture(path, 8.8, 4.6, "importance ratio r") as figure:
        for column, advantage in enumerate((1.0, -1.0)):
            limits = ((-0.15, 2.15), (-0.1, 2.15)) if advantage > 0 else ((-2.15, 0.15), (-1.25, 0.1))
            names = ("surrogate J(r)", "gradient dJ/dr")
            for row, (name, ylim) in enumerate(zip(names, limits, strict=True)):
                axes = figure.add_subplot(2, 2, 1 + column + 2 * row, xlim=(0, 2), ylim=ylim)
                axes.set(title=f"{name}, A = {advantage:g}")
                for label, surrogate in surrogates.items():
                    style = STYLES[type(surrogate).__name__]
                    curve = surrogate_and_slope(surrogate, ratio, advantage, old_prob)[row]
                    axes.plot(ratio, curve, label=label, **style)
                if advantage < 0:
                    handles = sorted(axes.get_lines(), key=lambda line: -line.get_ydata()[-1])
                    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return path


if __name__ == "__main__":
    draw_surrogates(Path(__file__).parent / "figures")
