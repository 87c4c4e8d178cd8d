"""One rollout's optimizer steps against a naive trainer: whole logits, scalar losses, row by row, no short cuts."""

import copy
import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from batches import AGGREGATIONS, SURROGATES, by_root, by_token, row_mean_weights
from processes import one_layer

import pspo.model.logprobs
import pspo.rollout.batching
import pspo.update
from pspo import distributed as dist
from pspo.config import (
    SYSTEM_PROMPT,
    AlgorithmConfig,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from pspo.losses import DPPO, GMPO, GSPO, P3O, PSPO, SAPO, TOPR, VESPO, Clip, NoClip, Surrogate, adapt_coef, log_ratio
from pspo.model import load_policy, load_tokenizer, stop_token_ids
from pspo.rollout import Prompts, Rollout, Sampling, encode_prompts, generate, prompt_order
from pspo.rollout.batching import split_minibatches
from pspo.run.prepare import prepare
from pspo.run.prompt_stream import PromptStream
from pspo.run.recorder import Recorder
from pspo.tasks import Problem, load_problems
from pspo.update import Learner, update

G, V, T_MAX, TEMPERATURE = 4, 64, 10, 0.7
PAIRS = [*zip(SURROGATES, 4 * AGGREGATIONS, strict=True)]  # every surrogate, each aggregation with four of them


def name(value) -> str:
    """A parameter in a test's name, where a function's address would be another one in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


def make_config(surrogate=None, *, group_size=G, max_steps=100, optimizer=None, gradients_every=0, **algorithm):
    surrogate = NoClip() if surrogate is None else surrogate
    return TrainConfig(
        algorithm=AlgorithmConfig(surrogate=surrogate, **algorithm),
        rollout=RolloutConfig(prompts=16, group_size=group_size, max_completion_tokens=T_MAX, temperature=TEMPERATURE),
        optimizer=OptimizerConfig(**{"max_grad_norm": 1.0, "microbatch_tokens": 60} | (optimizer or {})),
        run=RunConfig(max_steps=max_steps, gradients_every=gradients_every),
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


def make_learner(policy, config, sgd=None, fused=True):
    """AdamW as `prepare` makes it, or plain SGD with the learning rate given, whose steps are the gradients."""
    policy = copy.deepcopy(policy)
    o = config.optimizer
    if sgd is None:
        optimizer = torch.optim.AdamW(
            policy.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=fused
        )
    else:
        optimizer = torch.optim.SGD(policy.parameters(), lr=sgd)
    ref = copy.deepcopy(policy).requires_grad_(False) if config.algorithm.beta > 0 else None
    return Learner(policy, optimizer, reference=ref)


def patch_heads(monkeypatch, wrap):
    """Wrap the plain step and the one-pass one."""
    for name in ("backward", "one_pass"):
        monkeypatch.setattr(pspo.update, name, wrap(getattr(pspo.update, name)))


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(policy, rollout, advantages, config, sgd=None):
    learner = make_learner(policy, config, sgd)
    metrics = update(learner, rollout, advantages, config)
    return weights(learner.policy), metrics


# ---------------------------------------------------------------- the naive trainer


def naive_row(model, rollout, i):
    """log pi of row i's completion tokens (t,)."""
    return reference.row_logprobs(model, rollout.token_ids, i, TEMPERATURE)


def naive_entropies(model, rollout, i):
    """Entropies (t,) of the distributions that row i's completion tokens were drawn from."""
    logprobs = reference.vocabulary_logprobs(model, rollout.token_ids, i, TEMPERATURE)
    return -(logprobs.exp() * logprobs).sum(dim=1)


def naive_minibatch(model, rollout, advantages, rows, old, ref, certain, weight, config):
    """Backward of a minibatch's loss, its slopes dL/dlogprob from the scalar oracles; returns loss, mean KL, entropy.

    ``certain``: by row, true at tokens that a quantile leaves out; ``weight``: of the entropy bonus.
    """
    algorithm, entropy_sum = config.algorithm, 0.0
    name, parameters = type(algorithm.surrogate).__name__, dataclasses.asdict(algorithm.surrogate)
    sampled = rollout.completion_mask if rollout.sampled_mask is None else rollout.sampled_mask
    masks = {i: sampled[i][rollout.completion_mask[i]].tolist() for i in rows}
    kept = {i: sum(mask) for i, mask in masks.items()}
    total, kl_sum, linear = 0.0, 0.0, 0.0  # the last has the loss's gradient
    for i, length in kept.items():
        if length == 0:
            continue
        logprobs = naive_row(model, rollout, i)
        values = logprobs.tolist()
        row_advantages = advantages[i].reshape(-1)[: len(values)].tolist()
        row = [values], [old[i].tolist()], [row_advantages], [masks[i]]
        (losses,), (slopes,) = reference.surrogate(name, parameters, *row)
        sampler = (
            old[i] if rollout.sampler_logprobs is None else rollout.sampler_logprobs[i][rollout.completion_mask[i]]
        )
        moved = [x - y for x, y in zip(values, sampler.tolist(), strict=True)]
        how = (masks[i], row_advantages[0], algorithm.mask_off_policy)
        out = algorithm.mask_off_policy is not None and reference.off_policy(moved, *how)
        losses, slopes = (
            [0.0 if out or cut else x for x, cut in zip(part, certain[i], strict=True)] for part in (losses, slopes)
        )
        if algorithm.correction != "none":
            how = (masks[i], algorithm.correction, algorithm.correction_cap, algorithm.correction_floor)
            factors = reference.correction_weights(old[i].tolist(), sampler.tolist(), *how)
            losses, slopes = ([x * w for x, w in zip(part, factors, strict=True)] for part in (losses, slopes))
        if ref is not None:
            for t, (value, other) in enumerate(zip(values, ref[i].tolist(), strict=True)):
                kl, slope = reference.kl(value, other, algorithm.kl_estimator, old[i][t].item())
                kl_sum += kl * masks[i][t]
                losses[t] += algorithm.beta * kl * masks[i][t]
                slopes[t] += algorithm.beta * slope * masks[i][t]
        denominator = {
            "dapo": sum(kept.values()),
            "grpo": len(rows) * length,
            "dr_grpo": len(rows) * config.rollout.max_completion_tokens,
            by_root: len(rows) * math.sqrt(length),
        }[algorithm.aggregation]
        entropy = naive_entropies(model, rollout, i)[torch.tensor(masks[i])].sum()
        entropy_sum += entropy.item()
        total += sum(losses) / denominator - weight * entropy.item() / denominator
        linear = linear + (logprobs * torch.tensor(slopes, dtype=torch.float64) / denominator).sum()
        linear = linear - weight * entropy / denominator
    if torch.is_tensor(linear):
        linear.backward()
    n = max(sum(kept.values()), 1)
    return total, kl_sum / n, entropy_sum / n


def naive_update(policy, rollout, advantages, config, sgd=None, limit=math.inf):
    """The same as `update` without its short cuts; returns weights, pairs of loss and mean KL, and gradient norms."""
    algorithm, o = config.algorithm, config.optimizer
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
    sampled = (
        rollout.completion_mask if rollout.sampled_mask is None else rollout.sampled_mask & rollout.completion_mask
    )
    certain = [[False] * len(row) for row in old]
    for part in groups if algorithm.entropy_quantile < 1 else ():
        rows = [G * int(group) + j for group in part for j in range(G)]
        with torch.no_grad():
            entropies = {i: naive_entropies(model, rollout, i) for i in rows}
        tokens = torch.cat([entropies[i][sampled[i][rollout.completion_mask[i]]] for i in rows])
        lowest = reference.uncertain(tokens.tolist(), algorithm.entropy_quantile) - 1e-9
        for i in rows:
            certain[i] = (entropies[i] < lowest).tolist()
    losses, norms, coef, weight = [], [], 0.0, algorithm.entropy_coef if algorithm.entropy_target is None else 0.0
    for _ in range(algorithm.epochs):
        for part in groups:
            if len(losses) == limit:
                break
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            rows = [G * int(group) + j for group in part for j in range(G)]
            *pair, entropy = naive_minibatch(model, rollout, advantages, rows, old, ref, certain, weight, config)
            losses.append(tuple(pair))
            if algorithm.entropy_target is not None:  # Skywork-OR1
                below = entropy <= algorithm.entropy_target
                coef = max(0.0, coef + algorithm.entropy_coef * (1 if below else -1))
                weight = coef if below else 0.0
            norms.append(math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters())))
            if o.max_grad_norm > 0 and norms[-1] > o.max_grad_norm:
                for parameter in model.parameters():
                    parameter.grad.mul_(o.max_grad_norm / (norms[-1] + 1e-6))
            learner.optimizer.step()
    return weights(model), losses, norms


