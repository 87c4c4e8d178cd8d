"""A rollout with its rewards, and which of its rows have a signal."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pspo.config import AlgorithmConfig
from pspo.rollout.types import Rollout, join


def trained_rows(rollout: Rollout, advantages: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """(B,) bool: the rows with a signal, a token in the loss whose advantage, (B,) or (B, T), is not 0.

    Others have no gradient but that of terms, such as a KL penalty. Resampling replaces groups without such a row, and
    a step's statistics are of these rows.
    """
    mask = rollout.loss_mask
    if algorithm.mask_truncated:
        mask = mask & rollout.terminated[:, None]
    return (mask & (advantages.reshape(len(rollout), -1) != 0)).any(dim=1)


@dataclass(frozen=True)
class Experience:
    """A rollout, scored.

    Attributes:
        prompt_indices: of each group's prompt among the training prompts.
        rollout: B rows.
        rewards: (B,) float64, NaN if unknown.
        rewards_by_name: B values of each reward function.
        logged: by name B values that reward functions logged, None where there is none.
        advantages: (B,) or (B, T) float32; None until they are estimated.
        reward_failed: a reward function failed for some of the completions drawn (--reward.on_error none).
        drawn_rewards: those of all completions drawn for it, if --rollout.resample has replaced some.
        drawn_tokens: prompt and completion tokens of these, padding excluded.
    """

    prompt_indices: list[int]
    rollout: Rollout
    rewards: Tensor
    rewards_by_name: dict[str, list[float]]
    logged: dict[str, list[Any]] = field(default_factory=dict)
    advantages: Tensor | None = None
    reward_failed: bool = False
    drawn_rewards: list[float] = field(default_factory=list)
    drawn_tokens: int = 0

    def has_signal(self, algorithm: AlgorithmConfig) -> list[bool]:
        """By group, True if it has a row of `trained_rows`: with group-relative advantages, if its rewards differ."""
        rows = trained_rows(self.rollout, self.advantages, algorithm)
        return rows.view(len(self.prompt_indices), -1).any(dim=1).tolist()

    @property
    def row_advantages(self) -> list[float]:
        """B numbers: a row's advantage, or the mean over its tokens."""
        if self.advantages.dim() == 1:
            return self.advantages.tolist()
        lengths = self.rollout.loss_mask.sum(dim=1).clamp(min=1)
        return (self.advantages.sum(dim=1) / lengths).tolist()


def refill(experience: Experience, fresh: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Replace groups without signal by those of ``fresh`` that have one, until none is left.

    The advantages are left out: some estimators need all rows.
    """
    n_groups = len(experience.prompt_indices)
    group_size = len(experience.rewards) // n_groups
    has_signal = experience.has_signal(algorithm) + fresh.has_signal(algorithm)
    spare = [group for group in range(n_groups, len(has_signal)) if has_signal[group]]
    groups = []
    for group in range(n_groups):
        groups.append(spare.pop(0) if spare and not has_signal[group] else group)
    prompt_indices = experience.prompt_indices + fresh.prompt_indices
    rows = [group * group_size + i for group in groups for i in range(group_size)]
    indices = torch.tensor(rows)

    def select(values: dict[str, list], fresh_values: dict[str, list]) -> dict[str, list]:
        """The rows' values by name, None where there is none."""
        selected = {}
        for name in dict.fromkeys([*values, *fresh_values]):
            first = values.get(name, [None] * len(experience.rewards))
            joined = first + fresh_values.get(name, [None] * len(fresh.rewards))
            selected[name] = [joined[row] for row in rows]
        return selected

    return Experience(
        prompt_indices=[prompt_indices[group] for group in groups],
        rollout=join([experience.rollout, fresh.rollout]).rows(indices),
        rewards=torch.cat([experience.rewards, fresh.rewards])[indices],
        rewards_by_name=select(experience.rewards_by_name, fresh.rewards_by_name),
        logged=select(experience.logged, fresh.logged),
        reward_failed=experience.reward_failed or fresh.reward_failed,
        drawn_rewards=(experience.drawn_rewards or experience.rewards.tolist()) + fresh.rewards.tolist(),
        drawn_tokens=(experience.drawn_tokens or experience.rollout.tokens) + fresh.rollout.tokens,
    )
