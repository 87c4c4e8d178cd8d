"""Old log-probs: of the policy that ratios r = exp(logprob - old log-prob) are formed against.

| --rollout.lag | draws | --algorithm.ratio_to | minibatches | old log-probs are |
|---|---|---|---|---|
| 0 | policy or engine | either | 1 | the policy's before the first step, by the first visit's own pass |
| 0 | policy or engine | either | 2 or more | the same; of rows first visited after a step, by a pass before it |
| above 0 | policy | behaviour | any | the policy's that drew the rollout, by a pass when it is drawn |
| above 0 | engine | behaviour | any | the engine's: its weights are gone when they would be needed |
| above 0 | policy or engine | proximal | any | as without a lag |

An environment's turns count as the policy's. Every pass has the microbatches that are trained in: in bfloat16 other
shapes alone would move ratios by more than an update does.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pspo.config import TrainConfig
from pspo.model import autocast, to_device
from pspo.rollout.types import Batch, Rollout
from pspo.update.batching import (
    Minibatch,
    can_shrink,
    make_batch,
    shrink_microbatches,
    split_microbatches,
    split_minibatches,
)
from pspo.update.learner import Learner


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probs of a rollout's rows, without gradient.

    Attributes:
        values: (B, T), 0 where none are stored.
        is_stored: (B,) bool, on the CPU.
    """

    values: Tensor
    is_stored: Tensor

    def store(self, part: Batch, logprobs: Tensor) -> None:
        """Store a microbatch's (b, t)."""
        if part.rollout.completion_mask.any():  # not of a masked row, whose index is another row's
            self.values[to_device(part.indices, logprobs.device), : logprobs.shape[1]] = logprobs
            self.is_stored[part.indices] = True

    def rows(self, part: Batch) -> Tensor | None:
        """A microbatch's (b, t); None if they are not stored."""
        if not self.is_stored[part.indices].all():
            return None
        width = part.rollout.completion_ids.shape[1]
        return self.values[to_device(part.indices, self.values.device), :width]


def old_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> RowLogprobs:
    """Old log-probs before a rollout's first step; its minibatch's are stored when they are visited."""
    kept = batch.rollout.behaviour_logprobs
    if kept is None:
        return compute_logprobs(learner, batch, minibatches[1:], learner.policy, config)
    return RowLogprobs(to_device(kept, learner.policy.device), torch.ones(len(kept), dtype=torch.bool))


def keep_logprobs(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Rollout:
    """Give a rollout just drawn the log-probs that its ratios are formed against, --rollout.lag rollouts later.

    Rows that `update` leaves out have zeros. An engine's own are kept as they are.
    """
    if config.ratios_to_engine:
        return replace(rollout, behaviour_logprobs=rollout.sampler_logprobs)
    batch = make_batch(rollout, advantages, config.algorithm)
    minibatches = split_minibatches(learner, batch, config)
    logprobs = compute_logprobs(learner, batch, minibatches, learner.policy, config)
    return replace(rollout, behaviour_logprobs=logprobs.values.cpu())


def reference_logprobs(
    learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig
) -> Tensor | None:
    """(B, T) log-probs by the reference model; None without one."""
    if config.algorithm.beta == 0:
        return None
    with learner.reference_model() as reference:
        return compute_logprobs(learner, batch, minibatches, reference, config).values


def drawn_logprobs(learner: Learner, rollout: Rollout, model: PreTrainedModel, config: TrainConfig) -> Tensor:
    """(B, T) log-probs of a rollout just drawn by a model, before there are advantages; 0 in rows without a token."""
    batch = make_batch(rollout, torch.ones(len(rollout)), config.algorithm)
    return compute_logprobs(learner, batch, split_minibatches(learner, batch, config), model, config).values.cpu()


def compute_logprobs(
    learner: Learner, batch: Batch, minibatches: list[Minibatch], model: PreTrainedModel, config: TrainConfig
) -> RowLogprobs:
    """Log-probs of these minibatches' rows by a model, without gradient; smaller microbatches if memory runs out."""
    shape = batch.rollout.completion_ids.shape
    values = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    logprobs = RowLogprobs(values, torch.zeros(len(values), dtype=torch.bool))
    for minibatch in minibatches:
        while True:
            microbatches = split_microbatches(learner, batch, minibatch, config)
            try:
                for part in microbatches:
                    with autocast(config.model.autocast, model.device):
                        logprobs.store(part, part.rollout.logprobs(model, config.rollout.temperature))
                break
            except RuntimeError as error:
                if not can_shrink(learner, microbatches, error):
                    raise
            shrink_microbatches(learner, batch, microbatches, config)  # then all again
    return logprobs
