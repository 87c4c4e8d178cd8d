"""The optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches.

For one microbatch, `backward` is the method: log-probs -> surrogate -> aggregate -> backward. By default, where the
loss allows, `one_pass` runs in its place: the same to rounding, in less work.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.losses import Counts, add_terms, aggregate, entropy_quantile, token_divisors
from pspo.model import autocast, backward_in_one_pass, token_logprobs
from pspo.rollout.batching import Minibatch, retry_in_halves, split_minibatches
from pspo.rollout.types import Batch, Rollout
from pspo.run.learner import Learner
from pspo.run.step_metrics import StepMetrics, nucleus_mass


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of one rollout: epochs x minibatches, each accumulated over microbatches and ranks.

    The first minibatch needs no extra pass for old log-probs: its first forward pass precedes any step. A row
    stays in its microbatch, because in bf16 old and new log-probs must come from identical shapes.

    Args:
        rollout: B rows, this rank's.
        advantages: (B,) or (B, T) float32.

    Returns:
        The metrics of each step over all ranks' rows; ratios and the like are over tokens with A != 0.

    Raises ValueError if all of --run.max_steps are taken, or the rollout lacks what --algorithm needs.
    """
    if learner.steps >= config.run.max_steps:
        raise ValueError(f"the learner has taken all of --run.max_steps {config.run.max_steps}: raise it to go on")
    minibatches = split_minibatches(rollout, advantages, config, learner)
    retry = partial(retry_in_halves, learner, minibatches, config)  # if memory runs out
    retry(add_fixed_logprobs, learner, minibatches, config)
    retry(keep_uncertain_tokens, learner, minibatches, config)
    gradient = one_pass if learner.one_pass and config.algorithm.token_local else backward

    def accumulate(counts: Counts, batches: list[Batch]) -> StepMetrics:
        """Accumulate a minibatch's gradient over its microbatches."""
        metrics = StepMetrics(config.algorithm, learner.steps, counts, learner.policy.device)
        for batch in batches:
            loss, logprobs, entropies = gradient(learner, batch, counts, config)
            if batch.old_logprobs is None:
                batch.old_logprobs = logprobs  # of the first visit, for the next
            metrics.add(batch, loss, logprobs, entropies)
        return metrics

    steps, of_rollout = [], nucleus_mass(rollout)
    for counts, batches in minibatches * config.algorithm.epochs:
        if learner.steps < config.run.max_steps:
            metrics = retry(accumulate, counts, batches)
            steps.append(optimizer_step(learner, metrics, config) | of_rollout)
    learner.microbatch_limit = min(filter(None, dist.gather_objects(learner.microbatch_limit)), default=None)
    return steps


