"""Find settings that are one algorithm: their losses' gradients are equal, or differ by a factor without effect.

AdamW's step does not change when one factor scales every gradient and AdamW's epsilon. So, while no norm is clipped,
PSPO(alpha) with epsilon (1 - alpha) e is NoClip with epsilon e, and its KL penalty beta is NoClip's beta / (1 - alpha).
With one optimizer step a rollout every ratio is 1, where most losses have the same gradient.
"""

import contextlib
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pspo.cli.values import class_names
from pspo.losses import Surrogate, token_weights
from pspo_lab.runs import LabRun, Runs, grouped
from pspo_lab.settings import ARGUMENT, SURROGATE, Setting, Switches, make_setting

RATIOS = np.exp(np.linspace(-2.5, 2.5, 201))  # at which surrogates' curves are drawn
PROBES = np.exp(np.sinh(np.linspace(-8, 8, 4001)) / 75)  # at which losses are compared: dense at 1, from e^-20 to e^20
ADVANTAGES = (1.0, 2.0, -1.0, -2.0)
OLD_LOGPROBS = (-1.0, -3.0, -6.0)
SMALL_EPSILON = 1e-7  # far below a gradient's elements
OPTIONS = "optimizer.options"
SCALED = ("algorithm.beta", "algorithm.entropy_coef")  # coefficients relative to the surrogate


def make_surrogate(switches: Switches) -> Surrogate | None:
    """Return a run's surrogate; None if it is not part of pspo: code that a run's files name is never run."""
    cls = class_names(Surrogate).get(switches[SURROGATE].removeprefix("pspo.losses."))
    arguments = {name.removeprefix(ARGUMENT): switches[name] for name in switches if name.startswith(ARGUMENT)}
    with contextlib.suppress(Exception):  # a file may name any class, and give it any arguments
        return cls(**arguments)
    return None


def ratio_weights(surrogate: Surrogate, log_ratios: Tensor, advantage: float, old: float = 0.0) -> Tensor:
    """Return `token_weights` (B, T) at log-ratios (B, T), of tokens whose old log-probability is ``old``."""
    advantages = torch.full_like(log_ratios, advantage)
    mask = torch.ones_like(log_ratios, dtype=torch.bool)
    old_logprobs = torch.full_like(log_ratios, old)
    return token_weights(surrogate.bind_step(0), old_logprobs + log_ratios, old_logprobs, advantages, mask)


def token_curve(surrogate: Surrogate, advantage: float, ratios: np.ndarray = RATIOS, old: float = 0.0) -> Tensor | None:
    """Return the weights at ratios (n,); None if a weight depends on the rest of a completion."""
    tokens = torch.tensor(np.log(ratios))[:, None]  # completions of one token
    alone, together = (ratio_weights(surrogate, log_ratios, advantage, old) for log_ratios in (tokens, tokens.T))
    return together[0] if torch.allclose(alone.flatten(), together[0]) else None


def gradient(surrogate: Surrogate, at_ratio_1: bool) -> np.ndarray | None:
    """Return weights that tell losses apart, first at ratio 1 and advantage 1; None if they depend on other tokens."""
    ones = torch.zeros(1, 3, dtype=torch.float64)  # a completion of three tokens
    weights = [ratio_weights(surrogate, ones, advantage)[0] for advantage in ADVANTAGES]
    if not at_ratio_1:
        curves = [token_curve(surrogate, advantage, PROBES, old) for advantage in ADVANTAGES for old in OLD_LOGPROBS]
        if any(curve is None for curve in curves):
            return None
        weights += [curve / torch.tensor(PROBES).clamp(min=1) for curve in curves]  # the larger, the more rounded
    return torch.cat(weights).numpy()


def canonical(run: LabRun, is_clipped: bool) -> Setting:
    """Return a run's setting, with the gradient in place of the loss, and `SCALED` and epsilon scaled alike.

    Runs with equal canonical settings can differ by luck alone, as far as their files tell.
    """
    switches = run.switches
    surrogate = make_surrogate(switches)
    one_step = switches.get("algorithm.epochs") == switches.get("algorithm.minibatches") == 1
    on_policy = one_step and not switches.get("rollout.lag") and not switches.get("rollout.engine")
    weights = None if surrogate is None else gradient(surrogate, at_ratio_1=on_policy)
    if weights is None or not weights[0]:
        return run.setting
    options = json.loads(switches.get(OPTIONS) or "{}")
    is_adamw = switches.get("optimizer.name") == "adamw" and switches.get("algorithm.terms") == "[]"
    scale = float(abs(weights[0])) if is_adamw and not is_clipped else 1.0
    epsilon = options.pop("eps", 1e-8) / scale
    relative = {name: rounded(float(switches.get(name) or 0) / scale) for name in SCALED}
    relative["gradient"] = (np.round(weights / scale, 5) + 0.0).tobytes()  # no -0.0
    relative[OPTIONS] = json.dumps(options | {"eps": rounded(epsilon) if epsilon > SMALL_EPSILON else 0.0})
    return make_setting(switches, ignore=(SURROGATE, ARGUMENT, OPTIONS, *SCALED)).union(relative.items())


def rounded(number: float) -> float:
    """The number to nine digits: 0.09 / 0.9 is 0.1."""
    return float(f"{number:.9g}")


def has_clipped(run: LabRun) -> bool:
    """True if a gradient's norm was above its limit, or may have been."""
    limit = run.switches.get("optimizer.max_grad_norm")
    norm = run.metrics["grad_norm_max"].max() if "grad_norm_max" in run.metrics else np.inf
    return not isinstance(limit, int | float) or not (limit == 0 or norm < limit)


def algorithms(runs: Runs) -> dict[LabRun, Setting]:
    """The `canonical` setting of each run."""
    clipped = {run.setting for run in runs.labels if has_clipped(run)}
    one_run = {run.setting: run for run in runs.labels}
    found = {setting: canonical(run, setting in clipped) for setting, run in one_run.items()}
    return {run: found[run.setting] for run in runs.labels}


def describe_identities(runs: Runs, algorithm: dict[LabRun, Setting]) -> Iterator[str]:
    """A sentence for each set of settings that are one of `algorithms`."""
    for alike in grouped(runs.labels, algorithm.get).values():
        *others, last = dict.fromkeys(runs.labels[run] for run in alike)
        if others:
            text = f"{', '.join(others)} and {last} are one algorithm here: their losses' gradients are equal up to a "
            text += "factor, which changes no step of AdamW while no norm is clipped. "
            yield f"{text}They can differ by luck alone, so their differences are the noise floor."
