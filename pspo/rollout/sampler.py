"""Samplers draw the completions of prompts; which one a run has is chosen once, in `pspo.run.prepare`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import transformers
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.model import autocast
from pspo.rollout.generate import generate
from pspo.rollout.prompts import Prompts
from pspo.rollout.types import Rollout, Sampling


class RolloutSampler(Protocol):
    """What draws rollouts: `Sampler`, or another one around it."""

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        """Draw ``group_size`` completions of each prompt."""

    def with_sampling(self, sampling: Sampling) -> RolloutSampler:
        """The same with another sampling."""

    def seeded(self) -> RolloutSampler:
        """The same by torch's global generators, which an evaluation seeds."""

    def greedy(self, policy: transformers.PreTrainedModel) -> RolloutSampler:
        """Greedy decoding of a policy by torch's global generators, never by an engine."""


@dataclass(frozen=True)
class Sampler:
    """Samples from the policy itself, by `generate`.

    Attributes:
        autocast: --model.autocast.
        generators: entered to draw; those of `pspo.rollout.generators` are advanced by sampling alone.
        interruptible: entered to draw; `StopSignals` of `pspo.cli.signals` raises Stopped inside.
    """

    policy: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    autocast: str = "none"
    generators: AbstractContextManager = field(default_factory=nullcontext)
    interruptible: AbstractContextManager = field(default_factory=nullcontext)

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        with self.generators, autocast(self.autocast, self.policy.device), self.interruptible:
            return generate(self.policy, self.tokenizer, prompts.ids, self.sampling, group_size)

    def with_sampling(self, sampling: Sampling) -> Sampler:
        return replace(self, sampling=sampling)

    def seeded(self) -> Sampler:
        return replace(self, generators=nullcontext())

    def greedy(self, policy: transformers.PreTrainedModel) -> Sampler:
        return replace(self, policy=policy, sampling=self.sampling.greedy(), generators=nullcontext())


@dataclass(frozen=True)
class UnshardedSampler:
    """Gathers the weights of a sharded policy around each draw: ranks may then run different numbers of passes.

    Attributes:
        gathers: False where an engine draws, which has weights of its own.
    """

    sampler: RolloutSampler
    policy: transformers.PreTrainedModel
    gathers: bool = True

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.sampler.tokenizer

    @property
    def sampling(self) -> Sampling:
        return self.sampler.sampling

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        if not self.gathers:
            return self.sampler.draw(prompts, group_size)
        with dist.unsharded(self.policy):
            return self.sampler.draw(prompts, group_size)

    def with_sampling(self, sampling: Sampling) -> UnshardedSampler:
        return replace(self, sampler=self.sampler.with_sampling(sampling))

    def seeded(self) -> UnshardedSampler:
        return replace(self, sampler=self.sampler.seeded())

    def greedy(self, policy: transformers.PreTrainedModel) -> UnshardedSampler:
        return UnshardedSampler(self.sampler.greedy(policy), policy)
