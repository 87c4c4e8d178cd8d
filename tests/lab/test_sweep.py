"""`pspo sweep`: what runs, what is selected from which numbers, and what survives stops, kills and failures.

Most runs here are a stand-in's, which takes the command of a run and writes the files that pspo.train and
pspo.evaluate would, with validation rewards that a test chooses. The nightly ones are real.
"""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import yaml
from processes import run_command, until

from pspo.cli.parse import parse
from pspo.cli.values import to_yaml
from pspo.config import EvaluateConfig, TrainConfig
from pspo_lab.sweep_command import main
from pspo_lab.sweep_plan import SweepConfig, make_plan

REPOSITORY = Path(__file__).parents[2]

# Called as `python -m pspo.train --config F`, or with that as one word by a launcher. Rewards, pauses and failures come
# from world.json in the current folder, by folder of the run ("experiment/setting/seed"); every call is noted.
STAND_IN = """\
import json, os, shlex, sys, time, yaml
from pathlib import Path
words = shlex.split(sys.argv[1]) if len(sys.argv) == 2 else sys.argv
launched = [word for word in words if word.startswith("--nproc")]
words = words[len(words) - words[::-1].index("-m"):]
world = json.loads(Path("world.json").read_text())
training = words[0] == "pspo.train"
config = Path(words[2]).read_text()
folder = Path(yaml.safe_load(config)["run"]["output_dir"])
name = "/".join(folder.parts[1:])
noted = {"run": name, "pid": os.getpid(), "words": words, "launched": launched,
         "omp": os.environ.get("OMP_NUM_THREADS"), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(noted) + "\\n")
folder.mkdir(parents=True, exist_ok=True)
if training:
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "validation_reward": 0.9}) + "\\n" + json.dumps(
        {"step": 2, "validation_reward": world["rewards"].get(name, 0.5)}) + "\\n")
    (folder / "best").mkdir(exist_ok=True)
print("one line\\nthe last line", flush=True)
time.sleep(world["seconds"])
if name in world["fail"]:
    if launched:
        print("E1121 17:21:38.456000 77 torch/api.py:984] failed (exitcode: 1) rank: 1\\nTraceback\\n=====", flush=True)
    sys.exit(world["fail"][name])
summary = {"best_model": str(folder / "best"), "tokens": 1000, "seconds": 2.0}
(folder / ("summary.json" if training else "results.json")).write_text(json.dumps(summary))
"""

GRID = {"algorithm.surrogate": "Clip", "algorithm.surrogate.epsilon": [0.1, 0.2], "optimizer.lr": [1e-6, "5e-6"]}
SEARCH = {"seeds": [42], "keep": 2, "confirm_seeds": [43, 44], "switches": {"run.max_steps": 6}}
A, B, C, D = (f"clip-epsilon={epsilon}-lr={lr}" for epsilon in (0.1, 0.2) for lr in ("1e-06", "5e-06"))


@pytest.fixture
def here(here, monkeypatch) -> None:
    """The current folder, empty but for the stand-in, which takes the place of python."""
    script = here / "stand_in.py"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.delenv("OMP_NUM_THREADS")
    world()


def world(rewards: dict | None = None, seconds: float = 0, fail: dict | None = None) -> None:
    Path("world.json").write_text(json.dumps({"rewards": rewards or {}, "seconds": seconds, "fail": fail or {}}))


def sweep_file(**experiment) -> None:
    content = {"methods": {"clip": GRID}, "seeds": [0]} | experiment
    Path("sweep.yaml").write_text(yaml.safe_dump({"output": "out", "experiments": {"e": content}}, sort_keys=False))


def sweep(*args: str) -> int:
    """Exit code of a sweep of sweep.yaml in this process."""
    code = run_command(main, "--config", "sweep.yaml", *args)
    return 1 if isinstance(code, str) else code


