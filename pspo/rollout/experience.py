"""A rollout with its rewards: what is trained on, at once or --rollout.lag rollouts later."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pspo.rollout.types import Rollout, join


@dataclass
class Drawing:
    """A rollout that is not scored yet.

    Attributes:
        prompts: index of each group's training prompt.
        rollout: B rows; None while an engine draws them.
    """

    prompts: list[int]
    rollout: Rollout | None = None


@dataclass(frozen=True)
class Experience:
    """A rollout, scored.

    Attributes:
        prompts: index of each group's training prompt.
        rollout: B rows.
        rewards: (B,) float64, NaN if unknown.
        rewards_by_name: each reward function's own, B of them.
        drawn_rewards: those of all completions drawn for it, groups that were replaced included.
        drawn_tokens: prompt and completion tokens of these, padding excluded.
        logged: by name B values that reward functions logged, None where there is none.
        advantages: (B,) or (B, T) float32; None until they are estimated.
    """

    prompts: list[int]
    rollout: Rollout
    rewards: Tensor
    rewards_by_name: dict[str, list[float]]
    drawn_rewards: list[float]
    drawn_tokens: int
    logged: dict[str, list[Any]] = field(default_factory=dict)
    advantages: Tensor | None = None

    @property
    def signal(self) -> list[bool]:
        """By group, True if an advantage is not 0: with group-relative ones, if its rewards differ."""
        return self.advantages.view(len(self.prompts), -1).any(dim=1).tolist()

    @property
    def row_advantages(self) -> list[float]:
        """B numbers: a row's advantage, or the mean over its tokens."""
        if self.advantages.dim() == 1:
            return self.advantages.tolist()
        lengths = self.rollout.loss_mask.sum(dim=1).clamp(min=1)
        return (self.advantages.sum(dim=1) / lengths).tolist()

    def refill(self, fresh: "Experience") -> "Experience":
        """Replace groups without signal by those of ``fresh`` that have one, until none is left; without advantages."""
        signal, n = self.signal + fresh.signal, len(self.prompts)
        group_size, spare = len(self.rewards) // n, (group for group in range(n, len(signal)) if signal[group])
        groups = [group if signal[group] else next(spare, group) for group in range(n)]
        rows = [group * group_size + i for group in groups for i in range(group_size)]
        rewards = torch.cat([self.rewards, fresh.rewards])[rows]

        def chosen(own: dict[str, list], others: dict[str, list]) -> dict[str, list]:
            """By name the values of the rows chosen, None where there is none."""
            none, other_none = [None] * len(self.rewards), [None] * len(fresh.rewards)
            both = {name: own.get(name, none) + others.get(name, other_none) for name in own | others}
            return {name: [values[row] for row in rows] for name, values in both.items()}

        return Experience(
            [(self.prompts + fresh.prompts)[group] for group in groups],
            join([self.rollout, fresh.rollout]).rows(torch.tensor(rows, device=rewards.device)),
            rewards,
            chosen(self.rewards_by_name, fresh.rewards_by_name),
            self.drawn_rewards + fresh.drawn_rewards,
            self.drawn_tokens + fresh.drawn_tokens,
            chosen(self.logged, fresh.logged),
        )
