"""A split changes nothing: the gradient of a minibatch in parts, in another order, in wider padding is the same.

Other trainers have had bugs in this. A test first writes their flawed mean down and sees it change; then `aggregate`,
with the minibatch's counts, must not.
"""

import math

import pytest
import torch
from batches import random_batch

from pspo.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    P3O,
    PSPO,
    REINFORCE,
    SAPO,
    TOPR,
    VESPO,
    Clip,
    Counts,
    NoClip,
    aggregate,
)

LENGTHS = (12, 1, 9, 5, 0, 3, 11, 2)
COUNTS = Counts(tokens=43, sequences=8, max_completion_tokens=16)
WHOLE = [list(range(8))]
SPLITS = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "unequal parts": [[0], [1, 2, 3, 4, 5, 6], [7]],
    "single rows": [[row] for row in range(8)],
    "two ranks": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "shuffled": [[7, 0, 3], [5], [1, 2, 6, 4]],
}
SURROGATES = [Clip(), NoClip(), PSPO(), P3O(kl_coef=0.2), SAPO(), TOPR(), REINFORCE(), CISPO(), GSPO(0.1, 0.2), GMPO()]
each_surrogate = pytest.mark.parametrize("surrogate", [*SURROGATES, VESPO(), DPPO()], ids=repr)
each_how = pytest.mark.parametrize("how", ["dapo", "grpo", "dr_grpo"])


@pytest.fixture
def batch():
    return random_batch(LENGTHS, spread=0.3)


def loss_and_gradient(batch, loss, parts=WHOLE):
    """Sum and gradient over the parts, lists of rows, each one's loss by ``loss(new, old, advantages, mask)``."""
    leaf, total = batch[0].clone().requires_grad_(), 0.0
    for rows in parts:
        part = loss(*(tensor[rows] for tensor in (leaf, *batch[1:])))
        part.backward()
        total += part.item()
    return total, leaf.grad


def gradient(*args):
    return loss_and_gradient(*args)[1]


def aggregated(surrogate, how):
    return lambda *batch: aggregate(surrogate(*batch), batch[3], how, COUNTS)


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS)
@each_how
@each_surrogate
def test_any_split_gives_the_same_loss_and_gradient(batch, surrogate, how, parts):
    loss, whole = loss_and_gradient(batch, aggregated(surrogate, how))
    split_loss, split = loss_and_gradient(batch, aggregated(surrogate, how), parts)
    assert split_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=0)


@each_how
@each_surrogate
def test_more_padding_changes_nothing(batch, surrogate, how):
    wide = [
        torch.nn.functional.pad(batch[i], (0, 4), value=garbage) for i, garbage in ((0, math.nan), (1, -1e30), (3, 0))
    ]
    loss, narrow = loss_and_gradient(batch, aggregated(surrogate, how))
    wide_loss, padded = loss_and_gradient((*wide[:2], batch[2], wide[2]), aggregated(surrogate, how))
    assert wide_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(padded[:, :12], narrow, rtol=1e-12, atol=0)
    assert (padded[:, 12:] == 0).all()


@pytest.mark.parametrize("parts", [SPLITS["halves"], SPLITS["two ranks"]], ids=["microbatches", "ranks"])
def test_a_mean_of_token_means_changes_with_the_split(batch, parts):
    """It weighs a token by its microbatch or rank: transformers until 4.46, TRL's bnpo."""

    def token_mean(*batch):
        return NoClip()(*batch)[batch[3]].mean()

    whole = gradient(batch, token_mean)
    assert relative(gradient(batch, lambda *part: token_mean(*part) / len(parts), parts), whole) > 0.2
    assert relative(gradient(batch, aggregated(NoClip(), "dapo"), parts), whole) < 1e-6


def test_a_mean_over_columns_changes_with_the_longest_row(batch):
    """verl's without loss_scale_factor."""

    def column_mean(*batch):
        return (NoClip()(*batch) * batch[3]).sum() / batch[3].numel()

    wide = [torch.nn.functional.pad(tensor, (0, 4)) if tensor.shape[1] > 1 else tensor for tensor in batch]
    assert relative(gradient(wide, column_mean)[:, :12], gradient(batch, column_mean)) == pytest.approx(1 - 12 / 16)


@each_how
def test_rows_that_are_masked_out_keep_their_place_in_the_mean_of_sequences(batch, how):
    """A mean over the rows that are left weighs them by how many are not: verl's without global_batch_size."""

    def mean_of_rows_left(*batch):
        lengths = batch[3].sum(dim=1)
        return (NoClip()(*batch).sum(dim=1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum()

    *rest, mask = batch
    masked = mask.clone()
    masked[[0, 3, 6]] = False
    kept = [1, 2, 5, 7]
    for loss, change in ((mean_of_rows_left, 7 / 4 - 1), (aggregated(NoClip(), how), 0.0)):
        before, after = (gradient((*rest, each), loss)[kept] for each in (mask, masked))
        assert relative(after, before) == pytest.approx(change, abs=1e-12)