def noted() -> list[dict]:
    """The calls of the stand-in, in order."""
    file = Path("calls.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def calls() -> list[str]:
    return [call["run"] for call in noted()]


def test_the_protocol_runs_the_grid_the_best_again_and_what_wins_in_full(here, capsys):
    evaluate = {"evaluation": {"data.limit": 4, "eval.samples": 2, "data.system_prompt": None}}
    sweep_file(search=SEARCH, seeds=[0, 1], evaluate=evaluate, shared={"data.system_prompt": None})
    grid = {A: 0.1, B: 0.6, C: 0.3, D: 0.5}  # B and D are kept; B was lucky with seed 42
    confirm = {f"{B}/seed-43": 0.1, f"{B}/seed-44": 0.2, f"{D}/seed-43": 0.5, f"{D}/seed-44": 0.4}
    rewards = {f"{setting}/seed-42": reward for setting, reward in grid.items()} | confirm
    world(rewards={f"e-search/{name}": reward for name, reward in rewards.items()})
    assert sweep() == 0
    assert "all runs are finished: out" in capsys.readouterr().out
    assert calls() == [
        "e/untrained/tiny-base/evaluation",
        *(f"e-search/{setting}/seed-42" for setting in (A, B, C, D)),
        *(f"e-search/{setting}/seed-{seed}" for seed in (43, 44) for setting in (B, D)),
        f"e/{D}/seed-0", f"e/{D}/seed-0/evaluation", f"e/{D}/seed-1", f"e/{D}/seed-1/evaluation",
    ]  # fmt: skip

    selection = json.loads(Path("out/e/selection.json").read_text())["clip"]
    assert (selection["selected"], selection["confirmed"]) == (D, [B, D])
    confirmed = {B: {"42": 0.6, "43": 0.1, "44": 0.2}, D: {"42": 0.5, "43": 0.5, "44": 0.4}}
    assert selection["rewards"] == {A: {"42": 0.1}, C: {"42": 0.3}} | confirmed

    folders = (f"out/e/{D}/seed-1", f"out/e-search/{D}/seed-44")
    full, searched = (parse(TrainConfig, "pspo.train", ["--config", f"{folder}.yaml"])[0] for folder in folders)
    assert (full.run.seed, full.run.max_steps, full.run.output_dir) == (1, 100, folders[0])
    assert (full.optimizer.lr, full.algorithm.surrogate.epsilon) == (5e-6, 0.2)
    assert (searched.run.seed, searched.run.max_steps) == (44, 6)
    config, _ = parse(EvaluateConfig, "pspo.evaluate", noted()[-1]["words"][1:])
    assert (config.data.limit, config.eval.samples) == (4, 2)
    assert (config.model.name_or_path, config.run.output_dir) == (f"{folders[0]}/best", f"{folders[0]}/evaluation")
    assert full.data.system_prompt is config.data.system_prompt is config.model.revision is None  # no text "null"
    assert [Path(folder, "best").exists() for folder in folders] == [True, False]  # a search needs no weights
    assert (sweep(), len(calls())) == (0, 13)  # finished runs are not run again
    assert sweep("--dry_run") == 0
    assert re.search(r"runs +10\nfinished +10\n", capsys.readouterr().out)


def test_a_search_s_switches_override_a_method_s_these_the_shared_ones_and_all_a_file(here):
    Path("base.yaml").write_text("run: {max_steps: 9, record_tokens: 5}\nalgorithm: {surrogate: SAPO}\n")
    own = {"algorithm.surrogate.epsilon": 0.3, "algorithm.surrogate": "Clip", "rollout.prompts": 7, "run.max_steps": 5}
    shared = {"rollout.prompts": 3, "rollout.group_size": 2, "run.max_steps": 4, "config": "base.yaml"}
    sweep_file(methods={"clip": own}, shared=shared, search=SEARCH)
    (method,) = make_plan(parse(SweepConfig, "pspo sweep", ["--config", "sweep.yaml"])[0])
    for stage, steps in (("full", 5), ("grid", 6), ("confirm", 6)):
        job = method.jobs([stage], list(method.settings))[0]
        assert (job.config["rollout"]["prompts"], job.config["rollout"]["group_size"]) == (7, 2)
        assert (job.config["run"]["max_steps"], job.config["run"]["record_tokens"]) == (steps, 5)
        clip = {"class_path": "pspo.losses.Clip", "init_args": {"epsilon": 0.3, "epsilon_high": None, "delta": None}}
        assert job.config["algorithm"]["surrogate"] == clip
        assert job.setting == "clip-epsilon=0.3-prompts=7-max_steps=5"


def test_failed_runs_are_named_and_run_again_and_nothing_is_selected_without_them(here, capsys):
    sweep_file(search=SEARCH)
    failing = f"e-search/{B}/seed-42"
    rewards = {f"e-search/{B}/seed-{seed}": 1.0 for seed in (42, 43, 44)}
    world(rewards, fail={failing: 3})
    assert sweep() == 1
    reason = f"out/{failing}: exit code 3, no summary.json: the last line"
    assert f"failed: {reason} (see out/{failing}.log)" in capsys.readouterr().err
    assert len(calls()) == 4
    assert json.loads(Path("out/e/selection.json").read_text())["clip"]["selected"] is None
    world(rewards)
    assert sweep() == 0
    assert calls()[4] == failing
    assert calls()[-1] == f"e/{B}/seed-0"


def test_a_damaged_summary_fails_its_run_alone(here, capsys):
    sweep_file(methods={"pspo": {}, "clip": {}}, evaluate={"evaluation": {"data.limit": 4}})
    Path("out/e/pspo/seed-0").mkdir(parents=True)
    Path("out/e/pspo/seed-0/summary.json").write_text("{")
    assert sweep() == 1
    assert "out/e/pspo/seed-0/summary.json is damaged" in capsys.readouterr().err
    assert calls()[-2:] == ["e/clip/seed-0", "e/clip/seed-0/evaluation"]


def test_a_sweep_that_is_told_to_stop_stops_its_runs_and_resumes(here, capsys):
    sweep_file()
    world(seconds=600)
    stop = threading.Thread(target=lambda: (until(lambda: len(noted()) == 2), os.kill(os.getpid(), signal.SIGTERM)))
    stop.start()
    assert sweep("--workers", "2") == 130
    stop.join()
    assert "the same command resumes" in capsys.readouterr().err
    for call in noted():
        with pytest.raises(ProcessLookupError):
            os.kill(call["pid"], 0)
    world()
    assert sweep() == 0
    assert sorted(calls()[2:]) == sorted(f"e/{setting}/seed-0" for setting in (A, B, C, D))


def test_a_finished_run_or_evaluation_with_other_switches_is_refused(here, capsys):
    one = {"methods": {"pspo": {}}, "evaluate": {"evaluation": {"data.limit": 4}}}
    sweep_file(**one)
    assert sweep() == 0
    assert sweep("--output", "./out") == 0  # another spelling
    assert len(calls()) == 3
    for folder in ("out/e/pspo/seed-0/evaluation", "out/e/untrained/tiny-base/evaluation"):
        words = ["--data.limit", "4", "--model.name_or_path", "of/this/run", "--run.output_dir", folder]
        Path(folder, "config.yaml").write_text(to_yaml(parse(EvaluateConfig, "pspo.evaluate", words)[1]))
        Path(folder, "completions.jsonl").write_text("")
    assert sweep() == 0
    sweep_file(**one | {"evaluate": {"evaluation": {"data.limit": 8}}})
    assert sweep() == 2
    err = capsys.readouterr().err
    assert "out/e/pspo/seed-0/evaluation holds another experiment (--data.limit was 4, is 8)" in err
    sweep_file(**one, shared={"optimizer.lr": 1e-4})
    assert sweep() == 2
    assert "out/e/pspo/seed-0 holds another experiment (--optimizer.lr was 3e-05, is 0.0001)" in capsys.readouterr().err


@pytest.mark.parametrize(("experiment", "args", "message"), [
    ({"methods": {"pspo": {"optimizer.lr": [1, -1]}}}, [], "e/pspo-lr=-1: error: --optimizer.lr must be finite"),
    ({"search": SEARCH, "shared": {"run.validate_every": 0}}, [], "run.validate_every must be above 0 in a search"),
    ({}, ["--processes", "2"], "--processes above 1 needs --distributed.strategy ddp or fsdp2"),
])  # fmt: skip
def test_what_cannot_run_is_one_line_before_anything_runs(here, capsys, experiment, args, message):
    sweep_file(**experiment)
    assert sweep(*args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert not Path("out").exists()


@pytest.mark.parametrize(("processes", "shares", "threads"), [(1, {"4", "6", "8"}, "2"), (2, {"4,6"}, "4")])
def test_cores_and_gpus_are_shared_out_among_workers(here, capsys, monkeypatch, processes, shares, threads):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,8")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    sweep_file(shared={"distributed.strategy": "ddp"} if processes > 1 else {})
    world(seconds=0.3, fail={f"e/{D}/seed-0": 1})
    assert sweep(f"--processes={processes}") == 1
    assert {call["cuda"] for call in noted()} == shares
    assert {call["omp"] for call in noted()} == {threads}
    assert all(call["launched"] == [f"--nproc-per-node={processes}"] * (processes > 1) for call in noted())
    assert "exit code 1, no summary.json: the last line (see" in capsys.readouterr().err  # before torchrun's report


def test_a_dry_run_says_what_its_seeds_detect_and_how_long_it_takes(tmp_path, capsys, monkeypatch):
    """From a standard deviation: a referee's 7.3 points, with which five seeds detect 12; and from a pilot's runs."""
    monkeypatch.chdir(REPOSITORY)
    args = ["--config=configs/sweep/smollm2.yaml", "--only=smollm2-clip", f"--output={tmp_path}/out", "--dry_run"]
    main([*args, "--sd", "7.3"])
    out = capsys.readouterr().out
    assert "smollm2-clip: 5 seeds detect 12.3 points on the same problems at 80% power" in out
    assert "1, 2, 5 points take 421, 107, 19 seeds" in out  # R: power.t.test(sd=7.3, power=.8, type="one.sample")
    for seed, accuracy in enumerate((0.5, 0.6)):
        folder = tmp_path / f"pilot/seed-{seed}"
        folder.mkdir(parents=True)
        summary = {"after": {"accuracy": accuracy, "n": 9}, "seconds": 450, "optimizer_steps": 20}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text('{"step": 20, "reward": 0.5}\n')
        (folder / "environment.json").write_text('{"device": "cpu"}')
        switches = {"model": {"name_or_path": "tiny"}, "data": {"name": "sums"}, "run": {"seed": seed}}
        (folder / "config.yaml").write_text(json.dumps(switches))
    main([*args, "--pilot", str(folder.parent)])
    out = capsys.readouterr().out
    assert "160 optimizer steps take about 1.0 hours of the pilot's cpu, evaluations aside: 22.50 s" in out  # 5 x 32
    assert "Noise floor: two runs of one algorithm differ by 10.0 points" in out  # sqrt(2) 0.1 / sqrt(2)
    for file in folder.parent.glob("*/summary.json"):
        file.unlink()
    with pytest.raises(SystemExit):
        main([*args, "--pilot", str(folder.parent)])
    assert "--pilot must have finished runs" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "only", "runs"), [
    ("first", "", 12), ("paper", "alpha", 12), ("control", "tokens", 30), ("one-day", "", 15),
    ("decoupled-smollm2", "", 10), ("reliability", "bits", 6),
    pytest.param("smollm2", "", 82, marks=pytest.mark.nightly),
    pytest.param("decoupled", "", 160, marks=pytest.mark.nightly),
    pytest.param("off-policy", "", 2340, marks=pytest.mark.nightly),
    pytest.param("paper", "", 644, marks=pytest.mark.nightly),
    pytest.param("tiny", "", 309, marks=pytest.mark.nightly),
])  # fmt: skip
def test_the_sweep_files_of_the_repository(capsys, monkeypatch, name, only, runs):
    monkeypatch.chdir(REPOSITORY)
    switches = ["--only", only] if only else []
    main(["--config", f"configs/sweep/{name}.yaml", *switches, "--output=none", "--dry_run"])
    assert re.search(rf"runs +{runs}\n", capsys.readouterr().out)
