"""Losses of other papers, with the interface, symbols and rules of `pspo.losses.surrogates`.

With one advantage per row, the gradients are those of the sources' objectives under the same aggregation. A token's
loss has a gradient at that token alone: the stop-gradient sg holds a ratio s or weight w of the whole row fixed.
Some names mean something else in TRL or verl: docs/guide/trl.md has the settings that agree.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pspo.losses.surrogates import (
    MAX_LOG_RATIO,
    Surrogate,
    check,
    check_at_least_0,
    clip_range,
    log_ratio,
    policy_gradient,
)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's unmasked tokens, (B, T); its gradient at token t is the gradient of values_t.

    So the mean of a row's losses has the gradient of the mean: GSPO-token (Zheng et al. 2025, section 4.3).
    """
    fixed = values.detach()
    mean = fixed.where(mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    return mean + (values - fixed)


@dataclass(frozen=True)
class REINFORCE(Surrogate):
    """-A logprob: the policy gradient without importance weights (Williams 1992); biased once the policy has moved."""

    silent_at_zero_advantage = True

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        one = torch.ones_like(log_ratio(logprobs.detach(), old_logprobs, mask))
        return policy_gradient(one, logprobs, advantages, mask)


@dataclass(frozen=True)
class CISPO(Surrogate):
    """-sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A logprob: clips weights and drops no token (MiniMax-M1, 2025).

    Bounds lie around 1, as in verl. TRL's epsilon_high is the bound itself, ours + 1 (ScaleRL recommends 5, 4 here).
    epsilon None means no lower bound, as in the source.
    """

    epsilon: float | None = None
    epsilon_high: float = 4.0
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon", "epsilon_high")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs.detach(), old_logprobs, mask).exp()
        low = 0.0 if self.epsilon is None else 1 - self.epsilon
        return policy_gradient(ratio.clamp(low, 1 + self.epsilon_high), logprobs, advantages, mask)


@dataclass(frozen=True)
class GSPO(Surrogate):
    """-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), s = exp(mean of log r over the row) (Zheng et al. 2025).

    The source averages over sequences: aggregation ``grpo``. LUSPO (Liu et al. 2026) multiplies each sequence's loss by
    its length, which is GSPO with ``dr_grpo`` times the constant max_completion_tokens.
    """

    epsilon: float = 3e-4
    epsilon_high: float = 4e-4
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon", "epsilon_high")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = row_mean(log_ratio(logprobs, old_logprobs, mask), mask).exp()
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        return torch.where(mask, -torch.minimum(ratio * advantages, clipped * advantages), 0.0)


@dataclass(frozen=True)
class GMPO(Surrogate):
    """-A exp(mean of l), l = min(log r, epsilon) where A > 0, else max(log r, -epsilon) (Zhao et al. 2025).

    GMPO takes the geometric mean of clipped ratios, GRPO the arithmetic mean; aggregation ``grpo``.
    """

    epsilon: float = 0.4
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs, old_logprobs, mask)
        clipped = torch.where(advantages > 0, log_r.clamp(max=self.epsilon), log_r.clamp(min=-self.epsilon))
        return torch.where(mask, -row_mean(clipped, mask).exp() * advantages, 0.0)


@dataclass(frozen=True)
class VESPO(Surrogate):
    """-sg(w^k exp(lambda (1 - w))) A logprob, w the product of r over the row (Shen et al. 2026).

    The sign of A selects k and lambda. The weight is 1 at w = 1 and falls on both sides of its peak at w = k / lambda.
    """

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, *vars(self))

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs.detach(), old_logprobs, mask)
        log_w = log_r.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (B, 1)
        pos = self.k_pos * log_w + self.lambda_pos * (1 - log_w.exp())
        neg = self.k_neg * log_w + self.lambda_neg * (1 - log_w.exp())
        log_weight = torch.where(advantages > 0, pos, neg).clamp(max=MAX_LOG_RATIO)
        return policy_gradient(log_weight.exp(), logprobs, advantages, mask)


