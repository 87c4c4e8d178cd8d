"""Rollouts that are trained on later than they were drawn, and groups without signal that are drawn again."""

import copy
import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from naive import G, make_config, make_learner, make_rollout, naive_row, run, weights
from processes import TINY, plain, run_command

import pspo.train
from pspo.config import AlgorithmConfig
from pspo.files import read_jsonl
from pspo.losses import GSPO, PSPO
from pspo.rollout import Experience, Prompts, group_relative_advantages
from pspo.rollout.engine import EngineSampler
from pspo.rollout.sampler import How, PolicySampler
from pspo.rollout.source import Now, refill
from pspo.rollout.types import Nucleus, join
from pspo.tasks import Reward
from pspo.train import main
from pspo.update import drawn_logprobs, update

pytestmark = pytest.mark.usefixtures("here")
RUN = (
    *TINY, "--rollout.temperature=0.7", "--run.max_steps=10", "--run.save_every=2", "--data.limit=7",
    "--reward.functions=[test_staleness.Noisy]",
)  # fmt: skip


class Noisy(Reward):
    """Rewards of 0 and 1 that have nothing to do with the completion; a group is often without signal."""

    def __call__(self, completions, problems):
        return [float(random.random() < 0.3) for _ in completions]


def train(output: str, *args: str) -> int:
    return run_command(main, *RUN, f"--run.output_dir={output}", *args)


# ---------------------------------------------------------------- lag


@pytest.mark.parametrize(("lag", "ratio_to"), [(3, "behaviour"), (1, "proximal")])
def test_rollout_i_is_drawn_after_i_minus_lag_updates_and_trained_on_after_i(monkeypatch, lag, ratio_to):
    drawn, trained = [], []
    draw, update = Now.next, pspo.train.update

    def drawing(source):
        experience = draw(source)
        drawn.append((experience.rollout, copy.deepcopy(source.learner.policy)))
        return experience

    def training(learner, rollout, advantages, config):
        trained.append(rollout)
        steps = update(learner, rollout, advantages, config)
        (i,) = (i for i, (other, _) in enumerate(drawn) if other.completion_ids is rollout.completion_ids)
        assert i == len(trained) - 1
        assert len(drawn) == len(trained) + lag
        kept = rollout.behaviour_logprobs
        assert (kept is None) == (ratio_to == "proximal")
        rows = [row for row in range(len(rollout)) if advantages[row] != 0]
        for row in rows if kept is not None else ():  # one by one, unpadded, by the policy that drew them
            with torch.no_grad():
                logprobs = naive_row(drawn[i][1], rollout, row)
            torch.testing.assert_close(kept[row, : len(logprobs)].double(), logprobs, rtol=0, atol=2e-5)
        moved = i > 0 and rows
        assert (steps[0]["kl_old_new"] > 1e-7) == bool(moved and ratio_to == "behaviour")
        return steps

    monkeypatch.setattr(Now, "next", drawing)
    monkeypatch.setattr(pspo.train, "update", training)
    assert train("out", f"--rollout.lag={lag}", f"--algorithm.ratio_to={ratio_to}") == 0
    assert len(trained) == 5
    first = weights(drawn[0][1])
    unmoved = [torch.equal(weights(policy), first) for _, policy in drawn]
    assert all(unmoved[: lag + 1])
    assert not any(unmoved[lag + 2 :]) or lag == 3


@pytest.mark.parametrize("surrogate", [PSPO(0.3), GSPO(0.2, 0.2)], ids=repr)
def test_kept_logprobs_are_the_first_visit_s_to_the_bit(tiny_model, surrogate):
    """On time, `ratio_to` changes nothing: the same log-probs from a pass before or in the first visit."""
    rollout, advantages = make_rollout()
    for minibatches in (1, 2):
        config = make_config(surrogate, epochs=2, minibatches=minibatches)
        expected, steps = run(tiny_model(), rollout, advantages, config)
        learner = make_learner(tiny_model(), config)
        kept = drawn_logprobs(learner, rollout, advantages, learner.policy, config)
        learner = make_learner(tiny_model(), config)
        stale = dataclasses.replace(rollout, behaviour_logprobs=kept)
        assert update(learner, stale, advantages, config) == steps
        assert torch.equal(weights(learner.policy), expected)
        left_out = [i for i in range(len(rollout)) if advantages[i] == 0]
        assert left_out
        assert not kept[left_out].any()


class DrawsNow(EngineSampler):
    def begin(self, *_): ...

    def complete(self):
        return "drawn now"


def test_a_rollout_that_was_drawn_ahead_is_handed_out_for_its_prompts_alone():
    rollout, _ = make_rollout(groups=2)
    ids = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids[::G], rollout.prompt_mask[::G], strict=True)]
    for prompts, group_size in ((ids, G), (ids[::-1], G), (ids[:1], G), (ids, 1)):
        sampler = DrawsNow(None, None, PolicySampler(None), drawn=rollout)
        is_handed_out = prompts is ids and group_size == G
        assert sampler.draw(Prompts([], prompts), group_size, How(None)) is (rollout if is_handed_out else "drawn now")
        assert sampler.drawn is (None if is_handed_out else rollout)  # a validation leaves it to the training


