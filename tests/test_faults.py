"""Numbers gone bad and models that bring code, through the command: no weight and no checkpoint meets them."""

import json
import math
import pickle
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import TINY, Payload, assert_same, forked, run_command
from safetensors.torch import load_file

import pspo.run.recorder
from pspo.cli.parse import parse
from pspo.config import TrainConfig
from pspo.errors import RunFailed
from pspo.files import checkpoints, read_jsonl
from pspo.losses import NoClip
from pspo.model import ASSETS
from pspo.run.recorder import by_row, rollout_metrics
from pspo.run.run import prepare
from pspo.tasks import Problem, Reward
from pspo.tasks.workers import worker_pool
from pspo.train import main

pytestmark = pytest.mark.usefixtures("here")
metrics = partial(read_jsonl, Path("out/metrics.jsonl"))


class Broken(NoClip):
    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return super().__call__(logprobs, old_logprobs, advantages, mask) * math.nan


class Remembering(NoClip):
    """Has a state that runs code when it is loaded."""

    def state_dict(self):
        return {"mean": np.float64(1.0)}


class Length(Reward):
    def __call__(self, completions, problems):
        return [len(text) + row % 3 for row, text in enumerate(completions)]  # never all the same


@dataclass(frozen=True)
class Mean(NoClip):
    returns: str = "mean"

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        mean = super().__call__(logprobs, old_logprobs, advantages, mask).mean()
        return {"mean": lambda: mean, "raises": {}.popitem, "exits": sys.exit}[self.returns]()


def train(*args: str) -> int:
    return run_command(main, *TINY, "--run.output_dir=out", *args)


def start() -> dict[str, torch.Tensor]:
    return load_file(ASSETS / "tiny-base/model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name].float()) for name in one)


# --- optimizer steps --------------------------------------------------------------------------------------------------


def test_steps_gone_bad_in_a_row_end_the_run_and_leave_its_last_good_checkpoint(capsys, monkeypatch):
    monkeypatch.setattr(pspo.run.recorder, "MAX_SKIPPED", 3)
    args = ("--reward.functions=[test_faults.Length]", "--algorithm.surrogate=test_faults.Broken")
    assert train(*args) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert "3 optimizer steps in a row were skipped" in err
    assert "out/checkpoints/step-000002" in err
    assert [line["steps_skipped"] for line in metrics()] == [2, 2]
    assert same(load_file("out/checkpoints/step-000002/model.safetensors"), start())
    assert train(*args) == 1  # the two skipped before the checkpoint count on
    assert [line["step"] for line in metrics()] == [2, 4]


def test_a_good_step_in_between_starts_the_count_again(monkeypatch):
    calls, clip = [], torch.nn.utils.clip_grad_norm_

    def broken(*args):
        calls.append(clip(*args))
        return calls[-1] if len(calls) == 3 else calls[-1] * math.nan

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    monkeypatch.setattr(pspo.run.recorder, "MAX_SKIPPED", 3)
    args = ("--reward.functions=[test_faults.Length]", "--algorithm.epochs=1", "--run.max_steps=8", "--run.keep=8")
    assert train(*args) == 1
    assert [line["steps_skipped"] for line in metrics()] == [1, 1, 0, 1, 1, 1]
    two, three, five = (load_file(f"out/checkpoints/step-00000{n}/model.safetensors") for n in (2, 3, 5))
    assert same(two, start())
    assert not same(three, start())
    assert same(three, five)


def test_a_state_that_could_not_be_loaded_is_not_saved():
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        train("--algorithm.surrogate=test_faults.Remembering")
    assert not checkpoints(Path("out"))


def test_weights_that_are_not_finite_are_not_saved():
    run = prepare(*parse(TrainConfig, "", [*TINY, "--run.output_dir=out"]))
    run.start()
    run.checkpointer.take_snapshot()
    run.checkpointer.save_snapshot()
    next(run.learner.policy.parameters()).data[0, 0] = math.inf
    run.learner.steps = 2
    run.checkpointer.take_snapshot()
    with pytest.raises(RunFailed, match="step 2"):
        run.checkpointer.save_snapshot()
    with pytest.raises(RunFailed, match="step 2"):
        run.validator.validate()  # which replaces best/
    assert [folder.name for folder in checkpoints(Path("out"))] == ["step-000000"]


# --- rewards ----------------------------------------------------------------------------------------------------------

BAD = {  # switches, and what is shown
    "raises": ((), "KeyError: 'no such key'"),
    "in a validation": (
        ("--reward.functions.rows=4", "--run.validate_every=2", "--run.validation_limit=4"), "KeyError: 'no such key'"
    ),
    "every completion": (
        ("--reward.on_error=none", "--rollout.prompts=1", "--reward.functions.rows=4"),
        "every completion of this rollout is without a reward: {'Bad': \"KeyError"
    ),
    "a term": (
        ("--reward.functions.rows=0", "--algorithm.terms=[light_rewards.failing_term]"), "KeyError: 'no such key'"
    ),
    "drawn ahead": (("--rollout.engine=engines.Copy", "--rollout.lag=1"), "KeyError: 'no such key'"),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("raises", "in a validation", "a term") else pytest.mark.nightly)
        for case in BAD
    ],
)
def test_own_code_that_fails_saves_the_run_which_then_ends_as_if_nothing_had_happened(capsys, case):
    """The failed attempt drew tokens and random numbers: those of the rollout's beginning are in the checkpoint."""
    switches, said = BAD[case]
    worker_pool.cache_clear()  # whose process is in another folder
    args = ["--reward.functions=[light_rewards.Bad]", "--run.save_every=0", *switches]
    assert train(*args) == 0
    Path("out").rename("whole")
    Path("broken").touch()
    capsys.readouterr()
    assert train(*args) == 1
    err = capsys.readouterr().err
    assert said in err
    assert ('raise KeyError("no such key")' in err) == ("KeyError" in said)
    assert "pspo/run/" not in err  # no frames but the user's
    assert "last checkpoint: out/checkpoints/step-000004; the same command with --run.output_dir out resumes" in err
    assert [line["step"] for line in metrics()] == ([2] if case == "in a validation" else [2, 4])
    Path("broken").unlink()
    assert train(*args) == 0
    shutil.rmtree("out/checkpoints/step-000004")  # of the failure
    assert_same(Path("whole"), Path("out"))


