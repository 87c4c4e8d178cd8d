"""Correction weights against a slow reference, on hostile inputs, and the switches that need them."""

import math

import pytest
import reference
import torch

from pspo.config import AlgorithmConfig, DistributedConfig, RolloutConfig, TrainConfig
from pspo.losses import correction_ratios, correction_weights, diagnose_correction

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
each_mode = pytest.mark.parametrize("mode", MODES)


def make_batch(seed, spread=0.7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 6, generator=generator, dtype=dtype)
    sampler = old - spread * torch.randn(5, 6, generator=generator, dtype=dtype)
    return old, sampler, torch.arange(6) < torch.tensor([6, 1, 4, 0, 3])[:, None]


@each_mode
@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_reference(mode, cap, seed):
    old, sampler, mask = make_batch(seed)
    rows = zip(old.tolist(), sampler.tolist(), mask.tolist(), strict=True)
    expected = torch.tensor([reference.correction_weights(*row, mode, cap) for row in rows], dtype=torch.float64)
    actual = correction_weights(old.requires_grad_(), sampler, mask, mode, cap)
    assert not actual.requires_grad
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    garbage = sampler.where(mask, math.nan)
    assert torch.equal(correction_weights(old, garbage, mask, mode, cap), actual)


@each_mode
def test_values_worked_by_hand(mode):
    old = torch.tensor([[0.5, 0.8, 0.9]]).double().log()
    sampler = torch.tensor([[0.25, 0.2, 0.1]]).double().log()  # ratios 2 and 4, and a masked one
    mask = torch.tensor([[True, True, False]])
    expected = {"token_truncate": [2, 3, 0], "token_mask": [2, 0, 0]}.get(
        mode, [3 * mode.endswith("truncate")] * 2 + [0]
    )
    weights = correction_weights(old, sampler, mask, mode, 3.0)
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-12)
    kl = (2 - 1 - math.log(2) + 4 - 1 - math.log(4)) / 2
    ratios = correction_ratios(old, sampler, mask, mode)
    stats = diagnose_correction(old, sampler, ratios, mask, 3.0)
    assert stats["kl_sampler_old"] == pytest.approx(kl, rel=1e-12)
    assert stats["sampler_ratio_max"] == pytest.approx(4, rel=1e-12)
    assert stats["corrected_share"] == (0.5 if mode.startswith("token") else 1.0)
    assert diagnose_correction(old, old, torch.ones_like(old), mask, 1.0)["corrected_share"] == 0.0  # at the cap
    nothing = diagnose_correction(old, sampler, ratios, mask & False, 3.0)
    assert nothing == {"kl_sampler_old": 0.0, "sampler_ratio_max": 1.0, "corrected_share": 0.0}


@each_mode
@pytest.mark.parametrize("distance", [-1e30, -200.0, 200.0, 1e30])
def test_finite_and_bounded_at_extreme_ratios(mode, distance):
    old = torch.zeros(2, 3000)
    weights = correction_weights(old, old + distance, old == 0, mode, 3.0)
    assert weights.isfinite().all()
    assert weights.max() <= 3.0
    ratios = correction_ratios(old, old + distance, old == 0, mode)
    stats = diagnose_correction(old, old + distance, ratios, old == 0, 3.0)
    assert stats["corrected_share"] == (distance < 0)  # a product that underflows is below the cap


def test_unknown_mode():
    old, sampler, mask = make_batch(0)
    for mode in ("none", "token", "sequence_cap"):
        with pytest.raises(ValueError, match="token_truncate, token_mask, sequence_truncate, sequence_mask"):
            correction_weights(old, sampler, mask, mode, 3.0)


@pytest.mark.parametrize(
    "section",
    [
        {"rollout": RolloutConfig(decoder="hf")},
        {"rollout": RolloutConfig(repetition_penalty=1.1)},
        {"distributed": DistributedConfig("fsdp2", rollout="synced")},
    ],
    ids=str,
)
def test_samplers_that_keep_no_logprobs_are_refused(section):
    TrainConfig(**section)
    with pytest.raises(ValueError, match=r"--algorithm\.correction must be none .*got 'token_mask'"):
        TrainConfig(algorithm=AlgorithmConfig(correction="token_mask"), **section)
