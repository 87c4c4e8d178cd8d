"""The optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches.

`backward` is the method: hidden states -> log-probs -> surrogate -> terms -> aggregate -> backward.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.losses import Counts, aggregate, check_loss
from pspo.model import autocast, head_logprobs, hidden_states, row_chunks
from pspo.rollout.types import Batch, Rollout
from pspo.update.batching import Minibatch, can_halve, halve, split_minibatches
from pspo.update.learner import Learner
from pspo.update.tokens import Visit, concat_columns, step_metrics, token_columns


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps of this rank's rows (B) of a rollout, with advantages (B,) or (B, T) float32.

    The first minibatch needs no extra pass for old log-probs: its first forward pass precedes any step. Returns the
    metrics of each step over all ranks' rows. Raises ValueError if the rollout lacks what --algorithm needs, or all of
    --run.max_steps are taken.
    """
    steps_left = config.run.max_steps - learner.steps
    if steps_left <= 0:
        raise ValueError(f"the learner has taken all of --run.max_steps {config.run.max_steps}: raise it to go on")
    if config.algorithm.beta > 0 and learner.reference is None:
        raise ValueError("--algorithm.beta needs a reference model: pspo.update.learner.make_learner loads one")
    minibatches = split_minibatches(learner, rollout, advantages, config)
    if len(minibatches) > 1 or learner.reference is not None:
        add_fixed_logprobs(learner, minibatches, config)
    steps = []
    for minibatch in (minibatches * config.algorithm.epochs)[:steps_left]:
        steps.append(take_step(learner, minibatch, config))
    return steps


def take_step(learner: Learner, minibatch: Minibatch, config: TrainConfig) -> dict[str, float]:
    """Accumulate a minibatch's gradient, sum it over the ranks, clip it, and step; returns the step's metrics.

    If memory runs out, the whole minibatch is tried again with smaller microbatches. A loss or gradient that is not
    finite is counted and skipped.
    """
    while True:
        passes = []  # by microbatch
        try:
            for batch in minibatch.batches:
                if learner.is_sharded:  # FSDP gathers the weights around what it takes for a forward pass
                    part = partial(backward, learner, batch, minibatch.counts, config)
                    passes.append(learner.policy.call_with_weights(part))
                else:
                    passes.append(backward(learner, batch, minibatch.counts, config))
            break
        except RuntimeError as error:
            if not can_halve(learner, minibatch, error):
                raise
        learner.optimizer.zero_grad()  # outside the except block, whose error holds the tensors of the failed pass
        halve(learner, minibatch)
    for batch, visits in zip(minibatch.batches, passes, strict=True):
        if batch.old_logprobs is None:  # the first visit's, in the shapes that all later ones are computed in
            batch.old_logprobs = torch.cat([visit.inputs.logprobs for visit in visits])
    visits = [visit for part in passes for visit in part]

    loss = torch.stack([visit.loss for visit in visits]).sum()
    if learner.n_ranks > 1:
        loss = dist.sum_over_ranks(loss)
        dist.sum_gradients(learner.policy)
    grad_norm = torch.nn.utils.clip_grad_norm_(learner.policy.parameters(), config.optimizer.max_grad_norm or math.inf)
    if learner.is_sharded:
        grad_norm = dist.full_tensor(grad_norm)
    loss, grad_norm = torch.stack([loss, grad_norm]).tolist()  # the only wait for a GPU before the step
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    lr = learner.optimizer.param_groups[0]["lr"]
    if is_finite:
        learner.optimizer.step()
    if learner.scheduler is not None:
        learner.scheduler.step()
    learner.optimizer.zero_grad()
    learner.steps += 1

    tokens = token_columns(visits, config.algorithm)
    if learner.record is not None:
        learner.record.add(learner.steps, tokens)
    if learner.n_ranks > 1:
        tokens = concat_columns(tokens)
    metrics = {"loss": loss} | step_metrics(tokens, minibatch.counts, config.algorithm)
    return metrics | {"grad_norm": grad_norm, "lr": lr, "step_skipped": float(not is_finite)}


