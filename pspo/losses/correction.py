"""Correction weights: for tokens whose old log-probs are not those of the engine or older policy that drew them.

The weight, old / sampler, multiplies a token's loss after the surrogate and before the KL term.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from pspo.losses.surrogates import as_rows, function_name, log_ratio, masked

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: Correction | Callable,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Importance weights old / sampler, at most ``cap`` (as TRL 1.16, vllm_importance_sampling_mode).

    "token_mask" with a floor is IcePop (Ling Team 2025, 2510.18855: 0.5 and 5).

    Args:
        old_logprobs, sampler_logprobs, mask: (B, T), as the weights, which have no gradient and are 0 where masked.
        mode: "token_..." takes each token's ratio, "sequence_..." the product over the row's unmasked tokens;
            "..._truncate" cuts ratios at floor and cap (Yao et al. 2025), "..._mask" sets those outside them to 0.
            A function of your own gets the three tensors and returns weights, (B,) or (B, T).
    """
    if callable(mode):
        weights = mode(old_logprobs, sampler_logprobs, mask)
        return masked(as_rows(weights, mask, f"--algorithm.correction {function_name(mode)}"), mask)
    if mode not in get_args(Correction)[1:]:
        raise ValueError(f"unknown correction {mode!r}: choose one of {', '.join(get_args(Correction)[1:])}")
    log_r = log_ratio(old_logprobs, sampler_logprobs, mask)
    if mode.startswith("sequence"):
        log_r = log_r.sum(dim=1, keepdim=True)
    ratios = log_r.exp()
    inside = ratios.clamp(floor, cap)
    return masked(inside if mode.endswith("truncate") else ratios.where(ratios == inside, 0.0), mask)
