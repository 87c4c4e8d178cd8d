"""Terms: the parts of the loss besides the surrogate, each a small map from losses to losses.

A term is called as ``term(losses, x)`` with the losses (B, T) so far and the `LossInputs`, and returns losses (B, T).
The terms of --algorithm.terms come first, in order; then the correction, the KL penalty and the entropy bonus, if they
are on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pspo.errors import function_name
from pspo.losses.surrogates import as_rows, check, log_ratio

Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
KLEstimator = Literal["k1", "k2", "k3", "unbiased_k3"]


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss at the tokens of B rows."""

    logprobs: Tensor  # (B, T), the policy's, with gradient
    old_logprobs: Tensor  # (B, T), ratios are formed against them; in training r is 1 where masked
    advantages: Tensor  # (B, 1) or (B, T)
    mask: Tensor  # (B, T) bool, the tokens that the loss is about
    entropies: Tensor  # (B, T), entropies of the policy's distributions in nats, with gradient
    ref_logprobs: Tensor | None = None  # (B, T), the reference model's; None without one
    sampler_logprobs: Tensor | None = None  # (B, T), the sampler's; None unless it kept them
    step: int = 0  # optimizer steps taken so far


class Term(ABC):
    """Base of the terms, which gives them short names on the command line; your own term may be any callable."""

    @abstractmethod
    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor: ...


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

    They correct the loss of tokens that an engine or an older policy drew with log-probs other than the old ones.

    "token_mask" with a floor is IcePop (Ling Team 2025, 2510.18855: 0.5 and 5).

    Args:
        old_logprobs, sampler_logprobs, mask: (B, T). The weights are (B, T), too, without gradient, 0 where masked.
        mode: "token_..." takes each token's ratio, "sequence_..." the product over the row's unmasked tokens;
            "..._truncate" cuts ratios at floor and cap (Yao et al. 2025), "..._mask" sets ratios outside to 0.
            A function of your own gets the three tensors and returns weights, (B,) or (B, T).
    """
    if callable(mode):
        weights = mode(old_logprobs, sampler_logprobs, mask)
        return torch.where(mask, as_rows(weights, mask, f"--algorithm.correction {function_name(mode)}"), 0.0)
    if mode not in get_args(Correction)[1:]:
        raise ValueError(f"unknown correction {mode!r}: choose one of {', '.join(get_args(Correction)[1:])}")
    log_r = log_ratio(old_logprobs, sampler_logprobs, mask)
    if mode.startswith("sequence"):
        log_r = log_r.sum(dim=1, keepdim=True)
    ratios = log_r.exp()
    inside = ratios.clamp(floor, cap)
    return torch.where(mask, inside if mode.endswith("truncate") else ratios.where(ratios == inside, 0.0), 0.0)


@dataclass(frozen=True)
class SamplerCorrection(Term):
    """losses x w, w = old / sampler probability (`correction_weights`), for tokens drawn by an engine or old policy."""

    mode: Correction | Callable
    cap: float = 3.0
    floor: float = 0.0
    silent_at_zero_advantage = True

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        weights = correction_weights(x.old_logprobs, x.sampler_logprobs, x.mask, self.mode, self.cap, self.floor)
        return losses * weights


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k3",
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per token from the policy's samples (Schulman 2020, "Approximating KL ...").

    With x = ref_logprob - logprob: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x.
    A good value does not make a good gradient. In expectation, k2 has the gradient of KL(policy || reference), k3 has
    the gradient of KL(reference || policy), and k1 has 0, so that here k1 takes k2's gradient. k3 times the ratio r
    has an unbiased value and gradient, also from an older policy's samples, if r is the ratio to the policy that drew.
    This holds for tokens drawn from the whole distribution: tokens of a nucleus (top_p 0.85) bias every estimate.

    Args:
        logprobs, ref_logprobs, old_logprobs: (B, T), at the same temperature; "unbiased_k3" alone needs the last.
        estimator: "k1" (unbiased, signed, k2's gradient), "k2" (biased, low variance), "k3" (unbiased, at least 0) or
            "unbiased_k3" (r k3, r = exp(logprob - old_logprob) with its gradient: DeepSeek-V3.2, 2512.02556).

    Returns:
        (B, T), in nats, 0 where masked. x is clamped to +-20. Beyond a bound the gradient is the bound's, not 0:
        the penalty still pulls where the policy is furthest away.
    """
    moved = torch.where(mask, logprobs.detach() - logprobs, 0.0)  # 0, with the gradient of -logprobs
    x = log_ratio(ref_logprobs, logprobs.detach(), mask) + moved  # (B, T)
    k2 = 0.5 * x.square()
    if estimator == "k1":
        return k2 - k2.detach() - x.detach()
    if estimator == "k2":
        return k2
    if estimator == "k3":
        return torch.expm1(x) - x
    if estimator == "unbiased_k3":
        return log_ratio(logprobs, old_logprobs, mask).exp() * (torch.expm1(x) - x)
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2, k3 or unbiased_k3")


@dataclass(frozen=True)
class KLPenalty(Term):
    """losses + beta KL(policy || reference), by `kl_estimate`."""

    beta: float
    estimator: KLEstimator = "k3"

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses + self.beta * kl_estimate(x.logprobs, x.ref_logprobs, x.mask, self.estimator, x.old_logprobs)


@dataclass(frozen=True)
class SquaredLogRatio(Term):
    """losses + coef log^2 r / 2, the k2 of `kl_estimate` to the old policy: keeps later steps near to that policy.

    With `DPPO` at epsilon 0.2 and ratios to the sampler, this is prime-rl's default loss; coef is twice its kl_tau.
    """

    coef: float

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses + self.coef * kl_estimate(x.logprobs, x.old_logprobs, x.mask, "k2")


@dataclass(frozen=True)
class EntropyBonus(Term):
    """losses - coef H, H the entropy in nats: keeps the policy from becoming certain too soon."""

    coef: float

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        return losses - self.coef * x.entropies


@dataclass(frozen=True)
class OffPolicyMask(Term):
    """losses, but 0 where A < 0 in rows that the policy has moved away from: DeepSeek-V3.2's mask (2512.02556).

    In such a row the mean of log(sampler / policy), or of log(old / policy) without the sampler's log-probs, is above
    ``threshold``, in nats.
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
    """losses at each row's most uncertain share of tokens, else 0 ("Beyond the 80/20 Rule", 2506.01939: a batch's)."""

    share: float
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(0 < self.share <= 1, self, "share must be in (0, 1]", self.share)

    def __call__(self, losses: Tensor, x: LossInputs) -> Tensor:
        entropies = x.entropies.detach().masked_fill(~x.mask, -math.inf)
        lengths = x.mask.sum(dim=1, keepdim=True)  # (B, 1)
        n_staying = torch.ceil(self.share * lengths.double() - 1e-9).long()  # else 0.55 x 100 is above 55
        ranks = entropies.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # of equal ones the first
        return losses.where(ranks < n_staying, 0.0)
