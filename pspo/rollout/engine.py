"""Engines that draw rollouts in place of transformers: vLLM, or a class of your own by its import path."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pspo.config import RolloutConfig
from pspo.model import token_logprobs
from pspo.rollout import Prompts, Rollout, Sampling, as_rollout, left_pad, to_device
from pspo.rollout.types import Nucleus
from pspo.run.learner import Learner
from pspo.tasks.environment import import_for


class EngineError(RuntimeError):
    """Failure of an engine, in one line."""


class Engine(Protocol):
    """Draws completions with weights of its own: token ids go in, token ids and their log-probs come out.

    Made as ``Engine(config, max_tokens, device)``: the run's `TrainConfig`, the most tokens of a prompt and its
    completion together, and this rank's device. An engine that cannot be made raises ValueError, one that fails later
    EngineError.
    """

    tolerance: float  # nats by which its log-probs may differ from the policy's on average

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Take over the policy's weights; a version is pushed once."""

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Begin to draw what `complete` is asked for next, while the caller does other things."""

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int
    ) -> tuple[Tensor, Tensor | None, Nucleus | None]:
        """(N * group_size, T) completions, as `pspo.rollout.decode.decode`'s."""

    def close(self) -> None: ...

    @staticmethod
    def check(config: RolloutConfig) -> None:
        """Raise ValueError, before anything is loaded, if it cannot work here: its library is missing, say."""


@dataclass(frozen=True)
class EngineSampler:
    """Draws by an engine, which gets the learner's weights first."""

    engine: Engine
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    generators: AbstractContextManager = field(default_factory=nullcontext)  # as `TransformersSampler`'s

    def prefetch(self, prompts: Prompts, group_size: int) -> None:
        """Begin to draw what `collect` returns."""
        self.engine.push(self.learner.policy, self.learner.steps)
        with self.generators:
            self.engine.begin(prompts.ids, self.sampling, group_size)

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        self.engine.push(self.learner.policy, self.learner.steps)
        return self.collect(prompts, group_size)

    def holding_weights(self) -> AbstractContextManager[EngineSampler]:
        return nullcontext(self)

    def collect(self, prompts: Prompts, group_size: int) -> Rollout:
        """Wait for what was begun, with the weights that the engine had then."""
        with self.generators:
            drawn = self.engine.complete(prompts.ids, self.sampling, group_size)
        padded = left_pad(prompts.ids, self.sampling.pad_id)
        prompt_ids, prompt_mask = (to_device(part, self.learner.policy.device) for part in padded)
        return as_rollout(self.tokenizer, prompt_ids, prompt_mask, *drawn, self.sampling)


@torch.no_grad()
def check_engine(sampler: EngineSampler, prompts: Prompts) -> tuple[float, float]:
    """Mean and largest difference, in nats, of an engine's log-probs and the policy's of a few tokens that it draws.

    Raises ValueError if they are not of one model at one temperature.
    """
    sampling, policy, name = sampler.sampling, sampler.learner.policy, type(sampler.engine).__name__
    limits = {"max_completion_tokens": min(sampling.max_completion_tokens, 32), "min_completion_tokens": 0}
    few = replace(sampler, sampling=replace(sampling, logprobs=True, **limits))
    try:
        with torch.random.fork_rng(devices=[]):
            drawn = few.draw(prompts, group_size=2)
    except EngineError as error:
        raise ValueError(f"--rollout.engine {name} fails on a small batch: {error}") from error
    expected = token_logprobs(policy, *drawn.token_ids, sampling.temperature)
    error = (drawn.sampler_logprobs - expected)[drawn.completion_mask].abs()
    mean, largest = error.mean().item(), error.max().item()
    if not mean <= sampler.engine.tolerance:
        raise ValueError(
            f"--rollout.engine {name}: its log-probs differ from the policy's by {mean:.2g} nats on average, "
            f"{largest:.2g} at most: they are not of one model. Use --rollout.engine transformers for this model"
        )
    return mean, largest


def find_engine(config: RolloutConfig) -> type[Engine]:
    """Import the class of --rollout.engine; raises ValueError if there is none, or it cannot work here."""
    name = config.engine["class_path"] if isinstance(config.engine, dict) else config.engine
    engine = import_for("rollout.engine", name, "give the import path of a class, such as pspo_vllm.VLLM")
    if missing := [method for method in ("push", "begin", "complete", "close", "check") if not hasattr(engine, method)]:
        raise ValueError(f"--rollout.engine {name} has no {missing[0]}: pspo.rollout.engine.Engine says what it needs")
    engine.check(config)
    return engine
