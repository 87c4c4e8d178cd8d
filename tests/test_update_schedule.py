"""The off-policy schedule of an update: which passes it makes, where it stops, what it does when a step fails."""

import dataclasses
import math
from unittest import mock

import pytest
import reference
import torch
from batches import packing
from naive import OFF_POLICY, TEMPERATURE, G, assert_equals_naive, make_config, make_learner, make_rollout, run, weights
from processes import one_layer

import pspo.distributed
import pspo.rollout.types
import pspo.update.learner
from pspo.config import ModelConfig
from pspo.losses import GSPO, PSPO, TOPR, NoClip, Surrogate, log_ratio
from pspo.update import step as update_step
from pspo.update import update
from pspo.update.batching import make_batch, split_microbatches, split_minibatches
from pspo.update.tokens import TokenRecord


@pytest.mark.parametrize("mode", ["none", "bf16"])
def test_ratios_are_exactly_1_while_the_weights_stand_still(tiny_model, mode):
    """Old and new log-probs come from identical shapes, with and without gradient."""
    config = make_config(epochs=2, minibatches=3, beta=0.1)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, autocast=mode))
    _, metrics = run(tiny_model(), *make_rollout(), config, sgd=0.0)
    assert len(metrics) == 6
    for step in metrics:
        assert step["ratio_min"] == step["ratio_max"] == 1.0
        assert step["kl_old_new"] == step["tv"] == step["kl_reference"] == 0.0


