"""Aggregation: values against the scalar oracle, masks and counts; `test_update.py` has what changes nothing."""

import dataclasses
import math

import pytest
import reference
import torch
from batches import random_batch

from pspo.losses import Counts, aggregate

HOWS = ["dapo", "grpo", "dr_grpo"]
each_how = pytest.mark.parametrize("how", HOWS)
LENGTHS = torch.tensor([6, 1, 0, 4, 2, 6, 3, 5])
COUNTS = Counts(27, 8, 10)


@each_how
@pytest.mark.parametrize(("garbage", "seed"), [(math.nan, 0), (math.inf, 1)], ids=str)
def test_value_and_gradient_equal_the_oracle_and_garbage_under_the_mask_is_never_seen(how, garbage, seed):
    per_token_loss, _, _, mask = random_batch(LENGTHS.tolist(), seed)
    expected = reference.aggregate(per_token_loss.tolist(), mask.tolist(), how, **dataclasses.asdict(COUNTS))
    dirty = per_token_loss.where(mask, garbage).requires_grad_()
    actual = aggregate(dirty, mask, how, COUNTS)
    assert actual.dtype == torch.float64
    assert actual.shape == ()
    assert actual.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(actual, dirty)
    divisors = {"dapo": torch.tensor(27), "grpo": 8 * LENGTHS.clamp(min=1)[:, None], "dr_grpo": torch.tensor(80)}
    torch.testing.assert_close(gradient, mask / divisors[how].double(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("how", "expected"), [("dapo", 15 / 4), ("grpo", (2 + 9) / 3), ("dr_grpo", 15 / 60)])
def test_values_worked_by_hand(how, expected):
    per_token_loss = torch.tensor([[1.0, 2, 3], [9, 100, 100], [100, 100, 100]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert aggregate(per_token_loss, mask, how, Counts(4, 3, 20)).item() == pytest.approx(expected, rel=1e-6)


@each_how
@pytest.mark.parametrize("tokens", [0, 7])
def test_an_all_masked_microbatch_is_0_with_gradient_0(how, tokens):
    # tokens = 0: nothing in the whole minibatch; 7: the other microbatches hold them
    per_token_loss = torch.randn(3, 4, requires_grad=True)
    loss = aggregate(per_token_loss, torch.zeros(3, 4, dtype=torch.bool), how, Counts(tokens, 3, 4))
    (gradient,) = torch.autograd.grad(loss, per_token_loss)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 4))
