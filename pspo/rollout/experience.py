"""A rollout with its rewards: what is trained on, at once or --rollout.lag rollouts later."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pspo.rollout.advantages import AdvantageScale, group_relative_advantages
from pspo.rollout.types import Nucleus, Rollout, cat_padded


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
        advantages: (B,) float32.
        drawn_rewards: those of all completions drawn for it, groups that were replaced included.
        drawn_tokens: prompt and completion tokens of these, padding excluded.
        logged: by name B values that reward functions logged, None where there is none.
    """

    prompts: list[int]
    rollout: Rollout
    rewards: Tensor
    rewards_by_name: dict[str, list[float]]
    advantages: Tensor
    drawn_rewards: list[float]
    drawn_tokens: int
    logged: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def signal(self) -> list[bool]:
        """By group, True if its rewards differ: only then an advantage is not 0."""
        return self.advantages.view(len(self.prompts), -1).any(dim=1).tolist()

    def refill(self, fresh: "Experience", scale: AdvantageScale) -> "Experience":
        """Replace groups without signal by groups of ``fresh`` that have one, as far as these go."""
        signal, n = self.signal + fresh.signal, len(self.prompts)
        group_size, spare = len(self.rewards) // n, (group for group in range(n, len(signal)) if signal[group])
        groups = [group if signal[group] else next(spare, group) for group in range(n)]
        rows = torch.arange(group_size * len(signal)).view(-1, group_size)[groups].flatten().to(self.rewards.device)
        rewards = torch.cat([self.rewards, fresh.rewards])[rows]
        by_name = {name: values + fresh.rewards_by_name[name] for name, values in self.rewards_by_name.items()}
        parts = [(part.logged, [None] * len(part.rewards)) for part in (self, fresh)]
        logged = {name: [value for own, none in parts for value in own.get(name, none)]
                  for name in self.logged.keys() | fresh.logged.keys()}  # fmt: skip
        return Experience(
            [(self.prompts + fresh.prompts)[group] for group in groups],
            join([self.rollout, fresh.rollout]).rows(rows),
            rewards,
            {name: [values[row] for row in rows.tolist()] for name, values in by_name.items()},
            group_relative_advantages(rewards.float(), group_size, scale),
            self.drawn_rewards + fresh.drawn_rewards,
            self.drawn_tokens + fresh.drawn_tokens,
            {name: [values[row] for row in rows.tolist()] for name, values in logged.items()},
        )


def join(parts: Sequence[Rollout]) -> Rollout:
    """The rows of all rollouts, one after the other."""
    joined, width = {}, max(part.prompt_ids.shape[1] for part in parts)
    for name, value in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if isinstance(value, Nucleus):
            joined[name] = Nucleus.join(values)
        elif isinstance(value, list):
            joined[name] = [item for items in values for item in items]
        elif name.startswith("prompt"):
            joined[name] = torch.cat([pad(value, (width - value.shape[1], 0)) for value in values])
        elif value is not None:
            joined[name] = torch.cat(values) if value.dim() == 1 else cat_padded(values)
    return Rollout(**joined)
