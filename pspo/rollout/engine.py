"""Engines that draw rollouts in place of the policy: `pspo_vllm.VLLM`, or a class of your own by its import path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.errors import EngineError
from pspo.model import autocast
from pspo.rollout.drawing import random_numbers
from pspo.rollout.prompts import Prompts, completion_columns
from pspo.rollout.sampler import How, PolicySampler, interruptible, left_pad, make_rollout
from pspo.rollout.types import Completions, Rollout, Sampling
from pspo.tasks.problem import load_class


class Engine(Protocol):
    """Draws completions with its own copy of the weights. Made from --rollout.engine, it is checked, then started.

    Failures after the start raise EngineError.
    """

    tolerance: float  # nats by which the engine's log-probs may differ from the policy's on average

    def check(self) -> None:
        """Raise ValueError, before anything is loaded, if the engine cannot work here: without its library, say."""

    def start(self, config: TrainConfig, max_tokens: int, device: torch.device) -> None:
        """Start on this rank's device, for prompts plus completions of ``max_tokens``; ValueError if that fails."""

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Take over the policy's weights, unless the engine has this version."""

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Begin to draw; `complete`, called later with the same arguments, returns the result."""

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """(N * group_size, T) completions, padded after their stop token; and log-probs, if ``sampling`` asks."""

    def close(self) -> None: ...


@dataclass
class EngineSampler:
    """Draws by an engine, to which it first gives the policy's weights; by a model, if `How` names one."""

    engine: Engine
    learner: Any  # the run's `pspo.update.learner.Learner`
    by_model: PolicySampler
    asked: tuple[Prompts, int, How] | None = None  # the arguments of `begin`, until `complete`
    drawn: Rollout | None = None  # drawn ahead, and complete

    def draw(self, prompts: Prompts, group_size: int, how: How) -> Rollout:
        """The rollout drawn ahead, if it completes these prompts; otherwise a rollout drawn now."""
        if how.model is not None:
            return self.by_model.draw(prompts, group_size, how)
        self.settle()
        if self.drawn is not None and self.drawn.is_of(prompts.ids, group_size):
            rollout = self.drawn
            self.drawn = None
            return rollout
        self.begin(prompts, group_size, how)
        with interruptible(self.by_model.signals):  # not in `begin`, where ranks gather weights together
            return self.complete()

    def begin(self, prompts: Prompts, group_size: int, how: How) -> None:
        """Begin to draw, with the weights as they are now; `complete` returns the rollout."""
        self.engine.push(self.learner.policy, self.learner.steps)
        with random_numbers(how.generators):
            self.engine.begin(prompts.ids, how.sampling, group_size)
        self.asked = (prompts, group_size, how)

    def complete(self) -> Rollout:
        """The rollout that `begin` has begun."""
        prompts, group_size, how = self.asked
        self.asked = None
        with random_numbers(how.generators):
            ids, logprobs = self.engine.complete(prompts.ids, how.sampling, group_size)
        padded = left_pad(prompts.ids, how.sampling.pad_id)
        return make_rollout(self.by_model.tokenizer, padded, Completions(ids, logprobs), how.sampling)

    def settle(self) -> None:
        """Wait for the rollout drawn ahead. If a rank's engine fails, all ranks drop it, and draw its prompts again."""
        if self.asked is None:
            return
        self.drawn = None
        try:
            self.drawn = self.complete()
        except Exception as error:  # a user's engine may raise anything
            tqdm.write(f"the engine failed to draw ahead, and is asked again: {error}", file=sys.stderr)
        if dist.max_over_ranks(self.drawn is None):
            self.drawn = None


def find_engine(spec: dict[str, Any]) -> Engine:
    """Make the engine of --rollout.engine; raises ValueError if its class does not exist, or cannot work here."""
    engine = load_class(spec, "rollout.engine")()
    engine.check()
    return engine


def start_engine(
    engine: Engine, config: TrainConfig, learner: Any, by_model: PolicySampler, prompts: dict[str, Prompts], how: How
) -> EngineSampler:
    """Start an engine for the prompts of all splits, and check that it draws from the policy.

    Raises ValueError if the engine's log-probs of a few tokens differ from the policy's by more than `Engine.tolerance`
    on average: the two then differ in their model or temperature.
    """
    longest = max(len(ids) for split in prompts.values() for ids in split.ids)
    most = completion_columns(config.rollout.max_completion_tokens, config.rollout.environment is not None)
    engine.start(config, longest + most, learner.policy.device)
    sampler = EngineSampler(engine, learner, by_model)
    name = type(engine).__name__
    limit = min(how.sampling.max_completion_tokens, 32)
    short = replace(how.sampling, logprobs=True, max_completion_tokens=limit)
    few = prompts["train"].take(range(min(8, len(prompts["train"]))))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            rollout = sampler.draw(few, 2, replace(how, sampling=short))
    except EngineError as error:
        raise ValueError(f"--rollout.engine {name} fails on a small batch: {error}") from error
    with autocast(config.model.autocast, learner.policy.device):
        expected = rollout.logprobs(learner.policy, short.temperature).cpu()
    error = (rollout.sampler_logprobs - expected)[rollout.completion_mask].abs().mean().item()
    if not error <= engine.tolerance:
        fact = f"its log-probs differ from the policy's by {error:.2g} nats on average: the two differ in their model"
        raise ValueError(f"--rollout.engine {name}: {fact}. Leave --rollout.engine out for this model")
    return sampler
