"""Trackers get the lines of metrics.jsonl."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from processes import TINY

from pspo.files import read_jsonl
from pspo.run.recorder import MODULES, start_tracker
from pspo.train import main

ARGS = (*TINY, "--run.max_steps=4", "--run.validate_every=4", "--run.validation_limit=2", "--run.output_dir=out")


@pytest.fixture
def fake(monkeypatch):
    """Calls of a module that stands in for a tracker's own: fake("wandb")."""

    def make(name: str) -> list:
        calls = []
        module = SimpleNamespace(
            init=lambda **arguments: calls.append(("init", arguments)),
            log=lambda metrics, step: calls.append(("log", metrics, step)),
            finish=lambda: calls.append(("finish",)),
            __spec__=ModuleSpec(MODULES[name], None, origin="here"),  # which other libraries look for
        )
        monkeypatch.setitem(sys.modules, MODULES[name], module)
        return calls

    return make


def values(line: dict) -> dict:
    return {name: value for name, value in line.items() if name != "step"}


def test_a_service_gets_the_lines_of_metrics_jsonl(here, fake):
    calls = fake("wandb")
    main([*ARGS, "--run.tracker=wandb"])
    (_, started), *logged = calls
    assert (started["project"], started["name"]) == ("pspo", "out")
    assert started["config"]["algorithm"]["surrogate"]["init_args"] == {"alpha": 0.1}
    lines = read_jsonl(here / "out/metrics.jsonl")
    assert logged == [*(("log", values(line), line["step"]) for line in lines), ("finish",)]
    assert [line["step"] for line in lines] == [2, 4]
    calls.clear()
    main([*ARGS, "--run.tracker=wandb", "--run.max_steps=6"])
    (_, resumed), (_, _, step), *_ = calls
    assert (resumed["name"], resumed["id"], resumed["resume"], step) == ("out", started["id"], "allow", 6)


def test_trackio_continues_the_run_of_that_name(here, fake):
    calls = fake("trackio")
    for step in (0, 4):
        start_tracker("trackio", here / "out", {}, step)
    run = {"project": "pspo", "name": "out", "config": {}}
    assert calls == [("init", run | {"resume": "never"}), ("init", run | {"resume": "allow"})]


def test_tensorboard_holds_the_lines_of_metrics_jsonl(here):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    main([*ARGS, "--run.tracker=tensorboard"])
    events = accumulator.EventAccumulator(str(here / "out/tensorboard")).Reload()
    lines = read_jsonl(here / "out/metrics.jsonl")
    assert set(events.Tags()["scalars"]) == {name for line in lines for name in values(line)}
    for name in events.Tags()["scalars"]:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]  # kept as float32
