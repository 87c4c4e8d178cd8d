"""Engines in runs: what is refused, what they draw ahead, and what their deaths cost. With an engine of one's own."""

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from engines import CPU, Copy, train
from processes import before, one_layer

import pspo.train
from pspo.config import ModelConfig
from pspo.files import checkpoints, read_jsonl
from pspo.model import load_policy, token_logprobs
from pspo.rollout.engine import EngineError
from pspo.run.checkpointer import load_states
from pspo_vllm.vllm import VLLM

pytestmark = pytest.mark.usefixtures("here")


def test_an_engine_draws_during_each_update_with_the_weights_before_it(monkeypatch):
    """And ratios are formed against its own log-probs: rollout i of weights i - 1 is trained on in update i."""
    began, events = Copy.begin, []
    monkeypatch.setattr(Copy, "begin", lambda self, *asked: events.append(self.version) or began(self, *asked))
    monkeypatch.setattr(pspo.train, "update", pspo.train.update)  # undone at the end
    before("update", lambda learner, rollout, *_: events.append(("update", learner.steps, rollout)))
    assert train("out", "--rollout.lag=1", "--run.validate_every=0", "--algorithm.epochs=1") == 0
    steps = [event if isinstance(event, int) else event[:2] for event in events[1:]]  # but for the check at the start
    assert steps == [0, 0, ("update", 0), *(part for n in range(1, 6) for part in (n, ("update", n)))]
    rollouts = [event[2] for event in events if isinstance(event, tuple)]
    assert all(torch.equal(rollout.behaviour_logprobs, rollout.sampler_logprobs) for rollout in rollouts)
    policy = load_policy(ModelConfig(one_layer()), CPU)
    for i, rollout in enumerate(rollouts[:3]):
        own = token_logprobs(policy, *rollout.token_ids, 1.0)
        close = torch.allclose(own, rollout.sampler_logprobs, atol=1e-4)
        assert close == (i < 2)


class Dying(Copy):
    """Dies in its last draw, which nothing needs any more."""

    def complete(self, *asked):
        if self.version >= 4:
            raise EngineError("its process has died")
        return super().complete(*asked)


def test_an_engine_that_dies_ahead_loses_nothing_that_was_trained(capsys):
    args = ("--rollout.engine=test_engines.Dying", "--rollout.lag=1", "--run.validate_every=0", "--run.save_every=50")
    assert train("out", *args) == 0  # it has all the steps it needs
    assert [line["step"] for line in read_jsonl(Path("out/metrics.jsonl"))] == [2, 4, 6]
    stream = load_states(Path("out/checkpoints/step-000006"))["stream"]
    assert stream["position"] == 12  # the four it did not complete are drawn again
    assert train("out", *args, "--run.max_steps=8") == 1
    assert "the engine failed: its process has died" in capsys.readouterr().err
    assert train("on-time", *args, "--rollout.lag=0") == 1
    assert checkpoints(Path("on-time"))[0].name == "step-000004"


def test_a_death_is_raised_past_an_answer_that_nobody_awaits_and_after_the_last_weight(monkeypatch):
    weights = iter([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    monkeypatch.setattr("pspo_vllm.vllm.weights_of_files", lambda policy: weights)
    engine = VLLM()
    engine.connection, other_end = Pipe()
    other_end.send("an answer")
    other_end.close()
    with pytest.raises(EngineError, match="its process has died"):
        engine.push(None, version=1)
    assert not [*weights]
