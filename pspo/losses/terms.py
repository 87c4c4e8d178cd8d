"""Terms: everything of the loss besides the surrogate, each a small map from losses to losses.

A term is called as ``term(losses, x)`` with the losses (B, T) so far and the `LossInputs`, and returns losses (B, T).
Those of --algorithm.terms come first, in order; then the correction, the KL penalty and the entropy bonus, if they are
on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pspo.losses.correction import Correction, correction_weights
from pspo.losses.kl import KLEstimator, kl_estimate
from pspo.losses.surrogates import SilentHint, check, log_ratio


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss at the tokens of B rows."""

    logprobs: Tensor  # (B, T), the policy's, with gradient
    old_logprobs: Tensor  # (B, T), what ratios are formed against
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool, the tokens that the loss is about
    entropies: Tensor  # (B, T), of the policy's distributions in nats, with gradient
    ref_logprobs: Tensor | None = None  # (B, T), the reference model's; None without one
    sampler_logprobs: Tensor | None = None  # (B, T), what the tokens were drawn with; None unless the sampler kept them
    step: int = 0  # optimizer steps taken so far


class Term(SilentHint, ABC):
    """Base of the terms, for their short names on the command line; a term of your own may be any callable."""

    @abstractmethod
    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor: ...


@dataclass(frozen=True)
class SamplerCorrection(Term):
    """losses x w, w = old / sampler probability by `correction_weights`: for tokens of another engine or policy."""

    mode: Correction | Callable
    cap: float = 3.0
    floor: float = 0.0
    silent_at_zero_advantage = True

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        weights = correction_weights(x.old_logprobs, x.sampler_logprobs, x.mask, self.mode, self.cap, self.floor)
        return losses * weights


@dataclass(frozen=True)
class KLPenalty(Term):
    """losses + beta KL(policy || reference), by `kl_estimate`."""

    beta: float
    estimator: KLEstimator = "k3"

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses + self.beta * kl_estimate(x.logprobs, x.ref_logprobs, x.mask, self.estimator, x.old_logprobs)


@dataclass(frozen=True)
class SquaredLogRatio(Term):
    """losses + coef log^2 r / 2: k2, to the old policy, which the next steps then stay near to.

    With `DPPO` at epsilon 0.2 and ratios to the sampler it is prime-rl's default loss; coef is twice its kl_tau.
    """

    coef: float

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses + self.coef * kl_estimate(x.logprobs, x.old_logprobs, x.mask, "k2")


@dataclass(frozen=True)
class EntropyBonus(Term):
    """losses - coef H: keeps the policy from becoming certain too soon."""

    coef: float

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses - self.coef * x.entropies


@dataclass(frozen=True)
class OffPolicyMask(Term):
    """0 where A < 0 in a row that the policy has moved away from: DeepSeek-V3.2's off-policy mask (2512.02556).

    The threshold, in nats, is of the row's mean log(sampler / policy), or log(old / policy) without the sampler's.
    """

    threshold: float
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(self.threshold >= 0, self, "threshold must be at least 0", self.threshold)

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        sampler_logprobs = x.old_logprobs if x.sampler_logprobs is None else x.sampler_logprobs
        moved = log_ratio(sampler_logprobs, x.logprobs.detach(), x.mask).sum(dim=1, keepdim=True)  # (B, 1)
        is_near = moved <= self.threshold * x.mask.sum(dim=1, keepdim=True)
        return losses.where((x.advantages >= 0) | is_near, 0.0)


@dataclass(frozen=True)
class EntropyQuantile(Term):
    """0 at all but each row's most uncertain share of tokens ("Beyond the 80/20 Rule", 2506.01939: each batch's)."""

    share: float
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, self, "share must be in (0, 1]", self.share)

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        entropies = x.entropies.detach().masked_fill(~x.mask, -math.inf)
        lengths = x.mask.sum(dim=1, keepdim=True)  # (B, 1)
        n_staying = torch.ceil(self.share * lengths.double() - 1e-9).long()  # 0.55 of 100 would be above 55
        last = (n_staying - 1).clamp(min=0)  # rank of the least uncertain one that stays
        lowest = entropies.sort(dim=1, descending=True).values.gather(1, last)
        return losses.where(entropies >= lowest, 0.0)
