"""A run that is killed, stopped, damaged or started twice ends as if nothing had happened, to the last bit."""

import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from processes import (
    Payload,
    assert_same,
    at_call,
    before,
    contents,
    forked,
    kill_at_file_event,
    kill_at_step,
    metric_lines,
    one_layer,
    plain,
    run_command,
    send,
    states,
)
from transformers import Qwen2ForCausalLM

import pspo.evaluate.__main__
import pspo.run.prepare
import pspo.run.recorder
import pspo.train
from pspo.cli.parse import parse
from pspo.config import TrainConfig
from pspo.losses import NoClip, Surrogate
from pspo.cli.files import differences, flat, read_json, read_jsonl
from pspo.run.folders import RunFailed, checkpoints, describe, writing
from pspo.run.switches import FIXED, FREE, LONGER, ROUNDING, STEERED
from pspo.run.checkpointer import Checkpointer
from pspo.run.resume import find_checkpoint
from pspo.run.run import Run
from pspo.run.validator import Validator
from pspo.tasks import Reward
from pspo_lab.view.data import events

pytestmark = pytest.mark.usefixtures("here")
TINY = (
    f"--model.name_or_path={one_layer()}",
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1", "--run.max_steps=6",
    "--run.validate_every=4", "--run.validation_limit=2", "--run.test_limit=0", "--run.save_every=1",
    "--run.samples=8", "--data.limit=5", "--optimizer.lr=1e-3", "--optimizer.warmup_steps=2",
    "--optimizer.schedule=cosine", "--reward.functions=[test_resume.Noisy]",
)  # fmt: skip
CONSTANT = "--optimizer.schedule=constant"


class Noisy(Reward):
    """Draws from the generators that belong to everybody."""

    def __call__(self, completions, problems):
        return [random.random() + random.gauss(0, 1) + np.random.rand() for _ in completions]  # noqa: NPY002


class Often(Reward):
    """Equal for all completions of most problems, for a while."""

    def __call__(self, completions, problems, step):
        pairs = zip(completions, problems, strict=True)
        return [float(len(text)) if len(problem.prompt) % 3 == step // 2 % 3 else 1.0 for text, problem in pairs]


class Counting(Surrogate):
    """NoClip with a weight that depends on the step and on how often it was called."""

    calls = 0

    def __call__(self, logprobs, old_logprobs, advantages, mask, step):
        self.calls += 1
        return NoClip()(logprobs, old_logprobs, advantages, mask) * (1 + step / self.calls + self.calls)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def train(output: str, *args: str) -> int:
    return run_command(pspo.train.main, *TINY, f"--run.output_dir={output}", *args)


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
    "own loss": ("--algorithm.surrogate=test_resume.Counting", "--optimizer.name=sgd"),
    "other loss": ("--algorithm.surrogate=TOPR", "--algorithm.beta=0.1", "--algorithm.minibatches=2",
                   "--optimizer.microbatch_tokens=200", "--model.gradient_checkpointing=true"),
    "decoupled": ("--rollout.lag=2", "--algorithm.ratio_to=proximal", "--algorithm.correction=token_truncate",
                  "--algorithm.nucleus=replay"),
    "order": ("--rollout.order=signal", "--reward.functions=[test_resume.Often]", "--rollout.resample=1",
              "--rollout.lag=1"),
    "own pieces": ("--algorithm.advantages=batches.by_token", "--algorithm.aggregation=batches.by_root",
                   "--algorithm.correction=batches.row_mean_weights", "--rollout.lag=1"),
    "entropy": ("--algorithm.entropy_coef=0.1", "--algorithm.entropy_target=3", "--algorithm.entropy_quantile=0.5"),
    "reference": ("--algorithm.beta=0.1", "--algorithm.reference_every=3", "--algorithm.reference_mix=0.5",
                  "--algorithm.kl_estimator=unbiased_k3", "--algorithm.mask_off_policy=0.01"),
    "resampled": ("--rollout.resample=3", "--rollout.lag=1"),
    "engine": ("--rollout.engine=test_engines.Copy", "--rollout.lag=1"),  # it draws ahead
    "environment": ("--data.name=sums", "--rollout.environment=pspo.tasks.calculator.Calculator"),
    "lora": ("--model.lora.rank=2", "--algorithm.beta=0.1", "--algorithm.minibatches=2"),
    "lora, reference": ("--model.lora.rank=2", "--algorithm.beta=0.1", "--algorithm.reference_every=3"),
    "bfloat16": ("--model.dtype=bfloat16", "--algorithm.minibatches=2", "--algorithm.beta=0.1"),
    "adamw8bit": ("--optimizer.name=adamw8bit",),
    "paged_adamw8bit, bfloat16": ("--optimizer.name=paged_adamw8bit", "--model.dtype=bfloat16"),
    "sgd, bfloat16": ("--optimizer.name=sgd", "--optimizer.lr=0.1", "--model.dtype=bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if i < 3 else pytest.mark.nightly) for i, mode in enumerate(MODES)]
)
def test_killed_at_every_step_a_run_ends_as_if_nothing_had_happened(whole_with, capfd, mode):
    if "8bit" in mode:
        pytest.importorskip("bitsandbytes")
    args = MODES[mode]
    whole = whole_with(*args)
    for step in range(6) if mode == "default" else (0, 3, 5):
        assert forked(killed_at_step(step, *args)) == -signal.SIGKILL
        for name in ("metrics.jsonl", "samples.jsonl"):  # what a kill a moment later would leave
            with (Path("out") / name).open("a") as file:
                file.write('{"step": 6, "tokens": 1, "reward": 0.5}\n{"step": 8, "tok')
    assert train("out", *args) == 0
    if mode == "default":
        said = re.findall(r"^resuming out from (\S+)", capfd.readouterr().out, re.MULTILINE)
        assert said == [f"step-{step // 2 * 2:06d}" if step >= 2 else "the" for step in range(6)]  # "the start"
    assert_same(whole, Path("out"))
    if mode == "order":
        assert any(
            without for without, _ in states(checkpoints(Path("out"))[0] / "parts.pt")["stream"]["rests"].values()
        )
    if mode == "own loss":  # 6 steps of one microbatch; metrics do not count
        assert states(checkpoints(Path("out"))[0] / "parts.pt")["surrogate"] == {"calls": 6}


def test_the_completions_of_the_tests_stay_and_are_shown_again(capfd):
    args = ("--run.test_limit=3", "--reward.functions=[MathReward]")
    assert train("whole", *args) == 0
    said = capfd.readouterr().out.partition("greedy, held-out")[2].replace("whole", "out")
    assert "of 3 problems" in said
    assert forked(killed_at_step(5, *args)) == -signal.SIGKILL
    assert len(Path("out/test-before.jsonl").read_text().splitlines()) == 3
    for _ in range(2):  # resumed, and finished already
        capfd.readouterr()
        assert train("out", *args) == 0
        again = capfd.readouterr().out.partition("greedy, held-out")[2]
        assert [line for line in again.splitlines() if " s, " not in line] == [
            line for line in said.splitlines() if " s, " not in line
        ]
    assert_same(Path("whole"), Path("out"))
    assert train("fork", *args, "--run.fork_from=out", "--run.max_steps=8", CONSTANT) == 0
    for run in ("out", "fork"):
        capfd.readouterr()
        pspo.evaluate.__main__.main(["--compare", run])
        assert "T = 0, 3 problems" in capfd.readouterr().out


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
    """`nightly/test_kills.py` kills at every point."""

    def action() -> int:
        before("save", at_call(3, lambda: kill_at_file_event(45)), Checkpointer)
        return train("out")

    assert forked(action) == -signal.SIGKILL
    assert train("out") == 0
    assert_same(whole, Path("out"))


# --- damage, and a disk that fails ------------------------------------------------------------------------------------


def test_whoever_may_read_a_runs_folder_may_read_its_models(whole):
    rights = {path.stat().st_mode & 0o777 for path in whole.rglob("*") if path.is_file()}
    assert rights == {whole.stat().st_mode & 0o666}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit": flip,
    "missing": Path.unlink,
}


