"""`python -m pspo.sweep`: what runs, what is selected from which numbers, and what survives kills and failures.

Most runs here are a stand-in's, which takes the command of a run and writes the files that pspo.train and
pspo.evaluate would, with validation rewards that a test chooses. One sweep at the end is real.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import pspo.sweep.__main__
from pspo.config import TrainConfig
from pspo.run.cli import parse
from pspo.sweep.__main__ import SweepConfig, grid_points, make_plan, make_setting
from pspo.sweep.workers import clear_unfinished, ending

REPOSITORY = Path(__file__).parents[1]

# Called as `python -m pspo.train --config F`, or with that as one word by a launcher. Rewards, pauses and failures come
# from world.json in the current folder, by folder of the run ("experiment/setting/seed"); every call is noted.
STAND_IN = """\
import json, os, shlex, sys, time, yaml
from pathlib import Path
words = shlex.split(sys.argv[1]) if len(sys.argv) == 2 else sys.argv
launched = [word for word in words if word.startswith("--nproc")]
words = words[len(words) - words[::-1].index("-m"):]
world = json.loads(Path("world.json").read_text())
if words[0] == "pspo.train":
    config = yaml.safe_load(Path(words[2]).read_text())
    folder = Path(config["run"]["output_dir"])
else:
    switches = dict(word.removeprefix("--").split("=", 1) for word in words[1:])
    folder = Path(switches["run.output_dir"])
name = "/".join(folder.parts[1:])
def note(event):
    noted = {"event": event, "run": name, "omp": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid(),
             "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"), "words": words, "launched": launched}
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(noted) + "\\n")
note("start")
folder.mkdir(parents=True)
if words[0] == "pspo.train":
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "validation_reward": 0.9}) + "\\n" + json.dumps(
        {"step": 2, "validation_reward": world["rewards"].get(name, 0.5)}) + "\\n")
    (folder / "best").mkdir()
print("one line\\nthe last line", flush=True)
time.sleep(world["seconds"].get(name, world["seconds"].get("all", 0)))
if name in world["fail"]:
    sys.exit(world.get("code", 3))
