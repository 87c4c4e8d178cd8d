"""What is made of a surrogate's losses: corrections, terms and aggregates against slow references."""

import math
import runpy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import AGGREGATIONS, random_batch

from pspo.losses import (
    DPPO,
    Counts,
    EntropyQuantile,
    LossInputs,
    OffPolicyMask,
    SquaredLogRatio,
    aggregate,
    correction_weights,
    diagnose_correction,
)


@pytest.mark.parametrize("share", ["0.6", "0.55", "0.28", "0.15", "0.07", "1"])
def test_a_share_of_tokens_is_rounded_up_exactly_also_among_equal_ones(share):
    for length in (1, 25, 50, 85, 100, 180):
        x = LossInputs(*random_batch([length]), entropies=torch.rand(1, length).round(decimals=1))
        staying = EntropyQuantile(float(share))(torch.ones(1, length), x).sum()
        assert staying == math.ceil(Fraction(share) * length)


@pytest.mark.parametrize(
    ("mode", "bounds", "expected", "share"),
    [
        ("token_truncate", (3.0,), [2, 3, 0], 0.5),
        ("token_mask", (3.0,), [2, 0, 0], 0.5),
        ("sequence_truncate", (3.0,), [3, 3, 0], 1.0),
        ("sequence_mask", (3.0,), [0, 0, 0], 1.0),
        ("token_truncate", (5.0, 3.0), [3, 4, 0], 0.5),
        ("token_mask", (5.0, 3.0), [0, 4, 0], 0.5),
        ("sequence_truncate", (20.0, 9.0), [9, 9, 0], 1.0),
        ("sequence_mask", (20.0, 9.0), [0, 0, 0], 1.0),
        ("sequence_mask", (20.0, 7.5), [8, 8, 0], 0.0),
    ],
)
def test_values_worked_by_hand(mode, bounds, expected, share):
    old = torch.tensor([[0.5, 0.8, 0.9]]).double().log()
    sampler = torch.tensor([[0.25, 0.2, 0.1]]).double().log()  # ratios 2 and 4, and a masked one
    mask = torch.tensor([[True, True, False]])
    assert correction_weights(old, sampler, mask, mode, *bounds)[0].tolist() == pytest.approx(expected, rel=1e-12)
    tokens = (old[mask], sampler[mask], torch.tensor([0, 0]))
    stats = diagnose_correction(*tokens, mask[mask], mode, *bounds)
    kl = (2 - 1 - math.log(2) + 4 - 1 - math.log(4)) / 2
    assert stats == pytest.approx({"kl_sampler_old": kl, "sampler_ratio_max": 4, "corrected_share": share}, rel=1e-12)
    assert correction_weights(old, old, mask, mode, 1.0, 1.0).tolist() == [[1, 1, 0]]  # at both bounds
    nothing = diagnose_correction(*tokens, ~mask[mask], mode, 3.0)
    assert nothing == {"kl_sampler_old": 0.0, "sampler_ratio_max": 1.0, "corrected_share": 0.0}
    empty = [values[:0] for values in (*tokens, mask[mask])]  # every completion was truncated, and left out
    assert diagnose_correction(*empty, mode, 3.0) == nothing


@pytest.mark.parametrize("seed", range(2))
def test_the_off_policy_mask_leaves_out_rows_of_a_negative_advantage_and_a_large_mean_ratio(seed):
    logprobs, sampler, advantages, mask = random_batch((6, 1, 4, 0, 3), seed)
    losses = torch.ones_like(logprobs)

    def mask_of(advantages):
        logprobs_outside = logprobs.where(mask, math.nan)
        x = LossInputs(logprobs_outside, sampler + 9.0, advantages, mask, losses, sampler_logprobs=sampler)
        return OffPolicyMask(0.05)(losses, x) == 1

    stays = mask_of(advantages)
    for row, stays_in in enumerate(stays[:, 0].tolist()):
        log_r = (sampler - logprobs)[row][mask[row]].tolist()
        assert stays_in != (advantages[row, 0] < 0 and math.fsum(log_r) / max(len(log_r), 1) > 0.05)
    by_token = torch.linspace(-1, 1, 6, dtype=torch.float64) * torch.ones(5, 1)
    is_near = mask_of(torch.full_like(advantages, -1.0))
    assert torch.equal(mask_of(by_token), is_near | (by_token >= 0))


