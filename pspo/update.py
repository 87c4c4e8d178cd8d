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
from pspo.config import AlgorithmConfig, TrainConfig
from pspo.losses import Counts, aggregate, check_loss, correction_weights, kl_estimate, token_divisors
from pspo.model import autocast, backward_in_one_pass, token_logprobs
from pspo.optimizers.learner import Learner
from pspo.rollout.batching import Minibatch, retry_in_halves, split_minibatches
from pspo.rollout.step_metrics import StepMetrics, nucleus_mass
from pspo.rollout.types import Batch, Rollout


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of one rollout: epochs x minibatches, each accumulated over microbatches and ranks.

    The first minibatch needs no pass of its own for old log-probs: its first forward pass precedes any step. A row
    stays in its microbatch, because in bf16 old and new log-probs must come from identical shapes.

    Args:
        rollout: B rows, this rank's.
        advantages: (B,) float32.

    Returns:
        The metrics of each step over all ranks' rows; ratios and the like are over tokens with A != 0.

    Raises ValueError if all of --run.max_steps are taken, or the rollout lacks what --algorithm needs.
    """
    if learner.steps >= config.run.max_steps:
        raise ValueError(f"the learner has taken all of --run.max_steps {config.run.max_steps}: raise it to go on")
    if config.algorithm.correction != "none" and rollout.sampler_logprobs is None:
        raise ValueError("--algorithm.correction needs the sampler's log-probs: sample with Sampling(logprobs=True)")
    if config.algorithm.nucleus == "replay" and rollout.nucleus is None:
        raise ValueError("--algorithm.nucleus replay needs the sampler's nucleus: sample with Sampling(nucleus=True)")
    minibatches = split_minibatches(rollout, advantages, config, learner.microbatch_limit)
    retry = partial(retry_in_halves, learner, minibatches, config)
    retry(partial(add_fixed_logprobs, learner, minibatches, config))
    steps, mass = [], nucleus_mass(rollout)
    for minibatch in minibatches * config.algorithm.epochs:  # the same objects: the old log-probs of the first visit
        if learner.steps == config.run.max_steps:
            break
        metrics = retry(partial(accumulate, learner, minibatch, config))
        dist.sum_gradients(learner.policy)
        learner.record.add(learner.steps + 1, metrics.recorded())
        steps.append(optimizer_step(learner, metrics, config) | mass)
    learner.microbatch_limit = min(filter(None, dist.gather_objects(learner.microbatch_limit)), default=None)
    return steps


def accumulate(learner: Learner, minibatch: Minibatch, config: TrainConfig) -> StepMetrics:
    """Accumulate a minibatch's gradient over its microbatches; a first visit's log-probs become the old ones."""
    counts, batches = minibatch
    gradient = one_pass if learner.one_pass and config.algorithm.token_local else backward
    metrics = StepMetrics(config.algorithm, learner.steps, counts, learner.policy.device)
    for i, batch in enumerate(dist.communicate_once(learner.policy, batches, config.distributed.gather)):
        loss, logprobs, entropies = gradient(learner, batch, counts, config)
        if batch.old_logprobs is None:
            batch = batches[i] = replace(batch, old_logprobs=logprobs)
        metrics.add(batch, logprobs, entropies, loss)
    return metrics


def backward(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    Returns:
        The share, a scalar, and the policy's log-probs and entropies, (b, t); all without gradient.
    """
    algorithm, policy, rollout, mask = config.algorithm, learner.policy, batch.rollout, batch.rollout.loss_mask
    nucleus, temperature = batch.replayed(algorithm.nucleus), config.rollout.temperature
    with autocast(config.model.autocast, policy.device):
        logprobs, entropies = token_logprobs(policy, *rollout.token_ids, temperature, nucleus, with_entropies=True)
    losses = token_losses(algorithm, learner.steps, logprobs, *batch.loss_inputs)  # (b, t)
    loss = aggregate(losses, mask, algorithm.aggregation, counts)
    loss.backward()
    return loss.detach(), logprobs.detach(), entropies


