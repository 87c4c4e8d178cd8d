"""A naive trainer: whole logits, scalar losses, row by row, no short cuts; and what its tests share."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from batches import by_root

from pspo.config import AlgorithmConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import EntropyQuantile, NoClip
from pspo.rollout import Rollout
from pspo.update import update
from pspo.update.learner import Learner

G, V, T_MAX, TEMPERATURE = 4, 64, 10, 0.7
OFF_POLICY = {"epochs": 2, "minibatches": 2, "optimizer": {"lr": 3e-3}}


def make_config(surrogate=None, *, group_size=G, max_steps=100, optimizer=None, **algorithm):
    surrogate = NoClip() if surrogate is None else surrogate
    return TrainConfig(
        algorithm=AlgorithmConfig(surrogate=surrogate, **algorithm),
        rollout=RolloutConfig(prompts=16, group_size=group_size, max_completion_tokens=T_MAX, temperature=TEMPERATURE),
        optimizer=OptimizerConfig(**{"lr": 3e-5, "max_grad_norm": 1.0, "microbatch_tokens": 60} | (optimizer or {})),
        run=RunConfig(max_steps=max_steps),
    )


def make_rollout(groups=4, seed=0):
    """Rows of one prompt adjacent; lengths of 1 to 8 tokens; the second group's advantages are all 0."""
    generator = torch.Generator().manual_seed(seed)
    n, P, T = groups * G, 6, 8
    prompt_ids = torch.randint(V, (groups, P), generator=generator).repeat_interleave(G, dim=0)
    prompt_lengths = torch.randint(1, P + 1, (groups, 1), generator=generator).repeat_interleave(G, dim=0)
    lengths = torch.randint(1, T + 1, (n, 1), generator=generator)
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    advantages[G : 2 * G] = 0.0
    advantages[-2] = 0.0
    rollout = Rollout(
        prompt_ids,
        torch.arange(P) >= P - prompt_lengths,
        torch.randint(V, (n, T), generator=generator),
        torch.arange(T) < lengths,
        torch.rand(n, generator=generator) < 0.7,
        [str(i) for i in range(n)],
    )
    return rollout, advantages


def with_sampler(rollout, policy, spread, seed=6):
    """The rollout with made-up sampler log-probs around the policy's own; garbage where masked."""
    with torch.no_grad():
        logprobs = reference.batch_logprobs(policy, rollout.token_ids, TEMPERATURE)
    noise = spread * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed))
    sampler = (logprobs + noise).where(rollout.completion_mask, math.nan)
    return dataclasses.replace(rollout, sampler_logprobs=sampler)


def make_learner(policy, config, sgd=None, fused=True):
    """AdamW as `prepare` makes it, or plain SGD with the learning rate given, whose steps are the gradients."""
    policy = copy.deepcopy(policy)
    if sgd is None:
        options = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | config.optimizer.options
        optimizer = torch.optim.AdamW(policy.parameters(), lr=config.optimizer.lr, fused=fused, **options)
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=sgd)
    ref = copy.deepcopy(policy).requires_grad_(False) if config.algorithm.beta > 0 else None
    return Learner(policy, optimizer, reference=ref)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(policy, rollout, advantages, config, sgd=None):
    learner = make_learner(policy, config, sgd)
    metrics = update(learner, rollout, advantages, config)
    return weights(learner.policy), metrics


def naive_row(model, rollout, i):
    """log pi of row i's completion tokens (t,)."""
    return reference.row_logprobs(model, rollout.token_ids, i, TEMPERATURE)


def tokens_left_out(terms, entropies, mask):
    """By token of a row, True if one of the terms leaves it out of the surrogate's loss."""
    inside = [entropy for entropy, is_in_loss in zip(entropies, mask, strict=True) if is_in_loss]
    shares = [term.share for term in terms if isinstance(term, EntropyQuantile) and inside]
    lowest = max((reference.uncertain(inside, share) - 1e-9 for share in shares), default=0.0)
    return [entropy < lowest for entropy in entropies]