def test_a_damaged_checkpoint_is_named_and_skipped(cut_off, whole, capfd):
    newest = cut_off / "checkpoints/step-000004"
    shutil.copytree(newest, "kept")
    for name in ("model.safetensors", "parts.pt", "rank-0.pt", "manifest.json"):
        for spoil in DAMAGE.values():
            spoil(newest / name)
            (cut_off / "checkpoints/step-000009").write_text("no folder")
            assert find_checkpoint(cut_off, "auto").name == "step-000002"
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith(f"{newest} is damaged: ")
            assert name in line or name == "manifest.json"  # which vouches for the others
            shutil.copytree("kept", newest, dirs_exist_ok=True)
    for content in ("[]", "[" * 100_000, "\x1b[31m"):
        (newest / "manifest.json").write_text(content)
        assert find_checkpoint(cut_off, "auto").name == "step-000002"
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"{newest} is damaged: manifest.json (")
    (cut_off / "checkpoints/step-000009").unlink()
    shutil.copytree("kept", newest, dirs_exist_ok=True)
    flip(newest / "model.safetensors")
    assert train("out") == 0
    assert "resuming out from step-000002" in capfd.readouterr().out
    assert_same(whole, cut_off)


@pytest.mark.parametrize(
    ("content", "error"),
    [({"learner": Payload()}, "UnpicklingError"), ({"learner": {}}, "KeyError"), ([1], "TypeError")],
)
def test_a_crafted_checkpoint_is_refused_in_one_line_and_not_executed(cut_off, capfd, content, error):
    newest = cut_off / "checkpoints/step-000004"
    torch.save(content, newest / "parts.pt")
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["parts.pt"] = describe(newest / "parts.pt")
    (newest / "manifest.json").write_text(json.dumps(manifest))
    capfd.readouterr()
    assert train("out") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"{newest} does not hold what a run saves ({error}): choose another folder")
    assert not Path("executed").exists()


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def cannot_be_read(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # whose first bytes are an input/output error


def spoiled(run: Path, file: str, content: str) -> None:
    """A run with a damaged file, and others that a resumed one does away with."""
    (run / "tokens.parquet").mkdir(exist_ok=True)
    (run / "tokens.parquet/step-last.parquet").touch()
    (run / "test-after.jsonl").touch()
    (run / file).write_text(content)


SPOILT = {  # how a run's folder is spoiled, and what is said
    "every checkpoint is damaged": (
        lambda run: [flip(folder / "parts.pt") for folder in checkpoints(run)], "--run.output_dir out"
    ),
    "the best model is missing": (lambda run: shutil.rmtree(run / "best"), "out/best is missing"),
    "the disk fails": (lambda run: cannot_be_read(run / "checkpoints/step-000004/parts.pt"), "[Errno 5]"),
    **{
        f"{file} {content}": (partial(spoiled, file=file, content=content), f"out/{file} is damaged")
        for file, content in (
            ("metrics.jsonl", "{}\n"), ("samples.jsonl", '{"step": "2"}\n'), ("changes.jsonl", '{"step": null}\n'),
            ("summary.json", "{}"), ("summary.json", '{"optimizer_steps": []}'),
            ("summary.json", '{"optimizer_steps": 99, "best_model": "out/best"}'), ("config.yaml", "optimizer: 1"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
def test_a_run_that_cannot_be_resumed_is_left_alone(cut_off, capfd, spoil, said):
    spoil(cut_off)
    left = stamps(cut_off)
    assert train("out") == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
    assert stamps(cut_off) == left


@pytest.mark.parametrize("kilobytes", [pytest.param(500, marks=pytest.mark.nightly), 1500])
def test_a_save_that_finds_the_disk_full_leaves_the_old_checkpoint(whole, capfd, kilobytes):
    """Full for the weights, or for the larger optimizer state."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 2**10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def action() -> int:
        before("save", at_call(2, fill), Checkpointer)
        return train("out")

    assert forked(action) == 1
    steps = [line["step"] for line in read_jsonl(Path("out/metrics.jsonl"))]
    assert steps == [2, 4]
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "cannot save out/checkpoints/step-000004: " in err.splitlines()[-1]
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step-000002"]
    assert train("out") == 0
    assert_same(whole, Path("out"))


def test_a_disk_too_full_for_the_records_ends_the_run(capfd):
    def action() -> int:
        before("append_text", lambda path, *_: path.exists() or path.symlink_to("/dev/full"), pspo.run.recorder)
        return train("out", "--run.save_every=0")

    assert forked(action) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "cannot write into out: [Errno 28]" in err.splitlines()[-1]


def test_a_full_disk_is_named_whatever_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    torchs = RuntimeError("inline_container.cc:664 . unexpected pos 448 vs 342")
    for error in (torchs, OSError(28, "No space left on device")):
        said = pytest.raises(RunFailed, match=r"^cannot save: .*No space left on device$")
        with said, writing("cannot save", tmp_path / "none yet"):
            raise error


@pytest.mark.parametrize("validations", [True, False])
def test_a_run_whose_checkpoints_cannot_fit_does_not_start(whole, monkeypatch, capfd, validations):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**10))
    assert train("out", *(() if validations else ("--run.validate_every=0",))) == 2
    needed = float(re.search(r"error: --run.keep 2 needs (\S+) GiB .* --run.output_dir$", capfd.readouterr().err)[1])
    checkpoint = whole / "checkpoints/step-000006"
    model, moments = ((checkpoint / name).stat().st_size for name in ("model.safetensors", "parts.pt"))
    models = 3 if validations else 1
    assert needed * 2**30 == pytest.approx(3 * (model + moments) + models * model, rel=0.1)  # the third is saved first


# --- signals ----------------------------------------------------------------------------------------------------------

TOLD = [  # when, what, the exit code, the newest checkpoint
    pytest.param(
        pspo.train, "draw_prompts", 1, [signal.SIGINT], 75, "step-000000", id="rollout", marks=pytest.mark.nightly
    ),
    pytest.param(pspo.train, "update", 1, [signal.SIGTERM], 75, "step-000002", id="training"),
    pytest.param(Checkpointer, "save", 1, [signal.SIGINT], 75, "step-000002", id="save", marks=pytest.mark.nightly),
    pytest.param(pspo.train, "update", 2, [signal.SIGINT, signal.SIGINT], 130, "step-000002", id="twice"),
]


@pytest.mark.parametrize(("owner", "function", "call", "signals", "code", "saved"), TOLD)
def test_told_to_stop_a_run_saves_and_resumes_exactly(whole, capfd, owner, function, call, signals, code, saved):
    """Told once, it saves what it has computed; twice, it ends at once and loses nothing that was saved."""

    def action() -> int:
        before(function, at_call(call, lambda: send(*signals)), owner)
        return train("out")

    assert forked(action) == code
    err = capfd.readouterr().err
    assert f"\n{signals[0].name}: stopping after this pass or update" in err
    assert "--run.output_dir out resumes" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert checkpoints(Path("out"))[0].name == saved
    assert train("out") == 0
    assert_same(whole, Path("out"))


DRAWING = {  # what is being drawn at the signal: by what call of a function, the run's switches, the newest checkpoint
    "first test": (Validator, "test", 1, (), []),
    "rollout": (pspo.train, "draw_prompts", 2, (), ["step-000002"]),
    "validation": (Validator, "validate", 2, (), ["step-000004", "step-000002"]),
    "first validation": (Validator, "validate", 1, (), []),
    "last test": (Validator, "test", 2, (), ["step-000006", "step-000004"]),
    "lag fills": (pspo.train, "draw_prompts", 2, MODES["lag"], ["step-000000"]),
    "resampled": (
        pspo.train, "draw_prompts", 6, (*MODES["resampled"], "--reward.functions=[MathReward]"), ["step-000000"]
    ),
    "environment": (pspo.train, "draw_prompts", 2, MODES["environment"], ["step-000002"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if i < 3 else pytest.mark.nightly) for i, case in enumerate(DRAWING)]
)
def test_told_to_stop_while_it_draws_a_run_stops_before_the_next_pass_and_resumes_exactly(whole_with, capfd, case):
    """What was being drawn is drawn again; so it is if the resumed run is killed."""
    owner, function, call, mode, saved = DRAWING[case]
    args = (*mode, "--run.test_limit=3")
    whole = whole_with(*args)

    def note_passes() -> None:
        send(signal.SIGTERM)
        before("forward", lambda *_: Path("a-pass-after-the-signal").touch(), Qwen2ForCausalLM)

    def action() -> int:
        before(function, at_call(call, lambda: before("forward", at_call(3, note_passes), Qwen2ForCausalLM)), owner)
        return train("out", *args)

    assert forked(action) == 75
    assert not Path("a-pass-after-the-signal").exists()
    assert "Traceback" not in capfd.readouterr().err
    assert [folder.name for folder in checkpoints(Path("out"))] == saved
    assert forked(killed_at_step(5, *args)) == (0 if case == "last test" else -signal.SIGKILL)
    assert train("out", *args) == 0
    assert_same(whole, Path("out"))


def test_sigterm_from_outside_to_the_command_itself():
    command = [sys.executable, "-m", "pspo.train", *TINY, "--run.output_dir=out", "--run.max_steps=400"]
    command += ["--run.validate_every=0"]
    path = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parent}"
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as running:
        while running.poll() is None and not Path("out/metrics.jsonl").exists():
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 75
    steps = [line["step"] for line in read_jsonl(Path("out/metrics.jsonl"))]
    assert checkpoints(Path("out"))[0].name == f"step-{steps[-1]:06d}"


def test_ctrl_c_while_a_command_imports_or_loads_shows_no_traceback(capfd):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

    def action() -> int:
        before("load_splits", lambda *_: send(signal.SIGINT), pspo.run.prepare)
        return train("out")

    assert forked(action) == 130
    assert "Traceback" not in capfd.readouterr().err
    Path("torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "pspo.train"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")  # which a shell calls 130


# --- which run is resumed ---------------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(whole, capfd):
    def action() -> int:
        second = []
        before("draw_prompts", at_call(1, lambda: second.append(train("out"))))
        return train("out") or second[0]

    assert forked(action) == 2
    assert "--run.output_dir out is in use" in capfd.readouterr().err
    assert_same(whole, Path("out"))


def test_a_finished_run_stays_as_it_is(capfd):
    args = (CONSTANT, "--run.max_tokens=1", "--run.max_steps=4")
    assert train("out", *args) == 0
    left = stamps(Path("out"))
    for again, code, said in (
        (args, 0, "already finished: out/summary.json"),
        ((*args, "--run.max_steps=6"), 0, "already finished"),  # its tokens ended it
        ((*args, "--run.max_steps=3"), 2, "--run.max_steps was 4, is 3"),
        ((*args, "--optimizer.lr=1e-4"), 2, "out is finished, --optimizer.lr would change nothing"),
        ((*args, "--algorithm.epochs=1"), 2, "--algorithm.epochs was 2, is 1"),
        ((*args, "--run.seed=3"), 2, "--run.seed was 0, is 3"),
        ((*args, "--run.resume=never"), 2, "--run.output_dir out"),
    ):
        capfd.readouterr()
        assert train("out", *again) == code
        assert said in "".join(capfd.readouterr())
    assert stamps(Path("out")) == left
    shutil.rmtree("out/checkpoints")
    assert train("out", CONSTANT, "--run.max_tokens=1000", "--run.max_steps=4") == 2  # longer, from nothing


def test_a_resumed_run_keeps_its_name_unless_it_gets_another(capfd):
    for steps, given, kept in ((2, ("--run.name=mine",), "mine"), (4, (), "mine"), (6, ("--run.name=other",), "other")):
        assert train("out", CONSTANT, f"--run.max_steps={steps}", *given) == 0
        assert yaml.safe_load(Path("out/config.yaml").read_text())["run"]["name"] == kept
    assert "run.name" not in capfd.readouterr().err


def test_a_change_of_the_experiment_is_refused_and_any_other_said(cut_off, capfd):
    left = contents(cut_off)
    template = "--data.chat_template={messages: []}"
    assert train("out", "--algorithm.surrogate=Clip", "--run.max_steps=5", "--run.keep=1", template) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "--algorithm.surrogate was 'pspo.losses.PSPO', is 'pspo.losses.Clip'" in line
    assert "--data.chat_template was None, is {'messages': []}" in line
    assert "--run.max_steps was 6, is 5" in line  # the learning rate falls with the run's length
    assert contents(cut_off) == left

    assert train("out", "--run.keep=1", "--optimizer.microbatch_tokens=100", "--run.resume=out") == 0
    err = capfd.readouterr().err
    assert "--run.keep was 2, is 1\n" in err
    assert "--optimizer.microbatch_tokens was 4096, is 100 (other rounding)\n" in err
    assert len(checkpoints(cut_off)) == 1
    config = yaml.safe_load((cut_off / "config.yaml").read_text())
    assert (config["optimizer"]["microbatch_tokens"], config["run"]["resume"]) == (100, "auto")
    assert run_command(pspo.train.main, "--config", "out/config.yaml") == 0
    assert "already finished" in capfd.readouterr().out


def test_every_switch_that_may_change_is_one():
    _, settings = parse(TrainConfig, "", [])
    known = flat(settings).keys()
    assert known >= FREE | STEERED | ROUNDING | LONGER | FIXED
    assert {name for name in known if name.startswith("model.lora.")} <= FIXED


@pytest.mark.parametrize("finished", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_run_that_is_to_be_longer_ends_as_if_it_always_had_been(capfd, finished):
    assert train("whole", CONSTANT) == 0
    if finished:
        assert train("out", CONSTANT, "--run.max_steps=4") == 0
    else:
        assert forked(killed_at_step(3, CONSTANT, "--run.max_steps=4")) == -signal.SIGKILL
    assert train("out", CONSTANT) == 0
    assert "--run.max_steps was 4, is 6\n" in capfd.readouterr().err
    assert Path("out/summary-step-000004.json").exists() == finished
    Path("out/summary-step-000004.json").unlink(missing_ok=True)
    for run in ("whole", "out"):
        shutil.rmtree(f"{run}/checkpoints/step-000004")  # which tells how long the run was to be
    assert_same(Path("whole"), Path("out"))


def test_other_problems_under_the_same_name_are_refused(capfd):
    def data(folder: str, add: int) -> str:
        Path(folder).mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": f"What is {n} + 1?", "answer": n + add}) + "\n" for n in range(6)]
        Path(folder, "train.jsonl").write_text("".join(lines))
        return f"--data.path={folder}"

    args = ("--data.name=file", "--run.validate_every=0", data("mine", 1))
    assert forked(killed_at_step(5, *args)) == -signal.SIGKILL
    data("mine", 2)
    left = contents(Path("out"))
    for resume in ("auto", "out/checkpoints/step-000002"):
        assert train("out", *args, f"--run.resume={resume}") == 2
        assert "other problems" in capfd.readouterr().err
        assert contents(Path("out")) == left
    assert train("out", *args[:-1], data("moved", 1)) == 0  # the same ones, elsewhere


def test_resume_from_a_path(cut_off, whole, capfd):
    args = [arg for arg in TINY if "output_dir" not in arg]
    assert run_command(pspo.train.main, *args, f"--run.resume={cut_off}/checkpoints/step-000002") == 0
    assert "out from step-000002\n" in capfd.readouterr().out
    assert_same(whole, cut_off)
    (cut_off / "summary.json").unlink()
    shutil.copytree(cut_off / "checkpoints/step-000006", cut_off / "checkpoints/mine")
    for path in ("nowhere", cut_off / "best", cut_off / "checkpoints/mine"):
        assert train("out", f"--run.resume={path}") == 2
        assert f"--run.resume {path}" in capfd.readouterr().err
    assert train("else", f"--run.resume={cut_off}") == 2
    assert f"--run.resume {cut_off}" in capfd.readouterr().err


# --- steering ---------------------------------------------------------------------------------------------------------


def metrics(run: str, after: int = 0) -> list[dict]:
    return metric_lines(Path(run), after)


def changes(run: str) -> list[tuple]:
    return [tuple(change.values()) for change in read_jsonl(Path(run) / "changes.jsonl")]


def same_weights(one: str, other: str, model: str = "final") -> bool:
    return Path(one, model, "model.safetensors").read_bytes() == Path(other, model, "model.safetensors").read_bytes()


def test_a_changed_learning_rate_scales_its_schedule_as_if_set_by_hand(cut_off, whole, capfd):
    """Warm-up of 2 steps, then a cosine to 0 at step 6; changed at step 4."""

    def set_lr(learner, *_) -> None:
        if learner.steps == 4:
            learner.scheduler.base_lrs = [2e-4]
            for group in learner.optimizer.param_groups:
                group["lr"] *= 2e-4 / 1e-3
            learner.scheduler._last_lr = [group["lr"]]

    def by_hand() -> int:
        before("update", set_lr)
        return train("hand")

    assert forked(by_hand) == 0
    assert train("out", "--optimizer.lr=2e-4") == 0
    assert "changed from step 4 on: --optimizer.lr was 0.001, is 0.0002\n" in capfd.readouterr().err
    lines = metrics("out")
    factors = [line["lr"] / 1e-3 for line in metrics(str(whole))]
    assert [line["lr"] for line in lines] == pytest.approx([1e-3 * f for f in factors[:2]] + [2e-4 * factors[2]])
    assert factors[2] == pytest.approx(0.5 * (1 + math.cos(math.pi * 3 / 4)))
    assert lines == metrics("hand")
    assert same_weights("out", "hand")
    assert not same_weights("out", str(whole))
    assert changes("out") == [(4, "optimizer.lr", 1e-3, 2e-4)]
    card = Path("out/final/README.md").read_text()
    assert "| changed on the way | optimizer.lr 0.001 -&gt; 0.0002 at step 4 |" in card
    assert yaml.safe_load(Path("out/config.yaml").read_text())["optimizer"]["lr"] == 2e-4


STEER = ("--optimizer.lr=2e-4", "--algorithm.beta=0.1", "--algorithm.entropy_coef=0.01",
         "--optimizer.max_grad_norm=0.05", "--run.save_every=2", "--run.validate_every=2", "--run.samples=1",
         "--run.record_tokens=1", "--run.gradients_every=2")  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("step", [3, 5])
def test_a_steered_run_is_itself_resumed_to_the_last_bit(step):
    """Changed from step 2 on, and killed again before or after the next save."""
    assert forked(killed_at_step(3)) == -signal.SIGKILL
    shutil.copytree("out", "whole")
    assert train("whole", *STEER) == 0
    assert len(read_jsonl(Path("whole/samples.jsonl"))) == 4 * (2 + 1 + 1)  # two groups a rollout, then one
    assert [{"kl_reference", "validation_reward"} <= line.keys() for line in metrics("whole")] == [False, True, True]
    assert {change[:2] for change in changes("whole")} == {(2, name) for name in STEERED}
    assert forked(killed_at_step(step, *STEER)) == -signal.SIGKILL
    assert train("out", *STEER) == 0
    assert_same(Path("whole"), Path("out"))


@pytest.mark.nightly
def test_going_back_before_a_change_undoes_it(cut_off, whole):
    """The checkpoint's own configuration counts, not the run's last one."""
    assert train("out", "--optimizer.lr=2e-4", "--run.keep=4") == 0
    Path("out/summary.json").unlink()
    back = "--run.resume=out/checkpoints/step-000002"
    assert train("out", "--optimizer.lr=3e-4", "--run.keep=4", back) == 0
    assert changes("out") == [(2, "optimizer.lr", 1e-3, 3e-4)]
    Path("out/summary.json").unlink()
    assert train("out", "--run.keep=4", back) == 0
    assert changes("out") == []
    assert metrics("out") == metrics(str(whole))
    assert same_weights("out", str(whole))
    assert same_weights("out", str(whole), "best")


@pytest.mark.nightly
def test_the_penalty_and_validation_can_be_turned_off():
    assert forked(killed_at_step(5, "--algorithm.beta=0.1")) == -signal.SIGKILL
    assert train("out", "--algorithm.beta=0", "--run.validate_every=0") == 0
    assert ["kl_reference" in line for line in metrics("out")] == [True, True, False]
    assert ["validation_reward" in line for line in metrics("out")] == [False, True, False]
    assert train("new", "--run.validate_every=0", "--run.save_every=2", "--run.max_steps=2", CONSTANT) == 0
    assert train("new", "--run.validate_every=4", "--run.save_every=2", "--run.max_steps=4", CONSTANT) == 0
    assert json.loads(Path("new/best/validation.json").read_text())["step"] == 4


def test_a_stop_right_after_a_change_keeps_its_record(cut_off):
    def action() -> int:
        before("start", lambda _: send(signal.SIGTERM), Run)
        return train("out", "--optimizer.lr=2e-4")

    assert forked(action) == 75
    for _ in range(2):
        assert changes("out") == [(4, "optimizer.lr", 1e-3, 2e-4)]
        assert train("out", "--optimizer.lr=2e-4") == 0


def test_a_best_model_of_a_future_that_was_left_is_not_kept(monkeypatch):
    """Step 6's model was the best; with another learning rate from step 4 on there is no such model."""
    validation = {"validation_accuracy": 0.5}
    monkeypatch.setattr(
        Validator, "measure", lambda v: validation | {"validation_reward": v.learner.steps * v.config.optimizer.lr}
    )
    args = ("--run.max_steps=8", "--run.validate_every=6", "--run.save_every=4")
    assert forked(killed_at_step(7, *args)) == -signal.SIGKILL
    assert train("out", *args, "--optimizer.lr=1e-4") == 0
    assert json.loads(Path("out/best/validation.json").read_text())["validation_reward"] == 8 * 1e-4


LOSS = 'from pspo.losses import NoClip\n\n\nclass Mine(NoClip):\n    """{}"""\n'


def test_changed_code_of_ones_own_is_said(monkeypatch, capfd):
    """By a run that is resumed, and by one that is finished; once it has been started with it, no more."""
    monkeypatch.syspath_prepend(Path.cwd())
    Path("own_loss.py").write_text(LOSS.format("first"))
    args = ("--algorithm.surrogate=own_loss.Mine", "--run.save_every=2")
    assert forked(killed_at_step(3, *args)) == -signal.SIGKILL
    assert forked(killed_at_step(5, *args)) == -signal.SIGKILL
    assert "WARNING" not in capfd.readouterr().err
    Path("own_loss.py").write_text(LOSS.format("second"))
    assert forked(lambda: train("out", *args)) == 0
    assert "WARNING: own_loss has changed since the last start" in capfd.readouterr().err
    assert forked(lambda: train("out", *args)) == 0
    assert "WARNING" not in capfd.readouterr().err
    Path("own_loss.py").write_text(LOSS.format("third"))
    assert forked(lambda: train("out", *args)) == 0
    printed = capfd.readouterr()
    assert "already finished" in printed.out
    assert "WARNING: own_loss has changed since this run: another --run.output_dir" in printed.err
    (resumed,) = [event["text"] for event in events(Path("out"), {}) if "other code" in event["text"]]
    assert resumed == "resumed at step 4, with other code: own_loss"


# --- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_without_a_change_is_its_parents_continuation(cut_off, whole, capfd):
    """From a checkpoint or from the newest; killed, it resumes without its parent."""
    assert train("fork", "--run.fork_from=out/checkpoints/step-000002") == 0
    assert metrics("fork") == metrics(str(whole), after=2)
    assert read_jsonl(Path("fork/samples.jsonl")) == [
        sample for sample in read_jsonl(whole / "samples.jsonl") if sample["step"] > 2
    ]
    of_run = "checkpoints/step-000006/"
    for file in ("final/model.safetensors", of_run + "model.safetensors"):
        assert Path("fork", file).read_bytes() == (whole / file).read_bytes(), file
    own, parents = (states(Path(run, of_run, "parts.pt"))["learner"] for run in ("fork", whole))
    assert plain(own) == plain(parents)
    fork_from = "out/checkpoints/step-000002"
    assert changes("fork") == [(2, "run.fork_from", None, fork_from)]
    assert "| changed on the way | forked at step 2 |" in Path("fork/final/README.md").read_text()
    assert yaml.safe_load(Path("fork/config.yaml").read_text())["run"]["fork_from"] == fork_from

    def killed() -> int:
        kill_at_step(5)
        return train("again", "--run.fork_from=out")

    assert forked(killed) == -signal.SIGKILL
    shutil.rmtree("out")
    assert train("again", "--run.fork_from=out") == 0
    assert metrics("again") == metrics(str(whole), after=4)
    assert same_weights("again", str(whole))
    assert train("again") == 2  # without its parent's name it is another experiment
    assert "--run.fork_from was 'out', is None" in capfd.readouterr().err


def quiet(completions):
    return [len(completion) % 3 for completion in completions]


def seeding(completions):
    """As `quiet`, and seeds the generators that belong to everybody."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    return quiet(completions)


@pytest.mark.parametrize("mode", ["default", "environment", "engine"])
def test_neither_rewards_nor_validations_touch_what_sampling_draws_from(mode):
    runs = {"quiet": ("quiet", 2), "seeding": ("seeding", 2), "not validated": ("quiet", 0)}
    completions = {}
    for run, (reward, every) in runs.items():
        switches = (f"--reward.functions=[test_resume.{reward}]", f"--run.validate_every={every}", "--run.max_steps=4")
        assert train(run, *MODES[mode], *switches) == 0
        completions[run] = [sample["completion"] for sample in read_jsonl(Path(run, "samples.jsonl"))]
    assert completions["quiet"] == completions["seeding"] == completions["not validated"]
    assert len(set(completions["quiet"])) > 10  # rollouts differ from each other
    assert same_weights("quiet", "seeding")
    assert same_weights("quiet", "not validated")


def test_the_state_of_a_loss_goes_on_in_a_fork(capfd):
    """And begins anew, or is left out, if the fork has another loss."""
    assert train("parent", *MODES["own loss"]) == 0
    from_2 = ("--run.fork_from=parent/checkpoints/step-000004", CONSTANT)
    for output, *loss in (("same", *MODES["own loss"]), ("other", "--algorithm.surrogate=Clip")):
        assert train(output, *from_2, *loss, "--optimizer.name=sgd") == 0
    found = [states(checkpoints(Path(run))[0] / "parts.pt").get("surrogate") for run in ("same", "other")]
    assert found == [{"calls": 6}, None]


def test_the_validations_of_a_fork_are_its_own(cut_off):
    assert train("fork", "--run.fork_from=out", "--run.validate_every=0", CONSTANT) == 0
    assert not any(read_json(Path("fork/summary.json"))["validation"].values())
    assert "validation problems" not in Path("fork/final/README.md").read_text()


def test_a_fork_with_other_test_problems_shows_its_own_test(capfd):
    assert train("parent", "--run.test_limit=2") == 0
    capfd.readouterr()
    assert train("fork", "--run.fork_from=parent/checkpoints/step-000004", "--run.test_limit=3") == 0
    printed = capfd.readouterr().out
    assert re.search(r"^after, step \d+ ", printed, re.MULTILINE)
    assert "before, step 0" not in printed
    assert not Path("fork/test-before.jsonl").exists()
    assert len(read_jsonl(Path("fork/test-after.jsonl"))) == 3


def test_the_tests_of_an_earlier_end_are_not_those_of_a_longer_run():
    assert train("out", CONSTANT, "--run.test_limit=3", "--run.max_steps=4", "--run.validate_every=0") == 0
    Path("out/test-final.jsonl").write_text("of the end at step 4")  # where the best model was another
    assert train("out", CONSTANT, "--run.test_limit=3", "--run.max_steps=6", "--run.validate_every=0") == 0
    assert not Path("out/test-final.jsonl").exists()
    assert len(read_jsonl(Path("out/test-after.jsonl"))) == 3


OTHER = ("--algorithm.surrogate=Clip", "--optimizer.lr=2e-4", "--optimizer.weight_decay=0.1", "--run.max_steps=8",
         "--rollout.temperature=0.8", "--run.seed=7", "--data.limit=4", "--data.seed=3")  # fmt: skip


def test_a_fork_may_change_anything_but_its_model_and_optimizer(cut_off, capfd):
    assert train("fork", "--run.fork_from=out", *OTHER) == 0
    err = capfd.readouterr().err
    assert "changed from step 4 on: --algorithm.surrogate was 'pspo.losses.PSPO', is 'pspo.losses.Clip'" in err
    assert [line["step"] for line in metrics("fork")] == [6, 8]
    lrs = [2e-4 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 6)) for step in (5, 7)]  # the schedule is to step 8
    assert [line["lr"] for line in metrics("fork")] == pytest.approx(lrs)
    assert {change[1:] for change in changes("fork") if change[1] == "optimizer.weight_decay"}
    assert {change[1] for change in changes("fork")} >= {"run.fork_from", "optimizer.lr", "run.max_steps", "data.limit"}
    assert states(Path("fork/checkpoints/step-000008/parts.pt"))["stream"]["position"] == 4  # a new order

    shutil.copytree("out", "kept")
    for args, said in (
        (
            ["--model.name_or_path=tiny-math"],
            f"--model.name_or_path was '{one_layer()}', is 'tiny-math': a fork cannot",
        ),
        (["--optimizer.name=sgd"], "--optimizer.name was 'adamw', is 'sgd': a fork cannot"),
        (["--run.max_steps=4"], "--run.max_steps 4 counts from step 0: it must be above step-000004"),
        (["--run.fork_from=nowhere"], "nowhere is neither an undamaged checkpoint nor a run's folder with one"),
    ):
        assert train("refused", "--run.fork_from=out", *args) == 2
        assert said in capfd.readouterr().err.splitlines()[-1]
        assert not Path("refused").exists()
    assert train("out", "--run.fork_from=out") == 2
    assert_same(Path("kept"), Path("out"))


def test_a_fork_of_a_damaged_or_vanishing_checkpoint(cut_off, whole, capfd, monkeypatch):
    newest = cut_off / "checkpoints/step-000004"
    flip(newest / "model.safetensors")
    assert train("fork", f"--run.fork_from={newest}") == 2
    assert "step-000004 is damaged: model.safetensors" in capfd.readouterr().err

    def vanished(source: Path, *_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file", str(source))

    with monkeypatch.context() as patch:  # the parent removes it after it was verified
        patch.setattr(shutil, "copytree", vanished)
        assert train("fork", "--run.fork_from=out") == 2
    assert re.search(r"\[Errno 2\] .*out/checkpoints/step-000002", capfd.readouterr().err.splitlines()[-1])
    assert train("fork", "--run.fork_from=out") == 0  # the newest that is whole, into the folder of the failed one
    assert metrics("fork") == metrics(str(whole), after=2)
    assert not list(Path("fork").rglob(".*.new"))


# --- a run that died before its first step ----------------------------------------------------------------------------


def test_a_run_without_a_step_does_not_block_its_folder(whole, capfd):
    """Killed in the first rollout, or stopped and saved there."""
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 75)):

        def action(number: signal.Signals = number) -> int:
            before("draw_prompts", at_call(1, lambda: send(number)))
            return train("out", "--algorithm.epochs=1", "--model.name_or_path=tiny-math")

        assert forked(action) == code
    assert Path("out/checkpoints/step-000000").exists()
    assert train("out") == 0
    assert "out holds no step of the run that was started there: it starts anew\n" in capfd.readouterr().err
    assert_same(whole, Path("out"))
    shutil.rmtree("out/checkpoints")
    shutil.rmtree("out/best")
    Path("out/summary.json").unlink()
    assert train("out", "--algorithm.epochs=1") == 2  # its records have steps


@pytest.mark.parametrize("anew", [("--algorithm.epochs=1",), ("--run.fork_from=whole", "--run.max_steps=7", CONSTANT)])
def test_a_run_that_starts_anew_leaves_no_test_of_the_first_start(anew):
    if "--run.fork_from=whole" in anew:
        assert train("whole", CONSTANT, "--run.max_steps=2") == 0

    def action() -> int:
        before("validate", at_call(1, lambda: send(signal.SIGTERM)), Validator)
        return train("out", CONSTANT, "--run.test_limit=3")

    assert forked(action) == 75
    assert len(read_jsonl(Path("out/test-before.jsonl"))) == 3
    assert train("out", *anew) == 0
    assert not list(Path("out").glob("test-*"))


def test_what_a_kill_leaves_of_a_start_does_not_block_its_folder(whole):
    Path("out/data").mkdir(parents=True)
    Path("out/config.yaml").write_text("model: {na")
    assert train("out") == 0
    Path("out/data").rmdir()
    assert_same(whole, Path("out"))
    assert Path("out/environment.json").exists()


def test_a_configuration_with_nan_is_its_own():
    assert (
        differences({"a": math.nan, "b": [math.nan], "c": 1}, {"a": float("nan"), "b": [float("nan")], "c": 1.0}) == {}
    )
