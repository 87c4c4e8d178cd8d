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

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pspo.config import TrainConfig
from pspo.model import autocast, to_device
from pspo.rollout.types import Batch, Rollout
from pspo.update.batching import (
    Minibatch,
    make_batch,
    smaller_if_out_of_memory,
    split_microbatches,
    split_minibatches,
)
from pspo.update.learner import Learner


def old_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> Tensor:
    """(B, T) old log-probs before a rollout's first step, 0 where they are to be the first visit's own."""
    kept = batch.rollout.behaviour_logprobs
    if kept is not None:
        return to_device(kept, learner.policy.device)
    return compute_logprobs(learner, batch, minibatches[1:], learner.policy, config)


def drawn_logprobs(
    learner: Learner, rollout: Rollout, advantages: Tensor, model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs of a rollout just drawn, by a model; 0 in rows that `update` leaves out."""
    batch = make_batch(rollout, advantages, config.algorithm)
    return compute_logprobs(learner, batch, split_minibatches(learner, batch, config), model, config).cpu()


def compute_logprobs(
    learner: Learner, batch: Batch, minibatches: list[Minibatch], model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs of these minibatches' rows by a model, without gradient; 0 elsewhere."""
    shape = batch.rollout.completion_ids.shape
    logprobs = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    for minibatch in minibatches:
        while True:
            microbatches = split_microbatches(learner, batch, minibatch, config)
            with smaller_if_out_of_memory(learner, batch, microbatches, config):
                for part in microbatches:
                    with autocast(config.model.autocast, model.device):
                        values = part.rollout.logprobs(model, config.rollout.temperature)
                    if part.rollout.completion_mask.any():  # not of a masked row, whose index is another row's
                        logprobs[to_device(part.indices, model.device), : values.shape[1]] = values
                break
    return logprobs
