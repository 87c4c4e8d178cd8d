"""Use the losses of `pspo.losses` in other trainers; each module serves one trainer and has its name."""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from pspo import losses
from pspo.losses import Surrogate, check_loss, log_ratio, token_weights

BUILT_IN = [kind.__name__ for kind in Surrogate.__subclasses__() if kind.__module__.startswith("pspo.losses.")]


def make_surrogate(surrogate: Surrogate | str | dict[str, Any], **arguments: Any) -> Surrogate:
    """Make a surrogate from its name, such as "PSPO", or the import path of your own class, and its arguments.

    {"class_path": "PSPO", "init_args": {"alpha": 0.2}} gives both in one value. An instance is returned unchanged.
    Raises ValueError for an unknown name or argument.
    """
    if isinstance(surrogate, dict):
        if "class_path" not in surrogate or surrogate.keys() - {"class_path", "init_args"}:
            raise ValueError(f"{surrogate!r}: write {{'class_path': 'PSPO', 'init_args': {{'alpha': 0.2}}}}")
        return make_surrogate(surrogate["class_path"], **surrogate.get("init_args", {}))
    if isinstance(surrogate, str):
        kind = find_surrogate(surrogate)
        try:
            surrogate = kind(**arguments)
        except TypeError as error:
            raise ValueError(f"{kind.__name__}{inspect.signature(kind)}: {error}") from error
    elif arguments:
        raise ValueError(f"{surrogate!r} has its arguments already: leave {', '.join(arguments)} out")
    if not isinstance(surrogate, Surrogate):
        raise ValueError(f"a surrogate must be an instance of a subclass of pspo.losses.Surrogate, not {surrogate!r}")
    if hasattr(surrogate, "state_dict"):
        raise ValueError(f"{surrogate!r} keeps a state, which only the checkpoints of pspo hold")
    return surrogate


def find_surrogate(name: str) -> type[Surrogate]:
    """Return the class that a name or an import path means; "pspo.PSPO" and "pspo.losses.PSPO" both mean PSPO."""
    short = name.removeprefix("pspo.").removeprefix("losses.")
    if short in BUILT_IN:
        return getattr(losses, short)
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        near = [each for each in BUILT_IN if each.lower() == short.lower()] or BUILT_IN
        fix = f"name {' or '.join(near)}, or the import path of a class of your own"
        raise ValueError(f"there is no surrogate {name!r} ({error}): {fix}") from error


def token_losses(
    surrogate: Surrogate | str | dict[str, Any],
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    step: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses (B, T) of the tokens of B completions, with gradient and not yet averaged, and metrics.

    Args:
        surrogate: a name, an import path, a dict or an instance, as for `make_surrogate`.
        logprobs, old_logprobs, mask: (B, T), each row a completion; advantages: (B, 1) or (B, T).
        step: number of optimizer steps taken so far; only a surrogate that depends on the step needs it.

    Returns:
        The losses, 0 where masked, and three scalars over the unmasked tokens with A != 0, NaN if there are none:
        ``ratio``, the mean of r; ``slope``, the mean of dL/dlogprob / (-A r): 1 - alpha for PSPO, 1 for NoClip, and
        for Clip the share of tokens with a gradient; ``zero_weight_share``, the share of tokens without gradient.
    """
    surrogate = make_surrogate(surrogate)
    loss = surrogate.bind_step(step or 0)
    if step is None and loss is not surrogate:
        raise ValueError(f"{surrogate!r} asks for the optimizer step, which this trainer does not tell a loss")
    mask = mask.bool()
    losses = loss(logprobs, old_logprobs, advantages, mask)
    check_loss(surrogate, losses, logprobs)
    active = mask & (advantages != 0)
    weights = token_weights(loss, logprobs, old_logprobs, advantages, mask)
    with torch.no_grad():
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        metrics = {
            "ratio": ratio[active].mean(),
            "slope": (weights / (-advantages * ratio))[active].mean(),
            "zero_weight_share": (weights[active] == 0).float().mean(),
        }
    return losses, metrics