def test_a_validation_leaves_the_rollout_that_was_drawn_ahead_to_the_training():
    args = ("--rollout.engine=engines.Copy", "--rollout.lag=1", "--run.validation_limit=2")
    args += ("--reward.functions=[SoftOverlong]", "--reward.functions.buffer=24")
    for every in (0, 2):
        assert train(f"every-{every}", *args, f"--run.validate_every={every}") == 0
    assert read_jsonl(Path("every-0/samples.jsonl")) == read_jsonl(Path("every-2/samples.jsonl"))


# ---------------------------------------------------------------- resampling


def with_every_field(groups, seed):
    """A rollout that has what samplers, environments and the lag add."""
    rollout, _ = make_rollout(groups, seed)
    shape, counts = rollout.completion_ids.shape, rollout.completion_mask.long()
    return dataclasses.replace(
        rollout,
        sampler_logprobs=torch.randn(shape),
        nucleus=Nucleus([torch.arange(int(n)) for n in counts.sum(dim=1)], counts),
        sampled_mask=rollout.completion_mask.clone(),
        environment_rewards=[float(row) for row in range(len(rollout))],
        behaviour_logprobs=torch.randn(shape),
    )


def scored(rollout, rewards, first):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    prompts = list(range(first, first + len(rewards) // G))
    advantages = group_relative_advantages(rewards.float(), G)
    return Experience(prompts, rollout, rewards, {"r": rewards.tolist()}, advantages=advantages)


PLAIN = AlgorithmConfig()


def test_groups_without_signal_give_way():
    flat, mixed, unknown = [1.0] * G, [0.0, 1.0] * (G // 2), [math.nan] * G
    drawn, fresh = with_every_field(groups=4, seed=1), with_every_field(groups=3, seed=2)
    first, second = scored(drawn, flat + mixed + unknown + flat, 10), scored(fresh, mixed + flat + mixed, 20)
    assert (first.has_signal(PLAIN), second.has_signal(PLAIN)) == ([False, True, False, False], [True, False, True])
    cut = dataclasses.replace(second, rollout=dataclasses.replace(fresh, terminated=torch.arange(3 * G) >= 1))
    assert cut.has_signal(AlgorithmConfig(mask_truncated=True)) == [True, False, True]  # other rows of it count
    cut = dataclasses.replace(second, rollout=dataclasses.replace(fresh, terminated=torch.arange(3 * G) >= G))
    assert cut.has_signal(AlgorithmConfig(mask_truncated=True)) == [False, False, True]
    filled = refill(first, second, PLAIN)
    assert filled.advantages is None
    filled = dataclasses.replace(filled, advantages=group_relative_advantages(filled.rewards.float(), G, "rloo"))
    assert filled.prompt_indices == [20, 11, 22, 13]
    assert filled.has_signal(PLAIN) == [True, True, True, False]
    assert filled.drawn_tokens == drawn.tokens + fresh.tokens
    assert len(filled.drawn_rewards) == 7 * G
    assert filled.rewards_by_name["r"] == filled.rewards.tolist()
    for i, source in enumerate([fresh, drawn, fresh, drawn]):
        rows = torch.arange(i * G, (i + 1) * G)
        assert plain(filled.rollout.rows(rows)) == plain(source.rows(rows))  # with every field


def test_rollouts_that_lack_what_another_has_are_not_joined():
    bare, _ = make_rollout(groups=2)
    for field in ("sampler_logprobs", "nucleus", "environment_rewards"):
        full = dataclasses.replace(bare, **{field: getattr(with_every_field(2, 1), field)})
        for parts in ((bare, full), (full, bare)):
            with pytest.raises((AttributeError, TypeError)):
                join(parts)


def test_resampling_is_bounded_and_counted():
    longer = ("--run.max_steps=12", "--rollout.prompts=4", "--data.limit=50", "--run.save_every=0")
    assert train("out", "--rollout.resample=3", "--algorithm.epochs=1", *longer) == 0
    lines = read_jsonl(Path("out/metrics.jsonl"))
    shares = [line["resampled_share"] for line in lines]
    assert sum(shares) > 0
    assert max(shares) <= 3
    assert min(shares) == 0
    silent = sum(line["zero_advantage_share"] for line in lines) / len(lines)
    assert silent < 0.1  # every group silent with probability 0.25, after three more draws 0.004
    drawn = sum(1 + share for share in shares)
    mean = sum(line["reward_drawn"] * (1 + line["resampled_share"]) for line in lines) / drawn
    assert mean == pytest.approx(0.3, abs=0.06)  # unbiased; that of the rollouts trained on is not
