"""One rollout's optimizer steps against a naive trainer: the same weights, whatever is on, however it is split."""

import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from batches import AGGREGATIONS, PAIRS, SURROGATES, by_root, by_token, name, packing, row_mean_weights
from naive import OFF_POLICY, G, assert_equals_naive, make_config, make_rollout, naive_row, run, weights, with_sampler

from pspo.losses import GMPO, GSPO, P3O, PSPO, SAPO, TOPR, Clip, EntropyQuantile, NoClip, OffPolicyMask
from pspo.update.batching import make_batch, split_microbatches, split_minibatches


@pytest.mark.parametrize(
    ("surrogate", "aggregation", "switches"),
    [
        *((*pair, {}) for pair in PAIRS),
        *((*pair, {"beta": 0.5}) for pair in zip(SURROGATES[3:6], AGGREGATIONS[::-1], strict=True)),
        (Clip(0.1, delta=1.2), "grpo", {}),
        (TOPR(level="token"), "dr_grpo", {}),
        (P3O(kl_coef=0.5), "dapo", {}),
        *((NoClip(), "dapo", {"beta": 0.5, "kl_estimator": estimator}) for estimator in ("k1", "k2")),
        (Clip(), "dapo", {"mask_truncated": True, "beta": 0.5}),
        *((Clip(), aggregation, {"mask_truncated": True}) for aggregation in ("grpo", "dr_grpo")),
        (Clip(), by_root, {"beta": 0.5, "shuffle": True}),
        (GSPO(0.1, 0.2), "grpo", {"shuffle": True}),
        *((surrogate, "grpo", {"advantages": by_token}) for surrogate in (Clip(), TOPR())),
        *((*pair, {"entropy_coef": 0.3}) for pair in zip(SURROGATES[3:6], AGGREGATIONS, strict=True)),
        *((loss, "dapo", {"terms": [EntropyQuantile(0.3)], "beta": 0.5}) for loss in (Clip(), GSPO(0.1, 0.2))),
        *((surrogate, "grpo", {"beta": 0.5, "kl_estimator": "unbiased_k3"}) for surrogate in (Clip(), TOPR())),
    ],
    ids=name,
)
def test_two_epochs_of_two_minibatches_equal_the_naive_trainer(policy, surrogate, aggregation, switches):
    """Without a correction the sampler's log-probs are not seen; rows with A = 0 stay where a KL term moves them."""
    rollout, advantages = make_rollout()
    if "advantages" in switches:
        switches, advantages = {}, by_token(advantages, G, rollout.completion_mask)
    if "terms" not in switches:
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
        *((*pair, {"beta": 0.5}) for pair in PAIRS[3:6]),
        *(
            (Clip(), how, {"entropy_coef": 0.3, "optimizer": {"lr": 3e-3, "options": {"eps": 1e-4}}})
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
        (None, {"options": {"weight_decay": 0.1, "betas": [0.5, 0.9], "eps": 1e-4}, "max_grad_norm": 0.05}),
        (1.0, {"max_grad_norm": 0.02}),
        (0.01, {"max_grad_norm": 0.0}),  # switched off
    ],
    ids=str,
)
def test_optimizer_settings_are_the_naive_trainers(policy, sgd, optimizer):
    config = make_config(epochs=3, optimizer={"lr": 3e-3} | optimizer)
    metrics = assert_equals_naive(policy, *make_rollout(), config, sgd)
    assert metrics[0]["grad_norm"] > 0.1


CORRECTIONS = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize(
    ("surrogate", "correction", "beta"),
    [*zip([TOPR(), NoClip(), GSPO(0.1, 0.2), SAPO()], CORRECTIONS, [0.0, 0.5, 0.5, 0.0], strict=True)],
    ids=name,
)
def test_a_correction_equals_the_naive_trainer(policy, surrogate, correction, beta):
    rollout, advantages = make_rollout()
    rollout = with_sampler(rollout, policy, 0.6)
    algorithm = {"correction": correction, "correction_cap": 1.3, "beta": beta, "aggregation": "grpo"}
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
            corrected += [weight > 1.3 for weight in raw]
    assert metrics[0]["kl_sampler_old"] == pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-6)
    assert metrics[0]["sampler_ratio_max"] == pytest.approx(math.exp(max(log_r)), rel=1e-6)
    assert metrics[0]["corrected_share"] == pytest.approx(np.mean(corrected), rel=1e-6)
    assert 0.1 < metrics[0]["corrected_share"] < 0.9  # both happen


@pytest.mark.parametrize("surrogate", [PSPO(0.3), TOPR()], ids=name)
def test_a_stale_rollout_equals_the_naive_trainer(policy, surrogate):
    """Ratios are to the log-probs that were kept: off-policy from the first step on."""
    rollout, advantages = make_rollout()
    older = with_sampler(rollout, policy, 0.2).sampler_logprobs.nan_to_num()
    stale = dataclasses.replace(rollout, behaviour_logprobs=older)
    metrics = assert_equals_naive(policy, stale, advantages, make_config(surrogate, beta=0.5, **OFF_POLICY))
    assert metrics[0]["ratio_min"] < 0.9
    assert metrics[0]["kl_reference"] == 0.0


SPLIT = [  # with its settings whatever looks at more than one token
    *((*pair, {}) for pair in PAIRS[1::2]),
    (Clip(), by_root, {}),
    (GMPO(), "grpo", {"advantages": by_token}),
    (NoClip(), "dapo", {"correction": row_mean_weights}),
    (GMPO(), "dapo", {"terms": [EntropyQuantile(0.3)]}),
    (NoClip(), "grpo", {"correction": "token_mask", "terms": [OffPolicyMask(0.02)]}),
    (NoClip(), "grpo", {"beta": 0.5, "kl_estimator": "unbiased_k3", "entropy_coef": 0.2}),
]


@pytest.mark.parametrize(("surrogate", "aggregation", "switches"), SPLIT, ids=name)
def test_a_split_changes_nothing(policy, surrogate, aggregation, switches):
    """A minibatch in parts, its rows in another order; `test_distributed.py` has it over ranks."""
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
        batch = make_batch(rollout, advantages, config)
        (minibatch,) = split_minibatches(packing(tokens), batch, config)
        microbatches = split_microbatches(packing(tokens), batch, minibatch, config)
        return len(microbatches), *run(policy, rollout, advantages, config, sgd=0.1)

    _, expected, expected_metrics = steps(1000, rollout, advantages)
    parts = [steps(tokens, rollout, advantages) for tokens in (20, 1)]
    pieces = (surrogate, *make_config(surrogate, **switches).loss_terms)
    every_row = not all(getattr(piece, "silent_at_zero_advantage", False) for piece in pieces)
    assert [number for number, *_ in parts] == [4, 8 if every_row else 7]  # the last without the row with A = 0
    for _, end, metrics in (*parts, steps(1000, *shuffled)):
        move = (expected - weights(policy)).abs().max().item()
        assert move > 1e-3
        torch.testing.assert_close(end, expected, rtol=0, atol=1e-5 * move)  # norms are float32 in a float64 model
        for step, expected_step in zip(metrics, expected_metrics, strict=True):
            assert step == pytest.approx(expected_step, rel=1e-4, abs=1e-6)
