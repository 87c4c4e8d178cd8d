"""Assign the rows of a rollout to optimizer steps and microbatches; halve microbatches when memory runs out."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.losses import Counts
from pspo.model import is_out_of_memory
from pspo.model.device import MICROBATCH_TOKENS
from pspo.rollout.types import Batch, Rollout
from pspo.update.learner import Learner


@dataclass
class Minibatch:
    """One optimizer step: this rank's microbatches, and tokens and sequences counted over all ranks."""

    counts: Counts
    batches: list[Batch]


def split_minibatches(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[Minibatch]:
    """Assign rows to optimizer steps and to microbatches that fit the memory, once for all epochs of a rollout.

    Groups stay whole in a step, sorted by length there, so that microbatches hold little padding. Rows without a
    gradient are left out but counted: loss and gradient stay the same.
    """
    if learner.microbatch_tokens is None:
        learner.microbatch_tokens = config.optimizer.microbatch_tokens or MICROBATCH_TOKENS
    if config.algorithm.correction != "none" and rollout.sampler_logprobs is None:
        raise ValueError("--algorithm.correction needs the sampler's log-probs: sample with Sampling(logprobs=True)")
    if config.algorithm.nucleus == "replay" and rollout.nucleus is None:
        raise ValueError("--algorithm.nucleus replay needs nuclei: make_sampling(..., algorithm=config.algorithm)")
    if config.algorithm.mask_truncated:
        rollout = replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])
    advantages = advantages.cpu().reshape(len(rollout.texts), -1)  # (B, 1) or (B, T)
    whole = Batch(rollout, advantages, rollout.behaviour_logprobs)
    group_size = config.rollout.group_size
    prompt_lengths = rollout.prompt_mask.sum(dim=1).tolist()
    completion_lengths = rollout.completion_mask.sum(dim=1).tolist()

    def padded_tokens(rows: list[int]) -> int:
        """Tokens of a forward pass over some rows, padding included."""
        prompts = len({row // group_size for row in rows}) if learner.shares_prompts else len(rows)
        prompt_width = max(prompt_lengths[row] for row in rows)
        completion_width = max(completion_lengths[row] for row in rows)
        return prompts * prompt_width + len(rows) * completion_width

    loss_tokens = rollout.loss_mask.sum(dim=1)
    has_gradient = loss_tokens > 0
    pieces = (config.algorithm.surrogate, *config.algorithm.loss_terms)
    if all(getattr(piece, "silent_at_zero_advantage", False) for piece in pieces):
        has_gradient &= whole.advantages.any(dim=1)

    minibatches = []
    for groups in torch.arange(len(advantages)).view(-1, group_size).tensor_split(config.algorithm.minibatches):
        trained = [group[has_gradient[group]].tolist() for group in groups]
        trained = sorted(filter(None, trained), key=lambda rows: -max(completion_lengths[row] for row in rows))
        if not trained:
            trained = [[int(groups[0, 0])]]  # one row, of zero gradient: without any AdamW would skip its update
        batches = [whole.rows(torch.tensor(rows)) for rows in pack(trained, padded_tokens, learner.microbatch_tokens)]
        if learner.is_sharded:  # every rank must run the same number of passes
            missing = dist.max_over_ranks(len(batches)) - len(batches)
            batches += [batches[0].masked_row()] * missing
        sizes = torch.tensor([int(loss_tokens[groups.flatten()].sum()), groups.numel()])
        if learner.n_ranks > 1:
            sizes = dist.sum_over_ranks(sizes)
        counts = Counts(*sizes.tolist(), config.rollout.max_completion_tokens)
        minibatches.append(Minibatch(counts, batches))
    return minibatches


def pack(groups: list[list[int]], tokens: Callable[[list[int]], int], limit: float) -> list[list[int]]:
    """Fill microbatches with groups of rows, in order, up to ``limit`` tokens; only a larger group is split."""
    microbatches: list[list[int]] = [[]]
    for group in groups:
        parts = [group]
        if tokens(group) > limit:
            parts = [[row] for row in group]
        for part in parts:
            if microbatches[-1] and tokens(microbatches[-1] + part) > limit:
                microbatches.append([])
            microbatches[-1] += part
    return microbatches


def can_halve(learner: Learner, minibatch: Minibatch, error: RuntimeError) -> bool:
    """True if memory ran out and halving can help; never with shards, whose ranks must run equally many passes."""
    has_rows = max(len(batch.rollout) for batch in minibatch.batches) > 1
    return has_rows and is_out_of_memory(error) and not learner.is_sharded


def halve(learner: Learner, minibatch: Minibatch) -> None:
    """Divide each microbatch into halves, and make those of later rollouts as small.

    The denominators are the minibatch's, so the gradient is the same to rounding.
    """
    limit = max(1, max(batch.padded_tokens(learner.shares_prompts) for batch in minibatch.batches) // 2)
    learner.microbatch_tokens = min(limit, learner.microbatch_tokens)
    minibatch.batches = [half for batch in minibatch.batches for half in batch.halves()]
    torch.cuda.empty_cache()  # does nothing without a GPU
    advice = f"{limit:,} tokens from here on (--optimizer.microbatch_tokens)"
    tqdm.write(f"out of memory: the step is repeated, with microbatches of at most {advice}", file=sys.stderr)