@pytest.fixture(scope="module")
def policy(tiny_model):
    return tiny_model(dtype=torch.float64, num_hidden_layers=1)


def assert_equals_naive(policy, rollout, advantages, config, sgd=None):
    expected, losses, norms = naive_update(policy, rollout, advantages, config, sgd)
    actual, metrics = run(policy, rollout, advantages, config, sgd)
    for step, pair in zip(metrics, losses, strict=True):
        assert (step["loss"], step.get("kl_reference", 0.0)) == pytest.approx(pair, rel=1e-5, abs=1e-6)
    assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-5, abs=1e-9)
    assert (expected - weights(policy)).abs().max() > 1e-3  # otherwise nothing has been tested
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    return metrics


OFF_POLICY = {"epochs": 2, "minibatches": 2, "optimizer": {"lr": 3e-3}}


@pytest.mark.parametrize(
    ("surrogate", "aggregation", "switches"),
    [
        *((*pair, {}) for pair in PAIRS),
        *((*pair, {"beta": 0.5}) for pair in zip(SURROGATES[:6], 2 * AGGREGATIONS[::-1], strict=True)),
        (Clip(0.1, delta=1.2), "grpo", {}),
        (TOPR(level="token"), "dr_grpo", {}),
        (P3O(kl_coef=0.5), "dapo", {}),
        *((NoClip(), "dapo", {"beta": 0.5, "kl_estimator": estimator}) for estimator in ("k1", "k2")),
        (Clip(), "dapo", {"mask_truncated": True, "beta": 0.5}),
        *((Clip(), aggregation, {"mask_truncated": True}) for aggregation in ("grpo", "dr_grpo")),
        (Clip(), by_root, {"beta": 0.5}),
        *((surrogate, "grpo", {"advantages": by_token}) for surrogate in (Clip(), TOPR())),
        *((surrogate, how, {"entropy_coef": 0.3}) for surrogate in (Clip(), TOPR()) for how in AGGREGATIONS),
        *((surrogate, "dapo", {"entropy_quantile": 0.3, "beta": 0.5}) for surrogate in (Clip(), GSPO(0.1, 0.2))),
        (NoClip(), "grpo", {"entropy_coef": 0.2, "entropy_target": 10.0}),
        (NoClip(), "grpo", {"entropy_coef": 0.2, "entropy_target": 0.1}),
        *((surrogate, "grpo", {"beta": 0.5, "kl_estimator": "unbiased_k3"}) for surrogate in (Clip(), TOPR())),
    ],
    ids=name,
)
def test_two_epochs_of_two_minibatches_equal_the_naive_trainer(policy, surrogate, aggregation, switches):
    """Without a correction the sampler's log-probs are not seen; rows with A = 0 stay where a KL term moves them."""
    rollout, advantages = make_rollout()
    if "advantages" in switches:
        switches, advantages = {}, by_token(advantages, G, rollout.completion_mask)
    if "mask_off_policy" not in switches:
        rollout = dataclasses.replace(rollout, sampler_logprobs=torch.full(rollout.completion_ids.shape, math.nan))
    config = make_config(surrogate, aggregation=aggregation, **OFF_POLICY, **switches)
    metrics = assert_equals_naive(policy, rollout, advantages, config)
    assert metrics[3]["ratio_max"] > 1.1  # far enough off-policy to tell the surrogates apart
    assert metrics[3]["ratio_min"] < 0.9
    if "beta" in switches:
        assert metrics[0]["kl_reference"] == 0.0
        assert abs(metrics[3]["kl_reference"]) > 1e-3


@pytest.mark.parametrize(
    ("surrogate", "aggregation", "switches"),
    [
        *((*pair, {"beta": 0.5}) for pair in PAIRS[:6]),
        *(
            (Clip(), how, {"entropy_coef": 0.3, "optimizer": {"lr": 3e-3, "eps": 1e-4}})
            for how in (*AGGREGATIONS, by_root)
        ),
    ],
    ids=name,
)
def test_observations_are_attended_to_but_out_of_the_loss(policy, surrogate, aggregation, switches):
    """Log-probs depend on an environment's tokens; loss, counts and gradient are those of the sampled tokens alone."""
    config = make_config(surrogate, aggregation=aggregation, **OFF_POLICY | switches)
    rollout, advantages = make_rollout()
    generator = torch.Generator().manual_seed(1)
    sampled = torch.rand(rollout.completion_mask.shape, generator=generator) < 0.6
    sampled[3] = False
    assert_equals_naive(policy, dataclasses.replace(rollout, sampled_mask=sampled), advantages, config)


