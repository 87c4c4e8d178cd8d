"""Aggregate per-token losses into the one number that is differentiated.

Denominators are counts of the whole optimizer minibatch: its loss is the sum of its microbatches' losses, however the
minibatch is split. With the mask m and the per-token loss l of rows i and tokens t:

* ``dapo`` (Yu et al. 2025): sum(m l) / counts.tokens
* ``grpo`` (Shao et al. 2024): sum_i [sum_t(m l) / max(sum_t m, 1)] / counts.sequences
* ``dr_grpo`` (Liu et al. 2025): sum(m l) / (counts.sequences * counts.max_completion_tokens)
* a function of your own: sum(m l / d) with d = function(mask, counts), (B,) or (B, T), above 0. The d of a row must
  depend on that row and the counts alone, so that no split changes the loss.

A minibatch without a single unmasked token has loss 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pspo.errors import function_name
from pspo.losses.surrogates import as_rows

Aggregation = Literal["dapo", "grpo", "dr_grpo"]


@dataclass(frozen=True)
class Counts:
    """Size of one optimizer minibatch, over all its microbatches and ranks."""

    tokens: int  # unmasked completion tokens
    sequences: int  # rows, including rows that contribute nothing
    max_completion_tokens: int  # the configured limit (not the longest completion seen)


def aggregate(per_token_loss: Tensor, mask: Tensor, how: Aggregation | Callable, counts: Counts) -> Tensor:
    """Sum a microbatch's per-token loss (B, T) into its share of the minibatch's loss, a scalar."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1).float()  # (B, 1)
    if callable(how):
        divisors = as_rows(how(mask, counts), mask, f"--algorithm.aggregation {function_name(how)}", divisors=True)
    elif how == "dapo":
        divisors = torch.full_like(lengths, max(counts.tokens, 1))
    elif how == "grpo":
        divisors = lengths * counts.sequences
    elif how == "dr_grpo":
        divisors = torch.full_like(lengths, counts.sequences * counts.max_completion_tokens)
    else:
        raise ValueError(f"unknown aggregation {how!r}: choose dapo, grpo or dr_grpo")
    return (per_token_loss.where(mask, 0.0) / divisors).sum()
