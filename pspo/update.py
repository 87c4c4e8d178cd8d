"""The optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches.

For one microbatch, `backward` is the method: log-probs -> surrogate -> aggregate -> backward.
"""

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.config import AlgorithmConfig, TrainConfig
from pspo.losses import (
    Counts,
    aggregate,
    check_loss,
    correction_ratios,
    correction_weights,
    diagnose,
    diagnose_correction,
    kl_estimate,
    token_divisors,
    token_weights,
)
from pspo.model import StartingAdapters, autocast, backward_in_one_pass, is_out_of_memory, token_logprobs
from pspo.rollout import Batch, Rollout, to_device

T = TypeVar("T")


@dataclass
class Learner:
    """Everything an optimizer step changes, and the reference model that it leaves alone."""

    policy: PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None  # None for a constant learning rate
    reference: PreTrainedModel | StartingAdapters | None = None  # None if beta is 0
    steps: int = 0  # optimizer steps taken
    microbatch_limit: int | None = None  # tokens; below --optimizer.microbatch_tokens once memory has run out

    def __post_init__(self) -> None:
        self.scheduler = self.scheduler or torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)


class Minibatch(NamedTuple):
    """One optimizer step: this rank's microbatches, and tokens and sequences counted over all ranks."""

    counts: Counts
    batches: list[Batch]


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of one rollout: epochs x minibatches, each accumulated over microbatches and ranks.

    The first minibatch needs no pass of its own for old log-probs: its first forward pass precedes any step. A row
    stays in its microbatch, because in bf16 old and new log-probs must come from identical shapes.

    Args:
        rollout: B rows, this rank's.
        advantages: (B,) float32.

    Returns:
        The metrics of each step, in order, over all ranks' rows; ratios and the like are over tokens with A != 0.

    Raises ValueError if the learner has taken all of --run.max_steps already, or if --algorithm.correction lacks the
    sampler's log-probs.
    """
    if learner.steps >= config.run.max_steps:
        raise ValueError(f"the learner has taken all of --run.max_steps {config.run.max_steps}: raise it to go on")
    correct = config.algorithm.correction != "none"
    if correct and rollout.sampler_logprobs is None:
        raise ValueError("--algorithm.correction needs the sampler's log-probs: sample with Sampling(logprobs=True)")
    replay = config.algorithm.nucleus == "replay"
    if replay and rollout.nucleus is None:
        raise ValueError("--algorithm.nucleus replay needs the sampler's nucleus: sample with Sampling(nucleus=True)")
    minibatches = split_minibatches(rollout, advantages, config, learner.microbatch_limit)
    retry = partial(retry_in_halves, learner=learner, minibatches=minibatches, config=config)

    retry(partial(add_fixed_logprobs, learner, minibatches, config))
    steps: list[dict[str, float]] = []
    for minibatch in minibatches * config.algorithm.epochs:
        if learner.steps == config.run.max_steps:
            break
        loss, kl_reference, tokens = retry(partial(accumulate, learner, minibatch, config))
        dist.sum_gradients(learner.policy)
        loss, kl_reference = dist.sum_over_ranks(torch.stack([loss, kl_reference]))
        tokens = dist.concat_over_ranks(tokens, dim=1)
        steps.append(optimizer_step(learner, loss, tokens, config))
        if learner.reference is not None:
            steps[-1]["kl_reference"] = kl_reference.item()
        active = tokens[2] != 0  # the same tokens for every method
        steps[-1] |= diagnose(*tokens[:4], mask=active)
        if replay:
            mass = dist.sum_over_ranks(torch.stack([rollout.nucleus.mass.sum(), rollout.nucleus.mass.count_nonzero()]))
            steps[-1]["nucleus_mass"] = (mass[0] / mass[1]).item()
        if correct:
            steps[-1] |= diagnose_correction(tokens[1], *tokens[4:], active, config.algorithm.correction_cap)
    learner.microbatch_limit = min(filter(None, dist.gather_objects(learner.microbatch_limit)), default=None)
    return steps


def accumulate(learner: Learner, minibatch: Minibatch, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate a minibatch's gradient over its microbatches; a first visit's log-probs become the old ones.

    Returns:
        Loss and KL to the reference, scalars; and (4, N) of the N unmasked tokens in the microbatches: log-probs, old
        log-probs, advantages and the surrogate's weights dL/dlogprob; with a correction (6, N): the sampler's log-probs
        and the correction's ratios as well. All without gradient.
    """
    algorithm, (counts, batches), device = config.algorithm, minibatch, learner.policy.device
    loss, kl_reference, tokens = torch.zeros((), device=device), torch.zeros((), device=device), []
    for i, batch in enumerate(dist.communicate_once(learner.policy, batches, config.distributed.gather)):
        share, logprobs = backward(learner.policy, batch, counts, config)
        loss += share
        if batch.old_logprobs is None:
            batch = batches[i] = replace(batch, old_logprobs=logprobs)
        mask, row_advantages = batch.rollout.loss_mask, batch.advantages[:, None]  # (b, t), (b, 1)
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs, mask, algorithm.kl_estimator)
            kl_reference += kl.sum() / max(counts.tokens, 1)
        weights = token_weights(algorithm.surrogate, logprobs, batch.old_logprobs, row_advantages, mask)
        values = [logprobs, batch.old_logprobs, row_advantages, weights]
        if algorithm.correction != "none":
            sampler = batch.rollout.sampler_logprobs
            values += [sampler, correction_ratios(batch.old_logprobs, sampler, mask, algorithm.correction)]
        tokens.append(torch.stack([value.expand_as(mask)[mask] for value in values]))  # (4, n)
    return loss, kl_reference, torch.cat(tokens, dim=1)