@pytest.mark.parametrize(
    ("sgd", "optimizer"),
    [
        (None, {"weight_decay": 0.1, "beta1": 0.5, "beta2": 0.9, "eps": 1e-4, "max_grad_norm": 0.05}),
        (1.0, {"max_grad_norm": 0.02}),
        (0.01, {"max_grad_norm": 0.0}),  # switched off
    ],
    ids=str,
)
def test_optimizer_settings_are_the_naive_trainers(policy, sgd, optimizer):
    config = make_config(epochs=3, optimizer={"lr": 3e-3} | optimizer)
    metrics = assert_equals_naive(policy, *make_rollout(), config, sgd)
    assert metrics[0]["grad_norm"] > 0.1


@dataclass(frozen=True)
class Unmasked(NoClip):
    """A class of one's own that forgets the mask, and is singular where the filler stands under it."""

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return -(logprobs - old_logprobs).exp() * advantages + 0.0 * torch.log(-logprobs)


def test_what_a_surrogate_leaves_under_the_mask_does_not_matter(policy):
    rollout, advantages = make_rollout()
    settings = {"epochs": 2, "optimizer": {"microbatch_tokens": 1000, "max_grad_norm": 0.0}}
    ours, theirs = (run(policy, rollout, advantages, make_config(s, **settings)) for s in (NoClip(), Unmasked()))
    assert [step["loss"] for step in theirs[1]] == pytest.approx([step["loss"] for step in ours[1]], rel=1e-6)
    assert not any(step["step_skipped"] for step in ours[1])


CORRECTIONS = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def with_sampler(rollout, policy, spread, seed=6):
    """The rollout with made-up sampler log-probs around the policy's own; garbage where masked."""
    with torch.no_grad():
        own = reference.batch_logprobs(policy, rollout.token_ids, TEMPERATURE)
    noise = spread * torch.randn(own.shape, generator=torch.Generator().manual_seed(seed))
    sampler = (own + noise).where(rollout.completion_mask, math.nan)
    return dataclasses.replace(rollout, sampler_logprobs=sampler)


@pytest.mark.parametrize(
    ("surrogate", "correction", "beta"),
    [
        *zip([NoClip(), Clip(), GSPO(0.1, 0.2), VESPO()], CORRECTIONS, [0.0, 0.5, 0.5, 0.0], strict=True),
        *zip([TOPR(), GMPO(), SAPO(), NoClip()], CORRECTIONS, [0.0, 0.5, 0.5, 0.0], strict=True),
    ],
    ids=name,
)
def test_a_correction_equals_the_naive_trainer(policy, surrogate, correction, beta):
    rollout, advantages = make_rollout()
    rollout = with_sampler(rollout, policy, 0.6)
    bounds = {"correction_cap": 1.3, "correction_floor": 0.6 if beta else 0.0}
    algorithm = {"correction": correction, **bounds, "beta": beta, "aggregation": "grpo"}
    config = make_config(surrogate, **OFF_POLICY, **algorithm)
    metrics = assert_equals_naive(policy, rollout, advantages, config)
    without = run(policy, rollout, advantages, make_config(surrogate, **OFF_POLICY))
    assert metrics[0]["loss"] != without[1][0]["loss"]
    log_r, corrected = [], []
    for i in range(len(rollout) // 2):  # the first minibatch
        if advantages[i] != 0:
            mask = rollout.completion_mask[i]
            old, sampler = naive_row(policy, rollout, i).tolist(), rollout.sampler_logprobs[i][mask].tolist()
            log_r += [a - b for a, b in zip(old, sampler, strict=True)]
            raw = reference.correction_weights(old, sampler, [True] * len(old), correction, math.inf)
            corrected += [weight > 1.3 or weight < bounds["correction_floor"] for weight in raw]
    assert metrics[0]["kl_sampler_old"] == pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-6)
    assert metrics[0]["sampler_ratio_max"] == pytest.approx(math.exp(max(log_r)), rel=1e-6)
    assert metrics[0]["corrected_share"] == pytest.approx(np.mean(corrected), rel=1e-6)
    assert 0.1 < metrics[0]["corrected_share"] < 0.9  # both happen
    for name in ("kl_sampler_old", "sampler_ratio_max", "corrected_share"):  # of old log-probs: in each epoch the same
        assert metrics[2][name] == metrics[0][name]


@pytest.mark.parametrize("surrogate", [NoClip(), PSPO(0.3), TOPR(), GSPO(0.1, 0.2)], ids=name)
def test_a_stale_rollout_equals_the_naive_trainer(policy, surrogate):
    """Ratios are to the log-probs that were kept: off-policy from the first step on."""
    rollout, advantages = make_rollout()
    stale = dataclasses.replace(
        rollout, behaviour_logprobs=with_sampler(rollout, policy, 0.2).sampler_logprobs.nan_to_num()
    )
    metrics = assert_equals_naive(policy, stale, advantages, make_config(surrogate, beta=0.5, **OFF_POLICY))
    assert metrics[0]["ratio_min"] < 0.9
    assert metrics[0]["kl_reference"] == 0.0


def test_a_correction_needs_the_samplers_log_probs(policy):
    with pytest.raises(ValueError, match=r"--algorithm\.correction needs the sampler's log-probs"):
        run(policy, *make_rollout(), make_config(correction="token_mask"))


# ---------------------------------------------------------------- invariances


def padded(rollout):
    """The rollout with garbage in five more columns on the left and three on the right."""
    pad = torch.nn.functional.pad
    sampler = rollout.sampler_logprobs
    return dataclasses.replace(
        rollout,
        sampler_logprobs=None if sampler is None else pad(sampler, (0, 3), value=5.0),
        prompt_ids=pad(rollout.prompt_ids, (5, 0), value=13),
        prompt_mask=pad(rollout.prompt_mask, (5, 0), value=False),
        completion_ids=pad(rollout.completion_ids, (0, 3), value=17),
        completion_mask=pad(rollout.completion_mask, (0, 3), value=False),
    )


