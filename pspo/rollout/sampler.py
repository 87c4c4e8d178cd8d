"""Samplers draw the completions of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import transformers
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.model import autocast
from pspo.rollout.generate import generate
from pspo.rollout.prompts import Prompts
from pspo.rollout.types import Rollout, Sampling


class RolloutSampler(Protocol):
    """Draws rollouts as its `sampling` says: a frozen dataclass, so that `replace` makes one of another sampling."""

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        """Draw ``group_size`` completions of each prompt, with torch's global generator."""

    def holding_weights(self) -> AbstractContextManager[RolloutSampler]:
        """A sampler for a `with` block in which ranks may draw different numbers of times."""


@dataclass(frozen=True)
class TransformersSampler:
    """Samples from the policy itself, by `generate`.

    Attributes:
        autocast: --model.autocast.
        generators: entered to draw; those of `pspo.rollout.generators` are advanced by sampling alone.
    """

    policy: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    autocast: str = "none"
    generators: AbstractContextManager = field(default_factory=nullcontext)

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        with self.generators, dist.unsharded(self.policy), autocast(self.autocast, self.policy.device):
            return generate(self.policy, self.tokenizer, prompts.ids, self.sampling, group_size)

    @contextmanager
    def holding_weights(self) -> Iterator[TransformersSampler]:
        with dist.unsharded(self.policy):
            yield self
