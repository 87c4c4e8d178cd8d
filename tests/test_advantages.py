"""Group-relative advantages against the scalar oracle; groups of equal rewards get exactly 0."""

import random
import statistics

import pytest
import reference
import torch

from pspo.rollout.advantages import group_relative_advantages

each_scale = pytest.mark.parametrize("scale", ["none", "group", "batch", "rloo", "maxrl"])
REWARDS = [0.0, 0.05, 0.1, 1 / 3, 0.7, 1.0]  # most of them have no exact binary form


@each_scale
@pytest.mark.parametrize("group_size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_oracle(scale, group_size, seed):
    rng = random.Random(seed)
    rewards = [rng.choice(REWARDS) for _ in range(6 * group_size)]
    expected = torch.tensor(reference.group_relative_advantages(rewards, group_size, scale), dtype=torch.float64)
    actual = group_relative_advantages(torch.tensor(rewards, dtype=torch.float64), group_size, scale)
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    single = group_relative_advantages(torch.tensor(rewards), group_size, scale)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=2e-6, atol=1e-7)


def test_values_worked_by_hand():
    rewards = torch.tensor([1.0, 0, 0, 1, 3, 1], dtype=torch.float64)
    assert group_relative_advantages(rewards, 2).tolist() == [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]
    # stds with ddof 1: sqrt(1/2), sqrt(1/2), sqrt(2)
    grouped = group_relative_advantages(rewards, 2, "group", eps=0.0)
    root = 0.5**0.5
    assert grouped.tolist() == pytest.approx([root, -root, -root, root, root, -root], rel=1e-12)
    # the batch: mean 1, squared deviations 0 1 1 0 4 0, variance 6 / 5
    batch = group_relative_advantages(rewards, 2, "batch", eps=0.0)
    assert batch.tolist() == pytest.approx([a / 1.2**0.5 for a in (0.5, -0.5, -0.5, 0.5, 1.0, -1.0)], rel=1e-12)


def test_eps_is_added_to_the_standard_deviation():
    rewards = torch.tensor([0.0, 2.0], dtype=torch.float64)
    for scale in ("group", "batch"):
        a = group_relative_advantages(rewards, 2, scale, eps=0.5)
        assert a.tolist() == pytest.approx([-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)], rel=1e-12)
    default = group_relative_advantages(rewards, 2, "group")
    assert default[1].item() == pytest.approx(1 / (2**0.5 + 1e-4), rel=1e-12)