@pytest.mark.parametrize("surrogate", [Clip(), GSPO(0.1, 0.2)], ids=name)
@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_rows_that_the_policy_has_moved_away_from_are_left_out(policy, surrogate, correction):
    """With a correction from the sampler's log-probs, else from the old ones: from the second step on."""
    rollout, advantages = make_rollout()
    if correction != "none":
        rollout = with_sampler(rollout, policy, 0.6, seed=7)
    config = make_config(surrogate, mask_off_policy=0.02, correction=correction, beta=0.5, **OFF_POLICY)
    metrics = assert_equals_naive(policy, rollout, advantages, config)
    without = run(policy, rollout, advantages, make_config(surrogate, correction=correction, beta=0.5, **OFF_POLICY))[1]
    assert (metrics[0]["loss"] != without[0]["loss"]) == (correction != "none")
    assert metrics[2]["loss"] != without[2]["loss"]


def test_the_bonus_is_adapted_to_the_target(policy):
    """The weight rises by the coefficient while the entropy is at most the target; above it there is no bonus."""
    for target, weights_used in ((10.0, [0.0, 0.2, 0.4, 0.6]), (0.1, [0.0] * 4)):
        config = make_config(entropy_coef=0.2, entropy_target=target, **OFF_POLICY)
        learner = make_learner(policy, config)
        metrics = update(learner, *make_rollout(), config)
        assert [step["entropy_weight"] for step in metrics] == pytest.approx(weights_used)
        other = make_learner(policy, config)
        other.load_state_dict(copy.deepcopy(learner.state_dict()))
        assert (other.entropy_coef, other.entropy_weight) == (learner.entropy_coef, learner.entropy_weight)
    assert adapt_coef(0.5, 1.0, 0.9, 0.2) == (0.3, 0.0)


@pytest.mark.parametrize("mix", [1.0, 0.3])
def test_the_reference_follows_the_policy(policy, mix):
    """Every second step; the KL of a rollout is to the reference at its beginning."""
    config = make_config(beta=0.5, reference_every=2, reference_mix=mix, **OFF_POLICY)
    learner, expected = make_learner(policy, config), weights(policy)
    for seed in range(2):
        before, states = weights(learner.reference), []
        learner.optimizer.register_step_post_hook(lambda *_, states=states: states.append(weights(learner.policy)))
        rollout, advantages = make_rollout(seed=seed)
        naive = make_learner(policy, config)
        naive.policy.load_state_dict(learner.policy.state_dict())
        with torch.no_grad():
            reference_logprobs = reference.batch_logprobs(learner.reference, rollout.token_ids, TEMPERATURE)
            own = reference.batch_logprobs(learner.policy, rollout.token_ids, TEMPERATURE)
        kl = ((reference_logprobs - own).exp() - 1 - (reference_logprobs - own))[:8][rollout.completion_mask[:8]].mean()
        metrics = update(learner, rollout, advantages, config)
        assert metrics[0]["kl_reference"] == pytest.approx(kl.item(), rel=1e-5, abs=1e-12)
        for state in (states[1], states[3]):
            before = before + mix * (state - before)
        torch.testing.assert_close(weights(learner.reference), before, rtol=0, atol=1e-12)
    assert not torch.equal(weights(learner.reference), expected)
    other = make_learner(policy, config)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert torch.equal(weights(other.reference), weights(learner.reference))


SPLIT = [  # with its settings whatever looks at more than one token
    *((*pair, {}) for pair in PAIRS),
    (Clip(), by_root, {}),
    (GMPO(), "grpo", {"advantages": by_token}),
    (NoClip(), "dapo", {"correction": row_mean_weights}),
    *((surrogate, "grpo", {"entropy_coef": 0.3}) for surrogate in (Clip(), GMPO())),
    *((surrogate, "dapo", {"entropy_quantile": 0.3}) for surrogate in (Clip(), GMPO())),
    (NoClip(), "grpo", {"correction": "token_mask", "mask_off_policy": 0.02}),
    (NoClip(), "grpo", {"beta": 0.5, "kl_estimator": "unbiased_k3", "entropy_coef": 0.2, "entropy_target": 10.0}),
]


@pytest.mark.parametrize(("surrogate", "aggregation", "switches"), SPLIT, ids=name)
def test_a_split_changes_nothing(policy, surrogate, aggregation, switches):
    """A minibatch in parts, its rows in another order, in wider padding; `test_distributed.py` has it over ranks."""
    rollout, advantages = make_rollout(groups=2, seed=1)
    if "correction" in switches:
        rollout = with_sampler(rollout, policy, 0.6)
    advantages[G:] = torch.tensor([0.5, -1.0, 0.0, 0.7])
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(7))
    shuffled = rollout.rows(order), advantages[order]

    def steps(tokens, rollout, advantages):
        optimizer = {"microbatch_tokens": tokens, "max_grad_norm": 0.0}
        config = make_config(surrogate, epochs=2, aggregation=aggregation, optimizer=optimizer, **switches)
        if "advantages" in switches:
            advantages = by_token(advantages, G, rollout.completion_mask)
        ((_, batches),) = split_minibatches(rollout, advantages, config)
        return len(batches), *run(policy, rollout, advantages, config, sgd=0.1)

    _, expected, expected_metrics = steps(1000, rollout, advantages)
    parts = [steps(tokens, rollout, advantages) for tokens in (60, 20, 1)]
    every_row = make_config(surrogate, **switches).algorithm.needs_every_row
    assert [number for number, *_ in parts] == [2, 4, 8 if every_row else 7]  # the last without the row with A = 0
    for _, end, metrics in (*parts, steps(1000, *shuffled), steps(1000, padded(rollout), advantages)):
        move = (expected - weights(policy)).abs().max().item()
        assert move > 1e-3
        torch.testing.assert_close(end, expected, rtol=0, atol=1e-5 * move)  # norms are float32 in a float64 model
        for step, expected_step in zip(metrics, expected_metrics, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-4, abs=1e-6)


class Fading(Surrogate):
    """NoClip with a state: a weight that falls with every call."""

    calls = 0

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        self.calls += 1
        return NoClip()(logprobs, old_logprobs, advantages, mask) / self.calls


