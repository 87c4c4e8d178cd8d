"""Samplers draw the completions of prompts; which one a run has is chosen once, in `pspo.run.prepare`.

`Generators` are the random numbers of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import ModelConfig
from pspo.model import autocast
from pspo.model.exactness import check_exactness
from pspo.rollout.decode import set_torch_states, torch_states
from pspo.rollout.generate import decode_greedily, generate
from pspo.rollout.prompts import Prompts
from pspo.rollout.types import Rollout, Sampling
from pspo.tasks.workers import StopSignals


class RolloutSampler(Protocol):
    """Something that draws rollouts: `Sampler`, or another one around it."""

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    model_config: PretrainedConfig

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
        autocast_mode: --model.autocast of forward passes.
        rng_context: makes the context of drawing, such as `Generators.sampling`.
        signals: one that asks the run to stop ends a drawing at once.
    """

    policy: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    autocast_mode: str = "none"
    rng_context: Callable[[], AbstractContextManager] = nullcontext
    signals: StopSignals = field(default_factory=StopSignals)

    @property
    def model_config(self) -> PretrainedConfig:
        return self.policy.config

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        with self.rng_context(), autocast(self.autocast_mode, self.policy.device):
            self.signals.is_drawing = True
            try:
                if self.signals.error is not None:
                    raise self.signals.error
                rollout = generate(self.policy, self.tokenizer, prompts.ids, self.sampling, group_size)
                return prompts.continued(rollout)
            finally:
                self.signals.is_drawing = False

    def with_sampling(self, sampling: Sampling) -> Sampler:
        return replace(self, sampling=sampling)

    def seeded(self) -> Sampler:
        return replace(self, rng_context=nullcontext)

    def greedy(self, policy: transformers.PreTrainedModel) -> Sampler:
        return replace(self, policy=policy, sampling=self.sampling.greedy(), rng_context=nullcontext)


def make_sampler(
    config: ModelConfig,
    policy: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    prompts: Prompts,
) -> Sampler:
    """The sampler of a policy; ValueError for a model that `check_exactness` refuses, tried on a few prompts."""
    with dist.unsharded(policy):
        decode = partial(decode_greedily, policy, tokenizer, sampling)
        check_exactness(policy, prompts.ids, decode, config.autocast)
    return Sampler(policy, tokenizer, sampling, config.autocast)


@dataclass(frozen=True)
class WrappedSampler:
    """Base of samplers around another one."""

    sampler: RolloutSampler

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.sampler.tokenizer

    @property
    def sampling(self) -> Sampling:
        return self.sampler.sampling

    @property
    def model_config(self) -> PretrainedConfig:
        return self.sampler.model_config

    def with_sampling(self, sampling: Sampling) -> RolloutSampler:
        return replace(self, sampler=self.sampler.with_sampling(sampling))

    def seeded(self) -> RolloutSampler:
        return replace(self, sampler=self.sampler.seeded())

    def greedy(self, policy: transformers.PreTrainedModel) -> RolloutSampler:
        return replace(self, sampler=self.sampler.greedy(policy))


@dataclass(frozen=True)
class UnshardedSampler(WrappedSampler):
    """Gathers the weights of a sharded policy around each draw: ranks may then run different numbers of passes.

    Attributes:
        gathers: False where an engine draws, which has weights of its own.
    """

    policy: transformers.PreTrainedModel
    gathers: bool = True

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        with dist.unsharded(self.policy) if self.gathers else nullcontext():
            return self.sampler.draw(prompts, group_size)

    def greedy(self, policy: transformers.PreTrainedModel) -> UnshardedSampler:
        return UnshardedSampler(self.sampler.greedy(policy), policy)


class Generators:
    """Torch's generators as sampling alone advances them: global ones inside ``with generators.sampling():``.

    Python's, numpy's and torch's global generators are left to users' code: what a reward, an environment or a loss
    draws from them, or seeds, changes no completion. Making one seeds all. The state is that of both, on this rank.
    """

    per_rank = True

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed(seed)

    def seed(self, seed: int, steps: int = 0) -> None:
        """Seed all, differently on every rank and after every number of steps.

        On rank 0 at step 0 the seed of sampling is the run's own, as in a single process.
        """
        is_first = dist.rank() == 0 and steps == 0
        seed_all(seed if is_first else mix_seed(seed, steps, is_user_rng=False))
        self.states = torch_states(self.device)
        seed_all(mix_seed(seed, steps, is_user_rng=True))

    @contextmanager
    def sampling(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            set_torch_states(self.states, self.device)
            try:
                yield
            finally:
                self.states = torch_states(self.device)

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *position = np.random.get_state()  # noqa: NPY002 (users' code may draw from it)
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *position],
            "torch": torch_states(self.device),
            "sampling": self.states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        kind, keys, *position = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))  # noqa: NPY002
        set_torch_states(state["torch"], self.device)
        self.states = state["sampling"]


def mix_seed(seed: int, steps: int, is_user_rng: bool) -> int:
    """32 bits from a seed, this rank, the number of steps, and whose the generators are."""
    return int(np.random.SeedSequence((seed, dist.rank(), steps, is_user_rng)).generate_state(1)[0])


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
