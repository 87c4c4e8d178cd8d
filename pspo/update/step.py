"""The optimizer steps of one rollout: epochs x minibatches, each accumulated over its microbatches.

`backward` is the method: hidden states -> log-probs -> surrogate -> terms -> aggregate -> backward.

pspo leaves out a value model (advantages compare a group's rewards), packing (rows are padded), rewards per token
(advantages may be (B, T), though), and ratios to any policy but the one that `pspo.update.old` names.
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
from pspo.update.batching import Minibatch, halve_microbatches, make_batch, split_microbatches, split_minibatches
from pspo.update.learner import Learner
from pspo.update.old import old_logprobs, reference_logprobs
from pspo.update.tokens import Visit, concat_columns, step_metrics, token_columns


def update(learner: Learner, rollout: Rollout, advantages: Tensor, config: TrainConfig) -> list[dict[str, float]]:
    """Take the optimizer steps on this rank's B rows of a rollout, with advantages (B,) or (B, T) float32.

    Returns the metrics of each step over all ranks' rows. Raises ValueError if the rollout lacks what --algorithm
    needs, or if all of --run.max_steps are taken.
    """
    algorithm = config.algorithm
    steps_left = config.run.max_steps - learner.steps
    if steps_left <= 0:
        raise ValueError(f"the learner has taken all of --run.max_steps {config.run.max_steps}: raise it to go on")
    batch = make_batch(rollout, advantages, config)
    minibatches = split_minibatches(learner, batch, config)
    old = torch.zeros(rollout.completion_ids.shape, dtype=torch.float64, device=learner.policy.device)
    if rollout.behaviour_logprobs is not None or len(minibatches) > 1 or algorithm.shuffle:
        old = old_logprobs(learner, batch, minibatches, config)
    if learner.reference is not None:
        batch = replace(batch, ref_logprobs=reference_logprobs(learner, batch, minibatches, config))
    steps = []
    for epoch in range(algorithm.epochs):
        if algorithm.shuffle and epoch > 0:
            minibatches = split_minibatches(learner, batch, config, shuffled=True)
        for minibatch in minibatches[: steps_left - len(steps)]:
            is_first_visit = not steps and rollout.behaviour_logprobs is None  # its own pass computes old log-probs
            part = replace(batch, old_logprobs=None if is_first_visit else old)
            tokens, metrics = take_step(learner, part, minibatch, config)
            if is_first_visit:
                old[tokens["row"], tokens["position"]] = tokens["old_logprob"].to(old)
            steps.append(metrics)
    return steps


def take_step(
    learner: Learner, batch: Batch, minibatch: Minibatch, config: TrainConfig
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Accumulate a minibatch's gradient, sum it over the ranks, clip it, and step.

    Returns this rank's `token_columns` and the metrics. A step whose loss or gradient is not finite is only counted.
    """
    counts = minibatch.counts
    while True:
        learner.optimizer.zero_grad()  # gradients left by a step that raised, or by passes that ran out of memory
        visits = []
        microbatches = split_microbatches(learner, batch, minibatch, config)
        try:
            for part in microbatches:
                if learner.is_sharded:  # FSDP gathers the weights around a call that it takes for a forward pass
                    visits += learner.policy.call_with_weights(partial(backward, learner, part, counts, config))
                else:
                    visits += backward(learner, part, counts, config)
            break
        except RuntimeError as error:
            halve_microbatches(learner, minibatch, microbatches, config, error)
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
    learner.steps += 1  # before the weights change: a snapshot no longer matches them
    if is_finite:
        learner.optimizer.step()
    if learner.scheduler is not None:
        learner.scheduler.step()
    learner.optimizer.zero_grad()

    tokens = token_columns(visits)
    if learner.record is not None:
        learner.record.add(learner.steps, tokens)
    every = concat_columns(tokens) if learner.n_ranks > 1 else tokens
    metrics = {"loss": loss} | step_metrics(every, counts, config)
    return tokens, metrics | {"grad_norm": grad_norm, "lr": lr, "step_skipped": float(not is_finite)}


def backward(learner: Learner, batch: Batch, counts: Counts, config: TrainConfig) -> list[Visit]:
    """Accumulate the gradient of a microbatch's share of the minibatch's loss.

    One pass through the model's body computes hidden states. Chunks of whole rows go through the output embedding, the
    loss and back, so that few logits exist at a time; one backward pass through the body follows. Returns the results
    of each chunk, without gradient.
    """
    algorithm = config.algorithm
    policy = learner.policy
    rollout = batch.rollout
    surrogate = algorithm.surrogate.bind_step(learner.steps)
    visits = []
    gradients = []
    with autocast(config.model.autocast, policy.device):  # around everything: weights are cast once
        hidden = hidden_states(policy, rollout.token_ids, learner.shares_prompts)  # (N, H)
        for rows, tokens in row_chunks(policy, rollout.completion_mask):
            states = hidden[tokens].detach().requires_grad_()  # (n, H)
            logprobs, entropies = head_logprobs(policy, states, rollout.targets(rows), config.rollout.temperature)
            with torch.autocast(policy.device.type, enabled=False):
                x = batch.loss_inputs(rows, logprobs, entropies, learner.steps)
                losses = surrogate(x.logprobs, x.old_logprobs, x.advantages, x.mask)  # (b, t)
                check_loss(algorithm.surrogate, losses, x.logprobs)
                # dL/dlogprob of the surrogate alone, for metrics and the record: terms change the losses next.
                (weights,) = torch.autograd.grad(losses.sum(), x.logprobs, retain_graph=True, materialize_grads=True)
                for term in config.loss_terms:
                    losses = term(losses, x)
                    check_loss(term, losses, x.logprobs)
                loss = aggregate(losses, x.mask, algorithm.aggregation, counts)
                loss.backward()  # frees these logits
            gradients.append(states.grad)
            x = replace(x, logprobs=x.logprobs.detach(), entropies=x.entropies.detach())
            visits.append(Visit(x, loss.detach(), weights, batch.indices[rows], rollout.loss_mask[rows]))
        if hidden.requires_grad:  # False with adapters at the output embedding alone
            with torch.autocast(policy.device.type, enabled=False):
                hidden.backward(torch.cat(gradients))
    return visits