@pytest.mark.parametrize("seed", range(2))
def test_dppo_and_the_squared_log_ratio_are_prime_rls_default_loss(seed):
    """Its `default_loss_fn` at 559b4477, with its dppo_mask_low = dppo_mask_high = 0.2 and kl_tau = 1e-3."""
    logprobs, sampler, advantages, mask = random_batch((6, 1, 4, 0, 3), seed, spread=1.0)
    leaf = logprobs.clamp(max=-0.01).requires_grad_()
    x = LossInputs(leaf, sampler, advantages, mask, torch.zeros_like(leaf))
    losses = SquaredLogRatio(2e-3)(DPPO("tv", 0.2)(leaf, sampler, advantages, mask), x)
    (slopes,) = torch.autograd.grad(losses.sum(), leaf)
    p, q, log_r = leaf.detach().exp(), sampler.exp(), leaf.detach() - sampler
    is_dropped = torch.where(advantages > 0, p - q > 0.2, p - q < -0.2)
    policy_gradient = -advantages * p / q * ~is_dropped
    torch.testing.assert_close(losses.detach(), (policy_gradient + 1e-3 * log_r**2) * mask, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(slopes, (policy_gradient + 2e-3 * log_r) * mask, rtol=1e-12, atol=1e-15)
    assert 0 < (is_dropped & mask).sum() < mask.sum()


LENGTHS = torch.tensor([6, 1, 0, 4, 2, 6, 3, 5])
COUNTS = Counts(27, 8, 10)


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize(("garbage", "seed"), [(math.nan, 0), (math.inf, 1)], ids=str)
def test_value_and_gradient_are_of_exact_divisors_and_garbage_under_the_mask_is_never_seen(how, garbage, seed):
    per_token_loss, _, _, mask = random_batch(LENGTHS.tolist(), seed)
    divisors = {"dapo": torch.tensor(27), "grpo": 8 * LENGTHS.clamp(min=1)[:, None], "dr_grpo": torch.tensor(80)}
    expected = math.fsum((per_token_loss / divisors[how])[mask].tolist())
    dirty = per_token_loss.where(mask, garbage).requires_grad_()
    actual = aggregate(dirty, mask, how, COUNTS)
    assert actual.dtype == torch.float64
    assert actual.shape == ()
    assert actual.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(actual, dirty)
    torch.testing.assert_close(gradient, mask / divisors[how].double(), rtol=1e-14, atol=0)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> SimpleNamespace:
    page = (Path(__file__).parents[1] / "docs/methods/recipes.md").read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("recipes") / "recipes.py"
    path.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.mark.parametrize("recipe", ["PromptMean", "DeltaL"])
def test_recipes_weigh_tokens_as_their_sources_do(recipes, recipe):
    per_token_loss, _, _, mask = random_batch([6, 1, 3, 4])  # two groups of two
    lengths = mask.sum(dim=1)
    rewards = torch.tensor([1.0, 0.0, 0.2, 1.0])
    arguments = {"limit": 10} if recipe == "PromptMean" else {"alpha": 0.5}
    advantages = getattr(recipes, recipe)(**arguments)(rewards, 2, lengths)
    actual = aggregate(-advantages[:, None] * per_token_loss, mask, "dr_grpo", Counts(14, 4, 10)).item()
    A = [0.5, -0.5, -0.4, 0.4]
    rows = [-a * loss[keep].sum().item() for a, loss, keep in zip(A, per_token_loss, mask, strict=True)]
    if recipe == "PromptMean":
        expected = ((rows[0] + rows[1]) / 7 + (rows[2] + rows[3]) / 7) / 2
    else:  # sum_i x_i g_i with x_i = L_i^-alpha / sum_j L_j^-alpha, up to the source's constant 1 / M
        weights = [n**-0.5 for n in (6, 1, 3, 4)]
        expected = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights) / 10
    assert actual == pytest.approx(expected, rel=1e-6)


def test_recipes_filter_by_difficulty_and_adapt_the_entropy_bonus(recipes):
    rewards = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0])
    assert recipes.OfMediumDifficulty(0.3, 0.7)(rewards, 4).tolist() == [0] * 4 + [0.5, 0.5, -0.5, -0.5] + [0] * 4
    term = recipes.AdaptiveEntropy(target=0.5, delta=0.1)
    weights = []  # off after a step that was not below the target
    for step, entropy in enumerate([0.2, 0.4, 0.6, 0.6, 0.1]):
        x = LossInputs(*random_batch([3, 2]), entropies=torch.full((2, 3), entropy), step=step)
        losses = term(torch.zeros(2, 3), x)
        weights.append((-losses / x.entropies).mean().item())
        resumed = recipes.AdaptiveEntropy(target=0.5, delta=0.1)
        resumed.load_state_dict(term.state_dict())
        term = resumed
    assert weights == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.0])