def prompt_gradients(policy, rollout, advantages, minibatches):
    """(n, D) float64: the gradient of each prompt's share of its minibatch's loss, NoClip with dapo at r = 1."""
    policy, gradients = copy.deepcopy(policy).double(), []
    for minibatch in torch.arange(len(rollout)).view(-1, G).tensor_split(minibatches):
        tokens = rollout.completion_mask[minibatch.flatten()].sum()
        for indices in minibatch:
            rows = rollout.rows(indices)
            logprobs = reference.batch_logprobs(policy, rows.token_ids, TEMPERATURE)
            policy.zero_grad()
            (-logprobs * advantages[indices, None] * rows.completion_mask / tokens).sum().backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    return torch.stack(gradients).numpy()


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("tokens", [1000, 20, 1])
def test_gradient_metrics(policy, minibatches, tokens):
    """Against pairs of prompts' gradients, whatever the microbatches; the run's numbers stay."""
    rollout, advantages = make_rollout(seed=3)
    settings = {"epochs": 3, "minibatches": minibatches, "optimizer": {"microbatch_tokens": tokens}}
    plain = run(policy, rollout, advantages, make_config(**settings), sgd=0.1)
    learner, epochs = make_learner(policy, config := make_config(**settings, gradients_every=1), sgd=0.1), []
    take = learner.optimizer.register_step_pre_hook
    take(lambda *_: epochs.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).numpy()))
    steps = update(learner, rollout, advantages, config)
    assert torch.equal(weights(learner.policy), plain[0])
    assert [{name: x for name, x in step.items() if not name.startswith("gradient_")} for step in steps] == plain[1]

    own = prompt_gradients(policy, rollout, advantages, minibatches) / minibatches
    n = len(own)
    pairs = sum(own[i] @ own[j] for i in range(n) for j in range(n) if i != j)
    for step in steps:
        assert step["gradient_norm2"] == pytest.approx(n / (n - 1) * pairs, rel=1e-5)
        assert step["gradient_variance"] == pytest.approx((n * own).var(axis=0, ddof=1).sum(), rel=1e-5)
    first, *others = np.stack(epochs).reshape(3, minibatches, -1).sum(axis=1)
    cosines = [first @ other / np.linalg.norm(first) / np.linalg.norm(other) for other in others]
    assert [step.get("gradient_cosine") for step in steps[minibatches - 1 :: minibatches]] == [
        None, *(pytest.approx(cosine, rel=1e-6) for cosine in cosines)
    ]  # fmt: skip


def test_measuring_gradients_changes_no_state_of_a_loss(policy):
    ends = [run(policy, *make_rollout(), make_config(Fading(), gradients_every=every))[0] for every in (0, 1)]
    assert torch.equal(*ends)


def test_a_measure_that_runs_out_of_memory_is_left_out(policy, monkeypatch, capsys):
    config = make_config(epochs=2, gradients_every=1)
    plain = run(policy, *make_rollout(), make_config(epochs=2))
    failing = mock.Mock(
        side_effect=[torch.OutOfMemoryError("out of memory"), *[mock.DEFAULT] * 9], wraps=pspo.update.one_pass
    )
    monkeypatch.setattr(pspo.update, "one_pass", failing)
    learner = make_learner(policy, config)
    steps = update(learner, *make_rollout(), config)
    assert "gradient_norm2" not in steps[0]
    assert "gradient noise is not measured" in capsys.readouterr().err
    assert learner.microbatch_limit is None
    assert torch.equal(weights(learner.policy), plain[0])


def test_without_a_gradient_there_is_no_cosine(policy):
    rollout, advantages = make_rollout()
    steps = run(policy, rollout, 0 * advantages, make_config(epochs=2, gradients_every=1))[1]
    assert [step.get("gradient_cosine") for step in steps] == [None, None]
    assert steps[0]["gradient_norm2"] == steps[0]["gradient_variance"] == 0


def test_gradients_are_measured_where_a_multiple_is_crossed(policy):
    config = make_config(epochs=2, gradients_every=3)
    learner = make_learner(policy, config)
    measured = ["gradient_norm2" in update(learner, *make_rollout(seed=i), config)[0] for i in range(5)]
    assert measured == [False, True, True, False, True]  # steps 3, 6 and 9


@pytest.fixture(scope="module")
def real():
    """The embedded model, a rollout of its own over prompts with one system prompt, advantages with a zero group."""
    model, device = ModelConfig(), torch.device("cpu")
    policy, tokenizer = load_policy(model, device), load_tokenizer(model)
    problems = load_problems("arithmetic", "train", limit=4)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], SYSTEM_PROMPT)
    sampling = Sampling(stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, TEMPERATURE, 0.95, logprobs=True)
    torch.manual_seed(0)
    rollout = generate(policy, tokenizer, prompts, sampling, G)
    advantages = torch.randn(len(rollout))
    advantages[G : 2 * G] = 0.0
    return policy, rollout, advantages


@pytest.mark.parametrize(
    ("surrogate", "microbatch_tokens"),
    [*((loss, 300) for loss in (PSPO(0.3), TOPR(), GSPO(0.1, 0.2), DPPO())), (PSPO(0.3), 4096)],
    ids=name,
)
def test_float32_gradients_of_a_real_rollout_equal_the_plain_path(real, monkeypatch, surrogate, microbatch_tokens):
    """Everything on: shared beginnings and prompts, one pass through the head in chunks, zero-advantage rows out."""
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_BYTES", 1)
    monkeypatch.setattr(pspo.model.logprobs, "CHUNK_TOKENS", 100)
    policy, rollout, advantages = real
    optimizer = {"max_grad_norm": 0.0, "microbatch_tokens": microbatch_tokens}
    config = make_config(surrogate, epochs=2, optimizer=optimizer)
    step, seen = torch.optim.SGD.step, []

    def noted(self):
        seen.append(torch.cat([parameter.grad.flatten() for parameter in self.param_groups[0]["params"]]))
        step(self)

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    _, metrics = run(policy, rollout, advantages, config, sgd=0.01)
    naive_update(policy, rollout, advantages, config, sgd=0.01)
    assert metrics[1]["ratio_min"] < 0.9  # the second step is off-policy
    assert metrics[1]["ratio_max"] > 1.1
    for i, tolerance in enumerate([1e-5, 3e-5]):  # at the second step the weights themselves differ by a rounding
        assert (seen[i] - seen[2 + i]).norm() <= tolerance * seen[2 + i].norm()


# ---------------------------------------------------------------- the off-policy schedule


@pytest.mark.parametrize("mode", ["none", "bf16"])
def test_ratios_are_exactly_1_while_the_weights_stand_still(tiny_model, mode):
    """Old and new log-probs come from identical shapes, with and without gradient."""
    config = make_config(epochs=2, minibatches=3, beta=0.1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, autocast=mode))
    _, metrics = run(tiny_model(), *make_rollout(), config, sgd=0.0)
    assert len(metrics) == 6
    for step in metrics:
        assert step["ratio_min"] == step["ratio_max"] == 1.0
        assert step["kl_old_new"] == step["tv"] == step["kl_reference"] == 0.0


