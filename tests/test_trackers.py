"""Trackers get the lines of metrics.jsonl and nothing else; asked for in vain, they stop the run before it starts."""

import json
import math
import sys
from pathlib import Path

import pytest

import pspo.train
from pspo.run.trackers import MODULES, start_tracker

ARGS = (
    "--run.max_steps=4", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=0",
    "--run.validation_limit=2", "--run.validate_every=4", "--data.limit=20", "--run.output_dir=out",
)  # fmt: skip
FAKE_SERVICE = """
calls = []
def init(**arguments): calls.append(("init", arguments))
def log(metrics, step): calls.append(("log", metrics, step))
def finish(): calls.append(("finish",))
"""
FAKE_TENSORBOARD = """
calls = []
class SummaryWriter:
    def __init__(self, folder, purge_step): calls.append(("init", folder, purge_step))
    def add_scalar(self, name, value, step): calls.append((name, value, step))
    def flush(self): pass
    def close(self): calls.append(("finish",))
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def without_step(line: dict) -> dict:
    return {name: value for name, value in line.items() if name != "step"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_the_lines_of_metrics_jsonl(here, monkeypatch, name):
    (here / f"{name}.py").write_text(FAKE_SERVICE)
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, name, raising=False)
    pspo.train.main([*ARGS, f"--run.tracker={name}"])
    (_, started), *logged, finished = sys.modules.pop(name).calls
    assert (started["project"], started["name"]) == ("pspo", "out")
    assert started.get("dir") == ("out" if name == "wandb" else None)
    assert started["config"]["optimizer"]["lr"] == 3e-5
    assert started["config"]["algorithm"]["surrogate"]["init_args"] == {"alpha": 0.1}
    assert logged == [("log", without_step(line), line["step"]) for line in metrics_of(here)]
    assert [step for _, _, step in logged] == [2, 4]
    assert "validation_reward" in logged[1][1]
    assert all(isinstance(value, int | float) for _, line, _ in logged for value in line.values())  # no text at all
    assert finished == ("finish",)


def test_tensorboard_gets_the_lines_of_metrics_jsonl(here, monkeypatch):
    (here / "fake_tensorboard.py").write_text(FAKE_TENSORBOARD)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(MODULES, "tensorboard", "fake_tensorboard")
    pspo.train.main([*ARGS, "--run.tracker=tensorboard"])
    started, *logged, finished = sys.modules.pop("fake_tensorboard").calls
    assert started == ("init", "out/tensorboard", 1)
    expected = [(name, value, line["step"]) for line in metrics_of(here) for name, value in without_step(line).items()]
    assert logged == expected
    assert finished == ("finish",)


def test_tensorboard_hides_what_a_run_that_goes_on_does_again(here, monkeypatch):
    (here / "fake_tensorboard.py").write_text(FAKE_TENSORBOARD)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(MODULES, "tensorboard", "fake_tensorboard")
    start_tracker("tensorboard", here, {}, step=4)
    assert sys.modules.pop("fake_tensorboard").calls == [("init", str(here / "tensorboard"), 5)]


def test_tensorboard_s_own_reader_finds_the_same_numbers(here):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    pspo.train.main([*ARGS, "--run.tracker=tensorboard"])
    events = accumulator.EventAccumulator(str(here / "out/tensorboard"))
    events.Reload()
    lines = metrics_of(here)
    assert set(events.Tags()["scalars"]) == {name for line in lines for name in without_step(line)}
    for name in events.Tags()["scalars"]:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]  # kept as float32
    assert not [kind for kind, tags in events.Tags().items() if tags and kind != "scalars"]


def test_wandb_itself_takes_a_run(here, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    pspo.train.main([*ARGS, "--run.tracker=wandb"])
    (offline,) = (here / "out/wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def test_trackio_itself_takes_a_run(here, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(here / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed")
    pspo.train.main([*ARGS, "--run.tracker=trackio"])
    assert list((here / "trackio").rglob("pspo*"))


@pytest.mark.parametrize("name", list(MODULES))
def test_a_package_that_is_not_there_is_named_before_anything_is_loaded(here, capsys, monkeypatch, name):
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # as Python marks what cannot be imported
    monkeypatch.setattr(pspo.train, "load_tokenizer", lambda config: pytest.fail("loaded a tokenizer"))
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*ARGS, f"--run.tracker={name}"])
    assert exit_.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith(f"pspo.train: error: --run.tracker {name}: ")
    assert line.endswith(f"pip install 'pspo[{name}]'\n")
    assert list(here.iterdir()) == []


def test_no_tracker_is_imported_unless_asked_for(here, monkeypatch):
    for module in MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)
    pspo.train.main(ARGS)
    assert sorted(path.name for path in (here / "out").iterdir()) == [
        ".lock", "best", "checkpoints", "config.yaml", "environment.json", "final", "metrics.jsonl", "samples.jsonl",
        "summary.json",
    ]  # fmt: skip


def test_what_is_not_finite_is_left_out(here, monkeypatch):
    (here / "fake_service.py").write_text(FAKE_SERVICE)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(MODULES, "wandb", "fake_service")
    tracker = start_tracker("wandb", here, {})
    tracker.log({"step": 3, "loss": math.nan, "reward": 0.5, "ratio_max": math.inf})
    assert sys.modules.pop("fake_service").calls[1:] == [("log", {"reward": 0.5}, 3)]


def test_the_extras_are_those_the_messages_name():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for name in MODULES:
        assert f'\n{name} = ["{name}>=' in text