@pytest.mark.parametrize("args", [(), ("--reward.workers=1",)])
def test_processes_of_a_users_code_are_ordinary_ones(args):
    worker_pool.cache_clear()
    assert train("--reward.functions=[light_rewards.lengths_by_processes]", "--run.max_steps=2", *args) == 0


def test_a_fork_leaves_the_signals_blocked_that_were():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert forked(lambda: int(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))) == 1
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGTERM}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_run_in_a_thread():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(train).result() == 0


@pytest.mark.parametrize(("returns", "said"), [
    ("mean", "Mean must return a loss per token, (B, T) = (8, "), ("raises", "KeyError: "), ("exits", "SystemExit"),
])  # fmt: skip
def test_a_surrogate_must_return_the_loss_of_every_token(capsys, returns, said):
    args = ["--algorithm.surrogate=test_faults.Mean", f"--algorithm.surrogate.returns={returns}"]
    assert train("--reward.functions=[test_faults.Length]", *args) == 1
    err = capsys.readouterr().err
    assert said in err
    assert ("your code" in err) == (returns != "mean")
    assert "site-packages" not in err
    assert "no checkpoint was saved: the same command with --run.output_dir out starts anew" in err
    assert not Path("out/metrics.jsonl").exists()


def test_a_rollout_whose_rewards_are_all_equal_moves_nothing_and_is_seen():
    assert train("--reward.weights=[0.0]", "--algorithm.advantages=group") == 0
    for line in metrics():
        assert line["zero_advantage_share"] == 1
        assert line["reward_std"] == line["grad_norm"] == 0
    assert same(load_file("out/final/model.safetensors"), start())


def test_empty_and_truncated_completions_are_counted():
    columns = {"text": ["", " \n", "a", "b c"], "reward": [0, 1, math.nan, 0.5], "rewards": [{"A": math.nan}] * 4}
    columns |= {"trained": [True, False, False, False], "truncated": [False, False, True, True], "logged": [{}] * 4}
    columns |= {name: [0] * 4 for name in ("problem", "advantage", "tokens")}
    seen = rollout_metrics(by_row(columns, 4), [Problem("?")])
    shares = {"empty_share": 0.5, "truncated_share": 0.5, "reward_unknown_share": 0.25, "trained_share": 0.25}
    assert seen | shares | {"reward": 0.5} == seen
    assert math.isnan(seen["reward/A"])


# --- models that bring code ------------------------------------------------------------------------------------------


def needs_remote_code(folder: Path) -> None:
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map, "model_type": "own"}))
    (folder / "own.py").write_text("from pathlib import Path\nPath('executed').touch()\n")


def holds_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")


def has_an_unsafe_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")


def has_an_endless_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for i in range(10 ** 9) %}{% endfor %}")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (needs_remote_code, "--model.trust_remote_code"),
        (holds_a_pickle, "--model.name_or_path"),
        (has_an_unsafe_template, "chat template"),
        (has_an_endless_template, "chat template"),
    ],
)
def test_a_model_s_own_code_is_refused_in_one_line_and_not_run(capsys, model_folder, spoil, named):
    folder = model_folder()
    spoil(folder)
    assert train(f"--model.name_or_path={folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert str(folder) in line
    assert not Path("executed").exists()
    assert not Path("out").exists()