summary = {"best_model": str(folder / "best"), "tokens": 1000, "seconds": 2.0}
(folder / ("summary.json" if words[0] == "pspo.train" else "results.json")).write_text(json.dumps(summary))
note("end")
"""

METHODS = {
    "clip": {"algorithm.surrogate": "Clip", "algorithm.surrogate.epsilon": [0.1, 0.2], "optimizer.lr": [1e-6, "5e-6"]}
}
SEARCH = {"seeds": [42], "keep": 2, "confirm_seeds": [43, 44], "switches": {"run.max_steps": 6}}
A, B, C, D = (f"clip-epsilon={epsilon}-lr={lr}" for epsilon in (0.1, 0.2) for lr in ("1e-06", "5e-06"))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder, empty but for the stand-in, which takes the place of python."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "stand_in.py"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.delenv("OMP_NUM_THREADS")
    world()
    return tmp_path


def world(rewards: dict | None = None, seconds: dict | None = None, fail: tuple = ()) -> None:
    Path("world.json").write_text(json.dumps({"rewards": rewards or {}, "seconds": seconds or {}, "fail": fail}))


def sweep_file(name: str = "sweep.yaml", **experiment) -> Path:
    content = {"methods": METHODS, "seeds": [0]} | experiment
    Path(name).write_text(yaml.safe_dump({"output": "out", "experiments": {"e": content}}, sort_keys=False))
    return Path(name)


def sweep(*args: str) -> int:
    """Exit code of a sweep of sweep.yaml in this process."""
    previous = signal.getsignal(signal.SIGTERM)
    try:
        pspo.sweep.__main__.main(["--config", "sweep.yaml", *args])
        return 0
    except SystemExit as exit_:
        return exit_.code
    finally:
        signal.signal(signal.SIGTERM, previous)


def process(*args: str) -> subprocess.Popen:
    """A sweep of sweep.yaml as a process of its own group, its runs handed to the stand-in by a launcher."""
    launcher = f"{shlex.quote(str(Path('stand_in.py').absolute()))} {{command}}"
    return subprocess.Popen(
        [PYTHON, "-m", "pspo.sweep", "--config", "sweep.yaml", "--launcher", launcher, *args],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True,
    )  # fmt: skip


PYTHON = sys.executable


def calls(event: str = "start") -> list[str]:
    """The runs that were started (or ended), in order."""
    return [call["run"] for call in noted() if call["event"] == event]


def noted() -> list[dict]:
    file = Path("calls.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_the_protocol_runs_the_grid_the_best_again_and_what_wins_in_full(here, capsys):
    sweep_file(search=SEARCH, seeds=[0, 1], evaluate={"evaluation": {"data.limit": 4, "eval.samples": 2}})
    grid = {A: 0.1, B: 0.6, C: 0.3, D: 0.5}  # B and D are kept; B was lucky with seed 42
    confirm = {f"{B}/seed-43": 0.1, f"{B}/seed-44": 0.2, f"{D}/seed-43": 0.5, f"{D}/seed-44": 0.4}
    rewards = {f"{setting}/seed-42": reward for setting, reward in grid.items()} | confirm
    world(rewards={f"e-search/{name}": reward for name, reward in rewards.items()})
    assert sweep() == 0
    assert calls() == [
        *(f"e-search/{setting}/seed-42" for setting in (A, B, C, D)),
        *(f"e-search/{setting}/seed-{seed}" for seed in (43, 44) for setting in (B, D)),
        f"e/{D}/seed-0", f"e/{D}/seed-0/evaluation", f"e/{D}/seed-1", f"e/{D}/seed-1/evaluation",
    ]  # fmt: skip

    selection = json.loads(Path("out/e/selection.json").read_text())["clip"]
    assert selection["selected"] == D
    records = {record.pop("setting"): record for record in selection["settings"]}
    assert [setting for setting, record in records.items() if record["kept"]] == [B, D]
    assert {setting: record["mean_last"] for setting, record in records.items()} == pytest.approx(
        {A: 0.1, B: 0.3, C: 0.3, D: 1.4 / 3}
    )
    assert records[B]["last_validation_reward"] == {"42": 0.6, "43": 0.1, "44": 0.2}
    assert records[B]["best_validation_reward"] == dict.fromkeys(("42", "43", "44"), 0.9)
    assert records[C]["switches"] == {
        "algorithm.surrogate": "Clip", "algorithm.surrogate.epsilon": 0.2, "optimizer.lr": 1e-6,
    }  # fmt: skip

    full, searched = (yaml.safe_load(Path(f"out/{name}.yaml").read_text()) for name in
                      (f"e/{D}/seed-1", f"e-search/{D}/seed-44"))  # fmt: skip
    assert (full["run"]["seed"], full["run"]["max_steps"]) == (1, 100)
    assert (searched["run"]["seed"], searched["run"]["max_steps"]) == (44, 6)
    assert full["optimizer"]["lr"] == 5e-6
    resolved, _ = parse(TrainConfig, "pspo.train", ["--config", f"out/e/{D}/seed-1.yaml"])
    assert resolved.algorithm.surrogate.epsilon == 0.2
    assert set(full) == {"model", "data", "reward", "rollout", "algorithm", "optimizer", "distributed", "run"}
    evaluation = next(call["words"] for call in noted() if call["run"].endswith("seed-1/evaluation"))
    assert evaluation == [
        "pspo.evaluate", "--data.limit=4", "--eval.samples=2", f"--model.name_or_path=out/e/{D}/seed-1/best",
        f"--run.output_dir=out/e/{D}/seed-1/evaluation",
    ]  # fmt: skip
    assert Path(f"out/e/{D}/seed-1/best").exists()
    assert not Path(f"out/e-search/{D}/seed-42/best").exists()  # a search needs no weights

    out = capsys.readouterr().out
    assert f"e/{D}/seed-0: 1,000 tokens, 2 s, validation reward 0.500" in out
    assert "all 10 runs are finished: out" in out
    before = len(calls())
    assert sweep() == 0
    assert len(calls()) == before  # finished runs are not run again


def test_without_a_search_every_setting_runs_with_every_seed(here):
    sapo = {"algorithm.surrogate": "SAPO", "algorithm.surrogate.tau_pos": 1, "algorithm.surrogate.tau_neg": [1, 2]}
    pairs = [sapo, sapo | {"algorithm.surrogate.tau_pos": 2, "algorithm.surrogate.tau_neg": 2}]
    sweep_file(methods={"sapo": pairs, "noclip": {"algorithm.surrogate": "NoClip"}}, seeds=[5, 7])
    assert sweep() == 0
    settings = ("sapo-tau_pos=1-tau_neg=1", "sapo-tau_pos=1-tau_neg=2", "sapo-tau_pos=2-tau_neg=2", "noclip")
    assert sorted(calls()) == sorted(f"e/{setting}/seed-{seed}" for seed in (5, 7) for setting in settings)
    assert not list(Path("out").rglob("selection.json"))


def test_a_method_s_own_switches_come_before_the_shared_ones_and_the_search_s_before_both(here):
    sweep_file(
        methods={"pspo": {"rollout.prompts": 7, "run.max_steps": 5}},
        shared={"rollout.prompts": 3, "rollout.group_size": 2, "run.max_steps": 4},
        search=SEARCH,
    )
    (method,) = make_plan(parse(SweepConfig, "pspo.sweep", ["--config", "sweep.yaml"])[0])
    (setting,) = method.settings
    for run, steps in ((setting.full[0], 5), (setting.search[42], 6)):
        assert (run.config["rollout"]["prompts"], run.config["rollout"]["group_size"]) == (7, 2)
        assert run.config["run"]["max_steps"] == steps


def test_switches_override_a_file_and_the_order_in_a_mapping_does_not_matter(here):
    Path("base.yaml").write_text("run: {max_steps: 9, samples: 5}\nalgorithm: {surrogate: SAPO}\n")
    clip = {"algorithm.surrogate.epsilon": 0.3, "algorithm.surrogate": "Clip", "config": "base.yaml"}
    sweep_file(methods={"clip": clip}, shared={"run.max_steps": 4})
    (method,) = make_plan(parse(SweepConfig, "pspo.sweep", ["--config", "sweep.yaml"])[0])
    config = method.settings[0].full[0].config
    assert (config["run"]["max_steps"], config["run"]["samples"]) == (4, 5)
    assert config["algorithm"]["surrogate"]["class_path"] == "pspo.losses.Clip"
    assert config["algorithm"]["surrogate"]["init_args"]["epsilon"] == 0.3
    assert method.settings[0].slug == "clip-epsilon=0.3"


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_failed_runs_are_named_and_retried_on_request_and_nothing_is_selected_without_them(here, capsys):
    sweep_file(search=SEARCH)
    world(fail=[f"e-search/{B}/seed-42"], rewards={f"e-search/{B}/seed-{seed}": 1.0 for seed in (42, 43, 44)})
    for attempt in range(2):  # the second names it again, and does not run it
        assert sweep() == 1
        captured = capsys.readouterr()
        line = f"failed: out/e-search/{B}/seed-42: exit code 3: the last line (see out/e-search/{B}/seed-42.log)"
        assert line in captured.err
        assert "not selected: e/clip" in captured.err
        assert "--retry_failed" in captured.err
        assert (f"{B}/seed-42: FAILED, exit code 3" in captured.out) == (attempt == 0)
        assert len(calls()) == 4
    assert json.loads(Path("out/e/selection.json").read_text())["clip"]["selected"] is None
    world(rewards={f"e-search/{B}/seed-{seed}": 1.0 for seed in (42, 43, 44)})
    assert sweep("--retry_failed") == 0
    assert calls()[4] == f"e-search/{B}/seed-42"
    assert calls()[-1] == f"e/{B}/seed-0"
    assert not list(Path("out").rglob("*.failed"))


def test_a_failed_evaluation_is_repeated_without_the_training(here):
    sweep_file(methods={"pspo": {}}, evaluate={"evaluation": {}})
    world(fail=["e/pspo/seed-0/evaluation"])
    assert sweep() == 1
    Path("out/e/pspo/seed-0/evaluation").rmdir()
    world()
    assert sweep("--retry_failed") == 0
    assert calls() == ["e/pspo/seed-0", "e/pspo/seed-0/evaluation", "e/pspo/seed-0/evaluation"]


@pytest.mark.slow
def test_killed_at_any_point_a_sweep_goes_on_and_loses_only_what_died_with_it(here, capsys):
    sweep_file(seeds=[0, 1])
    lost, alone = f"e/{C}/seed-0", f"e/{D}/seed-0"
    world(seconds={"all": 0.05, lost: 600, alone: 8})
    first = process("--workers", "2")
    wait_for(lambda: {lost, alone} <= set(calls()))
    capsys.readouterr()
    assert sweep() == 2  # while the other is at it
    assert capsys.readouterr().err == (
        "pspo.sweep: error: --output out is in use by another sweep: wait for it, or choose another\n"
    )
    first.kill()
    os.kill(next(call["pid"] for call in noted() if call["run"] == lost), signal.SIGKILL)
    first.communicate()
    assert Path(f"out/{lost}/metrics.jsonl").exists()
    assert alone not in calls("end")  # it goes on without its sweep
    world()
    assert sweep() == 0
    every = sorted(f"e/{setting}/seed-{seed}" for setting in (A, B, C, D) for seed in (0, 1))
    assert sorted(calls("end")) == every  # the one left alone was waited for, and not done twice
    assert sorted(calls()) == sorted([*every, lost])


@pytest.mark.slow
def test_a_sweep_that_is_told_to_stop_stops_its_runs_and_says_how_to_go_on(here):
    sweep_file()
    world(seconds={"all": 600})
    running = process("--workers", "2")
    wait_for(lambda: len(calls()) == 2)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command goes on" in err
    assert "Traceback" not in err
    for call in noted():
        with pytest.raises(ProcessLookupError):
            os.kill(call["pid"], 0)
    assert not list(Path("out").rglob("*.failed"))


def test_a_run_that_was_stopped_is_not_failed_and_keeps_its_folder(here, capsys):
    """As by a scheduler: exit code 75. Unless its switches have changed meanwhile: then it starts over."""
    sweep_file(methods={"pspo": {}})
    run = make_plan(parse(SweepConfig, "", ["--config", "sweep.yaml"])[0])[0].settings[0].full[0]
    world(fail=["e/pspo/seed-0"])
    Path("world.json").write_text(json.dumps(json.loads(Path("world.json").read_text()) | {"code": 75}))
    assert sweep() == 1
    assert "failed: out/e/pspo/seed-0: exit code 75: the last line" in capsys.readouterr().err
    assert not list(Path("out").rglob("*.failed"))
    elsewhere = run.config | {"run": run.config["run"] | {"output_dir": str(run.folder.absolute())}}
    for config in (run.config, elsewhere):
        (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
        clear_unfinished(run)
        assert run.folder.is_dir()
    other = run.config | {"rollout": run.config["rollout"] | {"prompts": 7}}
    (run.folder / "config.yaml").write_text(yaml.safe_dump(other))
    clear_unfinished(run)
    assert not run.folder.exists()
    world()
    assert sweep() == 0


def test_a_finished_run_of_another_configuration_is_refused(here, capsys):
    sweep_file(methods={"pspo": {"algorithm.surrogate.alpha": 0.2}})
    assert sweep() == 0
    sweep_file(methods={"pspo": {"algorithm.surrogate.alpha": 0.2}}, shared={"optimizer.lr": 1e-4})
    assert sweep() == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "out/e/pspo-alpha=0.2/seed-0 was run with optimizer.lr 3e-05" in err
    assert "0.0001" in err


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ({"sedes": [1]}, "sedes"),
        ({"search": SEARCH | {"kep": 1}}, "kep"),
        ({"methods": {"clip": {"algorithm.epsi": 1}}}, "pspo.sweep: e/clip-epsi=1: error: .*algorithm.epsi"),
        ({"methods": {"clip": {"algorithm.surrogate": "Clip", "algorithm.surrogate.epsilon": -1}}}, "epsilon must be"),
        ({"methods": {"pspo": {"optimizer.lr": [1, -1]}}}, "e/pspo-lr=-1: error: --optimizer.lr must be above 0"),
        ({"methods": {"pspo": {"optimizer.lr": [1, 1]}}}, "e/pspo-lr=1: .*one point twice"),
        ({"methods": {"pspo": {"optimizer.lr": []}}}, "experiments.e.methods.pspo must map"),
        ({"methods": {"pspo": {1: 2}}}, "experiments.e.methods.pspo must map"),
        ({"methods": {}}, "experiments.e.methods must name"),
        ({"methods": {"a/b": {}}}, "'a/b' names a folder"),
        ({"seeds": []}, "experiments.e.seeds must be one or more different seeds"),
        ({"seeds": [1, 1]}, "experiments.e.seeds must be one or more different seeds"),
        ({"search": SEARCH | {"confirm_seeds": [42]}}, "experiments.e.search.seeds must be"),
        ({"search": SEARCH | {"keep": 0}}, "keep of at least 1"),
        ({"search": SEARCH, "shared": {"run.validate_every": 0}}, "set run.validate_every above 0"),
        ({"shared": {"run.seed": 3}}, "must not set run.seed"),
        ({"shared": {"config": "nowhere.yaml"}}, "nowhere.yaml"),
        ({"evaluate": {"evaluation": {"eval.tempratures": [0]}}}, "e, evaluate evaluation: error: .*tempratures"),
    ],
)
def test_a_bad_file_is_one_line_before_anything_runs(here, capsys, experiment, message):
    sweep_file(**experiment)
    assert sweep() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--only", "[f]"], "--only f: the sweep has no such experiment, only e"),
        (["--launcher", "srun"], "--launcher must hold {command}"),
        (["--launcher", "no-such-scheduler {command}"], "no-such-scheduler"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--processes", "0"], "--processes must be from 1"),
        (["--processes", "3", "--config", "ddp.yaml"], "rollout.prompts 32 must be a multiple of"),
        (["--processes", "2"], "experiments.e: distributed.strategy none with --processes 2: set ddp or fsdp2"),
    ],
)
def test_bad_switches(here, capsys, args, message):
    sweep_file()
    sweep_file("ddp.yaml", shared={"distributed.strategy": "ddp"})
    assert sweep(*args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert not Path("out").exists()


# --- the plan, the launcher, the devices ------------------------------------------------------------------------------


def test_dry_run_counts_runs_and_tokens_and_runs_nothing(here, capsys):
    shared = {"rollout.prompts": 2, "rollout.group_size": 3, "rollout.max_completion_tokens": 10,
              "data.max_prompt_tokens": 40, "algorithm.epochs": 2, "run.max_steps": 9}  # fmt: skip
    sweep_file(shared=shared, search=SEARCH, seeds=[0, 1, 2])
    assert sweep("--dry_run") == 0
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in capsys.readouterr().out.splitlines()}
    assert rows["e", "grid"] == ["4", "0", "3,600"]  # 3 rollouts of 6 rows of 50 tokens each
    assert rows["e", "confirm"] == ["4", "0", "3,600"]
    assert rows["e", "full"] == ["3", "0", "4,500"]  # 5 rollouts each
    assert not Path("out").exists()
    assert calls() == []
    sweep_file(shared=shared | {"run.max_tokens": 400}, search=SEARCH, seeds=[0, 1, 2])
    assert sweep("--dry_run") == 0
    assert re.search(r"full +3 +0 +2,100\n", capsys.readouterr().out)  # 400 and at most one rollout more
    sweep_file(shared=shared, search=SEARCH, seeds=[0, 1, 2])
    assert sweep() == 0
    assert sweep("--dry_run") == 0
    out = capsys.readouterr().out
    assert re.search(r"all +11 +11 +11,700\n", out)
    assert "finished so far: 2.0 s and 1,000 tokens a run" in out


def test_a_launcher_gets_the_command_as_one_word_and_no_environment_of_ours(here):
    sweep_file(methods={"pspo": {}})
    assert sweep("--launcher", f"sh -c 'exec {sys.executable} \"$1\"' name {{command}}", "--workers", "2") == 0
    (start, _) = noted()
    assert start["words"] == ["pspo.train", "--config", "out/e/pspo/seed-0.yaml"]
    assert start["omp"] is None


def test_a_launcher_that_does_not_wait_is_a_failure_that_says_so(here, capsys):
    sweep_file(methods={"pspo": {}})
    assert sweep("--launcher", "true {command}") == 1
    assert "exit code 0, but no summary.json" in capsys.readouterr().err


def test_cores_and_devices_are_dealt_out_among_workers(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    sweep_file(seeds=[0, 1])
    world(seconds={"all": 0.3})
    assert sweep() == 0  # one worker for each device
    starts = [call for call in noted() if call["event"] == "start"]
    assert {call["omp"] for call in starts} == {"4"}
    assert sorted(call["cuda"] for call in starts) == ["4"] * 4 + ["6"] * 4
    together = [call["event"] for call in noted()]
    assert together[:2] == ["start", "start"]
    running = 0
    for event in together:
        running += 1 if event == "start" else -1
        assert running <= 2


def test_runs_of_several_processes_share_out_devices_and_cores(here, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    sweep_file(seeds=[0, 1], shared={"distributed.strategy": "ddp"}, evaluate={"test": {}})
    world(seconds={"all": 0.3})
    assert sweep("--processes=2") == 0
    starts = [call for call in noted() if call["event"] == "start"]
    assert sorted(call["cuda"] for call in starts) == ["4,5"] * 8 + ["6,7"] * 8
    assert {call["omp"] for call in starts} == {"2"}
    assert {tuple(call["launched"]) for call in starts} == {("--nproc-per-node=2",)}


TORCHRUN_SAID = """\
\rtrain:  50%| 1/2\rtrain:  50%| 1/2
pspo.train: 3 optimizer steps in a row were skipped
W1121 17:21:38.123000 77 torch/distributed/elastic/multiprocessing/api.py:1010] Sending 79 closing signal SIGTERM
E1121 17:21:38.456000 77 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 75) rank: 1
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