@pytest.mark.parametrize("surrogate", [NoClip(), TOPR()], ids=["one pass", "recomputing"])
@pytest.mark.parametrize(("epochs", "minibatches", "beta"), [(1, 1, 0.0), (3, 1, 0.0), (2, 4, 0.0), (2, 2, 0.3)])
def test_no_forward_pass_more_than_needed(policy, monkeypatch, epochs, minibatches, beta, surrogate):
    rollout, advantages = make_rollout()
    advantages[advantages == 0] = 0.1
    passes = {"train": 0, "old": 0, "reference": 0}
    config = make_config(surrogate, epochs=epochs, minibatches=minibatches, beta=beta)
    learner = make_learner(policy, config)

    def counting(original):
        def counted(model, *args, **options):
            grad = torch.is_grad_enabled()
            passes["reference" if model is learner.reference else "train" if grad else "old"] += len(args[0])
            assert not (grad and model is learner.reference)
            assert (original.__name__ == "backward_in_one_pass") == (grad and surrogate.token_local)
            return original(model, *args, **options)

        return counted

    for name in ("token_logprobs", "backward_in_one_pass"):
        monkeypatch.setattr(pspo.update, name, counting(getattr(pspo.update, name)))
    update(learner, rollout, advantages, config)
    B = len(rollout)
    assert passes == {
        "train": epochs * B,
        "old": B - B // minibatches,  # all rows but the first minibatch's
        "reference": B if beta else 0,
    }


@dataclass(frozen=True)
class Kept(NoClip):
    """NoClip that does not say that it is silent where A = 0."""

    silent_at_zero_advantage = False


@pytest.mark.parametrize("truncate", [False, True])
def test_a_minibatch_without_signal_still_steps(policy, truncate):
    """AdamW's momentum moves the weights on; the second minibatch is all zeros (or all truncated)."""
    rollout, advantages = make_rollout(groups=2, seed=1)
    if truncate:
        rollout = dataclasses.replace(rollout, terminated=torch.arange(2 * G) < G)
        advantages = advantages + 0.3
    config = make_config(mask_truncated=truncate, **OFF_POLICY)
    metrics = assert_equals_naive(policy, rollout, advantages, config)
    assert metrics[1]["grad_norm"] == metrics[3]["grad_norm"] == 0.0
    assert all(math.isfinite(value) for step in metrics for value in step.values())


def test_max_steps_stops_in_the_middle_of_a_rollout(policy):
    rollout, advantages = make_rollout()
    config = make_config(epochs=3, minibatches=2, max_steps=7, optimizer={"lr": 3e-3})
    learner = make_learner(policy, config)
    learner.steps = 4
    metrics = update(learner, rollout, advantages, config)
    assert (len(metrics), learner.steps) == (3, 7)
    expected = naive_update(policy, rollout, advantages, config, limit=3)[0]
    torch.testing.assert_close(weights(learner.policy), expected, rtol=0, atol=1e-6)


def test_the_gradients_are_cleared_and_the_inputs_untouched(policy):
    rollout, advantages = make_rollout()
    before = copy.deepcopy((rollout, advantages))
    learner = make_learner(policy, make_config())
    update(learner, rollout, advantages, make_config(epochs=2, mask_truncated=True))
    assert all(parameter.grad is None for parameter in learner.policy.parameters())
    assert torch.equal(advantages, before[1])
    assert all(torch.equal(getattr(rollout, n), getattr(before[0], n)) for n in ("prompt_ids", "completion_mask"))


# ---------------------------------------------------------------- non-finite steps


@dataclass(frozen=True)
class Broken(Surrogate):
    """NoClip that goes wrong at one optimizer step, in the loss or in its gradient only."""

    learner: list
    step: int
    kind: str

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        loss = torch.where(mask, -log_ratio(logprobs, old_logprobs, mask).exp() * advantages, 0.0)
        if self.learner[0].steps != self.step:
            return loss
        if self.kind == "gradient":  # the square root's slope at 0 is infinite, and 0 times that is NaN
            return loss + torch.where(mask, ((logprobs - logprobs.detach()) * 0.0).sqrt(), 0.0)
        return loss * float(self.kind)


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_non_finite_step_never_reaches_the_weights(policy, step, kind):
    """What is left is as if that epoch had not been: the same weights as one epoch less, to the bit."""
    rollout, advantages = make_rollout()
    holder = []
    config = make_config(Broken(holder, step, kind), epochs=3, optimizer={"lr": 3e-3})
    holder.append(make_learner(policy, config))
    metrics = update(holder[0], rollout, advantages, config)
    assert [metric["step_skipped"] for metric in metrics] == [float(i == step) for i in range(3)]
    assert not math.isfinite(metrics[step]["loss"] + metrics[step]["grad_norm"])
    assert holder[0].steps == 3

    shorter = make_config(Broken([holder[0]], -1, kind), epochs=2, optimizer={"lr": 3e-3})
    expected, _ = run(policy, rollout, advantages, shorter)
    assert torch.isfinite(expected).all()
    assert torch.equal(weights(holder[0].policy), expected)


@pytest.mark.parametrize(
    ("surrogate", "switches"),
    [*((surrogate, {}) for surrogate in SURROGATES), (Clip(), {"entropy_coef": 0.3, "entropy_quantile": 0.3})],
    ids=name,
)
def test_the_one_pass_step_is_the_plain_one(policy, surrogate, switches):
    rollout, advantages = make_rollout()
    config = make_config(surrogate, beta=0.1, **switches, **OFF_POLICY)
    ends, metrics = [], []
    for one_pass in (False, True):
        learner = make_learner(policy, config)
        learner.one_pass = one_pass
        metrics.append(update(learner, rollout, advantages, config))
        ends.append(weights(learner.policy))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=2e-6)
    assert not torch.equal(ends[0], weights(policy))
    for plain, fast in zip(*metrics, strict=True):
        assert fast == pytest.approx(plain, abs=1e-4)


# ---------------------------------------------------------------- memory that runs out


