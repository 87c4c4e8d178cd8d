"""The paper's six surrogates, each a map from per-token log-probs to a per-token loss, to be minimised.

Symbols, shared with the tests and the README: ``r = exp(logprob - old_logprob)`` is the importance ratio, ``A`` the
advantage. `pspo.losses.aggregate` takes the means over tokens.

`log_ratio` holds the one numerical rule: log r is 0 under the mask and clamped to +-20 elsewhere, so that no finite
input gives inf or NaN in the loss or its gradient. bfloat16 in gives float32 out, float64 in gives float64 out. Only
the gradient of float16 log-probs can overflow (r above 65,504): call ``.float()`` on the log-probs first.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pspo.errors import UserCodeError, function_name

MAX_LOG_RATIO = 20.0


class Surrogate(ABC):
    """Base of all surrogates; subclass it (as a frozen dataclass) to try a loss of your own.

    A call maps ``logprobs`` (B, T), ``old_logprobs`` (B, T), ``advantages`` (B, 1) or (B, T) and ``mask`` (B, T)
    bool to the per-token loss (B, T), unreduced, 0 where masked. A fifth parameter, if it is called ``step``, gets the
    number of optimizer steps taken.

    A surrogate with ``state_dict`` and ``load_state_dict`` has a state, which checkpoints hold: rank 0's, or with
    ``per_rank = True`` every rank's. Training calls a surrogate on chunks of whole rows, and again if memory runs out.

    Training leaves out rows with A = 0 if the classes of the surrogate and of all terms set
    ``silent_at_zero_advantage = True``: loss and gradient are exactly 0 there. A subclass must set it again.
    """

    silent_at_zero_advantage = False

    @abstractmethod
    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor: ...

    def bind_step(self, step: int) -> Callable[..., Tensor]:
        """Return the map from the four tensors to the loss, with ``step`` bound if the surrogate takes it."""
        return partial(self, step=step) if "step" in inspect.signature(self).parameters else self

    def __repr__(self) -> str:  # a dataclass has its own
        arguments = (name for name in inspect.signature(type(self)).parameters if hasattr(self, name))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in arguments)})"


def check_loss(piece: Surrogate | Callable, loss: Tensor, logprobs: Tensor) -> None:
    """Raise UserCodeError unless the loss of a surrogate or term is (B, T), float32 or wider, with a gradient."""
    fault = None
    if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        fault = f"must return a loss per token, (B, T) = {tuple(logprobs.shape)}, not {got}"
    elif loss.dtype not in (torch.float32, torch.float64):
        fault = f"returned {loss.dtype}; it must return torch.float32 or wider: use .float()"
    elif logprobs.requires_grad and not loss.requires_grad:
        fault = "returned a loss without gradient; it must depend on logprobs, not detached"
    if fault is not None:
        raise UserCodeError(f"{function_name(piece)} {fault}")


def as_rows(values: Tensor, mask: Tensor, name: str, divisors: bool = False) -> Tensor:
    """(B, 1) or (B, T): values per row or token that the function ``name`` returned; 0 (divisors: 1) where masked."""
    rows = len(mask)
    shape = tuple(mask.shape)
    if not isinstance(values, Tensor) or values.shape not in ((rows,), (rows, 1), shape):
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        rule = f"a tensor with a value per row (B,) = ({rows},) or per token (B, T) = {shape}"
        raise UserCodeError(f"{name} returned {got}; it must return {rule}")
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    values = values.detach().to(mask.device, dtype).view(rows, -1)
    known = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
    values = values.where(known, 1.0 if divisors else 0.0)
    if not values.isfinite().all():
        raise UserCodeError(f"{name} returned values that are not finite")
    if divisors and not (values > 0).all():
        raise UserCodeError(f"{name} returned values that are not above 0")
    return values


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log r = logprob - old_logprob, shape (B, T), 0 where masked, clamped to +-20; float32 or wider."""
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return torch.where(mask, logprobs.to(dtype) - old_logprobs.to(dtype), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_gradient(weight: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """-sg(w) A logprob, (B, T), 0 where masked; ``weight`` is (B, 1) or (B, T), float32 or wider, without gradient."""
    return torch.where(mask, -weight * advantages * torch.where(mask, logprobs.to(weight.dtype), 0.0), 0.0)


def check(ok: bool, surrogate: Surrogate, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{type(surrogate).__name__}: {rule}, got {value}")


def check_at_least_0(surrogate: Surrogate, *names: str) -> None:
    for name in names:
        value = getattr(surrogate, name)
        check(value is None or value >= 0, surrogate, f"{name} must be at least 0", value)


def clip_range(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """Bounds of a ratio: 1 - epsilon and 1 + epsilon_high, or 1 + epsilon if epsilon_high is None."""
    return 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)


@dataclass(frozen=True)
class Clip(Surrogate):
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A): PPO's clipped surrogate (Schulman et al. 2017).

    Args:
        epsilon: width of the clip range below 1, and above 1, too, unless epsilon_high is set.
        epsilon_high: width of the clip range above 1 ("clip-higher", DAPO, Yu et al. 2025).
        delta: upper bound of r in the first, unclipped term ("two-sided clipping", INTELLECT-2, 2025); without delta
            that term has no bound where A < 0. Choose delta above 1 + epsilon_high.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check_at_least_0(self, "epsilon", "epsilon_high")
        check(self.delta is None or self.delta >= 1, self, "delta must be at least 1", self.delta)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        clipped = ratio.clamp(*clip_range(self.epsilon, self.epsilon_high))
        if self.delta is not None:
            ratio = ratio.clamp(max=self.delta)
        return torch.where(mask, -torch.minimum(ratio * advantages, clipped * advantages), 0.0)


@dataclass(frozen=True)
class NoClip(Surrogate):
    """-r A: the plain importance-weighted policy gradient."""

    silent_at_zero_advantage = True

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, -log_ratio(logprobs, old_logprobs, mask).exp() * advantages, 0.0)


@dataclass(frozen=True)
class PSPO(Surrogate):
    """-((1 - alpha) r + alpha) A: the ratio of the policy smoothed towards the old one (Dwyer et al. 2026, eq. 7).

    The gradient is exactly (1 - alpha) times NoClip's; the README says what follows from that.

    Args:
        alpha: smoothing strength in [0, 1]; 0 is NoClip, 1 has no gradient.
    """

    alpha: float = 0.1
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        check(0 <= self.alpha <= 1, self, "alpha must be in [0, 1]", self.alpha)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        smoothed_ratio = (1 - self.alpha) * ratio + self.alpha
        return torch.where(mask, -smoothed_ratio * advantages, 0.0)


@dataclass(frozen=True)
class P3O(Surrogate):
    """-(4 / tau) sigmoid(tau (r - 1)) A + kl_coef (r - 1 - log r): SCOPIC (Chen et al. 2023).

    The slope at r = 1 is A for every tau. The official code adds kl_coef KL(old || new); r - 1 - log r estimates it
    from old samples.
    """

    tau: float = 4.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        check(0 < self.tau < math.inf, self, "tau must be above 0 and finite", self.tau)
        check_at_least_0(self, "kl_coef")

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs, old_logprobs, mask)
        ratio = log_r.exp()
        gate = (4 / self.tau) * torch.sigmoid(self.tau * (ratio - 1))
        return torch.where(mask, -gate * advantages + self.kl_coef * (ratio - 1 - log_r), 0.0)

    @property
    def silent_at_zero_advantage(self) -> bool:
        return self.kl_coef == 0