@pytest.mark.parametrize(("printed", "ended"), [
    ("a\nb\rthe last\n\n", (3, "the last")),
    ("", (3, "")),
    ("saved\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15\n",
     (75, "torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 15")),
    (TORCHRUN_SAID, (75, "pspo.train: 3 optimizer steps in a row were skipped")),
    (TORCHRUN_SAID + TORCHRUN_SAID.replace("75", "-9").replace("3 opt", "4 opt"),
     (-9, "pspo.train: 4 optimizer steps in a row were skipped")),
])  # fmt: skip
def test_what_a_failed_run_is_said_to_have_ended_with(printed, ended):
    assert ending(3, printed) == ended


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "tiny"])
def test_the_sweep_files_of_the_repository(monkeypatch, name):
    monkeypatch.chdir(REPOSITORY)
    sweep, _ = parse(SweepConfig, "pspo.sweep", ["--config", f"configs/sweep/{name}.yaml", "--output=none"])
    points = {(experiment, method): list(grid_points(grid)) for experiment, part in sweep.experiments.items()
              for method, grid in part.methods.items()}  # fmt: skip
    last = {
        key: make_setting(sweep, *key, points[key][-1]) for key in points
    }  # each method's configuration is accepted
    searched = [experiment for experiment, part in sweep.experiments.items() if part.search]
    if name == "paper":
        assert len(searched) == 4
        for experiment in searched:
            sizes = {method: len(found) for (of, method), found in points.items() if of == experiment}
            assert sizes == {"noclip": 3, "clip": 12, "pspo": 12, "p3o": 12, "sapo": 18, "topr": 27}
            tokens = 75_000_000 if "math-1.5b" in experiment else 150_000_000
            assert last[experiment, "topr"].full[0].config["run"]["max_tokens"] == tokens
            assert last[experiment, "clip"].search[42].config["run"]["max_steps"] == 500
        pairs = {tuple(point[f"algorithm.surrogate.tau_{sign}"] for sign in ("pos", "neg"))
                 for point in points[searched[0], "sapo"]}  # fmt: skip
        assert pairs == {(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)}
        assert list(last[searched[0], "noclip"].full) == [0, 1, 2]
        assert list(last[searched[0], "noclip"].search) == [42, 43, 44]
    else:
        assert searched == ["tiny-base", "tiny-math"]
        assert all(len(part.seeds) == 5 for part in sweep.experiments.values())
        alphas = [point["algorithm.surrogate.alpha"] for point in points["alpha", "pspo"]]
        assert alphas == [0, 0.1, 0.2, 0.4, 0.5, 0.8]
        steps = last["off-policy", "clip"].full[0].config["algorithm"]
        assert (steps["epochs"], steps["minibatches"]) == (4, 4)
        control = {method: [(p["optimizer.name"], p["optimizer.lr"], p["optimizer.max_grad_norm"]) for p in found]
                   for (of, method), found in points.items() if of == "control"}  # fmt: skip
        assert control["pspo"] == [("adamw", 3e-5, 0), ("adamw", 3e-5, 0.1), ("sgd", 0.1, 0), ("sgd", 0.1, 0.1)]
        assert control["noclip"] == [*control["pspo"], ("sgd", 0.06, 0)]