def backward(policy: PreTrainedModel, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    Returns:
        The share, a scalar, and the policy's log-probs, (b, t); both without gradient.
    """
    algorithm, mask, advantages = config.algorithm, batch.rollout.loss_mask, batch.advantages[:, None]
    inputs, kept = (policy, *batch.rollout.token_ids, config.rollout.temperature), kept_tokens(batch, algorithm)
    one_pass = algorithm.surrogate.token_local and not algorithm.correction.startswith("sequence")
    if one_pass:  # the same gradient, without computing any logits twice
        divisors = token_divisors(mask, algorithm.aggregation, counts)
        token_inputs = (batch.old_logprobs, batch.ref_logprobs, batch.rollout.sampler_logprobs, advantages, mask)
        with autocast(config.model.autocast, policy.device):
            return backward_in_one_pass(*inputs, partial(per_token_loss, algorithm), token_inputs, divisors, kept)

    with autocast(config.model.autocast, policy.device):
        logprobs = token_logprobs(*inputs, kept)  # (b, t)
    known = (batch.old_logprobs, batch.ref_logprobs, batch.rollout.sampler_logprobs)
    losses = per_token_loss(algorithm, logprobs, *known, advantages, mask)  # (b, t)
    loss = aggregate(losses, mask, algorithm.aggregation, counts)
    loss.backward()
    return loss.detach(), logprobs.detach()


def kept_tokens(batch: Batch, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor] | None:
    """What `token_logprobs` renormalises over: the nucleus of every unmasked token; None for all tokens."""
    return batch.rollout.nucleus.kept(batch.rollout.completion_mask) if algorithm.nucleus == "replay" else None


def per_token_loss(
    algorithm: AlgorithmConfig,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sampler_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> Tensor:
    """The corrected surrogate, and beta times the KL to the reference, of every token: (b, t), 0 where masked.

    All tensors are (b, t), advantages (b, 1) or (b, t). ``old_logprobs`` is None on a row's first visit, when this
    policy is the old one; ``ref_logprobs`` is None if beta is 0; ``sampler_logprobs`` only serves a correction.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    losses = algorithm.surrogate(logprobs, old_logprobs, advantages, mask)
    check_loss(algorithm.surrogate, losses, logprobs)
    if algorithm.correction != "none":
        how = (algorithm.correction, algorithm.correction_cap)
        losses = losses * correction_weights(old_logprobs, sampler_logprobs, mask, *how)
    if ref_logprobs is not None:
        losses = losses + algorithm.beta * kl_estimate(logprobs, ref_logprobs, mask, algorithm.kl_estimator)
    return losses


def optimizer_step(learner: Learner, loss: Tensor, tokens: Tensor, config: TrainConfig) -> dict[str, float]:
    """Clip the gradient and step; a step whose loss, log-probs or gradient are not finite is skipped."""
    max_norm = config.optimizer.max_grad_norm or math.inf
    grad_norm = dist.full_tensor(torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), max_norm))
    lr, finite = learner.scheduler.get_last_lr()[0], bool(torch.isfinite(grad_norm + loss + tokens[0].sum()))
    if finite:
        learner.optimizer.step()
    learner.scheduler.step()
    learner.optimizer.zero_grad()
    learner.steps += 1
    return {"loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr, "step_skipped": float(not finite)}


def add_fixed_logprobs(learner: Learner, minibatches: list[Minibatch], config: TrainConfig, first: int = 1) -> None:
    """Compute what needs a pass before any step: the reference's log-probs, and old ones from minibatch ``first``."""
    own = isinstance(learner.reference, StartingAdapters)
    reference_context = learner.reference if own else nullcontext(learner.reference)
    with torch.no_grad(), autocast(config.model.autocast, learner.policy.device):
        for m, (_, batches) in enumerate(minibatches):
            for i, batch in enumerate(batches):
                inputs = (*batch.rollout.token_ids, config.rollout.temperature, kept_tokens(batch, config.algorithm))
                old_logprobs = batch.rollout.behaviour_logprobs
                if old_logprobs is None and m >= first:
                    old_logprobs = token_logprobs(learner.policy, *inputs)
                with reference_context as reference:
                    ref_logprobs = token_logprobs(reference, *inputs) if reference is not None else None
                batches[i] = replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def keep_logprobs(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Rollout:
    """The rollout with the log-probs of the policy as it is now, in the shapes that `update` will compute in.

    Rows that `update` leaves out have zeros. An engine's log-probs are kept as they are.
    """
    if config.ratios_to_engine:
        return replace(rollout, behaviour_logprobs=rollout.sampler_logprobs)
    minibatches = split_minibatches(rollout, advantages, config, learner.microbatch_limit)
    work = partial(add_fixed_logprobs, replace(learner, reference=None), minibatches, config, first=0)
    retry_in_halves(work, learner, minibatches, config)
    logprobs = minibatches[0].batches[0].old_logprobs.new_zeros(rollout.completion_ids.shape)
    for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
        logprobs[:, : batch.old_logprobs.shape[1]].index_add_(0, batch.indices, batch.old_logprobs)
    return replace(rollout, behaviour_logprobs=logprobs)


def split_minibatches(
    rollout: Rollout, advantages: Tensor, config: TrainConfig, limit: int | None = None
) -> list[Minibatch]:
    """Assign rows to optimizer steps and to microbatches, once for all epochs of a rollout. Groups stay whole.

    Rows with zero gradient (no unmasked token; A = 0 if the surrogate is silent then and beta is 0) are left out but
    counted: the denominators are the full minibatch's, so loss and gradient stay the same. The groups of a
    minibatch are sorted by length, so that microbatches hold little padding; a group is split only if it alone exceeds
    --optimizer.microbatch_tokens.
    """
    algorithm, group_size = config.algorithm, config.rollout.group_size
    if algorithm.mask_truncated:
        rollout = replace(rollout, completion_mask=rollout.completion_mask & rollout.terminated[:, None])
    sharded = config.distributed.strategy == "fsdp2"
    limit = min(limit or math.inf, config.optimizer.microbatch_tokens)
    moving = rollout.loss_mask.any(dim=1)  # (B,)
    if algorithm.beta == 0 and algorithm.surrogate.silent_at_zero_advantage:
        moving &= advantages != 0
    moving = moving.tolist()
    masks = (rollout.prompt_mask, rollout.completion_mask, rollout.loss_mask)
    prompt_lengths, lengths, loss_tokens = (mask.sum(dim=1).tolist() for mask in masks)

    def tokens(rows: list[int]) -> int:
        """Tokens of the forward pass, padding included; a group's prompt once if it is shared."""
        prompts = rows if sharded else {row // group_size for row in rows}
        return len(prompts) * max(prompt_lengths[row] for row in rows) + len(rows) * max(lengths[row] for row in rows)

    minibatches = []
    for groups in np.array_split(np.arange(len(rollout)).reshape(-1, group_size), algorithm.minibatches):
        sizes = torch.tensor([sum(loss_tokens[row] for row in groups.flat), groups.size], device=advantages.device)
        counts = Counts(*dist.sum_over_ranks(sizes).tolist(), config.rollout.max_completion_tokens)
        kept = [[row for row in group if moving[row]] for group in groups.tolist()]
        kept = sorted(filter(None, kept), key=lambda rows: -max(lengths[row] for row in rows))
        kept = kept or [[groups[0, 0]]]  # one row of zero gradient: without any AdamW skips its momentum update
        microbatches: list[list[int]] = [[]]
        for rows in kept:
            for part in [rows] if tokens(rows) <= limit else [[row] for row in rows]:
                if microbatches[-1] and tokens(microbatches[-1] + part) > limit:
                    microbatches.append([])
                microbatches[-1] += part
        indices = [to_device(torch.tensor(rows), advantages.device) for rows in microbatches]
        batches = [Batch(rollout, advantages).rows(rows) for rows in indices]
        if sharded:  # every rank must run the same number of passes
            batches = dist.pad_to_longest(batches, batches[0].masked_row())
        minibatches.append(Minibatch(counts, batches))
    return minibatches


def retry_in_halves(work: Callable[[], T], learner: Learner, minibatches: list[Minibatch], config: TrainConfig) -> T:
    """Return what ``work`` returns; if memory runs out, halve the microbatches and start over.

    The denominators are the minibatch's, so the gradient is the same to rounding. Log-probs that microbatches already
    have stay.
    """
    while True:
        try:
            return work()
        except RuntimeError as error:
            batches = [batch for minibatch in minibatches for batch in minibatch.batches]
            halvable = config.optimizer.halve_on_oom and max(len(batch.rollout) for batch in batches) > 1
            if not (is_out_of_memory(error) and halvable) or dist.is_sharded(learner.policy):  # its ranks go in step
                raise
        # Outside the except block, whose error holds the tensors of the failed pass.
        learner.optimizer.zero_grad()
        learner.microbatch_limit = max(1, max(batch.padded_tokens for batch in batches) // 2)
        for minibatch in minibatches:
            minibatch.batches[:] = [half for batch in minibatch.batches for half in batch.halves()]
        torch.cuda.empty_cache()  # does nothing without a GPU
        limit = f"{learner.microbatch_limit:,} tokens from here on (--optimizer.microbatch_tokens)"
        tqdm.write(f"out of memory: the step is repeated, with microbatches of at most {limit}", file=sys.stderr)
