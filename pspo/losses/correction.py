"""Correction weights: for tokens whose old log-probs are not those of the engine or older policy that drew them.

The weight, old / sampler, multiplies a token's loss after the surrogate and before the KL term.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from pspo.losses.surrogates import log_ratio, masked, token_values

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, mode: Correction | Callable, cap: float
) -> Tensor:
    """Importance weights old / sampler, at most ``cap`` (as TRL 1.16, vllm_importance_sampling_mode).

    Args:
        old_logprobs, sampler_logprobs, mask: (B, T).
        mode: "token_..." takes each token's ratio, "sequence_..." the product over the row's unmasked tokens;
            "..._truncate" cuts ratios at the cap (Yao et al. 2025), "..._mask" sets those above it to 0.
            A function of your own gets the three tensors and returns weights, (B,) or (B, T).
        cap: largest ratio.

    Returns:
        (B, T) without gradient, 0 where masked.
    """
    if callable(mode):
        return masked(token_values(mode(old_logprobs, sampler_logprobs, mask), mask, "correction", mode), mask)
    if mode not in get_args(Correction)[1:]:
        raise ValueError(f"unknown correction {mode!r}: choose one of {', '.join(get_args(Correction)[1:])}")
    log_r = log_ratio(old_logprobs, sampler_logprobs, mask)
    if mode.startswith("sequence"):
        log_r = log_r.sum(dim=1, keepdim=True)
    ratios = log_r.exp()
    weights = ratios.clamp(max=cap) if mode.endswith("truncate") else ratios.where(ratios <= cap, 0.0)
    return masked(weights, mask)