@dataclass(frozen=True)
class DPPO(Surrogate):
    """-M r A, M = 0 where the divergence is above epsilon and the step would add to it, else 1 (Qi et al. 2026).

    The mask depends on how much probability has moved, not on the ratio. With p and q the token's new and old
    probability, the divergence is that of the choice "this token or any other": |p - q| ("tv"), or
    KL = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) ("kl"). The step would add to it where A > 0 and p > q, or A <= 0
    and p < q. The source's top-K divergence needs the whole distribution, which a surrogate does not see. The source
    takes q from the sampler, we from the old log-probs; it has epsilon 0.15 or 0.2 for tv, 0.05 for kl, and caps r.
    """

    divergence: Literal["tv", "kl"] = "tv"
    epsilon: float = 0.15
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(self.divergence in ("tv", "kl"), self, 'divergence must be "tv" or "kl"', repr(self.divergence))
        check_at_least_0(self, "epsilon")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs, old_logprobs, mask)
        new = logprobs.detach().to(log_r.dtype).clamp(max=0.0)
        old = old_logprobs.detach().to(log_r.dtype).clamp(max=0.0)
        moved = new.exp() - old.exp()  # p - q
        divergence = moved.abs()
        if self.divergence == "kl":
            rest = 1e-8 - torch.expm1(new)  # 1 - p, above 0
            old_rest = 1e-8 - torch.expm1(old)  # 1 - q
            divergence = -old.exp() * log_r.detach() + old_rest * (old_rest / rest).log()
        further = torch.where(advantages > 0, moved > 0, moved < 0)
        contributes = ~(further & (divergence > self.epsilon))
        return torch.where(mask, -log_r.exp() * advantages * contributes, 0.0)


@dataclass(frozen=True)
class SPO(Surrogate):
    """-(r A - |A| (r - 1)^2 / (2 epsilon)): a quadratic penalty in place of the clip (Xie et al. 2024, 2401.16025).

    The minimum is at Clip's bounds, r = 1 + epsilon where A > 0 and 1 - epsilon where A < 0; beyond, the gradient leads
    back. CFPO (Cagatan et al. 2026, 2601.22801) is this loss.
    """

    epsilon: float = 0.2
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(self.epsilon > 0, self, "epsilon must be above 0", self.epsilon)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        penalty = advantages.abs() * (ratio - 1).square() / (2 * self.epsilon)
        return torch.where(mask, penalty - ratio * advantages, 0.0)


@dataclass(frozen=True)
class DRO(Surrogate):
    """-(A logprob - (tau / 2) log^2 w), w the product of r over the row (Kimi k1.5, 2501.12599, section 2.3.2).

    Direct Reward Optimization (Richemond et al. 2024), with the mean reward as its value function. A token's share of
    log^2 w is log w log r, with the gradient of log^2 w. verl's and Tinker's ``dro`` penalise each token's log^2 r, as
    level "token" does. The source gives no tau; 0.05 is Tinker's.
    """

    tau: float = 0.05
    level: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        check_at_least_0(self, "tau")
        check(self.level in ("sequence", "token"), self, 'level must be "sequence" or "token"', repr(self.level))

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs.detach(), old_logprobs, mask)
        log_w = log_r.sum(dim=1, keepdim=True) if self.level == "sequence" else log_r
        moved = torch.where(mask, logprobs - logprobs.detach(), 0.0)  # 0; its gradient is logprobs', also when clamped
        penalty = self.tau * log_w * (0.5 * log_r + moved)
        return penalty + policy_gradient(torch.ones_like(log_r), logprobs, advantages, mask)

    @property
    def silent_at_zero_advantage(self) -> bool:
        return self.tau == 0


@dataclass(frozen=True)
class CEGPPO(Surrogate):
    """-(w / sg(r)) r A: Clip that leaves a bounded gradient to the tokens it clips (Su et al. 2025, 2509.20712).

    w is r where Clip has a gradient, beta1 (1 - epsilon) below the range and beta2 (1 + epsilon_high) above it. The
    authors' code also cuts the loss at r = 10 where A < 0; the paper does not. beta1 = beta2 = 0 gives Clip's gradient.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta1: float = 0.75
    beta2: float = 1.0
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon", "epsilon_high", "beta1", "beta2")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        fixed = ratio.detach()
        low, high = clip_range(self.epsilon, self.epsilon_high)
        weight = torch.where((advantages < 0) & (fixed < low), self.beta1 * low, fixed)
        weight = torch.where((advantages > 0) & (fixed > high), self.beta2 * high, weight)
        return torch.where(mask, -weight / fixed * ratio * advantages, 0.0)


@dataclass(frozen=True)
class ASPO(Surrogate):
    """-sg(w) A logprob, w = min(1 / r, delta) where A > 0, else min(r, delta); 0 where Clip has no gradient.

    Where A > 0, tokens that became less likely weigh more, not less (Wang et al. 2025, 2510.06062v2, section 6). The
    authors' code has delta 3, different clip ranges for uncertain tokens, and ``dapo`` where the paper has ``grpo``.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float = 3.0
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon", "epsilon_high")
        check(self.delta >= 1, self, "delta must be at least 1", self.delta)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs.detach(), old_logprobs, mask)
        ratio = log_r.exp()
        low, high = clip_range(self.epsilon, self.epsilon_high)
        weight = torch.where(advantages > 0, -log_r, log_r).exp().clamp(max=self.delta)
        contributes = torch.where(advantages > 0, ratio <= high, ratio >= low)
        return policy_gradient(weight * contributes, logprobs, advantages, mask)
