"""The optimizer steps of one rollout: minibatches, microbatches, the gradient of each, and one step at a time."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from pspo.config import TrainConfig
from pspo.distributed import (
    as_forward,
    concatenate,
    gather,
    highest,
    is_sharded,
    microbatches,
    sum_gradients,
    total,
    whole,
)
from pspo.losses import Counts, diagnose, divided_sum, kl_estimate, token_divisors, token_weights
from pspo.model import autocast, backward_in_one_pass, out_of_memory, token_logprobs
from pspo.rollout import Batch, Rollout, to_device

T = TypeVar("T")


@dataclass
class Learner:
    """What an optimizer step changes, and the reference model that it leaves alone (None where beta is 0).

    Attributes:
        steps: optimizer steps taken.
        microbatch_limit: tokens, below --optimizer.microbatch_tokens where memory has run out before.
    """

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    steps: int = 0
    microbatch_limit: int | None = None


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches and ranks.

    Old log-probs cost no pass of their own where they need none: rows first visited before any step use that
    visit's detached log-probs. A row stays in its microbatch, so that its old and new log-probs come from identical
    shapes.

    Args:
        rollout: B rows, this rank's.
        advantages: (B,) float32.

    Returns:
        The metrics of each step, in order, of all ranks' rows; ratios and the like are those of the tokens with A != 0.
    """
    algorithm = config.algorithm
    if algorithm.mask_truncated:
        rollout = replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])

    minibatches = split_minibatches(rollout, advantages, config, learner.microbatch_limit)
    if is_sharded(learner.policy):
        even_out(minibatches)
    with_room(partial(add_fixed_logprobs, learner, minibatches, config), learner, minibatches, config)

    steps: list[dict[str, float]] = []
    for counts, batches in minibatches * algorithm.epochs:
        if learner.steps == config.run.max_steps:
            break
        gradient = partial(accumulate, learner, batches, counts, config)
        loss, kl_reference, seen = with_room(gradient, learner, minibatches, config)
        sum_gradients(learner.policy)
        loss, kl_reference = total(torch.stack([loss, kl_reference]))
        seen = concatenate(seen, dim=1)  # (4, N)
        max_norm = config.optimizer.max_grad_norm or math.inf
        grad_norm = whole(torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), max_norm))
        lr, finite = learner.scheduler.get_last_lr()[0], bool(torch.isfinite(grad_norm + loss + seen[0].sum()))
        if finite:  # numbers gone bad never reach the weights
            learner.optimizer.step()
        learner.scheduler.step()
        learner.optimizer.zero_grad()
        learner.steps += 1
        steps.append({"loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr, "step_skipped": float(not finite)})
        if learner.reference is not None:
            steps[-1]["kl_reference"] = float(kl_reference)
        steps[-1] |= diagnose(*seen, mask=seen[2] != 0)  # the same tokens for every method: those with an advantage
    learner.microbatch_limit = min(filter(None, gather(learner.microbatch_limit)), default=None)  # one for all ranks
    return steps


def add_fixed_logprobs(learner: Learner, minibatches: list[tuple[Counts, list[Batch]]], config: TrainConfig) -> None:
    """Give the microbatches the log-probs that need a pass now, while the policy is still the old one."""
    with torch.no_grad(), autocast(config.model.autocast, learner.policy.device):
        for m, (_, batches) in enumerate(minibatches):
            for i, batch in enumerate(batches):
                inputs = (*batch.rollout.token_ids, config.rollout.temperature)
                # Only rows first visited after a step need old ones.
                old_logprobs = as_forward(token_logprobs, learner.policy, *inputs) if m > 0 else None
                ref_logprobs = as_forward(token_logprobs, learner.reference, *inputs) if learner.reference else None
                batches[i] = replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def accumulate(
    learner: Learner, batches: list[Batch], counts: Counts, config: TrainConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a minibatch, over its microbatches; those without old log-probs are given this visit's.

    Returns:
        Loss and KL to the reference, scalars; and (4, N) of the N unmasked tokens in the microbatches: log-probs, old
        log-probs, advantages and weights. All without gradient.
    """
    algorithm, device = config.algorithm, learner.policy.device
    loss, kl_reference, seen = torch.zeros((), device=device), torch.zeros((), device=device), []
    for i, batch in enumerate(microbatches(learner.policy, batches, config.distributed.gather)):
        share, logprobs = backward(learner.policy, batch, counts, config)
        if batch.old_logprobs is None:
            batch = batches[i] = replace(batch, old_logprobs=logprobs)
        loss += share
        mask, row_advantages = batch.rollout.completion_mask, batch.advantages[:, None]  # (b, t), (b, 1)
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs, mask, algorithm.kl_estimator)
            kl_reference += kl.sum() / max(counts.tokens, 1)
        weights = token_weights(algorithm.surrogate, logprobs, batch.old_logprobs, row_advantages, mask)
        values = (logprobs, batch.old_logprobs, row_advantages, weights)
        seen.append(torch.stack([value.expand_as(mask)[mask] for value in values]))  # (4, n)
    return loss, kl_reference, torch.cat(seen, dim=1)


def even_out(minibatches: list[tuple[Counts, list[Batch]]]) -> None:
    """Add microbatches without a single unmasked token, so that every rank takes the same number of passes."""
    for _, batches in minibatches:
        row = batches[0].rows(torch.zeros(1, dtype=torch.long, device=batches[0].advantages.device))
        rollout = replace(row.rollout, completion_mask=torch.zeros_like(row.rollout.completion_mask))
        batches += [replace(row, rollout=rollout)] * (highest(len(batches)) - len(batches))


def with_room(
    work: Callable[[], T], learner: Learner, minibatches: list[tuple[Counts, list[Batch]]], config: TrainConfig
) -> T:
    """What ``work`` returns; where memory runs out it starts over, with microbatches half as large from then on.

    The denominators are the minibatch's, so that the gradient is the same to rounding. Log-probs that microbatches
    have been given stay.
    """
    while True:
        try:
            return work()
        except RuntimeError as error:
            batches = [batch for _, batches in minibatches for batch in batches]
            rows = max(len(batch.rollout) for batch in batches)
            mendable = out_of_memory(error) and config.optimizer.halve_on_oom and rows > 1
            if not mendable or is_sharded(learner.policy):  # whose ranks have to take the same number of passes
                raise
        # Out of the except block, whose error holds on to the tensors of the pass that failed.
        learner.optimizer.zero_grad()
        learner.microbatch_limit = max(1, max(map(padded_tokens, batches)) // 2)
        for _, batches in minibatches:
            batches[:] = [part for batch in batches for part in halves(batch)]
        if learner.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        tqdm.write(
            f"out of memory: the step is repeated, with microbatches of at most {learner.microbatch_limit:,} tokens "
            "from here on (--optimizer.microbatch_tokens)",
            file=sys.stderr,
        )


def padded_tokens(batch: Batch) -> int:
    """What a forward pass computes, prompts of adjacent rows once."""
    ids = batch.rollout.prompt_ids
    prompts = 1 + int((ids[1:] != ids[:-1]).any(dim=1).sum())
    return prompts * ids.shape[1] + batch.rollout.completion_ids.numel()


def halves(batch: Batch) -> list[Batch]:
    """Its first and its second half of the rows; a single row stays."""
    parts = torch.arange(len(batch.rollout), device=batch.advantages.device).tensor_split(2)
    return [batch.rows(part) for part in parts if len(part)]


def backward(policy: PreTrainedModel, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    Returns:
        The share, a scalar, and the policy's log-probs, (b, t); both without gradient.
    """
    algorithm, completion_mask = config.algorithm, batch.rollout.completion_mask  # (b, t)
    token_local = algorithm.surrogate.token_local

    def laid_out(values: Tensor) -> Tensor:
        """A token-local loss may see the unmasked tokens alone, as (N, 1): then the head needs one pass only."""
        return values.expand_as(completion_mask)[completion_mask][:, None] if token_local else values

    mask, advantages = laid_out(completion_mask), laid_out(batch.advantages[:, None])
    divisors = laid_out(token_divisors(completion_mask, algorithm.aggregation, counts))
    old = None if batch.old_logprobs is None else laid_out(batch.old_logprobs)
    ref = None if batch.ref_logprobs is None else laid_out(batch.ref_logprobs)
    share = torch.zeros((), device=mask.device)

    def loss(logprobs: Tensor, part: slice = slice(None)) -> Tensor:
        old_logprobs = logprobs.detach() if old is None else old[part]
        per_token_loss = algorithm.surrogate(logprobs, old_logprobs, advantages[part], mask[part])
        if ref is not None:
            kl = kl_estimate(logprobs, ref[part], mask[part], algorithm.kl_estimator)
            per_token_loss = per_token_loss + algorithm.beta * kl
        total = divided_sum(per_token_loss, mask[part], divisors[part])
        share.add_(total.detach())
        return total

    with autocast(config.model.autocast, mask.device):
        inputs = (policy, *batch.rollout.token_ids, config.rollout.temperature)
        if token_local:
            return share, as_forward(backward_in_one_pass, *inputs, loss)
        logprobs = as_forward(token_logprobs, *inputs)
    loss(logprobs).backward()
    return share, logprobs.detach()


def split_minibatches(
    rollout: Rollout, advantages: Tensor, config: TrainConfig, limit: int | None = None
) -> list[tuple[Counts, list[Batch]]]:
    """Assign rows to optimizer steps and to microbatches, once for all epochs of a rollout. Groups stay whole.

    Rows that cannot move the loss (no unmasked token, or advantage 0 where surrogate and KL are silent then) are left
    out but counted: the denominators are the full minibatch's, so loss and gradient stay what they were. The groups of
    a minibatch are sorted by length, so that microbatches hold little padding; a group is split only where it is over
    --optimizer.microbatch_tokens alone.
    """
    algorithm, group_size = config.algorithm, config.rollout.group_size
    limit = min(limit or math.inf, config.optimizer.microbatch_tokens)
    moving = rollout.completion_mask.any(dim=1)  # (B,)
    if algorithm.beta == 0 and algorithm.surrogate.silent_at_zero_advantage:
        moving &= advantages != 0
    moving = moving.tolist()
    prompt_lengths, lengths = (mask.sum(dim=1).tolist() for mask in (rollout.prompt_mask, rollout.completion_mask))

    def tokens(rows: list[int]) -> int:
        """What the forward pass computes, padding included; `token_logprobs` computes a group's prompt once."""
        alone = config.model.gradient_checkpointing or config.distributed.strategy == "fsdp2"
        prompts = rows if alone else {row // group_size for row in rows}
        return len(prompts) * max(prompt_lengths[row] for row in rows) + len(rows) * max(lengths[row] for row in rows)

    minibatches = []
    for numbers in np.array_split(np.arange(len(rollout) // group_size), algorithm.minibatches):
        groups = [range(number * group_size, (number + 1) * group_size) for number in numbers.tolist()]
        own = [sum(lengths[row] for group in groups for row in group), len(groups) * group_size]
        in_all = total(torch.tensor(own, device=advantages.device)).tolist()
        counts = Counts(*in_all, config.rollout.max_completion_tokens)
        kept = [[row for row in group if moving[row]] for group in groups]
        kept = sorted(filter(None, kept), key=lambda rows: -max(lengths[row] for row in rows))
        if not kept:  # a row whose gradient is 0: a step without any gradient would stop AdamW's momentum, too
            kept = [[groups[0][0]]]
        microbatches: list[list[int]] = [[]]
        for rows in kept:
            for part in [rows] if tokens(rows) <= limit else [[row] for row in rows]:
                if microbatches[-1] and tokens(microbatches[-1] + part) > limit:
                    microbatches.append([])
                microbatches[-1] += part
        indices = [to_device(torch.tensor(rows), advantages.device) for rows in microbatches]
        minibatches.append((counts, [Batch(rollout, advantages).rows(rows) for rows in indices]))
    return minibatches
