"""A run that is killed or stopped, and started again, ends as if nothing had happened, to the last bit."""

import functools
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import TINY, assert_same, before, forked, kill_at_file_event, kill_at_step, run_command, send
from transformers import Qwen2ForCausalLM

import pspo.train
from pspo.files import checkpoints, read_jsonl
from pspo.losses import NoClip, Surrogate
from pspo.rollout import PolicySampler
from pspo.rollout.source import Now
from pspo.run.checkpointer import Checkpointer, load_states
from pspo.run.validator import Validator
from pspo.tasks import Reward
from pspo.train import main

pytestmark = pytest.mark.usefixtures("here")
RUN = (
    *TINY, "--run.validate_every=4", "--run.validation_limit=2", "--optimizer.warmup_steps=2",
    "--optimizer.schedule=cosine", "--reward.functions=[test_resume.Noisy]",
)  # fmt: skip
CONSTANT = "--optimizer.schedule=constant"


class Noisy(Reward):
    """Draws from the generators that belong to everybody."""

    def __call__(self, completions, problems):
        return [random.random() + random.gauss(0, 1) + np.random.rand() for _ in completions]  # noqa: NPY002


class CountsCalls:
    calls = 0

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Counting(CountsCalls, Surrogate):
    """NoClip with a weight that depends on the step and on how often it was called."""

    def __call__(self, logprobs, old_logprobs, advantages, mask, step):
        self.calls += 1
        return NoClip()(logprobs, old_logprobs, advantages, mask) * (1 + step / self.calls + self.calls)


class Fading(CountsCalls):
    """A term whose factor depends on how often it was called."""

    def __call__(self, losses, x):
        self.calls += 1
        return losses * (1 + 1 / self.calls)


def train(output: str, *args: str) -> int:
    return run_command(main, *RUN, f"--run.output_dir={output}", *args)


@pytest.fixture(scope="module")
def whole_with(tmp_path_factory) -> Callable[..., Path]:
    """Runs that nothing happened to, by their switches, each trained once."""

    @functools.cache
    def make(*args: str) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "whole"
        assert train(str(folder), *args) == 0
        return folder

    return make


@pytest.fixture
def whole(whole_with) -> Path:
    return whole_with()


def killed_at_step(step: int, *args: str) -> Callable[[], int]:
    """A run in out/, killed when it is about to take this optimizer step."""

    def action() -> int:
        kill_at_step(step)
        return train("out", *args)

    return action


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    assert forked(lambda: os.chdir(folder) or killed_at_step(5)()) == -signal.SIGKILL
    assert [folder.name for folder in checkpoints(folder / "out")] == ["step-000004", "step-000002"]
    return folder / "out"


@pytest.fixture
def cut_off(killed) -> Path:
    """A run that was killed after its second checkpoint."""
    return shutil.copytree(killed, Path("out"))


