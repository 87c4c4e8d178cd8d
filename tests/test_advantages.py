"""Group-relative advantages against the scalar oracle; groups of equal rewards get exactly 0."""

import random
import statistics

import pytest
import reference
import torch

from pspo.losses import UserCodeError
from pspo.rollout import Experience, Rollout, estimate_advantages
from pspo.rollout.advantages import gdpo, group_relative_advantages

each_scale = pytest.mark.parametrize("scale", ["none", "group", "batch", "rloo", "maxrl"])
REWARDS = [0.0, 0.05, 0.1, 1 / 3, 0.7, 1.0]  # most of them have no exact binary form
NAN = float("nan")


@each_scale
@pytest.mark.parametrize(("group_size", "how"), [(2, {}), (3, {}), (8, {"eps": 0.5})], ids=str)
def test_equals_the_oracle(scale, group_size, how):
    rng = random.Random(group_size)
    rewards = [rng.choice(REWARDS) for _ in range(6 * group_size)]
    expected = torch.tensor(reference.group_relative_advantages(rewards, group_size, scale, **how), dtype=torch.float64)
    given = torch.tensor(rewards, dtype=torch.float64)
    actual = group_relative_advantages(given, group_size, scale, **how)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    assert given.tolist() == rewards
    single = group_relative_advantages(given.float(), group_size, scale, **how)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=2e-6, atol=1e-7)


@each_scale
@pytest.mark.parametrize(("reward", "dtype"), [(0.1, torch.float32), (0.7, torch.float64), (1e-30, torch.float32)])
def test_a_group_of_equal_rewards_gets_exactly_0(scale, reward, dtype):
    for group_size in (2, 3, 7, 64):
        equal, mixed = torch.full((group_size,), reward, dtype=dtype), torch.linspace(0, 1, group_size, dtype=dtype)
        advantages = group_relative_advantages(torch.cat([equal, mixed, equal]), group_size, scale)
        assert (advantages[:group_size] == 0.0).all()
        assert (advantages[-group_size:] == 0.0).all()
        assert advantages[group_size] < 0 < advantages[2 * group_size - 1]
        assert (group_relative_advantages(equal, group_size, scale) == 0.0).all()


@each_scale
def test_unknown_rewards_count_neither_in_means_nor_in_deviations(scale):
    rewards = [[1.0, 0, NAN, NAN], [3, 1, 2, NAN], [1, NAN, NAN, NAN], [NAN] * 4]
    advantages = group_relative_advantages(torch.tensor(rewards, dtype=torch.float64).flatten(), 4, scale)
    std = statistics.stdev([1, 0, 3, 1, 2, 1]) + 1e-4 if scale == "batch" else 1
    for row, group in zip(advantages.view(4, 4).tolist(), rewards, strict=True):
        known = [reward for reward in group if reward == reward]
        expected = [0.0] * len(known)
        if len(known) > 1:
            expected = reference.group_relative_advantages(known, len(known), "none" if scale == "batch" else scale)
        assert row == pytest.approx([a / std for a in expected] + [0.0] * (4 - len(known)), rel=1e-12)


@pytest.mark.parametrize(("group_size", "seed"), [(2, 0), (4, 1)])
def test_gdpo_equals_the_oracle(group_size, seed):
    """Functions of other scales; one that is unknown leaves its row to the others; an equal group has exactly 0."""
    rng = random.Random(seed)
    rewards = [[scale * rng.choice(REWARDS) for _ in range(5 * group_size)] for scale in (1.0, 30.0)]
    for row in rewards:
        row[:group_size] = [row[0]] * group_size
    weights, tensors = [1.0, 0.25], {i: torch.tensor(row, dtype=torch.float64) for i, row in enumerate(rewards)}
    actual = gdpo(sum(tensors.values()), group_size, tensors, weights)
    assert actual.tolist() == pytest.approx(reference.gdpo(rewards, weights, group_size), rel=1e-12, abs=1e-15)
    assert actual[:group_size].tolist() == [0.0] * group_size
    unknown = torch.where(torch.arange(5 * group_size) == group_size, NAN, sum(tensors.values()))  # of the total alone
    without = {i: row.where(~unknown.isnan(), NAN) for i, row in tensors.items()}
    assert torch.equal(gdpo(unknown, group_size, tensors, weights), gdpo(unknown, group_size, without, weights))
    nothing = {i: torch.full_like(row, NAN) for i, row in tensors.items()}
    assert not gdpo(sum(nothing.values()), group_size, nothing, weights).any()
    assert not gdpo(torch.zeros(group_size), group_size, {}, []).any()  # a distillation without rewards


def make_experience(rewards):
    """Scored rows of 1, 2, ... tokens, by two functions of which the second gives nothing."""
    n = len(rewards)
    mask = torch.arange(n) < torch.arange(1, n + 1)[:, None]
    ids, by_name = torch.zeros(n, n, dtype=torch.long), {"a": rewards, "b": [0.0] * n}
    rollout = Rollout(ids, ids == 0, ids, mask, torch.arange(n) > 0, [""] * n)
    return Experience([0], rollout, torch.tensor(rewards, dtype=torch.float64), by_name, rewards, 0)


def test_a_function_gets_what_its_signature_names():
    seen = {}

    def estimator(rewards, group_size, lengths, mask, truncated, rewards_by_function, weights, problems):
        seen.update({name: getattr(value, "tolist", lambda value=value: value)() for name, value in locals().items()})
        return rewards[:, None] * mask

    advantages = estimate_advantages(make_experience([1.0, 2.0, NAN]), estimator, 3, ["p"] * 3, [0.5, 2.0])
    assert advantages.tolist() == [[1, 0, 0], [2, 2, 0], [0, 0, 0]]
    assert seen["lengths"] == [1, 2, 3]
    assert seen["truncated"] == [True, False, False]
    assert seen["mask"] == [[True, False, False], [True, True, False], [True, True, True]]
    assert (seen["group_size"], seen["weights"], seen["problems"]) == (3, [0.5, 2.0], ["p"] * 3)
    assert seen["rewards_by_function"]["b"].tolist() == [0.0] * 3

    experience = make_experience([1.0, 0.0])
    assert estimate_advantages(experience, "gdpo", 2, []).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-3)


@pytest.mark.parametrize("returned", [torch.zeros(3), torch.tensor([1.0, NAN]), None])
def test_a_function_that_returns_something_else_is_refused(returned):
    with pytest.raises(UserCodeError):
        estimate_advantages(make_experience([1.0, 0.0]), lambda rewards, group_size: returned, 2, [])