def one_pass(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`backward` of a token-local loss, without computing any logits twice: the same numbers to rounding."""
    algorithm, policy, rollout = config.algorithm, learner.policy, batch.rollout
    divisors = token_divisors(rollout.loss_mask, algorithm.aggregation, counts)
    how = (config.rollout.temperature, partial(token_losses, algorithm, learner.steps), batch.loss_inputs, divisors)
    with autocast(config.model.autocast, policy.device):
        return backward_in_one_pass(policy, *rollout.token_ids, *how, batch.replayed(algorithm.nucleus))


def token_losses(
    algorithm: AlgorithmConfig,
    step: int,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    sampler_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> Tensor:
    """The surrogate's losses, multiplied by the correction weights, plus beta times the KL to the reference.

    Result and tensors are (b, t), or (n, 1) of the n tokens of a chunk of `one_pass`; advantages may be (b, 1).
    ``old_logprobs`` is None on a first visit, whose log-probs are the old ones; ``ref_logprobs`` is None without beta.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    losses = algorithm.surrogate.at(step)(logprobs, old_logprobs, advantages, mask)
    check_loss(algorithm.surrogate, losses, logprobs)
    if algorithm.correction != "none":
        how = (algorithm.correction, algorithm.correction_cap)
        losses = losses * correction_weights(old_logprobs, sampler_logprobs, mask, *how)
    if ref_logprobs is not None:
        losses = losses + algorithm.beta * kl_estimate(logprobs, ref_logprobs, mask, algorithm.kl_estimator)
    return losses


def optimizer_step(learner: Learner, metrics: StepMetrics, config: TrainConfig) -> dict[str, float]:
    """Clip the gradient and step; a step whose loss, log-probs or gradient are not finite is skipped."""
    max_norm = config.optimizer.max_grad_norm or math.inf
    grad_norm = dist.full_tensor(torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), max_norm))
    lr, finite = learner.scheduler.get_last_lr()[0], metrics.reduce() and bool(torch.isfinite(grad_norm))
    if finite:
        learner.optimizer.step()
    learner.scheduler.step()
    learner.optimizer.zero_grad()
    learner.steps += 1
    return metrics.compute() | {"grad_norm": grad_norm.item(), "lr": lr, "step_skipped": float(not finite)}


def add_fixed_logprobs(learner: Learner, minibatches: list[Minibatch], config: TrainConfig, first: int = 1) -> None:
    """Compute what needs a pass before any step: reference log-probs, and old ones of minibatch ``first`` and later."""
    with torch.no_grad(), autocast(config.model.autocast, learner.policy.device):
        for m, (_, batches) in enumerate(minibatches):
            for i, batch in enumerate(batches):
                nucleus = batch.replayed(config.algorithm.nucleus)
                inputs = (*batch.rollout.token_ids, config.rollout.temperature, nucleus)
                old_logprobs = batch.rollout.behaviour_logprobs
                if old_logprobs is None and m >= first:
                    old_logprobs = token_logprobs(learner.policy, *inputs)
                with learner.reference_model() as reference:
                    ref_logprobs = token_logprobs(reference, *inputs) if reference is not None else None
                batches[i] = replace(batch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)


def keep_logprobs(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Rollout:
    """Give a rollout the log-probs of the policy as it is now, in the shapes that `update` will compute in.

    Rows that `update` leaves out have zeros. An engine's log-probs are kept as they are.
    """
    if config.ratios_to_engine:
        return replace(rollout, behaviour_logprobs=rollout.sampler_logprobs)
    minibatches = split_minibatches(rollout, advantages, config, learner.microbatch_limit)
    work = partial(add_fixed_logprobs, replace(learner, reference=None), minibatches, config, first=0)
    retry_in_halves(learner, minibatches, config, work)
    logprobs = minibatches[0].batches[0].old_logprobs.new_zeros(rollout.completion_ids.shape)
    for batch in (batch for minibatch in minibatches for batch in minibatch.batches):
        logprobs[:, : batch.old_logprobs.shape[1]].index_add_(0, batch.indices, batch.old_logprobs)
    return replace(rollout, behaviour_logprobs=logprobs)