MODES = {  # the switches of a run; whatever keeps a state of its own is here
    "default": (),
    "lag": ("--rollout.lag=2",),
    "own loss": ("--algorithm.surrogate=test_resume.Counting", "--algorithm.terms=[test_resume.Fading]",
                 "--optimizer.name=sgd"),
    "other loss": ("--algorithm.surrogate=TOPR", "--algorithm.beta=0.1", "--algorithm.minibatches=2",
                   "--optimizer.microbatch_tokens=200", "--model.gradient_checkpointing=true",
                   "--optimizer.options={weight_decay: 0.1}"),
    "decoupled": ("--rollout.lag=2", "--algorithm.ratio_to=proximal", "--algorithm.correction=token_truncate",
                  "--algorithm.nucleus=replay"),
    "own pieces": ("--algorithm.advantages=batches.by_token", "--algorithm.aggregation=batches.by_root",
                   "--algorithm.correction=batches.row_mean_weights", "--rollout.lag=1"),
    "resampled": ("--rollout.resample=3", "--rollout.lag=1"),
    "engine": ("--rollout.engine=engines.Copy", "--rollout.lag=1"),  # it draws ahead
    "environment": ("--data.name=sums", "--rollout.environment=examples.calculator.Calculator"),
    "lora": ("--model.lora.rank=2", "--algorithm.beta=0.1", "--algorithm.minibatches=2"),
    "refreshed": ("--algorithm.beta=0.5", "--algorithm.reference_every=1"),
    "distilled": ("--algorithm.reference=tiny-math", "--algorithm.beta=1", "--algorithm.kl_estimator=k2",
                  "--reward.functions=[]", "--optimizer.schedule=constant"),
    "bfloat16": ("--model.dtype=bfloat16", "--algorithm.minibatches=2", "--algorithm.beta=0.1"),
    "paged_adamw8bit, bfloat16": ("--optimizer.name=paged_adamw8bit", "--model.dtype=bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "lag" else pytest.mark.nightly) for mode in MODES]
)
def test_killed_at_every_step_a_run_ends_as_if_nothing_had_happened(whole_with, capfd, mode):
    if "8bit" in mode:
        pytest.importorskip("bitsandbytes")
    args = MODES[mode]
    whole = whole_with(*args)
    for step in range(6) if mode == "default" else (3, 5):
        assert forked(killed_at_step(step, *args)) == -signal.SIGKILL
        for name in ("metrics.jsonl", "samples.jsonl"):  # what a kill a moment later would leave
            with (Path("out") / name).open("a") as file:
                file.write('{"step": 6, "tokens": 1, "reward": 0.5}\n{"step": 8, "tok')
    assert train("out", *args) == 0
    if mode == "default":
        resumed = re.findall(r"^resuming out from (\S+)", capfd.readouterr().out, re.MULTILINE)
        assert resumed == ["step-000002", "step-000002", "step-000004", "step-000004"]  # before step 2 it starts anew
    assert_same(whole, Path("out"))
    if mode == "own loss":  # 6 steps of one microbatch; metrics do not count
        saved = load_states(checkpoints(Path("out"))[0])
        assert saved["algorithm.surrogate"] == saved["algorithm.terms.0"] == {"calls": 6}


def test_a_best_model_newer_than_the_checkpoint_stays(monkeypatch):
    """Validation finds each model better than the one before: step 6's is in best/ when the run resumes from step 4."""
    validation = {"validation_accuracy": 0.5}
    monkeypatch.setattr(Validator, "measure", lambda self: validation | {"validation_reward": self.learner.steps + 1.0})
    args = ("--run.max_steps=8", "--run.validate_every=6", "--run.save_every=4")
    assert train("whole", *args) == 0
    assert forked(killed_at_step(7, *args)) == -signal.SIGKILL
    assert checkpoints(Path("out"))[0].name == "step-000004"
    assert json.loads(Path("out/best/validation.json").read_text())["step"] == 6
    assert train("out", *args) == 0
    assert_same(Path("whole"), Path("out"))


def test_killed_in_the_middle_of_a_save_a_run_ends_as_if_nothing_had_happened(whole):
    """The next test kills at every point."""

    def action() -> int:
        before("save_snapshot", lambda *_: kill_at_file_event(12), Checkpointer, nth=3)
        return train("out")

    assert forked(action) == -signal.SIGKILL
    assert train("out") == 0
    assert_same(whole, Path("out"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "switches",
    [(), ("--rollout.lag=1", "--rollout.resample=1"), ("--model.lora.rank=2", "--model.dtype=bfloat16")],
    ids=["plain", "stale", "lora"],
)
def test_killed_at_any_file_event_of_a_run_the_same_command_ends_it_and_nothing_is_left(switches):
    pytest.importorskip("peft")  # whose files would be opened in every process
    args = ("--rollout.max_completion_tokens=4", "--run.max_steps=4", "--run.validate_every=2", "--run.test_limit=2",
            "--run.save_every=2", "--run.keep=1", "--run.quiet", *switches)  # fmt: skip

    def killed(n: int) -> int:
        kill_at_file_event(n)
        return train("out", *args)

    assert forked(lambda: train("whole", *args)) == 0
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        shutil.rmtree("out", ignore_errors=True)
        n = 1 + len(codes)
        codes.append(forked(lambda n=n: killed(n)))
        assert forked(lambda: train("out", *args)) == 0, n
        assert_same(Path("whole"), Path("out"))
    assert set(codes) == {-signal.SIGKILL, 0}
    assert len(codes) > 100


# --- signals ----------------------------------------------------------------------------------------------------------

TOLD = [  # before what, and the exit code
    pytest.param(pspo.train, "update", 1, [signal.SIGTERM], 75, id="training", marks=pytest.mark.nightly),
    pytest.param(Checkpointer, "save_snapshot", 1, [signal.SIGINT], 75, id="save", marks=pytest.mark.nightly),
    pytest.param(pspo.train, "update", 2, [signal.SIGINT, signal.SIGINT], 130, id="twice"),
]


@pytest.mark.parametrize(("owner", "function", "call", "signals", "code"), TOLD)
def test_told_to_stop_a_run_saves_and_resumes_exactly(whole, capfd, owner, function, call, signals, code):
    """Told once, it saves what it has computed; twice, it ends at once and loses nothing that was saved."""

    def action() -> int:
        before(function, lambda *_: send(*signals), owner, nth=call)
        return train("out")

    assert forked(action) == code
    err = capfd.readouterr().err
    assert f"\n{signals[0].name}: stopping after this pass or update" in err
    assert "--run.output_dir out resumes" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert checkpoints(Path("out"))[0].name == "step-000002"
    assert train("out") == 0
    assert_same(whole, Path("out"))


TESTED = ("--run.test_limit=3",)
DRAWING = {  # what is being drawn at the signal: by what call of a function, the run's switches, the newest checkpoint
    "first test": (Validator, "test", 1, TESTED, []),
    "rollout": (Now, "next", 2, (), ["step-000002"]),
    "validation": (Validator, "validate", 2, (), ["step-000004", "step-000002"]),
    "last test": (Validator, "test", 2, TESTED, ["step-000006", "step-000004"]),
    "test of the best": (Validator, "test", 3, (*MODES["lora"], *TESTED), ["step-000006", "step-000004"]),
    "rollout of an engine": (Now, "next", 2, ("--rollout.engine=engines.Copy",), ["step-000002"]),
    "lag fills": (Now, "next", 2, MODES["lag"], []),
    "resampled": (PolicySampler, "draw", 6, (*MODES["resampled"], "--reward.functions=[MathReward]"), []),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "rollout" else pytest.mark.nightly) for case in DRAWING]
)
def test_told_to_stop_while_it_draws_a_run_stops_before_the_next_pass_and_resumes_exactly(whole_with, capfd, case):
    """What was being drawn is drawn again; so it is if the resumed run is killed."""
    owner, function, call, args, saved = DRAWING[case]
    whole = whole_with(*args)

    def record_passes(*_: object) -> None:
        send(signal.SIGTERM)
        before("forward", lambda *_: Path("a-pass-after-the-signal").touch(), Qwen2ForCausalLM)

    def action() -> int:
        before(function, lambda *_: before("forward", record_passes, Qwen2ForCausalLM, nth=3), owner, nth=call)
        return train("out", *args)

    assert forked(action) == 75
    assert not Path("a-pass-after-the-signal").exists()
    last = capfd.readouterr().err.splitlines()[-1]
    newest = f"last checkpoint: out/checkpoints/{saved[0]}; " if saved else "no checkpoint"
    assert last.startswith(f"stopped; {newest}")
    assert [folder.name for folder in checkpoints(Path("out"))] == saved
    assert forked(killed_at_step(5, *args)) == (0 if saved[:1] == ["step-000006"] else -signal.SIGKILL)
    assert train("out", *args) == 0
    assert_same(whole, Path("out"))


