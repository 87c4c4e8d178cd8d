"""Runs that are killed, stopped, damaged or started twice: real faults, in processes of their own, to the last bit.

The processes are forks that call the command's `main`: the fault is real (SIGKILL, SIGTERM, a full disk), the imports
are not paid again. They compute with one thread, for a fork may not use its parent's.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import pspo.train
from pspo.config import TrainConfig
from pspo.model import load_policy
from pspo.run.checkpoint import Saver, checkpoints, verify
from pspo.run.cli import parse
from pspo.run.resume import FREE, LONGER, ROUNDING, find_checkpoint
from pspo.train import prepare, save_best

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
REPOSITORY = Path(__file__).parents[1]
TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1", "--run.max_steps=6",
    "--run.validate_every=4", "--run.validation_limit=2", "--run.test_limit=0", "--run.save_every=1",
    "--run.samples=8", "--data.limit=5", "--optimizer.lr=1e-3", "--optimizer.warmup_steps=2",
    "--optimizer.schedule=cosine", "--reward.functions=[noisy_reward.Noisy]",
)  # fmt: skip
NOISY = """
import random
import numpy as np
from pspo.tasks import Reward

class Noisy(Reward):
    '''Draws from the generators that belong to everybody.'''

    def __call__(self, completions, problems):
        return [len(text) / 10 + random.random() + random.gauss(0, 1) + np.random.rand() for text in completions]
"""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # else a warning about the forks
    (tmp_path / "noisy_reward.py").write_text(NOISY)
    return tmp_path


def train(output: str, *args: str) -> int:
    """Exit code of the command, in this process."""
    try:
        pspo.train.main([*TINY, f"--run.output_dir={output}", *args])
        return 0
    except SystemExit as exit_:
        return exit_.code


def forked(action: Callable[[], int]) -> int:
    """Exit code of the action in a process of its own, or minus the signal that killed it."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = action()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def before(name: str, action: Callable[..., None], module=pspo.train) -> None:
    """Have the action done before each call of a function, with its arguments."""
    function = getattr(module, name)

    def replacement(*args, **kwargs):
        action(*args)
        return function(*args, **kwargs)

    setattr(module, name, replacement)


def send(*signals: signal.Signals) -> Callable[..., None]:
    """Sends these signals to this process, the first time that it is called."""
    left = list(signals)

    def action(*_) -> None:
        while left:
            os.kill(os.getpid(), left.pop(0))

    return action


def killed_at_step(step: int, output: str, *args: str) -> Callable[[], int]:
    """The command, killed where it is about to take this optimizer step, all that it began to save on the disk."""

    def action() -> int:
        learners, savers = [], []

        def kill(*_) -> None:
            if learners[-1].steps == step:
                for saver in savers[-1:]:
                    saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)

        before("save", lambda saver, *_: savers.append(saver), Saver)
        before("update", lambda learner, *_: learners.append(learner))
        before("clip_grad_norm_", kill, torch.nn.utils)
        return train(output, *args)

    return action


def contents(run: Path) -> dict[str, object]:
    """Everything that a run leaves, but for times, memory and the folder's name."""
    files: dict[str, object] = {}
    for path in (path for path in run.rglob("*") if path.is_file()):
        name, text = str(path.relative_to(run)), path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            text = [{key: value for key, value in line.items() if not key.startswith("seconds/")} for line in lines]
        elif path.name in ("summary.json", "state.json"):
            record = json.loads(text)
            text = {key: value for key, value in record.items() if key not in ("seconds", "peak_memory_gb")}
            text["best_model"] = Path(record.get("best_model", "")).name
        elif path.name == "config.yaml":
            text = yaml.safe_load(text)
            del text["run"]["output_dir"]
        if path.name != "manifest.json":
            files[name] = text
    return files


def assert_same(one: Path, other: Path) -> None:
    left, right = contents(one), contents(other)
    assert set(left) == set(right)
    assert [name for name in left if left[name] != right[name]] == []


