"""Correction weights, for tokens that another engine or an older policy drew than the old log-probs describe.

The weight, old / sampler, multiplies a token's loss after the surrogate and before the KL term.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from pspo.losses.surrogates import log_ratio, masked

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, mode: Correction, cap: float
) -> Tensor:
    """Importance weights old / sampler, at most ``cap`` (as TRL 1.16, vllm_importance_sampling_mode).

    Args:
        old_logprobs, sampler_logprobs, mask: (B, T).
        mode: "token_..." takes each token's ratio, "sequence_..." the product over the row's unmasked tokens;
            "..._truncate" lowers ratios above the cap to it (Yao et al. 2025), "..._mask" sets them to 0.
        cap: largest weight.

    Returns:
        (B, T) without gradient, 0 where masked.
    """
    if mode not in get_args(Correction)[1:]:
        raise ValueError(f"unknown correction {mode!r}: choose one of {', '.join(get_args(Correction)[1:])}")
    ratios = correction_ratios(old_logprobs, sampler_logprobs, mask, mode)
    return masked(ratios.clamp(max=cap) if mode.endswith("truncate") else ratios.where(ratios <= cap, 0.0), mask)


def correction_ratios(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, mode: Correction) -> Tensor:
    """The weights before the cap, (B, T): old / sampler of each token, or the product over its row's unmasked ones."""
    log_r = log_ratio(old_logprobs, sampler_logprobs, mask)
    return (log_r.sum(dim=1, keepdim=True).expand_as(mask) if mode.startswith("sequence") else log_r).exp()
