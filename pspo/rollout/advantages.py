"""Advantages: group-relative, or estimated by a user's function, given by its import path.

Scales of `group_relative_advantages`, A = R - mean of its group:

* "none" leaves A as it is (Dwyer et al. 2026, section 2)
* "group" (GRPO, Shao et al. 2024) and "batch" divide by the standard deviation of the group, or of all rewards over all
  ranks, ddof = 1, plus eps
* "rloo" (Ahmadian et al. 2024) is R - mean of the group's other rewards: n / (n - 1) times "none" in a group of n
* "maxrl" (Tajwar et al. 2026) divides by the group's mean, for rewards of at least 0
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import Advantages
from pspo.errors import function_name
from pspo.losses.surrogates import as_rows
from pspo.rollout.types import Experience
from pspo.tasks import Problem


def estimate_advantages(
    experience: Experience,
    estimator: Advantages | Callable[..., Tensor],
    group_size: int,
    problems: Sequence[Problem],
    weights: Sequence[float] | None = None,
    computed: Mapping[str, Callable[[], Any]] | None = None,
) -> Tensor:
    """Advantages of a scored rollout's B rows by "gdpo" or a function of your own, (B,) or (B, T), 0 where unknown.

    Args:
        estimator: called with the rewards (B,), NaN if unknown, the group size, and of these what its signature names:
            ``mask`` (B, T), true at drawn tokens; ``lengths`` (B,), the number of these; ``truncated`` (B,) bool;
            ``rewards_by_function``, a dict of unweighted (B,); ``weights`` of the functions; ``problems``, a list of B.
            Under several ranks the estimator gets the whole groups of this rank.
        weights: weights of the reward functions; None for 1 each.
        computed: further arguments by name: in a run ``reference``, a model, and ``reference_logprobs`` (B, T).

    Raises UserCodeError if a function returns another shape, NaN or inf.
    """
    rewards = experience.rewards.float()
    mask = experience.rollout.loss_mask
    rewards_by_function = {name: rewards.new_tensor(values) for name, values in experience.rewards_by_name.items()}
    weights = list(weights or ())
    optional = {
        "lengths": mask.sum(dim=1),
        "mask": mask,
        "truncated": ~experience.rollout.terminated,
        "rewards_by_function": rewards_by_function,
        "weights": weights + [1.0] * (len(rewards_by_function) - len(weights)),  # 1 for an environment's
        "problems": problems,
    }
    function = gdpo if estimator == "gdpo" else estimator
    parameters = inspect.signature(function).parameters
    arguments = {name: value for name, value in optional.items() if name in parameters}
    arguments |= {name: compute() for name, compute in (computed or {}).items() if name in parameters}
    advantages = function(rewards, group_size, **arguments)
    name = f"--algorithm.advantages {function_name(estimator)}"
    return as_rows(advantages, mask & ~rewards.isnan()[:, None], name).squeeze(1)


def group_relative_advantages(rewards: Tensor, group_size: int, scale: str = "none", eps: float = 1e-4) -> Tensor:
    """(B,) A = R - mean of its group, scaled as the module says: float32, float64 for float64 rewards.

    The rows of a group are adjacent. NaN is an unknown reward: A is 0, and means and deviations leave it out.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2 (a group of 1 has advantage 0 always), got {group_size}")
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, group_size)  # (B / G, G)
    unknown = groups.isnan()
    highest = groups.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    all_equal = ((groups == highest) | unknown).all(dim=1, keepdim=True)  # exactly 0: a rounded mean leaves noise
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if scale != "none":
        advantages = rescaled(advantages, groups, scale, eps)
    return torch.where(all_equal | unknown, 0.0, advantages).flatten()


def rescaled(advantages: Tensor, groups: Tensor, scale: str, eps: float) -> Tensor:
    """Advantages (B / G, G) of groups of rewards (B / G, G), by a scale other than "none"."""
    if scale == "group":
        return advantages / (_std(groups) + eps)
    if scale == "batch":
        return advantages / (_std(dist.concat_over_ranks(groups).view(1, -1)) + eps)
    if scale == "rloo":
        n = (~groups.isnan()).sum(dim=1, keepdim=True).to(groups.dtype)
        return advantages * (n / (n - 1).clamp(min=1))
    if scale == "maxrl":
        if (groups < 0).any():
            raise ValueError("--algorithm.advantages maxrl divides by mean rewards: they must be at least 0")
        return advantages / groups.nanmean(dim=1, keepdim=True)
    raise ValueError(f"unknown advantage scale {scale!r}: choose none, group, batch, rloo or maxrl")


def gdpo(
    rewards: Tensor,
    group_size: int,
    rewards_by_function: dict[str, Tensor],
    weights: Sequence[float],
    eps: float = 1e-4,
) -> Tensor:
    """(B,) sum of each reward function's weighted "group" advantages, divided by that sum's deviation over all rows.

    GDPO (2601.05242): functions of different scales and variances weigh alike. The paper then subtracts the mean,
    which is 0, because each group sums to 0. A row whose reward is NaN is in no group's mean or deviation.
    """
    rows = [values.where(~rewards.isnan(), torch.nan) for values in rewards_by_function.values()]
    scaled = [group_relative_advantages(values, group_size, "group", eps) for values in rows]
    weighted = [weight * values for weight, values in zip(weights, scaled, strict=True)]
    total = sum(weighted, start=torch.zeros_like(rewards))
    total_or_nan = total.where(~rewards.isnan(), torch.nan)[:, None]
    deviation = _std(dist.concat_over_ranks(total_or_nan).T).squeeze() + eps
    return torch.where(total == 0, 0.0, total / deviation)


def _std(rewards: Tensor) -> Tensor:
    """Standard deviation of each row's known rewards, (n, 1), ddof = 1; NaN for fewer than two rewards."""
    squares = (rewards - rewards.nanmean(dim=1, keepdim=True)).square()
    return (squares.nansum(dim=1, keepdim=True) / ((~rewards.isnan()).sum(dim=1, keepdim=True) - 1)).sqrt()