@pytest.mark.parametrize(("epochs", "minibatches", "beta"), [(1, 1, 0.0), (3, 1, 0.0), (2, 4, 0.0), (2, 2, 0.3)])
def test_no_forward_pass_more_than_needed(policy, monkeypatch, epochs, minibatches, beta):
    rollout, advantages = make_rollout()
    advantages[advantages == 0] = 0.1
    passes = {"train": 0, "old": 0, "reference": 0}
    config = make_config(epochs=epochs, minibatches=minibatches, beta=beta)
    learner = make_learner(policy, config)

    def counted(original):
        def count(model, ids, *args):
            rows = ids[0] if isinstance(ids, tuple) else ids
            grad = torch.is_grad_enabled()
            passes["reference" if model is learner.reference else "train" if grad else "old"] += len(rows)
            assert not (grad and model is learner.reference)
            return original(model, ids, *args)

        return count

    monkeypatch.setattr(update_step, "hidden_states", counted(update_step.hidden_states))
    monkeypatch.setattr(pspo.rollout.types, "token_logprobs", counted(pspo.rollout.types.token_logprobs))
    update(learner, rollout, advantages, config)
    B = len(rollout)  # old log-probs of the first minibatch's rows need no pass
    assert passes == {"train": epochs * B, "old": B - B // minibatches, "reference": B if beta else 0}


@pytest.mark.parametrize("switches", [{}, {"mask_truncated": True}, {"shuffle": True, "epochs": 5}], ids=str)
def test_a_minibatch_without_signal_still_steps(policy, switches):
    """AdamW's momentum moves the weights on. The row that stands for it is recorded, if shuffled another each time."""
    rollout, advantages = make_rollout()
    advantages[G:] = 0.0
    if "mask_truncated" in switches:
        rollout = dataclasses.replace(rollout, terminated=torch.arange(4 * G) < G)
        advantages = advantages + 0.3
    config = make_config(**OFF_POLICY | switches)
    metrics = assert_equals_naive(policy, rollout, advantages, config)
    assert [step["grad_norm"] == 0.0 for step in metrics].count(True) == len(metrics) / 2
    assert all(math.isfinite(value) for step in metrics for value in step.values())
    learner = make_learner(policy, config)
    learner.record = TokenRecord(len(rollout))
    update(learner, rollout, advantages, config)
    old = reference.batch_logprobs(policy, rollout.token_ids, TEMPERATURE)
    for visit in learner.record.visits:
        torch.testing.assert_close(torch.tensor(visit["old_logprob"]), old[visit["row"], visit["position"]])


def test_max_steps_stops_in_the_middle_of_a_rollout(policy):
    config = make_config(epochs=3, minibatches=2, max_steps=3, optimizer={"lr": 3e-3})
    assert len(assert_equals_naive(policy, *make_rollout(), config)) == 3


@dataclasses.dataclass(frozen=True)
class Broken(Surrogate):
    """NoClip that goes wrong at one optimizer step, in the loss or in its gradient only."""

    learner: list
    step: int
    kind: str

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        loss = torch.where(mask, -log_ratio(logprobs, old_logprobs, mask).exp() * advantages, 0.0)
        if self.learner[0].steps != self.step:
            return loss
        if self.kind == "gradient":  # the square root's slope at 0 is infinite, and 0 times that is NaN
            return loss + torch.where(mask, ((logprobs - logprobs.detach()) * 0.0).sqrt(), 0.0)
        return loss * float(self.kind)


@pytest.mark.parametrize(("step", "kind"), [(0, "nan"), (1, "inf"), (1, "gradient")])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_non_finite_step_never_reaches_the_weights(policy, step, kind):
    """What is left is as if that epoch had not been: the same weights as one epoch less, to the bit."""
    rollout, advantages = make_rollout()
    holder = []
    config = make_config(Broken(holder, step, kind), epochs=3, optimizer={"lr": 3e-3})
    holder.append(make_learner(policy, config))
    metrics = update(holder[0], rollout, advantages, config)
    assert [metric["step_skipped"] for metric in metrics] == [float(i == step) for i in range(3)]
    assert not math.isfinite(metrics[step]["loss"] + metrics[step]["grad_norm"])
    assert holder[0].steps == 3

    shorter = make_config(Broken([holder[0]], -1, kind), epochs=2, optimizer={"lr": 3e-3})
    expected, _ = run(policy, rollout, advantages, shorter)
    assert torch.isfinite(expected).all()
    assert torch.equal(weights(holder[0].policy), expected)


def test_a_step_that_raises_leaves_nothing_to_the_next_one(policy, monkeypatch):
    """Of an error in the second microbatch, which a loop of a user's own may catch."""
    rollout, advantages = make_rollout()
    config = make_config(epochs=1, optimizer={"lr": 3e-3})
    expected, _ = run(policy, rollout, advantages, config)
    learner = make_learner(policy, config)
    effects = [mock.DEFAULT, ValueError("once"), *[mock.DEFAULT] * 9]
    monkeypatch.setattr(update_step, "backward", mock.Mock(wraps=update_step.backward, side_effect=effects))
    with pytest.raises(ValueError, match="once"):
        update(learner, rollout, advantages, config)
    update(learner, rollout, advantages, config)
    assert torch.equal(weights(learner.policy), expected)


def fails_above(function, rows: int, calls: list[int]):
    """A pass that works, gradient and all, and only then finds no memory, where its batch has more rows."""

    def wrapper(first, batch, *args, **named):
        result = function(first, batch, *args, **named)
        calls.append(len(batch.rollout))
        if calls[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    return wrapper


@pytest.mark.parametrize(("surrogate", "rows"), [(TOPR(), 1), (GSPO(0.1, 0.2), 2), (PSPO(0.3), 3)], ids=repr)
def test_a_step_that_runs_out_of_memory_is_repeated_with_the_same_result(policy, monkeypatch, capsys, surrogate, rows):
    rollout, advantages = make_rollout()
    config = make_config(surrogate, beta=0.1, **OFF_POLICY)
    expected, expected_metrics = run(policy, rollout, advantages, config)
    calls: list[int] = []
    monkeypatch.setattr(update_step, "backward", fails_above(update_step.backward, rows, calls))
    learner = make_learner(policy, config)
    metrics = update(learner, rollout, advantages, config)
    torch.testing.assert_close(weights(learner.policy), expected, rtol=0, atol=2e-6)
    assert len(metrics) == len(expected_metrics) == 4
    assert metrics[0]["ratio_min"] == metrics[0]["ratio_max"] == 1  # old log-probs are of the shapes trained in
    for step, expected_step in zip(metrics, expected_metrics, strict=True):
        assert step == pytest.approx(expected_step, abs=1e-4)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 8  # of two minibatches
    assert all(line.startswith("out of memory: the step is repeated, with microbatches of at most") for line in lines)
    assert calls[-1] <= rows < max(calls)

    limit, tried = learner.microbatch_tokens, len(calls)
    update(learner, rollout, advantages, config)
    if rows > 1:  # the smaller microbatches stay; they are limited by tokens, of which two short rows may have as few
        assert learner.microbatch_tokens == limit
        assert max(calls[tried:]) <= rows
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_what_smaller_microbatches_do_not_mend_is_raised(policy, monkeypatch, error):
    """Another error, and memory that is too small for a single row."""
    monkeypatch.setattr(update_step, "backward", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        run(policy, *make_rollout(), make_config())


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 4), ("cosine", 4)])
def test_learning_rates_by_closed_form(schedule, warmup):
    steps, peak = 12, 1e-3
    optimizer = {"lr": peak, "schedule": schedule, "warmup_steps": warmup}
    config = make_config(epochs=steps, max_steps=steps, optimizer=optimizer)
    config = dataclasses.replace(config, model=ModelConfig(one_layer()))
    learner = pspo.update.learner.make_learner(config, torch.device("cpu"))
    used = []
    learner.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    metrics = update(learner, *make_rollout(groups=1), config)
    progress = [(step - warmup) / (steps - warmup) for step in range(steps)]
    after = [1.0 if schedule == "constant" else (1 + math.cos(math.pi * share)) / 2 for share in progress]
    expected = [peak * (step / warmup if step < warmup else after[step]) for step in range(steps)]
    assert used == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert [step["lr"] for step in metrics] == used


