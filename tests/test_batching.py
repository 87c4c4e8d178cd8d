"""Rows to optimizer steps and microbatches, and the order of prompts."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from naive import T_MAX, G, make_config, make_rollout

from pspo.losses import P3O, NoClip
from pspo.rollout import prompt_order
from pspo.rollout.batching import split_minibatches


@dataclass(frozen=True)
class Kept(NoClip):
    """NoClip that does not say that it is silent where A = 0."""

    silent_at_zero_advantage = False


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
    for size, minibatch in zip(sizes, minibatch_list, strict=True):
        counts, batches = minibatch.counts, minibatch.batches
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
    (minibatch,) = split_minibatches(rollout, advantages, config)
    assert sum(batch.rollout.completion_ids.numel() for batch in minibatch.batches) <= 1.15 * int(lengths.sum())


def test_a_prompt_counts_for_every_row_where_it_is_not_shared():
    """Ranks with shards and models with states compute prompts row by row; others once for the rows of a prompt."""
    rollout, advantages = make_rollout(8)
    config = make_config(Kept(), optimizer={"microbatch_tokens": 120})
    plain = split_minibatches(rollout, advantages, config)[0].batches
    assert all(padded_tokens(batch) == batch.padded_tokens() for batch in plain)
    unshared = split_minibatches(rollout, advantages, config, shares_prompts=False)[0].batches
    assert len(unshared) > len(plain)
    assert all(padded_tokens(batch, group_size=1) <= 120 for batch in unshared)
    assert all(padded_tokens(batch, group_size=1) == batch.padded_tokens(shared=False) for batch in unshared)


def test_rows_left_out_are_counted():
    rollout, advantages = make_rollout()
    for surrogate in (NoClip(), P3O(), P3O(kl_coef=0.5)):
        (minibatch,) = split_minibatches(rollout, advantages, make_config(surrogate))
        counts, batches = minibatch.counts, minibatch.batches
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