def fails_above(function, rows: int, calls: list[int]):
    """A pass that works, gradient and all, and only then finds no memory, where its batch has more rows."""

    def wrapper(first, batch, *args):
        result = function(first, batch, *args)
        calls.append(len(batch.rollout))
        if calls[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    return wrapper


@pytest.mark.parametrize(
    ("surrogate", "rows"),
    [
        pytest.param(surrogate, 1 + i % 3, marks=[] if i < 6 else pytest.mark.nightly)
        for i, surrogate in enumerate(SURROGATES)
    ],
    ids=name,
)
def test_a_step_that_runs_out_of_memory_is_repeated_with_the_same_result(policy, monkeypatch, capsys, surrogate, rows):
    rollout, advantages = make_rollout()
    config = make_config(surrogate, beta=0.1, **OFF_POLICY)
    expected, expected_metrics = run(policy, rollout, advantages, config)
    calls: list[int] = []
    patch_heads(monkeypatch, lambda head: fails_above(head, rows, calls))
    learner = make_learner(policy, config)
    metrics = update(learner, rollout, advantages, config)
    torch.testing.assert_close(weights(learner.policy), expected, rtol=0, atol=2e-6)
    assert len(metrics) == len(expected_metrics) == 4
    for step, expected_step in zip(metrics, expected_metrics, strict=True):
        assert step == pytest.approx(expected_step, abs=1e-4)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 4
    assert all(line.startswith("out of memory: the step is repeated, with microbatches of at most") for line in lines)
    assert calls[-1] <= rows < max(calls)

    limit, tried = learner.microbatch_limit, len(calls)
    update(learner, rollout, advantages, config)
    if rows > 1:  # the smaller microbatches stay; they are limited by tokens, of which two short rows may have as few
        assert learner.microbatch_limit == limit
        assert max(calls[tried:]) <= rows
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["one row", "switched off", "another error"])
def test_what_smaller_microbatches_do_not_mend_is_raised(policy, monkeypatch, how):
    rollout, advantages = make_rollout()
    config = make_config(optimizer={"halve_on_oom": how != "switched off"})
    error = ValueError("no") if how == "another error" else torch.OutOfMemoryError("CUDA out of memory")
    patch_heads(monkeypatch, lambda head: mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        run(policy, rollout, advantages, config)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_step_with_a_log_prob_that_is_not_finite_is_skipped(policy, monkeypatch, value):
    """Whatever loss and gradient are."""

    def broken(head):
        def wrapper(*args):
            share, logprobs, entropies = head(*args)
            return share, logprobs.index_fill(1, torch.tensor([0]), value), entropies

        return wrapper

    patch_heads(monkeypatch, broken)
    end, (metrics,) = run(policy, *make_rollout(), make_config(epochs=1))
    assert metrics["step_skipped"] == 1
    assert math.isfinite(metrics["loss"] + metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    assert torch.equal(end, weights(policy))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_skipped_step_adapts_nothing(policy):
    """Neither the bonus's weight nor the reference, which is due at the last step."""
    settings = {"beta": 0.5, "reference_every": 3, "entropy_coef": 0.2, "entropy_target": 10.0}
    holder = []
    config = make_config(Broken(holder, 2, "nan"), epochs=3, optimizer={"lr": 3e-3}, **settings)
    holder.append(make_learner(policy, config))
    metrics = update(holder[0], *make_rollout(), config)
    assert [step["entropy_weight"] for step in metrics] == [0.0, 0.2, 0.4]
    assert holder[0].entropy_weight == 0.4
    assert torch.equal(weights(holder[0].reference), weights(policy))


def test_a_loss_without_gradient_leaves_the_weights(policy):
    end, metrics = run(policy, *make_rollout(), make_config(PSPO(1.0), epochs=2))
    assert torch.equal(end, weights(policy))
    assert [step["step_skipped"] for step in metrics] == [0.0, 0.0]


# ---------------------------------------------------------------- schedules, minibatches, order


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rates_by_closed_form(tmp_path, schedule, warmup):
    steps, peak = 12, 1e-3
    config = TrainConfig(
        model=ModelConfig(one_layer()),
        data=DataConfig(limit=2),
        algorithm=AlgorithmConfig(epochs=steps),
        rollout=RolloutConfig(prompts=1, group_size=4),
        optimizer=OptimizerConfig(lr=peak, schedule=schedule, warmup_steps=warmup),
        run=RunConfig(output_dir=str(tmp_path / "run"), max_steps=steps, validate_every=0, test_limit=0),
    )
    learner = prepare(config, {}).learner
    used = []
    learner.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    metrics = update(learner, *make_rollout(groups=1), config)
    expected = []
    for step in range(steps):
        progress = (step - warmup) / (steps - warmup)
        after = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        expected.append(peak * (step / warmup if step < warmup else after[schedule]))
    assert used == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert [step["lr"] for step in metrics] == used


def padded_tokens(batch, group_size=G):
    """What a microbatch costs: each prompt once, at the width of the longest, and all completions likewise."""
    prompts = {int(text) // group_size for text in batch.rollout.texts}
    return len(prompts) * batch.rollout.prompt_ids.shape[1] + batch.rollout.completion_ids.numel()


@pytest.mark.parametrize("tokens", [1, 30, 60, 100, 10**6])
@pytest.mark.parametrize(
    ("groups", "minibatches", "sizes"), [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (3, 3, [1] * 3)]
)
def test_minibatches_hold_whole_groups_and_count_everything(groups, minibatches, sizes, tokens):
    rollout, advantages = make_rollout(groups)
    config = make_config(Kept(), minibatches=minibatches, optimizer={"microbatch_tokens": tokens})
    minibatch_list = split_minibatches(rollout, advantages, config)
    start = 0
    for size, (counts, batches) in zip(sizes, minibatch_list, strict=True):
        rows = range(start, start + size * G)
        seen = [int(text) for batch in batches for text in batch.rollout.texts]
        assert sorted(seen) == list(rows)
        assert torch.equal(torch.cat([batch.advantages for batch in batches]), advantages[seen, None])
        assert (counts.sequences, counts.max_completion_tokens) == (size * G, T_MAX)
        assert counts.tokens == sum(int(rollout.completion_mask[i].sum()) for i in rows)
        for batch in batches:
            assert padded_tokens(batch) <= tokens or len(batch.rollout) == 1
        longest = [max(int(rollout.completion_mask[i].sum()) for i in seen[k : k + G]) for k in range(0, len(seen), G)]
        assert longest == sorted(longest, reverse=True)
        if tokens == 10**6:
            assert len(batches) == 1
        if tokens == 1:
            assert len(batches) == size * G
        start = rows.stop
    assert start == len(rollout)


def test_sorting_by_length_saves_padding():
    """16 groups of long and short completions in turns: in their own order every microbatch would be as wide as T."""
    rollout, advantages = make_rollout(16)
    lengths = torch.where(torch.arange(len(rollout)) // G % 2 == 0, 8, 2)
    rollout = dataclasses.replace(rollout, completion_mask=torch.arange(8) < lengths[:, None])
    config = make_config(Kept(), optimizer={"microbatch_tokens": 160})
    ((_, batches),) = split_minibatches(rollout, advantages, config)
    assert sum(batch.rollout.completion_ids.numel() for batch in batches) <= 1.15 * int(lengths.sum())


def test_a_prompt_counts_for_every_row_where_it_is_not_shared(policy, monkeypatch):
    """Ranks with shards and models with states compute prompts row by row; recomputing activations shares them."""
    rollout, advantages = make_rollout(8)
    config = make_config(Kept(), optimizer={"microbatch_tokens": 120})
    plain = split_minibatches(rollout, advantages, config)[0][1]
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, gradient_checkpointing=True))
    checkpointed = split_minibatches(rollout, advantages, config)[0][1]
    assert [batch.rollout.texts for batch in checkpointed] == [batch.rollout.texts for batch in plain]
    assert all(padded_tokens(batch) == batch.padded_tokens() for batch in plain)
    sharded = dataclasses.replace(config, distributed=DistributedConfig("fsdp2"))
    monkeypatch.setattr(pspo.rollout.batching, "shares_prompts", lambda _: False)
    for how in (sharded, config):
        unshared = split_minibatches(rollout, advantages, how, make_learner(policy, config))[0][1]
        assert len(unshared) > len(plain)
        assert all(padded_tokens(batch, group_size=1) <= 120 for batch in unshared)
        assert all(padded_tokens(batch, group_size=1) == batch.padded_tokens(shared=False) for batch in unshared)


def test_rows_left_out_are_counted():
    rollout, advantages = make_rollout()
    for surrogate in (NoClip(), P3O(), P3O(kl_coef=0.5)):
        ((counts, batches),) = split_minibatches(rollout, advantages, make_config(surrogate))
        assert counts.tokens == int(rollout.completion_mask.sum())
        assert counts.sequences == 16
        kept = sorted(int(text) for batch in batches for text in batch.rollout.texts)
        assert kept == [i for i in range(16) if advantages[i] != 0 or not surrogate.silent_at_zero_advantage]


def test_prompt_order_is_a_permutation_an_epoch():
    def first(n, seed, length):
        order = prompt_order(n, seed)
        return [next(order) for _ in range(length)]

    chosen = first(10, 3, 40)
    epochs = [chosen[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert first(10, 3, 40) == chosen
    assert first(10, 4, 40) != chosen
    assert first(1, 0, 3) == [0, 0, 0]


def draw_by_signal(rollouts, order="signal", state=None):
    """Prompts by rollout of all ranks; of twelve one in four never has a signal, and one in four only at times."""
    config = TrainConfig(rollout=RolloutConfig(prompts=4, order=order), run=RunConfig(seed=3))
    stream, drawn = PromptStream(Prompts([Problem(str(i)) for i in range(12)], [[i] for i in range(12)]), config), []
    if state is not None:
        stream.load_state_dict(state)
    for _ in range(rollouts):
        prompts, _ = stream.next(4)
        signal = [i % 4 > 1 or (i % 4 == 1 and (i + stream.position // 12) % 3 == 0) for i in prompts]
        stream.note(SimpleNamespace(prompts=prompts, signal=signal))
        drawn.append(sorted(chain(*dist.gather_objects(prompts))))
    return drawn, stream.state_dict()


def test_prompts_without_signal_rest_for_as_many_passes():
    """Against a loop over the passes; a part of it resumed from a state is the same."""
    order, position, without, back, expected = prompt_order(12, 3), 0, [0] * 12, [0] * 12, []
    for _ in range(60):
        drawn = []
        while len(drawn) < 4:
            i, its_pass, position = next(order), position // 12, position + 1
            if its_pass >= back[i]:
                drawn.append((i, its_pass))
        for i, its_pass in drawn:
            without[i] = 0 if i % 4 > 1 or (i % 4 == 1 and (i + position // 12) % 3 == 0) else without[i] + 1
            back[i] = its_pass + 1 + without[i]
        expected.append(sorted(i for i, _ in drawn))
    drawn, state = draw_by_signal(60)
    assert drawn == expected
    assert state["position"] == position
    counts = Counter(chain(*drawn))
    assert max(counts[i] for i in (0, 4, 8)) < 0.5 * min(counts[i] for i in range(12) if i % 4 > 1)
    assert min(counts[i] for i in (0, 4, 8)) > 2  # they come back
    first, middle = draw_by_signal(25)
    assert first + draw_by_signal(35, state=middle)[0] == expected
    plain, state = draw_by_signal(60, "shuffled", middle | {"position": 0})  # a fork
    assert Counter(chain(*plain)) == dict.fromkeys(range(12), 20)
    assert state["rests"] == {}


def test_rests_begin_after_a_prompt_s_own_pass():
    """Rollouts end where passes do: with signal in all groups the order is the shuffled one, without they rest."""
    config = TrainConfig(rollout=RolloutConfig(prompts=4, order="signal"), run=RunConfig(seed=3))
    stream = PromptStream(Prompts([Problem(str(i)) for i in range(8)], [[i] for i in range(8)]), config)
    order, silent = prompt_order(8, 3), None
    for rollout in range(1, 9):
        prompts, _ = stream.next(4)
        assert (prompts, stream.position) == ([next(order) for _ in range(4)], 4 * rollout)
        stream.note(SimpleNamespace(prompts=prompts, signal=[True] * 4))
    passes = []  # that the last prompt of each is in
    for number in range(4, 15):
        drawn = []
        while stream.position < 8 * (number + 1):
            prompts, _ = stream.next(1)
            silent = prompts[0] if silent is None else silent
            stream.note(SimpleNamespace(prompts=prompts, signal=[prompts[0] != silent]))
            drawn += prompts
        passes += [number] if silent in drawn else []
    assert passes == [4, 6, 9, 13]


def test_a_save_is_due_where_a_multiple_was_crossed():
    def is_due(every, before, after):
        learner = SimpleNamespace(steps=after)
        return Recorder.is_due(SimpleNamespace(limit_reached=False, first_step=before, learner=learner), every)

    for every in range(1, 6):
        for before in range(12):
            for after in range(before, 15):
                multiples = [step for step in range(before + 1, after + 1) if step % every == 0]
                assert is_due(every, before, after) == bool(multiples)
    assert not any(is_due(0, before, before + 3) for before in range(5))
