"""Old log-probs: the ratios r = exp(logprob - old log-prob) are formed against them.

| --rollout.lag | draws | --algorithm.ratio_to | minibatches | old log-probs are |
|---|---|---|---|---|
| 0 | policy or engine | either | 1 | the policy's before the first step, computed by that step's own pass |
| 0 | policy or engine | either | 2 or more | the same; rows of later steps get a pass before the first step |
| above 0 | policy | behaviour | any | those of the policy that drew, by a pass right after the draw |
| above 0 | engine | behaviour | any | the engine's own: the weights that drew are gone by then |
| above 0 | policy or engine | proximal | any | as without a lag |

Turns in an environment count as drawn by the policy. Every pass uses the same microbatches as training: in bfloat16,
different shapes alone would move ratios by more than an update does.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pspo.config import TrainConfig
from pspo.model import autocast, to_device
from pspo.rollout.types import Batch, Rollout
from pspo.update.batching import Minibatch, halve_microbatches, make_batch, split_microbatches, split_minibatches
from pspo.update.learner import Learner


def old_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> Tensor:
    """(B, T) old log-probs before a rollout's first step; 0 in rows for which that step's own pass computes them."""
    if batch.rollout.behaviour_logprobs is not None:
        return to_device(batch.rollout.behaviour_logprobs, learner.policy.device)
    later = minibatches[1:] + fillers(batch, minibatches, config)
    return compute_logprobs(learner, batch, later, learner.policy, config)


def drawn_logprobs(
    learner: Learner, rollout: Rollout, advantages: Tensor, model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs by ``model`` of a rollout that was just drawn; 0 in rows that `update` leaves out."""
    batch = make_batch(rollout, advantages, config)
    minibatches = split_minibatches(learner, batch, config)
    minibatches += fillers(batch, minibatches, config)
    return compute_logprobs(learner, batch, minibatches, model, config).cpu()


def reference_logprobs(learner: Learner, batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> Tensor:
    """(B, T) log-probs of a rollout by the reference model."""
    with learner.reference_model() as reference:
        return compute_logprobs(learner, batch, minibatches, reference, config)


def fillers(batch: Batch, minibatches: list[Minibatch], config: TrainConfig) -> list[Minibatch]:
    """Under --algorithm.shuffle, a minibatch of the rows that the first epoch skips, but a later one may visit."""
    if not config.algorithm.shuffle:
        return []
    visited = {row for minibatch in minibatches for rows in minibatch.groups for row in rows}
    rows = [[row] for row in range(0, len(batch.rollout), config.rollout.group_size) if row not in visited]
    return [replace(minibatches[0], groups=rows or [[0]])]  # never empty: shards run equally many passes


def compute_logprobs(
    learner: Learner, batch: Batch, minibatches: list[Minibatch], model: PreTrainedModel, config: TrainConfig
) -> Tensor:
    """(B, T) log-probs by ``model`` of the minibatches' rows, without gradient; 0 in all other rows."""
    shape = batch.rollout.completion_ids.shape
    logprobs = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=model.device)
    for minibatch in minibatches:
        while True:
            microbatches = split_microbatches(learner, batch, minibatch, config)
            try:
                for part in microbatches:
                    with autocast(config.model.autocast, model.device):
                        values = part.rollout.logprobs(model, config.rollout.temperature)
                    if part.rollout.completion_mask.any():  # a masked row that fills up a rank repeats another's number
                        logprobs[to_device(part.indices, logprobs.device), : values.shape[1]] = values.to(logprobs)
                break
            except RuntimeError as error:
                halve_microbatches(learner, minibatch, microbatches, config, error)
    return logprobs
