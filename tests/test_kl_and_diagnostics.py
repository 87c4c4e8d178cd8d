"""KL estimators, per-token weights and step statistics, against oracles and numbers worked out with numpy."""

import dataclasses
import math

import numpy as np
import pytest
import reference
import torch
from batches import SURROGATES, random_batch

from pspo.losses import P3O, PSPO, TOPR, Clip, diagnose, kl_estimate, token_weights

each_estimator = pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased_k3"])
LOSSES = [*SURROGATES, Clip(0.1, 0.4, 1.8), P3O(2.0, kl_coef=0.5), TOPR(0.5, 2.0, 0.25, 1.5, level="token")]


def make_batch(seed=0, spread=0.6, dtype=torch.float64):
    batch = random_batch((7, 3, 1, 6, 2), seed, spread, dtype)
    batch[2][0] = 0.0
    return batch


# ---------------------------------------------------------------- KL estimators


@each_estimator
@pytest.mark.parametrize("seed", range(2))
def test_value_and_gradient_equal_the_oracle(estimator, seed):
    logprobs, ref, _, mask = make_batch(seed, spread=3.0)
    logprobs[0] = ref[0] + torch.tensor([25, -29.9, -99.9, -1e4, -1e30, 1e30, 0.0])  # beyond the clamp, and equal
    old = logprobs + torch.linspace(-1, 1, logprobs.shape[1])
    old[1, 0] = logprobs[1, 0] + 30
    logprobs, ref = logprobs.where(mask, math.nan).requires_grad_(), ref.where(mask, math.inf)
    value = kl_estimate(logprobs, ref, mask, estimator, old)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert (value[~mask] == 0).all()
    assert (gradient[~mask] == 0).all()
    for b, t in mask.nonzero().tolist():
        expected = reference.kl(logprobs[b, t].item(), ref[b, t].item(), estimator, old[b, t].item())
        rounding = 1e-12 + 4e-16 * abs(expected[0])  # gradients are differences of terms as large as the value
        assert (value[b, t].item(), gradient[b, t].item()) == pytest.approx(expected, rel=1e-9, abs=rounding)
    if estimator == "k3":
        assert torch.equal(kl_estimate(logprobs, ref, mask), value)  # the default
    if estimator != "k1":
        assert (value >= 0).all()


@each_estimator
@pytest.mark.parametrize("seed", range(2))
def test_value_and_gradient_in_expectation_over_the_policys_samples(estimator, seed):
    """By enumeration; of an older policy's samples for unbiased_k3, whose gradient is exact, too.

    The gradient of k1 and k2 is that of KL(policy || reference), k3's of KL(reference || policy).
    """
    generator = torch.Generator().manual_seed(seed)
    theta, ref_logits = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    policy, ref = theta.requires_grad_().log_softmax(0), ref_logits.log_softmax(0)
    kl, reverse_kl = (policy.exp() * (policy - ref)).sum(), (ref.exp() * (ref - policy)).sum()
    older = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    drawn_by = older if estimator == "unbiased_k3" else policy.detach()
    estimate = kl_estimate(policy[None], ref[None], torch.ones(1, 9, dtype=torch.bool), estimator, older[None])[0]
    expectation = (drawn_by.exp() * estimate).sum()
    if estimator == "k2":  # biased; equal only to second order
        assert expectation.item() != pytest.approx(kl.item(), rel=1e-3)
    else:
        assert expectation.item() == pytest.approx(kl.item(), rel=1e-12)
    (sampled,) = torch.autograd.grad(expectation, theta, retain_graph=True)
    (exact,) = torch.autograd.grad(reverse_kl if estimator == "k3" else kl, theta)
    torch.testing.assert_close(sampled, exact, rtol=1e-10, atol=1e-14)


# ---------------------------------------------------------------- per-token weights and diagnose


def diagnose_rows(logprobs, old, advantages, weights, mask):
    """`diagnose` of the unmasked tokens with A != 0 of tensors (B, T), and their rows."""
    advantages = advantages.expand_as(mask)
    is_active = mask & (advantages != 0)
    rows = torch.arange(len(mask))[:, None].expand_as(mask)
    return diagnose(*(tensor[is_active] for tensor in (logprobs, old, advantages, weights, rows)))


@pytest.mark.parametrize("surrogate", LOSSES, ids=repr)
def test_against_numpy_with_the_closed_forms_weights(surrogate):
    logprobs, old, advantages, mask = batch = make_batch(seed=3)  # advantages of both signs
    rows, parameters = (tensor.tolist() for tensor in batch), dataclasses.asdict(surrogate)
    slopes = torch.tensor(reference.surrogate(type(surrogate).__name__, parameters, *rows)[1], dtype=torch.float64)
    weights = token_weights(surrogate, *batch)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, slopes, rtol=1e-9, atol=1e-12)
    stats = diagnose_rows(logprobs, old, advantages, weights, mask)
    keep = (mask & (advantages != 0)).numpy()
    w = slopes.numpy()[keep]
    A = np.broadcast_to(advantages.numpy(), keep.shape)[keep]
    log_r = (logprobs - old).numpy()[keep]
    r = np.exp(log_r)
    row_ratio = np.exp(np.where(keep, logprobs - old, 0).sum(axis=1))[keep.any(axis=1)]
    expected = {
        "ratio_mean": r.mean(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        **{f"ratio_p{q}": np.sort(r)[round(q / 100 * (len(r) - 1))] for q in (1, 50, 99)},
        "ess": r.sum() ** 2 / (len(r) * (r**2).sum()),
        "ess_sequence": row_ratio.sum() ** 2 / (len(row_ratio) * (row_ratio**2).sum()),
        "kl_old_new": (r - 1 - log_r).mean(),
        "tv": np.abs(r - 1).mean() / 2,
        "tv_smoothed": np.abs((r - 1) * w / (A * r)).mean() / 2,
        "zero_weight_share": (w == 0).mean(),
        "zero_weight_share_positive": (w[A > 0] == 0).mean(),
        "zero_weight_share_negative": (w[A < 0] == 0).mean(),
        "clamped_share": 0.0,
    }
    assert stats == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_clamped_share_and_finite_statistics_far_away():
    log_r = torch.tensor([[0.0, 19.9, 20.1, -20.1, -1e4, 1e30, 0.3, -19.9]])
    tokens, mask = (log_r, torch.zeros_like(log_r), torch.ones(1, 1)), log_r > -1e30
    stats = diagnose_rows(*tokens, token_weights(PSPO(), *tokens, mask), mask)
    assert stats["clamped_share"] == 0.5
    assert all(math.isfinite(value) for value in stats.values())
    assert stats["ratio_max"] == pytest.approx(math.exp(20), rel=1e-5)
    assert stats["ratio_min"] == pytest.approx(math.exp(-20), rel=1e-5)


def test_no_token_at_all():
    stats = diagnose(*[torch.zeros(0)] * 5)
    for name, value in stats.items():
        assert value == (1.0 if name.startswith(("ratio", "ess")) else 0.0), name
