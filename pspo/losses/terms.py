"""Everything of the loss besides the surrogate: factors of its tokens, a KL penalty and an entropy bonus."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from pspo.losses.correction import Correction, correction_weights, on_policy
from pspo.losses.kl import KLEstimator, kl_estimate
from pspo.losses.surrogates import Surrogate, check_loss


class Terms(Protocol):
    """Fields of `pspo.config.AlgorithmConfig`."""

    surrogate: Surrogate
    correction: Correction | Callable | None
    correction_cap: float
    correction_floor: float
    mask_off_policy: float | None
    beta: float
    kl_estimator: KLEstimator
    entropy_coef: float


def add_terms(
    algorithm: Terms,
    losses: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    uncertain: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
) -> Tensor:
    """Check a surrogate's losses, leave tokens out of them or weigh them; add the KL penalty and the entropy bonus.

    By default none of these is on, and the losses are returned as they came.

    Args:
        losses: (B, T), what ``algorithm.surrogate`` returned; as all others, or (n, 1) of n tokens.
        uncertain: bool, the tokens in the surrogate's loss under --algorithm.entropy_quantile; None for all.
        ref_logprobs: None without beta.
    """
    check_loss(algorithm.surrogate, losses, logprobs)
    if uncertain is not None:
        losses = losses.where(uncertain, 0.0)
    if algorithm.mask_off_policy is not None:
        sampler = old_logprobs if sampler_logprobs is None else sampler_logprobs
        losses = losses.where(on_policy(logprobs, sampler, advantages, mask, algorithm.mask_off_policy), 0.0)
    if algorithm.correction != "none":
        how = (algorithm.correction, algorithm.correction_cap, algorithm.correction_floor)
        losses = losses * correction_weights(old_logprobs, sampler_logprobs, mask, *how)
    if ref_logprobs is not None:
        kl = kl_estimate(logprobs, ref_logprobs, mask, algorithm.kl_estimator, old_logprobs)
        losses = losses + algorithm.beta * kl
    if algorithm.entropy_coef > 0:
        losses = losses - algorithm.entropy_coef * entropies
    return losses