CASES = {
    "PSPO": ("--algorithm.surrogate=PSPO",),
    "Clip, gradient checkpointing": ("--algorithm.surrogate=Clip", "--model.gradient_checkpointing=true"),
    "NoClip, SGD": ("--algorithm.surrogate=NoClip", "--optimizer.name=sgd"),
    "P3O, microbatches": ("--algorithm.surrogate=P3O", "--optimizer.microbatch_tokens=200"),
    "SAPO, minibatches": ("--algorithm.surrogate=SAPO", "--algorithm.minibatches=2"),
    "TOPR, KL": ("--algorithm.surrogate=TOPR", "--algorithm.beta=0.1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("args", CASES.values(), ids=CASES)
def test_killed_at_every_step_a_run_ends_as_if_nothing_had_been(here, args):
    assert train("whole", *args) == 0
    for step in range(6):
        assert forked(killed_at_step(step, "out", *args)) == -signal.SIGKILL
    assert train("out", *args) == 0
    assert_same(here / "whole", here / "out")
    weights = load_file(here / "out/final/model.safetensors")
    start = load_file(REPOSITORY / "pspo/assets/tiny-base/model.safetensors")
    assert all(not torch.equal(weights[name], start[name].float()) for name in weights)


def test_a_run_that_is_killed_once_takes_up_where_it_was_saved(here, capfd):
    assert train("whole") == 0
    assert forked(killed_at_step(5, "out")) == -signal.SIGKILL
    for name in ("metrics.jsonl", "samples.jsonl"):  # what a kill a moment later would leave
        with (here / "out" / name).open("a") as file:
            file.write('{"step": 6, "tokens": 1, "reward": 0.5}\n{"step": 8, "tok')
    capfd.readouterr()
    assert train("out") == 0
    assert "going on with out from step-000004\n" in capfd.readouterr().out
    assert_same(here / "whole", here / "out")


def test_killed_before_anything_was_saved_a_run_starts_over(here, capfd):
    assert train("whole", "--run.save_every=0") == 0
    assert forked(killed_at_step(5, "out", "--run.save_every=0")) == -signal.SIGKILL
    assert not (here / "out/checkpoints").exists()
    assert train("out", "--run.save_every=0") == 0
    assert "from the start: nothing was saved" in capfd.readouterr().out
    assert_same(here / "whole", here / "out")


def test_a_best_model_newer_than_the_checkpoint_stays(here, monkeypatch):
    """Validation finds each model better than the one before: step 8's is in best/ when the run goes on from step 6."""

    def better(config, setup):
        return {"validation_reward": 1.0 + setup.learner.steps, "validation_accuracy": 0.5}

    monkeypatch.setattr(pspo.train, "validate", better)
    args = ("--run.max_steps=12", "--run.validate_every=8", "--run.save_every=5")
    assert train("whole", *args) == 0
    assert forked(killed_at_step(9, "out", *args)) == -signal.SIGKILL
    assert checkpoints(here / "out")[0].name == "step-000006"
    assert json.loads((here / "out/best/validation.json").read_text())["step"] == 8
    assert train("out", *args) == 0
    assert_same(here / "whole", here / "out")


# --- killed while it saves --------------------------------------------------------------------------------------------


def killed_at_file_event(n: int, action: Callable[[], None]) -> Callable[[], int]:
    """The action, killed before the n-th time that it opens, makes, renames, removes or syncs a file or folder."""

    def watched() -> int:
        left = [n]

        def count(event: str, _=None) -> None:
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync"):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        before("fsync", lambda _: count("fsync"), os)
        action()
        return 0

    return watched


@pytest.mark.slow
def test_killed_at_any_point_of_a_save_there_is_a_whole_checkpoint_and_a_whole_best(here):
    config, resolved = parse(TrainConfig, "", [*TINY, "--run.output_dir=out", "--run.keep=1"])
    setup = prepare(config, resolved)
    embedding = setup.learner.policy.get_input_embeddings().weight

    def save(step: int) -> None:
        """Weights, steps and validation all tell the step."""
        setup.learner.steps, setup.progress.best = step, {"step": step}
        embedding.data[0, 0] = step
        setup.saver.save(step, "", setup.progress)
        setup.saver.wait()
        save_best(config, setup)

    outcomes, n = set(), 0
    save(1)
    shutil.copytree("out", "start")
    while True:
        n += 1
        code = forked(killed_at_file_event(n, lambda: save(2)))
        found = find_checkpoint(here / "out", "auto")
        verify(found)
        steps = json.loads((found / "state.json").read_text())["steps"]
        assert load_file(found / "model.safetensors")["model.embed_tokens.weight"][0, 0] == steps
        best = json.loads((here / "out/best/validation.json").read_text())["step"]
        assert load_file(here / "out/best/model.safetensors")["model.embed_tokens.weight"][0, 0] == best
        assert best <= steps
        assert sorted(path.name[0] for path in here.glob("out/**/*.*") if path.is_dir()) == []  # nothing half done
        outcomes.add((code, steps, best))
        if code == 0:
            break
        shutil.rmtree("out")
        shutil.copytree("start", "out")
    assert n > 50
    assert outcomes == {(-9, 1, 1), (-9, 2, 1), (-9, 2, 2), (0, 2, 2)}


@pytest.mark.slow
def test_killed_in_the_middle_of_a_save_a_run_ends_as_if_nothing_had_been(here):
    assert train("whole", "--run.keep=1") == 0
    for n in range(5, 70, 16):
        assert forked(lambda n=n: killed_in_second_save(n)) == -signal.SIGKILL
        assert train("out", "--run.keep=1") == 0
        assert_same(here / "whole", here / "out")
        shutil.rmtree("out")


def killed_in_second_save(n: int) -> int:
    saves = []

    def watch(*_) -> None:
        saves.append(None)
        if len(saves) == 2:
            killed_at_file_event(n, lambda: None)()

    before("save", watch, Saver)
    return train("out", "--run.keep=1")


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cut_off(here) -> Path:
    """A run that was killed after its second checkpoint."""
    assert forked(killed_at_step(5, "out")) == -signal.SIGKILL
    assert [folder.name for folder in checkpoints(here / "out")] == ["step-000004", "step-000002"]
    return here / "out"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes of"),
    "one bit": (flip, "is not what was saved"),
    "missing": (Path.unlink, "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "bytes of"),
}


def test_a_damaged_checkpoint_is_named_and_passed_over(cut_off, capfd):
    shutil.copytree(cut_off, "kept")
    names = [path.name for path in (cut_off / "checkpoints/step-000004").iterdir()]
    assert len(names) == 11
    for name in names:
        for damage, said in DAMAGE.values():
            damage(cut_off / "checkpoints/step-000004" / name)
            found = find_checkpoint(cut_off, "auto")
            assert found.name == "step-000002"
            line = capfd.readouterr().err
            assert line.startswith(f"{cut_off}/checkpoints/step-000004 is damaged: ")
            assert line.endswith("; passed over\n")
            assert line.count("\n") == 1
            assert (name in line and said in line) or name == "manifest.json"  # which vouches for the others
            shutil.rmtree(cut_off)
            shutil.copytree("kept", cut_off)
    flip(cut_off / "checkpoints/step-000004/model.safetensors")
    assert train("out") == 0
    assert train("whole") == 0
    assert_same(Path("whole"), cut_off)


def test_with_all_checkpoints_damaged_the_run_is_left_alone(cut_off, capfd):
    for folder in checkpoints(cut_off):
        flip(folder / "training.pt")
    left = {path: path.read_bytes() for path in cut_off.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert train("out") == 2
    *damage, line = capfd.readouterr().err.splitlines()
    assert [f"step-00000{n} is damaged" in text for n, text in zip((4, 2), damage, strict=True)] == [True, True]
    assert "no checkpoint that could be gone on from" in line
    assert {path: path.read_bytes() for path in cut_off.rglob("*") if path.is_file()} == left


def test_a_best_model_that_is_gone_is_missed(cut_off, capfd):
    shutil.rmtree(cut_off / "best")
    capfd.readouterr()
    assert train("out") == 2
    assert "out/best is missing" in capfd.readouterr().err


def full_disk(output: str, limit: int) -> int:
    """The command; from the second checkpoint on no file may become larger than this."""
    saves = []

    def watch(*_) -> None:
        saves.append(None)
        if len(saves) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    before("save", watch, Saver)
    return train(output)


@pytest.mark.parametrize(("limit", "written"), [(2**20, 4), (5 * 2**20, 6)])
def test_a_save_that_finds_the_disk_full_leaves_the_old_checkpoint(here, capfd, limit, written):
    """Full for the weights, or for the larger optimizer state: that is written in the background, and seen later."""
    assert forked(lambda: full_disk("out", limit)) == 1
    steps = [json.loads(line)["step"] for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == written
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "pspo.train: cannot save out/checkpoints/step-000004: " in err.splitlines()[-1]
    assert [path.name for path in (here / "out/checkpoints").iterdir()] == ["step-000002"]
    assert train("out") == 0
    assert train("whole") == 0
    assert_same(here / "whole", here / "out")


def as_anybody(action: Callable[[], int]) -> Callable[[], int]:
    """Without root's right to write everywhere."""

    def run() -> int:
        if os.geteuid() == 0:  # Linux: capset, no capabilities left
            nothing = (ctypes.c_uint32 * 6)()
            assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), nothing) == 0
        return action()

    return run


def test_a_disk_too_full_for_the_records_ends_the_run_in_one_line(here, capfd):
    def action() -> int:
        before("append_jsonl", lambda path, *_: path.exists() or path.symlink_to("/dev/full"))
        return train("out", "--run.save_every=0")

    assert forked(action) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("pspo.train: cannot write into out: [Errno 28]")


def test_a_save_is_finished_when_a_run_that_failed_is_told_to_stop(here, capfd):
    """The save goes on in the background when the next reward raises; the signal comes while it is waited for."""
    saving, finish = threading.Event(), Saver._finish

    def slowly(self, *args) -> None:
        saving.set()
        time.sleep(2)
        finish(self, *args)

    def fail(*_) -> None:
        if saving.is_set():
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            raise RuntimeError("a reward's")

    def action() -> int:
        Saver._finish = slowly
        before("reward", fail)
        return train("out")

    assert forked(action) == 1
    assert "RuntimeError: a reward's" in capfd.readouterr().err
    assert find_checkpoint(here / "out", "auto").name == "step-000002"


def test_a_folder_that_may_not_be_written_to(cut_off, capfd):
    """First the run's; then that of its checkpoints, which shows only when it saves."""
    cut_off.chmod(0o555)
    assert forked(as_anybody(lambda: train("out"))) == 2
    assert capfd.readouterr().err.splitlines()[-1].endswith("out cannot be written to; choose another folder")
    cut_off.chmod(0o755)
    (cut_off / "checkpoints").chmod(0o555)
    assert forked(as_anybody(lambda: train("out"))) == 1
    assert "pspo.train: cannot save out/checkpoints/step-000006: " in capfd.readouterr().err.splitlines()[-1]
    assert len(checkpoints(cut_off)) == 2
    (cut_off / "checkpoints").chmod(0o755)
    assert train("out") == 0


# --- signals ----------------------------------------------------------------------------------------------------------

PHASES = {
    "first validation": (pspo.train, "validate", "step-000000"),
    "rollout": (pspo.train, "generate", "step-000002"),
    "training": (pspo.train, "update", "step-000002"),
    "save": (Saver, "save", "step-000002"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "number"), [
    ("first validation", signal.SIGTERM), ("rollout", signal.SIGINT), ("training", signal.SIGTERM),
    ("save", signal.SIGINT),
])  # fmt: skip
def test_told_to_stop_a_run_finishes_its_rollout_saves_and_goes_on_exactly(here, capfd, phase, number):
    module, function, saved = PHASES[phase]

    def stopped() -> int:
        before(function, send(number), module)
        return train("out", "--run.save_every=2")

    assert forked(stopped) == 75
    err = capfd.readouterr().err
    assert f"\n{number.name}: stopping after this rollout, then saving; a second one stops at once\n" in err
    assert err.endswith("\nstopped; the same command with --run.output_dir out goes on\n")
    assert checkpoints(here / "out")[0].name == saved
    assert train("out", "--run.save_every=2") == 0
    assert train("whole", "--run.save_every=2") == 0
    if phase == "first validation":
        assert contents(here / "whole")["metrics.jsonl"] == contents(here / "out")["metrics.jsonl"]
    assert_same(here / "whole", here / "out")


def test_a_second_signal_stops_at_once_and_loses_nothing_saved(here, capfd):
    def interrupted() -> int:
        rollouts = []
        stop = send(signal.SIGINT, signal.SIGINT)
        before("update", lambda *_: rollouts.append(None) or (len(rollouts) == 2 and stop()))
        return train("out")

    assert forked(interrupted) == 130
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert [folder.name for folder in checkpoints(here / "out")] == ["step-000002"]
    assert train("out") == 0
    assert train("whole") == 0
    assert_same(here / "whole", here / "out")


@pytest.mark.slow
def test_sigterm_from_outside_to_the_command_itself(here):
    command = [sys.executable, "-m", "pspo.train", *TINY, "--run.output_dir=out", "--run.max_steps=400"]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        while running.poll() is None and not (here / "out/metrics.jsonl").exists():
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 75, err
    steps = [json.loads(line)["step"] for line in (here / "out/metrics.jsonl").read_text().splitlines()]
    assert checkpoints(here / "out")[0].name == f"step-{steps[-1]:06d}"
    assert not (here / "out/summary.json").exists()


# --- which run is gone on with ----------------------------------------------------------------------------------------


def test_two_runs_in_one_folder(cut_off, capfd):
    """The first is stopped in its tracks, not ended, while the second tries."""
    child = os.fork()
    if child == 0:
        before("generate", lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        os._exit(train("out"))
    os.waitpid(child, os.WUNTRACED)
    capfd.readouterr()
    try:
        assert train("out") == 2
        line = "--run.output_dir out is in use by another run: wait for it, or choose another folder"
        assert capfd.readouterr().err == f"pspo.train: error: {line}\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert train("out") == 0


def test_a_finished_run_is_finished(here, capfd):
    assert train("out") == 0
    left = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in here.rglob("*.*") if path.is_file()}
    capfd.readouterr()
    assert train("out") == 0
    assert capfd.readouterr().out.startswith("finished before, nothing to do: out/summary.json\n")
    assert train("out", "--optimizer.lr=1e-4") == 2
    assert "--optimizer.lr was 0.001, is 0.0001" in capfd.readouterr().err
    assert train("out", "--run.resume=never") == 2
    assert "--run.output_dir out already holds something" in capfd.readouterr().err
    now = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in here.rglob("*.*") if path.is_file()}
    assert now == left


def test_a_change_of_the_experiment_is_refused_and_any_other_said(cut_off, capfd):
    left = contents(cut_off)
    capfd.readouterr()
    assert train("out", "--algorithm.surrogate=Clip", "--run.max_steps=5", "--run.keep=1") == 2
    line = capfd.readouterr().err
    assert line.count("\n") == 1
    assert "--algorithm.surrogate.class_path was 'pspo.losses.PSPO', is 'pspo.losses.Clip'" in line
    assert "--run.max_steps was 6, is 5" in line
    assert "keep" not in line
    assert contents(cut_off) == left

    assert train("out", "--run.keep=1", "--optimizer.microbatch_tokens=100", "--run.resume=out") == 0
    err = capfd.readouterr().err
    assert "going on with a change: --run.keep was 2, is 1\n" in err
    assert "--optimizer.microbatch_tokens was 4096, is 100 (other rounding)\n" in err
    assert len(checkpoints(cut_off)) == 1
    config = yaml.safe_load((cut_off / "config.yaml").read_text())
    assert (config["optimizer"]["microbatch_tokens"], config["run"]["resume"]) == (100, "auto")
    pspo.train.main(["--config", "out/config.yaml"])
    assert "finished before" in capfd.readouterr().out


def test_every_switch_that_may_change_is_one():
    _, text = parse(TrainConfig, "", [])
    known = {f"{section}.{name}" for section, part in yaml.safe_load(text).items() for name in part}
    assert known >= FREE | ROUNDING | LONGER


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_is_to_be_longer_ends_as_if_it_always_had_been(here, capfd, finished):
    constant = "--optimizer.schedule=constant"
    assert train("whole", constant) == 0
    if finished:
        assert train("out", constant, "--run.max_steps=4") == 0
    else:
        assert forked(killed_at_step(3, "out", constant, "--run.max_steps=4")) == -signal.SIGKILL
    capfd.readouterr()
    assert train("out", constant) == 0
    assert "going on with a change: --run.max_steps was 4, is 6\n" in capfd.readouterr().err
    if finished:
        assert json.loads((here / "out/summary-step-000004.json").read_text())["optimizer_steps"] == 4
        (here / "out/summary-step-000004.json").unlink()
        config = Path("checkpoints/step-000004/config.yaml")  # of the shorter run
        shutil.copy(here / "whole" / config, here / "out" / config)
    assert_same(here / "whole", here / "out")
    assert train("out", constant) == 0
    assert "finished before" in capfd.readouterr().out


def test_a_finished_run_without_checkpoints_stays_as_it_is(here, capfd):
    constant = "--optimizer.schedule=constant"
    assert train("out", constant, "--run.max_steps=4") == 0
    shutil.rmtree(here / "out/checkpoints")
    left = contents(here / "out")
    assert train("out", constant) == 2
    assert "no checkpoint that could be gone on from" in capfd.readouterr().err
    assert contents(here / "out") == left


def test_a_run_that_ended_by_its_tokens_has_nothing_more_to_do(here, capfd):
    args = ("--optimizer.schedule=constant", "--run.max_tokens=1")
    assert train("out", *args, "--run.max_steps=4") == 0
    assert train("out", *args) == 0
    assert "finished before" in capfd.readouterr().out


def test_a_run_whose_learning_rate_falls_with_its_length_keeps_it(here, capfd):
    assert train("out", "--optimizer.schedule=linear", "--run.max_steps=4") == 0
    assert train("out", "--optimizer.schedule=linear") == 2
    assert "--run.max_steps was 4, is 6" in capfd.readouterr().err


def test_other_problems_under_the_same_name(here, capfd):
    def data(folder: str, add: int) -> str:
        Path(folder).mkdir(exist_ok=True)
        for split in ("train", "validation"):
            lines = [json.dumps({"prompt": f"What is {n} + 1?", "answer": n + add}) + "\n" for n in range(6)]
            Path(folder, f"{split}.jsonl").write_text("".join(lines))
        return f"--data.path={folder}"

    args = ("--data.name=file", "--optimizer.schedule=constant", data("mine", 1))
    assert forked(killed_at_step(5, "out", *args)) == -signal.SIGKILL
    data("mine", 2)
    capfd.readouterr()
    left = contents(here / "out")
    for resume in ("auto", "out/checkpoints/step-000002"):
        assert train("out", *args, f"--run.resume={resume}") == 2
        assert "of other problems" in capfd.readouterr().err
        assert contents(here / "out") == left
    moved = ("--data.name=file", "--optimizer.schedule=constant", data("moved", 1))
    assert train("out", *moved) == 0  # the same ones, elsewhere
    left = contents(here / "out")
    assert train("out", *args, "--run.max_steps=8") == 2
    assert contents(here / "out") == left  # finished, as it was


def test_a_checkpoint_that_cannot_be_read_just_now_stays(cut_off, capfd, monkeypatch):
    def fail(model, *args):
        if "checkpoints" not in model.name_or_path:
            return load_policy(model, *args)
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise ValueError("does not load") from error

    left = contents(cut_off)
    with monkeypatch.context() as patch:
        patch.setattr(pspo.run.resume, "load_policy", fail)
        assert train("out") == 2
    assert capfd.readouterr().err == "pspo.train: error: [Errno 5] Input/output error\n"
    assert contents(cut_off) == left


def test_resume_from_a_path(cut_off, capfd):
    args = [arg for arg in TINY if "output_dir" not in arg]
    (cut_off / "checkpoints/step-000004/README.md").write_text("a mark")  # so that this one would not verify
    pspo.train.main([*args, f"--run.resume={cut_off}/checkpoints/step-000002"])
    out, err = capfd.readouterr()
    assert f"going on with {cut_off} from step-000002" in out
    assert "damaged" not in err
    assert train("whole") == 0
    assert_same(Path("whole"), cut_off)
    checkpoint = cut_off / "checkpoints/step-000006"
    shutil.copytree(checkpoint, f"{checkpoint}-mine")  # not taken for one by itself either
    assert find_checkpoint(cut_off, "auto") == checkpoint
    for path, said in (
        ("nowhere", "neither a run's folder"),
        (str(cut_off / "best"), "neither a run's folder"),
        (f"{checkpoint}-mine", "is no checkpoint's name, such as step-000042"),
    ):
        if "mine" in path:
            (cut_off / "summary.json").unlink()
        assert train("out", f"--run.resume={path}") == 2
        assert said in capfd.readouterr().err
    assert train("else", f"--run.resume={cut_off}") == 2
    assert "is not in --run.output_dir else" in capfd.readouterr().err