# --- for real ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_sweep_trains_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep_file(
        shared={"rollout.prompts": 2, "rollout.max_completion_tokens": 24, "data.limit": 20, "run.max_steps": 2,
                "run.test_limit": 0, "run.validate_every": 1, "run.validation_limit": 4},
        methods={"pspo": {"algorithm.surrogate.alpha": 0.5, "optimizer.name": "sgd"}},
        evaluate={"evaluation": {"data.limit": 4}},
    )  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-m", "pspo.sweep", "--config", "sweep.yaml"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    run = Path("out/e/pspo-alpha=0.5-name=sgd/seed-0")
    assert {"config.yaml", "metrics.jsonl", "summary.json", "best", "final"} < {path.name for path in run.iterdir()}
    written, planned = (yaml.safe_load(path.read_text()) for path in (run / "config.yaml", run.with_suffix(".yaml")))
    assert written == planned
    assert (written["run"]["seed"], written["optimizer"]["name"]) == (0, "sgd")
    assert json.loads((run / "evaluation/results.json").read_text())["n"] == 4
    assert "2 steps" in run.with_suffix(".log").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_a_real_sweep_of_runs_of_two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep_file(
        shared={"distributed.strategy": "ddp", "rollout.prompts": 4, "rollout.max_completion_tokens": 24,
                "data.limit": 20, "run.max_steps": 2, "run.test_limit": 0, "run.validate_every": 0},
        methods={"pspo": {}, "lost": {"model.name_or_path": "./nowhere"}},
    )  # fmt: skip
    done = subprocess.run(
        [PYTHON, "-m", "pspo.sweep", "--config", "sweep.yaml", "--processes=2"], check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "exit code 2: pspo.train: error: --model.name_or_path: model folder nowhere does not exist" in done.stderr
    run = Path("out/e/pspo/seed-0")
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
