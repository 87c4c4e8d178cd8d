"""Losses of the studies: NoClip without tokens whose ratio is out of range; a mask that falls on random completions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pspo.losses.correction import correction_weights
from pspo.losses.surrogates import Surrogate, log_ratio, masked


@dataclass(frozen=True)
class Cut(Surrogate):
    """-r A where r is within 1 - epsilon and 1 + epsilon, and of the other tokens those that ``keep`` names.

    A token is outward where its gradient takes r further from 1, A (r - 1) > 0, and else inward. Clip keeps the inward.

    Args:
        keep: nothing, inward or outward.
        epsilon: half-width of the range.
    """

    keep: str = "nothing"
    epsilon: float = 0.2
    silent_at_zero_advantage = token_local = True

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        outward = (ratio - 1) * advantages > 0
        kept = {"nothing": outward & False, "inward": ~outward, "outward": outward}[self.keep]
        return masked(-ratio * advantages * (kept | ((ratio - 1).abs() <= self.epsilon)), mask)


def shuffled_sequence_mask(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The weights (B,) of ``sequence_mask`` at the default bounds, given to random completions, the same in each epoch.

    As many completions without weight, and as much weight on the others, but not each one's own.
    """
    weights = correction_weights(old_logprobs, sampler_logprobs, mask, "sequence_mask", cap=3.0).amax(dim=1)
    return weights[shuffled_rows(sampler_logprobs)]


def random_mask(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Weights (B,) of ``sequence_truncate``; 0 at random, for as many completions as ``sequence_mask`` leaves out."""
    modes = ("sequence_truncate", "sequence_mask")
    own, kept = (correction_weights(old_logprobs, sampler_logprobs, mask, mode, cap=3.0).amax(dim=1) for mode in modes)
    return own * (kept > 0)[shuffled_rows(sampler_logprobs)]


def shuffled_rows(sampler_logprobs: Tensor) -> Tensor:
    """A permutation (B,) of a rollout's rows, which its log-probs seed."""
    generator = torch.Generator().manual_seed(int(-1e6 * sampler_logprobs.double().sum()) % 2**31)
    return torch.randperm(len(sampler_logprobs), generator=generator).to(sampler_logprobs.device)