@dataclass(frozen=True)
class SAPO(Surrogate):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg (Gao et al. 2025).

    The source advises tau_neg > tau_pos. The default tau_neg = 3 is the PSPO paper's; TRL and verl have 1.05.
    """

    tau_pos: float = 1.0
    tau_neg: float = 3.0
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        for name, tau in vars(self).items():
            check(0 < tau < math.inf, self, f"{name} must be above 0 and finite", tau)

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        tau = torch.where(advantages > 0, ratio.new_tensor(self.tau_pos), self.tau_neg)
        gate = (4 / tau) * torch.sigmoid(tau * (ratio - 1))
        return torch.where(mask, -gate * advantages, 0.0)


@dataclass(frozen=True)
class TOPR(Surrogate):
    """-sg(w) A logprob, w = clip(r, a, b), (a, b) is (a_pos, b_pos) where A > 0, else (a_neg, b_neg) (Le Roux 2025).

    The stop-gradient sg makes it REINFORCE with a tapered weight. At level "sequence", the source's, r is the
    ratio of the whole completion: the product over the row's unmasked tokens. With the defaults, positive rows
    weigh 1 and negative ones min(r, 1). The sign is A's here, but the reward's in the source.
    """

    a_pos: float = 1.0
    b_pos: float = 1.0
    a_neg: float = 0.0
    b_neg: float = 1.0
    level: Literal["sequence", "token"] = "sequence"
    silent_at_zero_advantage = True

    def __post_init__(self) -> None:
        pos = (self.a_pos, self.b_pos)
        neg = (self.a_neg, self.b_neg)
        check(0 <= self.a_pos <= self.b_pos, self, "0 <= a_pos <= b_pos must hold", pos)
        check(self.a_pos < math.inf and self.a_neg < math.inf, self, "a_pos and a_neg must be finite", (*pos, *neg))
        check(0 <= self.a_neg <= self.b_neg, self, "0 <= a_neg <= b_neg must hold", neg)
        check(self.level in ("sequence", "token"), self, 'level must be "sequence" or "token"', repr(self.level))

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        log_r = log_ratio(logprobs.detach(), old_logprobs, mask)
        if self.level == "sequence":
            log_r = log_r.sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # (B, 1)
        ratio = log_r.exp()
        weight = torch.where(advantages > 0, ratio.clamp(self.a_pos, self.b_pos), ratio.clamp(self.a_neg, self.b_neg))
        return policy_gradient(weight, logprobs, advantages, mask)