def naive_minibatch(model, rollout, advantages, rows, old, ref, config):
    """Backward of a minibatch's loss, its slopes dL/dlogprob from the scalar oracles; returns loss and mean KL."""
    algorithm = config.algorithm
    surrogate, parameters = type(algorithm.surrogate).__name__, dataclasses.asdict(algorithm.surrogate)
    sampled = rollout.completion_mask if rollout.sampled_mask is None else rollout.sampled_mask
    masks = {i: sampled[i][rollout.completion_mask[i]].tolist() for i in rows}
    lengths = {i: sum(mask) for i, mask in masks.items()}
    total, kl_sum, linear = 0.0, 0.0, 0.0  # the last has the loss's gradient
    for i, length in lengths.items():
        if length == 0:
            continue
        vocabulary = reference.vocabulary_logprobs(model, rollout.token_ids, i, TEMPERATURE)  # (t, V)
        tokens = rollout.completion_ids[i][rollout.completion_mask[i]]
        logprobs = vocabulary.gather(1, tokens[:, None]).squeeze(1)
        entropies = -(vocabulary.exp() * vocabulary).sum(dim=1)
        values = logprobs.tolist()
        row_advantages = advantages[i].reshape(-1)[: len(values)].tolist()
        row = [values], [old[i].tolist()], [row_advantages], [masks[i]]
        (losses,), (slopes,) = reference.surrogate(surrogate, parameters, *row)
        sampler = old[i]
        if rollout.sampler_logprobs is not None:
            sampler = rollout.sampler_logprobs[i][rollout.completion_mask[i]]
        left_out = tokens_left_out(algorithm.terms, entropies.tolist(), masks[i])
        losses = [0.0 if out else x for x, out in zip(losses, left_out, strict=True)]
        slopes = [0.0 if out else x for x, out in zip(slopes, left_out, strict=True)]
        if config.correction != "none":
            bounds = (config.correction, algorithm.correction_cap, algorithm.correction_floor)
            factors = reference.correction_weights(old[i].tolist(), sampler.tolist(), masks[i], *bounds)
            losses = [x * w for x, w in zip(losses, factors, strict=True)]
            slopes = [x * w for x, w in zip(slopes, factors, strict=True)]
        if ref is not None:
            for t, (value, other) in enumerate(zip(values, ref[i].tolist(), strict=True)):
                kl, slope = reference.kl(value, other, algorithm.kl_estimator, old[i][t].item())
                kl_sum += kl * masks[i][t]
                losses[t] += algorithm.beta * kl * masks[i][t]
                slopes[t] += algorithm.beta * slope * masks[i][t]
        denominator = {
            "dapo": sum(lengths.values()),
            "grpo": len(rows) * length,
            "dr_grpo": len(rows) * config.rollout.max_completion_tokens,
            by_root: len(rows) * math.sqrt(length),
        }[algorithm.aggregation]
        bonus = algorithm.entropy_coef * entropies[torch.tensor(masks[i])].sum()
        total += (sum(losses) - bonus.item()) / denominator
        linear = linear + (logprobs * torch.tensor(slopes, dtype=torch.float64) / denominator).sum()
        linear = linear - bonus / denominator
    if torch.is_tensor(linear):
        linear.backward()
    return total, kl_sum / max(sum(lengths.values()), 1)


def naive_update(policy, rollout, advantages, config, sgd=None):
    """The same as `update` without its short cuts; returns weights, pairs of loss and mean KL, and gradient norms."""
    algorithm = config.algorithm
    max_grad_norm = config.optimizer.max_grad_norm
    learner = make_learner(policy, config, sgd, fused=False)
    model = learner.policy
    if algorithm.mask_truncated:
        mask = rollout.completion_mask.clone()
        mask[~rollout.terminated] = False
        rollout = dataclasses.replace(rollout, completion_mask=mask)
    with torch.no_grad():  # of all rows, by the initial policy
        old = [naive_row(model, rollout, i) for i in range(len(rollout))]
    ref = old if learner.reference else None  # the initial policy is the reference model
    if rollout.behaviour_logprobs is not None:
        old = [rollout.behaviour_logprobs[i][rollout.completion_mask[i]] for i in range(len(rollout))]
    groups = np.array_split(np.arange(len(rollout) // G), algorithm.minibatches)
    losses, norms = [], []
    for epoch in range(algorithm.epochs):
        if algorithm.shuffle and epoch > 0:
            order = np.random.default_rng((config.run.seed, 0, len(losses))).permutation(len(rollout) // G)
            groups = np.array_split(order, algorithm.minibatches)
        for part in groups:
            if len(losses) == config.run.max_steps:
                break
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            rows = [G * int(group) + j for group in part for j in range(G)]
            losses.append(naive_minibatch(model, rollout, advantages, rows, old, ref, config))
            norms.append(math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters())))
            if max_grad_norm > 0 and norms[-1] > max_grad_norm:
                for parameter in model.parameters():
                    parameter.grad.mul_(max_grad_norm / (norms[-1] + 1e-6))
            learner.optimizer.step()
    return weights(model), losses, norms


def assert_equals_naive(policy, rollout, advantages, config, sgd=None):
    expected, losses, norms = naive_update(policy, rollout, advantages, config, sgd)
    actual, metrics = run(policy, rollout, advantages, config, sgd)
    for step, pair in zip(metrics, losses, strict=True):
        assert (step["loss"], step.get("kl_reference", 0.0)) == pytest.approx(pair, rel=1e-5, abs=1e-6)
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-5, abs=1e-9)
    assert (expected - weights(policy)).abs().max() > 1e-3  # otherwise nothing has been tested
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    return metrics
