"""Aggregation: values against the scalar oracle, and the same loss and gradient however a minibatch is split."""

import dataclasses
import math

import pytest
import reference
import torch

from pspo.losses import P3O, PSPO, SAPO, TOPR, Clip, Counts, NoClip, aggregate

HOWS = ["dapo", "grpo", "dr_grpo"]
each_how = pytest.mark.parametrize("how", HOWS)
SURROGATES = [Clip(), NoClip(), PSPO(), P3O(kl_coef=0.2), SAPO(), TOPR()]


def make_minibatch(seed=0, rows=8, length=6, dtype=torch.float64):
    """logprobs, old_logprobs, advantages, mask (lengths 0 to ``length``, at least one row fully masked), counts."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator, dtype=dtype) * 3
    logprobs = old + 0.5 * torch.randn(rows, length, generator=generator, dtype=dtype)
    advantages = torch.randn(rows, 1, generator=generator, dtype=dtype)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    lengths[2] = 0
    mask = torch.arange(length) < lengths
    return logprobs, old, advantages, mask, Counts(int(mask.sum()), rows, 10)


def loss_and_gradient(surrogate, how, microbatches, counts, logprobs):
    """Sum over microbatches (lists of row indices), as gradient accumulation does; gradient (B, T)."""
    leaf = logprobs[0].clone().requires_grad_()
    total = 0.0
    for rows in microbatches:
        batch = (leaf[rows], *(tensor[rows] for tensor in logprobs[1:]))
        loss = aggregate(surrogate(*batch), batch[3], how, counts)
        loss.backward()
        total += loss.item()
    return total, leaf.grad


@each_how
@pytest.mark.parametrize("seed", range(10))
def test_equals_the_oracle(how, seed):
    per_token_loss, _, _, mask, counts = make_minibatch(seed)
    expected = reference.aggregate(per_token_loss.tolist(), mask.tolist(), how, **dataclasses.asdict(counts))
    actual = aggregate(per_token_loss, mask, how, counts)
    assert actual.shape == ()
    assert actual.dtype == torch.float64
    assert actual.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("how", "expected"), [("dapo", 15 / 4), ("grpo", (2 + 9) / 3), ("dr_grpo", 15 / 60)])
def test_values_worked_by_hand(how, expected):
    per_token_loss = torch.tensor([[1.0, 2, 3], [9, 100, 100], [100, 100, 100]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert aggregate(per_token_loss, mask, how, Counts(4, 3, 20)).item() == pytest.approx(expected, rel=1e-6)


@each_how
def test_gradient_is_each_tokens_weight(how):
    per_token_loss, _, _, mask, counts = make_minibatch()
    per_token_loss.requires_grad_()
    (gradient,) = torch.autograd.grad(aggregate(per_token_loss, mask, how, counts), per_token_loss)
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    weight = {
        "dapo": torch.full_like(lengths, counts.tokens),
        "grpo": counts.sequences * lengths,
        "dr_grpo": torch.full_like(lengths, counts.sequences * counts.max_completion_tokens),
    }[how]
    torch.testing.assert_close(gradient, mask / weight.double(), rtol=1e-14, atol=0)


# ---------------------------------------------------------------- invariances

ONE_BY_EIGHT = [list(range(8))]
SPLITS = {
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4x2": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "8x1": [[row] for row in range(8)],
    "uneven, out of order": [[7, 0, 3], [5], [1, 2, 6, 4]],
}


@each_how
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_any_split_gives_the_same_loss_and_gradient(how, split, surrogate):
    *tensors, counts = make_minibatch()
    loss, gradient = loss_and_gradient(surrogate, how, ONE_BY_EIGHT, counts, tensors)
    split_loss, split_gradient = loss_and_gradient(surrogate, how, split, counts, tensors)
    assert split_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=0)


@each_how
@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_row_order_changes_nothing(how, surrogate):
    *tensors, counts = make_minibatch()
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    loss, gradient = loss_and_gradient(surrogate, how, ONE_BY_EIGHT, counts, tensors)
    shuffled = [tensor[order] for tensor in tensors]
    other_loss, other_gradient = loss_and_gradient(surrogate, how, ONE_BY_EIGHT, counts, shuffled)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(other_gradient, gradient[order], rtol=1e-12, atol=0)


@each_how
@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
def test_more_padding_changes_nothing(how, surrogate):
    logprobs, old, advantages, mask, counts = make_minibatch()
    pad = torch.nn.functional.pad
    wide = [pad(logprobs, (0, 5), value=math.nan), pad(old, (0, 5), value=-1e30), advantages, pad(mask, (0, 5))]
    narrow_result = loss_and_gradient(surrogate, how, ONE_BY_EIGHT, counts, [logprobs, old, advantages, mask])
    wide_result = loss_and_gradient(surrogate, how, ONE_BY_EIGHT, counts, wide)
    assert wide_result[0] == pytest.approx(narrow_result[0], rel=1e-12)
    torch.testing.assert_close(wide_result[1][:, :6], narrow_result[1], rtol=1e-12, atol=0)
    assert (wide_result[1][:, 6:] == 0).all()


# ---------------------------------------------------------------- masks and counts


@each_how
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30], ids=str)
def test_garbage_under_the_mask_is_never_seen(how, garbage):
    per_token_loss, _, _, mask, counts = make_minibatch()
    clean = aggregate(per_token_loss, mask, how, counts)
    dirty = torch.where(mask, per_token_loss, garbage).requires_grad_()
    loss = aggregate(dirty, mask, how, counts)
    (gradient,) = torch.autograd.grad(loss, dirty)
    assert torch.equal(loss.detach(), clean)
    assert (gradient[~mask] == 0).all()
    assert gradient.isfinite().all()


@each_how
@pytest.mark.parametrize("tokens", [0, 7])
def test_an_all_masked_microbatch_is_0_with_gradient_0(how, tokens):
    # tokens = 0: nothing in the whole minibatch; 7: the other microbatches hold them
    per_token_loss = torch.randn(3, 4, requires_grad=True)
    loss = aggregate(per_token_loss, torch.zeros(3, 4, dtype=torch.bool), how, Counts(tokens, 3, 4))
    (gradient,) = torch.autograd.grad(loss, per_token_loss)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 4))


@each_how
def test_the_denominator_comes_from_counts_and_not_from_the_microbatch(how):
    per_token_loss, _, _, mask, counts = make_minibatch()
    base = aggregate(per_token_loss, mask, how, counts).item()
    uses = {"dapo": {"tokens"}, "grpo": {"sequences"}, "dr_grpo": {"sequences", "max_completion_tokens"}}[how]
    for name in ("tokens", "sequences", "max_completion_tokens"):
        doubled = dataclasses.replace(counts, **{name: 2 * getattr(counts, name)})
        factor = 0.5 if name in uses else 1.0
        assert aggregate(per_token_loss, mask, how, doubled).item() == pytest.approx(factor * base, rel=1e-12)


def test_the_three_weigh_long_answers_differently():
    # A row of 1 token and one of 4, all losses 1: equal per row under grpo, by length under the others.
    mask = torch.tensor([[True, False, False, False], [True] * 4])
    share = {}
    for how in HOWS:
        per_token_loss = torch.ones(2, 4, requires_grad=True)
        loss = aggregate(per_token_loss, mask, how, Counts(5, 2, 8))
        (gradient,) = torch.autograd.grad(loss, per_token_loss)
        share[how] = (gradient.sum(dim=1) / gradient.sum()).tolist()
    assert share["grpo"] == pytest.approx([0.5, 0.5])
    assert share["dapo"] == share["dr_grpo"] == pytest.approx([0.2, 0.8])


def test_counts_are_frozen():
    counts = Counts(tokens=5, sequences=2, max_completion_tokens=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        counts.tokens = 6


@pytest.mark.parametrize("how", ["mean", "DAPO", "", "bnpo"])
def test_an_unknown_aggregation_is_named_with_the_choices(how):
    with pytest.raises(ValueError, match=f"{how}.*dapo, grpo or dr_grpo"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), how, Counts(1, 1, 1))