# --- what must not matter ---------------------------------------------------------------------------------------------


def test_a_run_that_is_to_be_longer_ends_as_if_it_always_had_been():
    assert train("whole", CONSTANT) == 0
    assert train("out", CONSTANT, "--run.max_steps=4") == 0
    assert train("out", CONSTANT) == 0
    for run in ("whole", "out"):
        shutil.rmtree(f"{run}/checkpoints/step-000004")  # which tells how long the run was to be
    assert_same(Path("whole"), Path("out"))
    assert train("cut", CONSTANT, "--run.max_steps=3") == 0
    assert train("cut", CONSTANT) == 2  # its last rollout has an epoch to come


def short_lengths(completions):
    return [len(completion) % 3 for completion in completions]


def seeding(completions):
    """As `short_lengths`, and seeds the generators that belong to everybody."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    return short_lengths(completions)


@pytest.mark.parametrize("mode", ["default", pytest.param("environment", marks=pytest.mark.nightly)])
def test_neither_rewards_nor_validations_touch_what_sampling_draws_from(mode):
    runs = {"quiet": ("short_lengths", 2), "seeding": ("seeding", 2), "not validated": ("short_lengths", 0)}
    completions = {}
    for run, (reward, every) in runs.items():
        switches = (f"--reward.functions=[test_resume.{reward}]", f"--run.validate_every={every}", "--run.max_steps=4")
        assert train(run, *MODES[mode], *switches) == 0
        completions[run] = [sample["completion"] for sample in read_jsonl(Path(run, "samples.jsonl"))]
    assert completions["quiet"] == completions["seeding"] == completions["not validated"]
    assert len(set(completions["quiet"])) > 10  # rollouts differ from each other
    weights = [Path(run, "final/model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] == weights[2]
