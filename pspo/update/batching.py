"""Assign the rows of a rollout to optimizer steps and microbatches; halve microbatches when memory runs out."""

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.losses import Counts
from pspo.model import is_out_of_memory
from pspo.model.device import MICROBATCH_TOKENS
from pspo.rollout.types import Batch, Rollout, trained_rows, without_truncated
from pspo.update.learner import Learner


@dataclass(frozen=True)
class Minibatch:
    """Rows of one optimizer step."""

    counts: Counts  # over all ranks, including rows without a gradient
    groups: list[list[int]]  # this rank's rows with a gradient, longest completions first; never empty
    lengths: Tensor  # (2, B) int64, tokens of the prompt and of the completion of every row of the rollout


def make_batch(rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Batch:
    """All rows of a rollout as the loss sees them; raises ValueError if the rollout lacks what the algorithm needs."""
    if config.correction != "none" and rollout.sampler_logprobs is None:
        raise ValueError("--algorithm.correction needs the sampler's log-probs: sample with Sampling(logprobs=True)")
    if (config.algorithm.nucleus == "replay") != (rollout.nucleus is not None):
        raise ValueError("--algorithm.nucleus replay needs nuclei, ignore none: make_sampling(..., algorithm=...)")
    if config.algorithm.mask_truncated:
        rollout = without_truncated(rollout)
    return Batch(rollout, advantages.cpu().reshape(len(rollout.texts), -1))


def split_minibatches(learner: Learner, batch: Batch, config: TrainConfig, shuffled: bool = False) -> list[Minibatch]:
    """Assign the rows of a rollout to an epoch's optimizer steps: groups stay whole, in order or ``shuffled``.

    Rows without a gradient are counted, but not trained on: loss and gradient stay the same.
    """
    algorithm = config.algorithm
    loss_tokens = batch.rollout.loss_mask.sum(dim=1)
    lengths = torch.stack([batch.rollout.prompt_mask.sum(dim=1), batch.rollout.completion_mask.sum(dim=1)])
    has_gradient = loss_tokens > 0
    pieces = (algorithm.surrogate, *config.loss_terms)
    silent = "silent_at_zero_advantage"  # read from the class itself: a subclass may add a loss at A = 0
    if all(silent in vars(type(piece)) and getattr(piece, silent) for piece in pieces):
        has_gradient = trained_rows(batch.rollout, batch.advantages, algorithm)
    groups = torch.arange(len(loss_tokens)).view(-1, config.rollout.group_size)
    if shuffled:
        groups = groups[np.random.default_rng((config.run.seed, dist.rank(), learner.steps)).permutation(len(groups))]
    minibatches = []
    for part in groups.tensor_split(min(algorithm.minibatches, len(groups))):  # resampling draws a few groups alone
        trained = [group[has_gradient[group]].tolist() for group in part]
        trained = sorted(filter(None, trained), key=lambda rows: -int(lengths[1, rows].max()))
        trained = trained or [[int(part[0, 0])]]  # a row of gradient 0: AdamW would skip its update without rows
        sizes = torch.tensor([int(loss_tokens[part.flatten()].sum()), part.numel()])
        if learner.n_ranks > 1:
            sizes = dist.sum_over_ranks(sizes)
        minibatches.append(Minibatch(Counts(*sizes.tolist(), config.rollout.max_completion_tokens), trained, lengths))
    return minibatches


def split_microbatches(learner: Learner, batch: Batch, minibatch: Minibatch, config: TrainConfig) -> list[Batch]:
    """Fill microbatches with a minibatch's rows up to a limit of tokens; only a group above the limit is split."""
    limit = learner.microbatch_tokens or config.optimizer.microbatch_tokens or MICROBATCH_TOKENS
    filled: list[list[int]] = [[]]
    for group in minibatch.groups:
        fits = padded_tokens(learner, minibatch, group, config) <= limit
        for rows in [group] if fits else [[row] for row in group]:
            if filled[-1] and padded_tokens(learner, minibatch, filled[-1] + rows, config) > limit:
                filled.append([])
            filled[-1] += rows
    microbatches = [batch.rows(torch.tensor(rows)) for rows in filled]
    return fill_up(microbatches) if learner.is_sharded else microbatches


def fill_up(microbatches: list[Batch]) -> list[Batch]:
    """Add masked microbatches until all ranks have equally many: with shards, all must run equally many passes."""
    missing = dist.max_over_ranks(len(microbatches)) - len(microbatches)
    row = microbatches[0].rows(torch.tensor([0]))
    masked = replace(row.rollout, completion_mask=row.rollout.completion_mask & False)
    return microbatches + [replace(row, rollout=masked)] * missing


def padded_tokens(learner: Learner, minibatch: Minibatch, rows: list[int], config: TrainConfig) -> int:
    """Number of tokens in a forward pass over some rows, padding included; a shared prompt counts once."""
    width, length = minibatch.lengths[:, rows].amax(dim=1).tolist()
    prompts = len({row // config.rollout.group_size for row in rows}) if learner.shares_prompts else len(rows)
    return prompts * width + len(rows) * length


def halve_microbatches(
    learner: Learner, minibatch: Minibatch, microbatches: list[Batch], config: TrainConfig, error: RuntimeError
) -> None:
    """Set the learner's limit to half the largest microbatch if memory ran out; raises any other ``error``.

    The loss divides by the minibatch's counts, so the gradient is the same to rounding. Out of memory is raised, too,
    if all microbatches are single rows, or with shards, whose ranks must run equally many passes.
    """
    several = [part.indices.tolist() for part in microbatches if len(part.rollout) > 1]
    if learner.is_sharded or not several or not is_out_of_memory(error):
        raise error
    learner.microbatch_tokens = max(padded_tokens(learner, minibatch, rows, config) for rows in several) // 2
    advice = f"{learner.microbatch_tokens:,} tokens from here on (--optimizer.microbatch_tokens)"
    tqdm.write(f"out of memory: the step is repeated, with microbatches of at most {advice}", file=sys.stderr)
