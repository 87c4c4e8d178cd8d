# ruff: noqa: F811 (fixtures)
"""Which run a folder holds, and what a fork takes over from another one."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from processes import assert_same, before, contents, forked, metric_lines, plain, send
from test_damage import flip, stamps
from test_resume import CONSTANT, MODES, RUN, cut_off, killed, killed_at_step, train, whole, whole_with  # noqa: F401

import pspo.run.run
from pspo.cli.parse import parse
from pspo.cli.values import to_yaml
from pspo.config import TrainConfig
from pspo.files import checkpoints, read_jsonl
from pspo.rollout.source import Now
from pspo.run.checkpointer import load_states
from pspo.run.run import check_same
from pspo.run.validator import Validator

pytestmark = pytest.mark.usefixtures("here")


def same_weights(one: str, other: str) -> bool:
    return Path(one, "final/model.safetensors").read_bytes() == Path(other, "final/model.safetensors").read_bytes()


# --- the same configuration resumes -----------------------------------------------------------------------------------


def test_two_runs_in_one_folder(whole, capfd):
    """The second one is started while the first one loads its model."""

    def action() -> int:
        second = []
        before("make_learner", lambda *_: second.append(train("out")), pspo.run.run, nth=1)
        return train("out") or second[0]

    assert forked(action) == 2
    assert "--run.output_dir out is in use" in capfd.readouterr().err
    assert_same(whole, Path("out"))


def test_a_finished_run_stays_as_it_is(capfd):
    args = (CONSTANT, "--run.max_tokens=1", "--run.max_steps=4", "--run.test_limit=3")
    assert train("out", *args) == 0
    printed = capfd.readouterr().out.partition("greedy, held-out")[2]
    left = stamps(Path("out"))
    for again, code, said in (
        (args, 0, printed),
        ((*args, "--run.max_steps=3"), 2, "--run.max_steps was 4, is 3"),
        ((*args, "--optimizer.lr=1e-4"), 2, "--optimizer.lr was 0.001, is 0.0001"),
    ):
        capfd.readouterr()
        assert train("out", *again) == code
        assert said in "".join(capfd.readouterr())
    assert stamps(Path("out")) == left
    shutil.rmtree("out/checkpoints")
    assert train("out", CONSTANT, "--run.max_tokens=1000", "--run.max_steps=4", "--run.test_limit=3") == 2  # anew


def test_another_configuration_is_refused_with_every_switch_that_differs(cut_off, capfd):
    left = contents(cut_off)
    template = "--data.chat_template={messages: []}"
    assert train("out", "--algorithm.surrogate=Clip", "--run.max_steps=5", "--run.keep=1", template) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "--algorithm.surrogate was 'pspo.losses.PSPO', is 'pspo.losses.Clip'" in line
    assert "--data.chat_template was None, is {'messages': []}" in line
    assert "--run.max_steps was 6, is 5" in line  # the learning rate falls with the run's length
    assert "--run.fork_from out" in line
    assert contents(cut_off) == left


def test_what_changes_no_number_may_differ(cut_off, whole):
    kept = shutil.copytree(checkpoints(cut_off)[0], cut_off / "checkpoints/step-000004-kept")  # a user's, no checkpoint
    (cut_off / ".lock").unlink()  # as in a copy of the run
    assert train("out", "--run.keep=1", "--run.save_every=4", "--run.quiet") == 0
    assert len(checkpoints(cut_off)) == 1
    assert kept.exists()
    assert yaml.safe_load((cut_off / "config.yaml").read_text())["run"]["keep"] == 1
    assert metric_lines(cut_off) == metric_lines(whole)
    assert same_weights("out", str(whole))


def test_other_servers_may_draw(tmp_path):
    engine = {"class_path": "pspo_vllm.Servers", "init_args": {"urls": ["http://a:8000"]}}
    _, settings = parse(TrainConfig, "pspo.train", [f"--rollout.engine={engine}", "--rollout.lag=1"])
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    settings["rollout"]["engine"]["init_args"]["urls"] = ["http://b:8000"]
    assert [*check_same(tmp_path, settings)] == ["rollout.engine.init_args.urls"]
    assert not check_same(tmp_path, settings | {"rollout": settings["rollout"] | {"engine": engine}})
    settings["rollout"]["engine"]["class_path"] = "my.Engine"
    with pytest.raises(ValueError, match=r"--rollout\.engine was 'pspo_vllm\.Servers', is 'my\.Engine'"):
        check_same(tmp_path, settings)


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
    assert train("out", *args) == 2
    assert "other problems" in capfd.readouterr().err
    assert contents(Path("out")) == left
    assert train("out", *args[:-1], data("moved", 1)) == 0  # the same ones, elsewhere
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    assert train("../out", *args[:-1], data("moved", 2)) == 2  # others under the same relative path: not finished
    assert "other problems" in capfd.readouterr().err


# --- a run that died before its first checkpoint ----------------------------------------------------------------------


def test_another_configuration_removes_nothing_of_a_run_without_a_checkpoint(capfd):
    assert forked(killed_at_step(5, "--run.save_every=0")) == -signal.SIGKILL
    left = contents(Path("out"))
    assert {"best", "metrics.jsonl"} <= {path.name for path in Path("out").iterdir()}
    assert train("out", "--run.save_every=0", "--optimizer.lr=1e-4") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "--run.output_dir out holds another experiment (--optimizer.lr was" in line
    assert contents(Path("out")) == left


def test_a_run_without_a_checkpoint_does_not_block_its_folder(whole, capfd):
    def action() -> int:
        before("next", lambda *_: send(signal.SIGKILL), Now, nth=1)
        return train("out", "--algorithm.epochs=1", "--model.name_or_path=tiny-math", "--run.test_limit=3")

    assert forked(action) == -signal.SIGKILL
    assert len(read_jsonl(Path("out/test-before.jsonl"))) == 3
    assert train("out") == 0
    assert "out holds no checkpoint: its run starts anew\n" in capfd.readouterr().err
    assert_same(whole, Path("out"))


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_fork_without_a_change_is_its_parents_continuation(whole_with, lag):
    """From a checkpoint or from the newest; killed, it resumes without its parent."""
    switches = ("--reward.functions=[test_resume.short_lengths]",  # draws nothing in the first validation
                f"--rollout.lag={lag}")  # fmt: skip
    whole = whole_with(*switches)
    shutil.copytree(whole, "parent")
    assert train("fork", *switches, "--run.fork_from=parent/checkpoints/step-000004") == 0
    assert metric_lines(Path("fork")) == metric_lines(whole, after=4)
    samples = read_jsonl(whole / "samples.jsonl")
    assert read_jsonl(Path("fork/samples.jsonl")) == [sample for sample in samples if sample["step"] > 4]
    for file in ("final/model.safetensors", "checkpoints/step-000006/model.safetensors"):
        assert Path("fork", file).read_bytes() == (whole / file).read_bytes(), file
    last = "checkpoints/step-000006"
    assert plain(load_states(Path("fork", last))["learner"]) == plain(load_states(whole / last)["learner"])

    shutil.rmtree("parent/checkpoints/step-000006")

    def start() -> int:
        before("next", lambda *_: send(signal.SIGKILL), Now, nth=1)
        return train("again", *switches, "--run.fork_from=parent")

    assert forked(start) == -signal.SIGKILL
    shutil.rmtree("parent")
    assert train("again", *switches, "--run.fork_from=parent") == 0
    assert metric_lines(Path("again")) == metric_lines(whole, after=4)
    assert same_weights("again", str(whole))


@pytest.mark.parametrize(
    ("switches", "kept"),
    [
        (("--algorithm.surrogate=test_resume.Counting", "--algorithm.terms=[test_resume.Fading]"), [{"calls": 6}] * 2),
        (("--algorithm.surrogate=Clip",), [None, None]),
    ],
)
def test_the_state_of_a_loss_goes_on_in_a_fork_with_the_same_one(whole_with, switches, kept):
    parent = whole_with(*MODES["own loss"])
    from_4 = f"--run.fork_from={parent}/checkpoints/step-000004"
    assert train("fork", from_4, CONSTANT, *switches, "--optimizer.name=sgd") == 0
    saved = load_states(checkpoints(Path("fork"))[0])
    assert [saved.get(name) for name in ("algorithm.surrogate", "algorithm.terms.0")] == kept


OTHER = ("--algorithm.surrogate=Clip", "--optimizer.lr=2e-4", "--run.max_steps=8", "--rollout.temperature=0.8",
         "--run.seed=7", "--data.limit=4", "--data.seed=3", "--rollout.lag=1")  # fmt: skip


@pytest.mark.parametrize(
    ("switches", "steps"),
    [(["--model.dtype=float32"], {8}), (["--optimizer.options={eps: 1.0e-7}"], {4}), (["--optimizer.name=sgd"], set())],
    ids=str,
)
def test_each_part_of_a_fork_loads_what_fits_it(cut_off, switches, steps):
    assert train("fork", "--run.fork_from=out", *OTHER, *switches) == 0
    assert [line["step"] for line in metric_lines(Path("fork"))] == [6, 8]
    lrs = [2e-4 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 6)) for step in (5, 7)]  # the schedule is to step 8
    assert [line["lr"] for line in metric_lines(Path("fork"))] == pytest.approx(lrs)
    saved = load_states(Path("fork/checkpoints/step-000008"))
    assert saved["stream"]["position"] == 6  # a new order, of which one rollout waits
    moments = saved["learner"]["optimizer"]["state"]
    assert {int(state["step"]) for state in moments.values()} == steps  # moments that do not fit begin anew


def test_a_fork_at_another_learning_rate_trains_on_the_rollouts_that_wait(whole_with):
    parent = whole_with("--rollout.lag=1")
    from_4 = f"--run.fork_from={parent}/checkpoints/step-000004"
    assert train("fork", "--rollout.lag=1", from_4, "--optimizer.lr=1e-5") == 0
    assert metric_lines(Path("fork"))[0]["reward"] == metric_lines(parent, after=4)[0]["reward"]


def test_a_fork_begins_with_a_rollout_of_its_own_and_its_own_limit_of_memory(here):
    """The parent was stopped in a validation, and drew four rows at a time once memory had run out."""

    def action() -> int:
        before("next", lambda source: setattr(source.how.generators, "max_rows", 4), Now)
        before("validate", lambda *_: send(signal.SIGTERM), Validator, nth=2)
        return train("stopped")

    assert forked(action) == 75
    assert load_states(Path("stopped/checkpoints/step-000004"))["recorder"]["line"]["step"] == 4
    assert train("fork", "--run.fork_from=stopped") == 0
    assert [line["step"] for line in metric_lines(Path("fork"))] == [6]
    newest = [load_states(checkpoints(Path(run))[0])["ranks"][0] for run in ("stopped", "fork")]
    assert [rank["generators"]["max_rows"] for rank in newest] == [4, math.inf]


def test_what_cannot_be_forked_is_refused(cut_off, capfd):
    lora = ("--model.lora.rank=2", "--run.max_steps=2", "--run.validate_every=0")
    assert train("adapters", *lora) == 0
    shutil.copytree("out", "kept")
    misfit = "are not of this model: fork under its model"
    for said, *words in (
        ("nowhere is neither an undamaged checkpoint nor a run's folder with one", "--run.fork_from=nowhere"),
        ("best is neither", "--run.fork_from=out/best"),
        (misfit, "--run.fork_from=out", "--model.name_or_path=tiny-math"),
        (misfit, *lora, "--run.fork_from=adapters", "--model.lora.rank=4"),
        ("have --model.lora.alpha 32: fork with the same", *lora, "--run.fork_from=adapters",
         "--model.lora.alpha=64"),
        ("step-000004 has taken 4 steps: raise --run.max_steps", CONSTANT, "--run.fork_from=out", "--run.max_steps=4"),
    ):  # fmt: skip
        shutil.rmtree("new", ignore_errors=True)
        assert train("new", *words) == 2
        assert said in capfd.readouterr().err
    assert train("out", "--run.fork_from=out") == 2
    assert_same(Path("kept"), Path("out"))


def test_a_fork_of_a_damaged_checkpoint(cut_off, capfd):
    newest = cut_off / "checkpoints/step-000004"
    flip(newest / "model.safetensors")
    assert train("fork", f"--run.fork_from={newest}") == 2
    assert "step-000004 is damaged: model.safetensors" in capfd.readouterr().err
    assert train("fork", "--run.fork_from=out") == 0  # the newest that is whole, into the folder of the failed one
    assert [line["step"] for line in metric_lines(Path("fork"))] == [4, 6]