def backward(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> list[Visit]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    One pass through the model's body makes hidden states. Whole rows, few enough that few logits exist at a time, go
    through the output embedding, the loss and back; then one pass goes back through the body. Returns what each of
    these parts computed, without gradient.
    """
    algorithm = config.algorithm
    policy = learner.policy
    rollout = batch.rollout
    surrogate = algorithm.surrogate.bind_step(learner.steps)
    visits = []
    gradients = []
    device_type = policy.device.type
    with autocast(config.model.autocast, policy.device):  # around all: casts weights once
        hidden = hidden_states(policy, *rollout.token_ids, learner.shares_prompts)  # (N, H)
        for rows, tokens in row_chunks(policy, rollout.completion_mask):
            states = hidden[tokens].detach().requires_grad_()  # (n, H)
            logprobs, entropies = head_logprobs(policy, states, rollout.targets(rows), config.rollout.temperature)
            with torch.autocast(device_type, enabled=False):
                x = batch.loss_inputs(rows, logprobs, entropies, learner.steps)
                losses = surrogate(x.logprobs, x.old_logprobs, x.advantages, x.mask)  # (b, t)
                check_loss(algorithm.surrogate, losses, x.logprobs)
                # dL/dlogprob of the surrogate alone, for metrics and the record: terms change the losses next.
                (weights,) = torch.autograd.grad(losses.sum(), x.logprobs, retain_graph=True, materialize_grads=True)
                for term in algorithm.loss_terms:
                    losses = term(losses, x)
                    check_loss(term, losses, x.logprobs)
                loss = aggregate(losses, x.mask, algorithm.aggregation, counts)
                loss.backward()  # frees these logits
            gradients.append(states.grad)
            x = replace(x, logprobs=x.logprobs.detach(), entropies=x.entropies.detach())
            visits.append(Visit(x, loss.detach(), weights, batch.indices[rows], rollout.loss_mask[rows]))
        if hidden.requires_grad:  # not with adapters at the output embedding alone
            with torch.autocast(device_type, enabled=False):
                hidden.backward(torch.cat(gradients))
    return visits


def add_fixed_logprobs(
    learner: Learner, minibatches: list[Minibatch], config: TrainConfig, first: int = 1, with_reference: bool = True
) -> None:
    """Compute what needs a pass before any step: reference log-probs, and old ones of minibatch ``first`` and later."""
    for i, minibatch in enumerate(minibatches):
        with_old = i >= first and minibatch.batches[0].old_logprobs is None
        while True:
            try:
                for batch in minibatch.batches:
                    with autocast(config.model.autocast, learner.policy.device):
                        add_batch_logprobs(learner, batch, config.rollout.temperature, with_old, with_reference)
                break
            except RuntimeError as error:
                if not can_halve(learner, minibatch, error):
                    raise
            halve(learner, minibatch)  # then all again, in the shapes that are trained in from here on


def add_batch_logprobs(
    learner: Learner, batch: Batch, temperature: float, with_old: bool, with_reference: bool
) -> None:
    """Give a microbatch its reference log-probs, and its old ones."""
    if with_old:
        batch.old_logprobs = batch.rollout.logprobs(learner.policy, temperature)
    if with_reference and learner.reference is not None:
        with learner.reference_model() as reference:
            batch.ref_logprobs = batch.rollout.logprobs(reference, temperature)


def keep_logprobs(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> Rollout:
    """Give a rollout the log-probs of the policy as it is now, in the shapes that `update` will compute in,
    unless memory runs out.

    Rows that `update` leaves out have zeros. An engine's log-probs are kept as they are.
    """
    if config.ratios_to_engine:
        return replace(rollout, behaviour_logprobs=rollout.sampler_logprobs)
    minibatches = split_minibatches(learner, rollout, advantages, config)
    add_fixed_logprobs(learner, minibatches, config, first=0, with_reference=False)
    dtype = minibatches[0].batches[0].old_logprobs.dtype
    logprobs = torch.zeros(rollout.completion_ids.shape, dtype=dtype)
    for minibatch in minibatches:
        for batch in minibatch.batches:
            width = batch.old_logprobs.shape[1]
            logprobs[:, :width].index_add_(0, batch.indices, batch.old_logprobs.cpu())
    return replace(rollout, behaviour_logprobs=logprobs)