def backward(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    Returns:
        The share, a scalar, and the policy's log-probs and entropies, (b, t); all without gradient.
    """
    algorithm, rollout = learner.adapted(config.algorithm), batch.rollout
    old_logprobs, advantages, mask, *others = batch.loss_inputs
    with autocast(config.model.autocast, learner.policy.device):
        inputs = (*rollout.token_ids, config.rollout.temperature, rollout.nucleus_ids, True, algorithm.entropy_coef > 0)
        logprobs, entropies = token_logprobs(learner.policy, *inputs)  # (b, t)
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    surrogate = algorithm.surrogate.at(learner.steps)
    losses = surrogate(logprobs, old_logprobs, advantages, mask)  # (b, t)
    losses = add_terms(algorithm, losses, logprobs, entropies, old_logprobs, advantages, mask, *others)
    loss = aggregate(losses, mask, algorithm.aggregation, counts)
    loss.backward()
    return loss.detach(), logprobs.detach(), entropies.detach()


def optimizer_step(learner: Learner, metrics: StepMetrics, config: TrainConfig) -> dict[str, float]:
    """Sum the gradient over the ranks, clip it, and step; only count if loss, log-probs or gradient are not finite."""
    dist.sum_gradients(learner.policy)
    max_norm = config.optimizer.max_grad_norm or math.inf
    grad_norm = dist.full_tensor(torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), max_norm))
    values, finite = metrics.reduce()
    skipped, lr = not (finite and torch.isfinite(grad_norm)), learner.scheduler.get_last_lr()[0]
    if not skipped:
        learner.optimizer.step()
    learner.scheduler.step()
    learner.optimizer.zero_grad()
    learner.steps += 1
    values |= learner.follow(config.algorithm, values["entropy"], skipped)
    learner.record.add(learner.steps, metrics.tokens())
    return values | {"grad_norm": grad_norm.item(), "lr": lr, "step_skipped": float(skipped)}


def one_pass(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of a token-local loss, without computing any logits twice: the same numbers to rounding."""
    algorithm, rollout = learner.adapted(config.algorithm), batch.rollout
    surrogate = algorithm.surrogate.at(learner.steps)

    def token_losses(logprobs, entropies, old_logprobs, advantages, mask, *others):  # (n, 1) of a chunk
        old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
        losses = surrogate(logprobs, old_logprobs, advantages, mask)
        losses = add_terms(algorithm, losses, logprobs, entropies, old_logprobs, advantages, mask, *others)
        return losses.where(mask, 0.0)  # an environment's tokens

    divisors = token_divisors(rollout.loss_mask, algorithm.aggregation, counts)
    how = (config.rollout.temperature, token_losses, batch.loss_inputs, divisors, rollout.nucleus_ids)
    with autocast(config.model.autocast, learner.policy.device):
        return backward_in_one_pass(learner.policy, *rollout.token_ids, *how)


def add_fixed_logprobs(learner: Learner, minibatches: list[Minibatch], config: TrainConfig, first: int = 1) -> None:
    """Compute what needs a pass before any step: reference log-probs, and old ones of minibatch ``first`` and later."""
    with torch.no_grad(), autocast(config.model.autocast, learner.policy.device):
        for m, (_, batches) in enumerate(minibatches):
            for batch in batches:
                inputs = (*batch.rollout.token_ids, config.rollout.temperature, batch.rollout.nucleus_ids)
                batch.old_logprobs = batch.rollout.behaviour_logprobs
                if batch.old_logprobs is None and m >= first:
                    batch.old_logprobs = token_logprobs(learner.policy, *inputs)
                with learner.reference_model() as reference:
                    if reference is not None:
                        batch.ref_logprobs = token_logprobs(reference, *inputs)


def keep_uncertain_tokens(learner: Learner, minibatches: list[Minibatch], config: TrainConfig) -> None:
    """Find each minibatch's most uncertain tokens, all ranks' together, if --algorithm.entropy_quantile is below 1.

    A pass of its own before any step: they are the same in all epochs, and under any split into microbatches.
    """
    if (share := config.algorithm.entropy_quantile) == 1:
        return
    for _, batches in minibatches:
        entropies = []  # (b, t) of each microbatch
        for batch in batches:
            inputs = (*batch.rollout.token_ids, config.rollout.temperature, batch.rollout.nucleus_ids)
            with torch.no_grad(), autocast(config.model.autocast, learner.policy.device):
                entropies.append(token_logprobs(learner.policy, *inputs, with_entropies=True)[1])
        tokens = torch.cat([part[batch.rollout.loss_mask] for part, batch in zip(entropies, batches, strict=True)])
        lowest = entropy_quantile(dist.concat_over_ranks(tokens), share)
        for part, batch in zip(entropies, batches, strict=True):
            batch.uncertain = part >= lowest


def keep_logprobs(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Rollout:
    """Give a rollout the log-probs of the policy as it is now, in the shapes that `update` will compute in.

    Rows that `update` leaves out have zeros. An engine's log-probs are kept as they are.
    """
    if config.ratios_to_engine:
        return replace(rollout, behaviour_logprobs=rollout.sampler_logprobs)
    minibatches = split_minibatches(rollout, advantages, config, learner)
    policy_alone = replace(learner, reference=None)
    retry_in_halves(learner, minibatches, config, add_fixed_logprobs, policy_alone, minibatches, config, 0)
    logprobs = minibatches[0].batches[0].old_logprobs.new_zeros(rollout.completion_ids.shape)
    for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
        logprobs[:, : batch.old_logprobs.shape[1]].index_add_(0, batch.indices, batch.old_logprobs)
    return replace(rollout, behaviour_logprobs=logprobs)