# ---------------------------------------------------------------- rows to optimizer steps and microbatches


@dataclasses.dataclass(frozen=True)
class Kept(NoClip):
    """A subclass, which does not inherit NoClip's hint that rows with A = 0 may be left out."""


def split(learner, rollout, advantages, config):
    """Counts and microbatches of each minibatch."""
    batch = make_batch(rollout, advantages, config)
    minibatches = split_minibatches(learner, batch, config)
    return [(minibatch.counts, split_microbatches(learner, batch, minibatch, config)) for minibatch in minibatches]


def tokens_of(batch, group_size=G):
    """What a microbatch costs: each prompt once, at the width of the longest, and all completions likewise."""
    prompts = {int(text) // group_size for text in batch.rollout.texts}
    return len(prompts) * batch.rollout.prompt_ids.shape[1] + batch.rollout.completion_ids.numel()


@pytest.mark.parametrize("tokens", [1, 60, 10**6])
@pytest.mark.parametrize(
    ("groups", "minibatches", "sizes"), [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (3, 3, [1] * 3)]
)
def test_minibatches_hold_whole_groups_and_count_everything(groups, minibatches, sizes, tokens):
    rollout, advantages = make_rollout(groups)
    config = make_config(Kept(), minibatches=minibatches)
    start = 0
    minibatches_of_tokens = split(packing(tokens), rollout, advantages, config)
    for size, (counts, batches) in zip(sizes, minibatches_of_tokens, strict=True):
        rows = range(start, start + size * G)
        seen = [int(text) for batch in batches for text in batch.rollout.texts]
        assert sorted(seen) == list(rows)
        assert torch.equal(torch.cat([batch.advantages for batch in batches]), advantages[seen, None])
        assert (counts.sequences, counts.max_completion_tokens) == (size * G, config.rollout.max_completion_tokens)
        assert counts.tokens == sum(int(rollout.completion_mask[i].sum()) for i in rows)
        for batch in batches:
            assert tokens_of(batch) <= tokens or len(batch.rollout) == 1
        longest = [max(int(rollout.completion_mask[i].sum()) for i in seen[k : k + G]) for k in range(0, len(seen), G)]
        assert longest == sorted(longest, reverse=True)
        if tokens == 10**6:
            assert len(batches) == 1
        if tokens == 1:
            assert len(batches) == size * G
        start = rows.stop
    assert start == len(rollout)


def test_what_fills_up_the_passes_of_a_rank_holds_no_token(monkeypatch):
    rollout, advantages = make_rollout(8)
    monkeypatch.setattr(pspo.distributed, "max_over_ranks", lambda value: value + 2)
    ((_, batches),) = split(packing(10**6, is_sharded=True), rollout, advantages, make_config())
    assert [bool(batch.rollout.loss_mask.any()) for batch in batches] == [True, False, False]
