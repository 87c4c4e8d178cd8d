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
from pspo.update.batching import Minibatch, halve_microbatches, make_batch, split_microbatches, split_minibatches
from pspo.update.learner import Learner


def old_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> Tensor:
    """(B, T) old log-probs before a rollout's first step; 0 in rows whose old log-probs that step's pass makes."""
    if batch.rollout.behaviour_logprobs is not None:
        return to_device(batch.rollout.behaviour_logprobs, learner.policy.device)
    later = minibatches[1:] + fillers(batch, minibatches, config)
    return compute_logprobs(learner, batch, later, learner.policy, config)


def drawn_logprobs(
    learner: Learner, rollout: Rollout, advantages: Tensor, model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs of a rollout just drawn, by a model; 0 in rows that `update` leaves out."""
    batch = make_batch(rollout, advantages, config)
    minibatches = split_minibatches(learner, batch, config)
    minibatches += fillers(batch, minibatches, config)
    return compute_logprobs(learner, batch, minibatches, model, config).cpu()


def reference_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> Tensor:
    """(B, T) log-probs of a rollout by the reference model, which --algorithm.reference_every refreshes first."""
    if config.algorithm.reference_every > 0:
        learner.refresh_reference(config.algorithm.reference_every)
    with learner.reference_model() as reference:
        return compute_logprobs(learner, batch, minibatches, reference, config)


def fillers(batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> list[Minibatch]:
    """Under --algorithm.shuffle the rows that no first visit makes, but may fill up a later epoch's minibatch."""
    if not config.algorithm.shuffle:
        return []
    visited = {row for minibatch in minibatches for rows in minibatch.groups for row in rows}
    rows = [[row] for row in range(0, len(batch.rollout), config.rollout.group_size) if row not in visited]
    return [Minibatch(minibatches[0].counts, rows or [[0]])]  # never empty: shards run equally many passes


def compute_logprobs(
    learner: Learner, batch: Batch, minibatches: list[Minibatch], model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs of these minibatches' rows by a model, without gradient; 0 elsewhere."""
    shape = batch.rollout.completion_ids.shape
    logprobs = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    for minibatch in minibatches:
        while True:
            microbatches = split_microbatches(learner, batch, minibatch, config)
            try:
                for part in microbatches:
                    with autocast(config.model.autocast, model.device):
                        values = part.rollout.logprobs(model, config.rollout.temperature)
                    if part.rollout.completion_mask.any():  # not of a masked row, whose index is another row's
                        logprobs[to_device(part.indices, model.device), : values.shape[1]] = values
                break
            except RuntimeError as error:
                halve_microbatches(learner, batch, microbatches, config, error)
    return logprobs
