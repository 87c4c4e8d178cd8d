"""Assign the rows of a rollout to optimizer steps and microbatches; halve microbatches when memory runs out."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import AlgorithmConfig, TrainConfig
from pspo.losses import Counts
from pspo.model import is_out_of_memory, shares_prompts
from pspo.rollout.types import Batch, Rollout, to_device
from pspo.run.learner import Learner

T = TypeVar("T")


class Minibatch(NamedTuple):
    """One optimizer step: this rank's microbatches, and tokens and sequences counted over all ranks."""

    counts: Counts
    batches: list[Batch]


def split_minibatches(
    rollout: Rollout, advantages: Tensor, config: TrainConfig, learner: Learner | None = None
) -> list[Minibatch]:
    """Assign rows to optimizer steps and to microbatches, once for all epochs of a rollout. Groups stay whole.

    Rows with zero gradient (no unmasked token; A = 0 if the surrogate is silent then, without a KL or entropy term) are
    left out but counted: the denominators are the full minibatch's, so loss and gradient stay the same. The groups of a
    minibatch are sorted by length, so that microbatches hold little padding; a group is split only if it alone exceeds
    --optimizer.microbatch_tokens, or the learner's limit. A prompt counts once if its rows share it.
    """
    algorithm, group_size, sharded = config.algorithm, config.rollout.group_size, config.sharded
    advantages = advantages.reshape(len(rollout), -1)  # (B, 1) or (B, T)
    whole = Batch(prepare_rollout(rollout, algorithm), advantages)
    rollout, limit = whole.rollout, config.optimizer.microbatch_tokens
    if learner is not None:
        limit = min(limit, learner.microbatch_limit or math.inf)
    shared = not sharded and (learner is None or shares_prompts(learner.policy))
    silent = algorithm.surrogate.silent_at_zero_advantage and not algorithm.needs_every_row
    contributes = (rollout.loss_mask.any(dim=1) & (advantages.any(dim=1) | (not silent))).tolist()  # by row
    masks = (rollout.prompt_mask, rollout.completion_mask, rollout.loss_mask)
    prompt_lengths, lengths, loss_tokens = (mask.sum(dim=1).tolist() for mask in masks)

    def tokens(rows: list[int]) -> int:
        """Tokens of the forward pass, padding included; a group's prompt once if it is shared."""
        prompts = {row // group_size for row in rows} if shared else rows
        return len(prompts) * max(prompt_lengths[row] for row in rows) + len(rows) * max(lengths[row] for row in rows)

    minibatches = []
    for groups in np.array_split(np.arange(len(rollout)).reshape(-1, group_size), algorithm.minibatches):
        sizes = torch.tensor([sum(loss_tokens[row] for row in groups.flat), groups.size], device=advantages.device)
        counts = Counts(*dist.sum_over_ranks(sizes).tolist(), config.rollout.max_completion_tokens)
        trained = [[row for row in group if contributes[row]] for group in groups.tolist()]
        trained = sorted(filter(None, trained), key=lambda rows: -max(lengths[row] for row in rows))
        trained = trained or [[groups[0, 0]]]  # of zero gradient: with no row at all AdamW would skip its update
        indices = [to_device(torch.tensor(rows), advantages.device) for rows in pack(trained, tokens, limit)]
        batches = [whole.rows(rows) for rows in indices]
        if sharded:  # every rank must run the same number of passes
            batches = dist.pad_to_longest(batches, batches[0].masked_row())
        minibatches.append(Minibatch(counts, batches))
    return minibatches


def prepare_rollout(rollout: Rollout, algorithm: AlgorithmConfig) -> Rollout:
    """Remove what --algorithm leaves out of the loss; ValueError if the rollout lacks what the loss needs."""
    if algorithm.correction != "none" and rollout.sampler_logprobs is None:
        raise ValueError("--algorithm.correction needs the sampler's log-probs: sample with Sampling(logprobs=True)")
    if algorithm.nucleus == "replay" and rollout.nucleus is None:
        raise ValueError("--algorithm.nucleus replay needs the sampler's nucleus: sample with Sampling(nucleus=True)")
    if algorithm.mask_truncated:
        rollout = replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])
    return replace(rollout, nucleus=None) if algorithm.nucleus == "ignore" else rollout


def pack(groups: list[list[int]], tokens: Callable[[list[int]], int], limit: float) -> list[list[int]]:
    """Fill microbatches with groups of rows, in order, up to ``limit`` tokens; only a larger group is split."""
    microbatches: list[list[int]] = [[]]
    for rows in groups:
        for part in [rows] if tokens(rows) <= limit else [[row] for row in rows]:
            if microbatches[-1] and tokens(microbatches[-1] + part) > limit:
                microbatches.append([])
            microbatches[-1] += part
    return microbatches


def retry_in_halves(
    learner: Learner, minibatches: list[Minibatch], config: TrainConfig, work: Callable[..., T], *args: Any
) -> T:
    """Return ``work(*args)``; if memory runs out, halve the microbatches and start over.

    The denominators are the minibatch's, so the gradient is the same to rounding. Log-probs that microbatches already
    have stay.
    """
    while True:
        try:
            return work(*args)
        except RuntimeError as error:
            batches = [batch for minibatch in minibatches for batch in minibatch.batches]
            halvable = config.optimizer.halve_on_oom and max(len(batch.rollout) for batch in batches) > 1
            # sharded: ranks must run equally many passes
            if not (is_out_of_memory(error) and halvable) or dist.is_sharded(learner.policy):
                raise
        # Outside the except block, whose error holds the tensors of the failed pass.
        learner.optimizer.zero_grad()
        shared = shares_prompts(learner.policy)
        learner.microbatch_limit = max(1, max(batch.padded_tokens(shared) for batch in batches) // 2)
        for minibatch in minibatches:
            minibatch.batches[:] = [half for batch in minibatch.batches for half in batch.halves()]
        torch.cuda.empty_cache()  # does nothing without a GPU
        limit = f"{learner.microbatch_limit:,} tokens from here on (--optimizer.microbatch_tokens)"
        tqdm.write(f"out of memory: the step is repeated, with microbatches of at most {limit}", file=sys.stderr)