@each_scale
@pytest.mark.parametrize("reward", [0.0, 0.05, 0.1, 1 / 3, 0.7, 1.0, -2.3, 1e-30, 12345.678])
@pytest.mark.parametrize("group_size", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_gets_exactly_0(scale, reward, group_size, dtype):
    if scale == "maxrl":
        reward = abs(reward)
    equal = torch.full((group_size,), reward, dtype=dtype)
    mixed = torch.linspace(0, 1, group_size, dtype=dtype)
    advantages = group_relative_advantages(torch.cat([equal, mixed, equal]), group_size, scale)
    assert (advantages[:group_size] == 0.0).all()
    assert (advantages[-group_size:] == 0.0).all()
    assert advantages[group_size] < 0 < advantages[2 * group_size - 1]
    alone = group_relative_advantages(equal, group_size, scale)
    assert torch.equal(alone, torch.zeros_like(equal))


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_nearly_equal_rewards_are_not_taken_for_equal(scale):
    rewards = torch.tensor([0.1, 0.1 + 1e-6], dtype=torch.float64)
    advantages = group_relative_advantages(rewards, 2, scale, eps=1.0)
    assert advantages[0] < 0 < advantages[1]


@each_scale
def test_groups_are_independent_and_their_advantages_sum_to_0(scale):
    rewards = torch.tensor([random.Random(1).choice(REWARDS) for _ in range(40)], dtype=torch.float64)
    rewards = rewards[torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    before = rewards.clone()
    advantages = group_relative_advantages(rewards, 4, scale)
    assert torch.equal(rewards, before)
    assert advantages.shape == (40,)
    torch.testing.assert_close(advantages.view(10, 4).sum(dim=1), torch.zeros(10, dtype=torch.float64))
    if scale != "batch":
        first = group_relative_advantages(rewards[:4], 4, scale)
        torch.testing.assert_close(first, advantages[:4], rtol=1e-14, atol=0)
    if scale == "maxrl":
        return
    # a constant added to all rewards changes nothing
    shifted = group_relative_advantages(rewards + 5, 4, scale)
    torch.testing.assert_close(shifted, advantages, rtol=1e-9, atol=1e-12)


def test_maxrl_weighs_the_successes_of_a_group_by_their_inverse_number():
    """Of binary rewards: 1 / successes - 1 / n of each success, -1 / n of each failure, times n."""
    rewards = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    expected = [4 / 1 - 1, -1, -1, -1, 4 / 3 - 1, 4 / 3 - 1, 4 / 3 - 1, -1, 0, 0, 0, 0]
    assert group_relative_advantages(rewards, 4, "maxrl").tolist() == pytest.approx(expected, rel=1e-12)
    # a common factor of the rewards changes nothing
    assert group_relative_advantages(rewards / 8, 4, "maxrl").tolist() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"--algorithm\.advantage_scale maxrl divides"):
        group_relative_advantages(rewards - 0.5, 4, "maxrl")


@pytest.mark.parametrize("scale", ["none", "group", "batch", "maxrl"])
def test_unknown_rewards_count_neither_in_means_nor_in_deviations(scale):
    nan = float("nan")
    rewards = torch.tensor([1.0, 0, nan, nan, 3, 1, 2, nan, 1, nan, nan, nan] + [nan] * 4, dtype=torch.float64)
    advantages = group_relative_advantages(rewards, 4, scale)
    known = torch.tensor([0, 1, 4, 5, 6])
    std = statistics.stdev([1, 0, 3, 1, 2, 1]) + 1e-4 if scale == "batch" else 1
    of_groups = (([1.0, 0], 2), ([3.0, 1, 2], 3))
    alone = [reference.group_relative_advantages(*of, "none" if scale == "batch" else scale) for of in of_groups]
    assert advantages[known].tolist() == pytest.approx([a / std for a in [*alone[0], *alone[1]]], rel=1e-12)
    advantages[known] = 0.0
    assert torch.equal(advantages, torch.zeros_like(advantages))


def test_rloo_leaves_out_the_own_reward_and_unknown_ones():
    nan = float("nan")
    rewards = torch.tensor([1.0, 0, 0, 3, 1, nan, 0, nan, 1, nan, nan, nan], dtype=torch.float64)
    expected = [0, -4 / 3, -4 / 3, 3 - 1 / 3, 1, 0, -1, 0, 0, 0, 0, 0]
    assert group_relative_advantages(rewards, 4, "rloo").tolist() == pytest.approx(expected, rel=1e-12)
    none = group_relative_advantages(rewards[:4], 4)
    torch.testing.assert_close(group_relative_advantages(rewards[:4], 4, "rloo"), none * 4 / 3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_reward_types_give_float32(dtype):
    advantages = group_relative_advantages(torch.tensor([1, 0, 0, 0], dtype=dtype), 4)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("group_size", [1, 0, -2, 4, 5])
def test_group_sizes_that_do_not_fit(group_size):
    with pytest.raises(ValueError, match=str(group_size)):
        group_relative_advantages(torch.zeros(6), group_size)


@pytest.mark.parametrize("scale", ["mean", "None", ""])
def test_unknown_scale(scale):
    with pytest.raises(ValueError, match=f"{scale}.*none, group, batch, rloo or maxrl"):
        group_relative_advantages(torch.zeros(4), 2, scale)
