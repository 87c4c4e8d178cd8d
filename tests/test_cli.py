"""The commands as a user meets them: a run's files, reproducibility, every option once, and bad input."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import pspo.evaluate.__main__
import pspo.train
from pspo.config import OptimizerConfig
from pspo.model import ASSETS

REPOSITORY = Path(__file__).parents[1]
SMALL = (
    "--run.max_steps=4", "--rollout.prompts=4", "--run.test_limit=16", "--run.validation_limit=8",
    "--run.validate_every=2", "--run.save_every=2", "--run.seed=1", "--data.limit=100",
)  # fmt: skip
FAST = (
    "--run.max_steps=2", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=0",
    "--run.validate_every=0", "--data.limit=20",
)  # fmt: skip


def process(folder: Path, module: str, *args: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(metrics: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if not key.startswith("seconds/")} for line in metrics]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder, from which modules can be imported."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def fast(*args: str, output: str = "out") -> list[dict]:
    """The metrics of a short run in this process."""
    pspo.train.main([*FAST, f"--run.output_dir={output}", *args])
    return read_jsonl(Path(output) / "metrics.jsonl")


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def own_data(folder: Path, prompt: str = "prompt", answer: str = "answer", splits: tuple = ("train", "test")) -> Path:
    for offset, split in enumerate(splits):
        records = [{prompt: f"Tom has {n} apples. He buys 2 more. How many?", answer: n + 2} for n in range(2, 12)]
        write_jsonl(folder / f"{split}.jsonl", records[offset:])
    return folder


# --- one real run, looked at from all sides ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    folder = tmp_path_factory.mktemp("run")
    return process(folder, "pspo.train", *SMALL, "--run.output_dir=out"), folder / "out"


@pytest.mark.slow
def test_a_run_succeeds_and_says_what_it_did(run):
    result, _ = run
    assert result.returncode == 0, result.stderr
    assert re.search(r"^before +\d+\.\d% \[\d", result.stdout, re.MULTILINE)
    assert re.search(r"^after +\d+\.\d% \[\d", result.stdout, re.MULTILINE)
    assert "python -m pspo.evaluate --model.name_or_path out/best" in result.stdout
    assert "PSPO(alpha=0.1)" in result.stdout
    assert not list(run[1].parent.glob("runs"))


@pytest.mark.slow
def test_stderr_of_a_good_run_holds_progress_bars_only(run):
    bars = re.split(r"[\r\n]", run[0].stderr.replace("\x1b[A", ""))
    unexpected = [line for line in bars if line.strip() and not re.match(r"(rollout|train|validate|test \w+): ", line)]
    assert unexpected == []
    assert "reward" in run[0].stderr
    assert "tokens/s" in run[0].stderr


@pytest.mark.slow
def test_a_run_s_folder(run):
    folder = run[1]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "best", "checkpoints", "config.yaml", "environment.json", "final", "metrics.jsonl", "samples.jsonl",
        "summary.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    for model in (folder / "best", folder / "final", *(folder / "checkpoints").iterdir()):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}


@pytest.mark.slow
def test_metrics_have_one_finite_line_per_rollout(run):
    metrics = read_jsonl(run[1] / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [2, 4]  # two epochs per rollout
    assert 0 < metrics[0]["tokens"] < metrics[1]["tokens"]
    expected = {"reward", "reward_std", "reward/MathReward", "zero_advantage_share", "completion_tokens",
                "truncated_share", "loss", "grad_norm", "lr", "step_skipped", "ratio_mean", "ratio_min", "ratio_max",
                "ess", "zero_weight_share", "clamped_share", "validation_reward", "validation_accuracy",
                "seconds/generate", "seconds/reward", "seconds/train", "seconds/validate"}  # fmt: skip
    for line in metrics:
        assert expected <= set(line)
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
        assert 0 <= line["reward"] <= 1
        assert line["reward"] == line["reward/MathReward"]
        assert 0 < line["completion_tokens"] <= line["completion_tokens_max"] <= 128
        assert line["ratio_min"] <= line["ratio_mean"] <= line["ratio_max"]
        assert line["lr"] == OptimizerConfig().lr
        assert line["step_skipped"] == 0


@pytest.mark.slow
def test_samples(run):
    samples = read_jsonl(run[1] / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [2, 2, 4, 4]
    for sample in samples:
        assert set(sample) == {"step", "prompt", "gold", "completion", "reward"}
        assert sample["reward"] in (0, 0.05, 1)
        assert sample["prompt"]
        assert "<|im" not in sample["completion"]


@pytest.mark.slow
def test_summary(run):
    summary = json.loads((run[1] / "summary.json").read_text())
    for moment in ("before", "after"):
        evaluation = summary[moment]
        low, high = evaluation["ci95"]
        assert evaluation["n"] == 16
        assert 0 <= low <= evaluation["accuracy"] <= high <= 1
        assert (evaluation["accuracy"] * 16).is_integer()
    assert summary["tokens"] == read_jsonl(run[1] / "metrics.jsonl")[-1]["tokens"]
    assert summary["optimizer_steps"] == 4
    assert summary["seconds"] > 0
    assert (run[1].parent / summary["best_model"]).samefile(run[1] / "best")
    assert summary["best_step"] in (0, 2, 4)


@pytest.mark.slow
def test_environment(run):
    environment = json.loads((run[1] / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"commit", "device", "platform"} <= set(environment)


@pytest.mark.slow
def test_final_model_loads_with_plain_transformers_and_generates(run):
    model = AutoModelForCausalLM.from_pretrained(run[1] / "final")
    tokenizer = AutoTokenizer.from_pretrained(run[1] / "final")
    problem = read_jsonl(run[1] / "samples.jsonl")[0]["prompt"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=48, do_sample=False)
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "####" in text
    assert model.dtype == torch.float32
    before = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base").state_dict()
    moved = [not torch.equal(weights, before[name]) for name, weights in model.state_dict().items()]
    assert all(moved)


@pytest.mark.slow
def test_a_run_s_configuration_runs_as_it_is_and_gives_the_same_numbers(run, here):
    config = run[1] / "config.yaml"
    pspo.train.main(["--config", str(config), "--run.output_dir=again"])
    again = here / "again"
    assert untimed(read_jsonl(again / "metrics.jsonl")) == untimed(read_jsonl(run[1] / "metrics.jsonl"))
    assert (again / "samples.jsonl").read_bytes() == (run[1] / "samples.jsonl").read_bytes()
    assert (again / "final/model.safetensors").read_bytes() == (run[1] / "final/model.safetensors").read_bytes()
    one, other = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run[1], again))
    assert other["run"].pop("output_dir") == "again"
    assert one["run"].pop("output_dir") == "out"
    assert one == other
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (run[1], again))
    assert (one["before"], one["after"]) == (other["before"], other["after"])


def test_an_old_run_is_left_alone(here, capsys):
    fast("--run.max_steps=1")
    before = tree(here)
    capsys.readouterr()
    for args in (["--run.resume=never"], ["--run.seed=3"]):
        with pytest.raises(SystemExit) as exit_:
            fast("--run.max_steps=1", *args)
        assert exit_.value.code == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        assert "--run.output_dir out" in line
        assert tree(here) == before
    shutil.rmtree(here / "out")
    (here / "out").mkdir()
    (here / "out/thesis.tex").write_text("not a run")
    assert "--run.output_dir out already holds something" in refused(capsys, pspo.train, "--run.output_dir=out")


def test_seeds(here):
    one, same, other = (untimed(fast(f"--run.seed={seed}", output=f"{n}")) for n, seed in enumerate((3, 3, 4)))
    assert one == same
    assert one != other
    assert read_jsonl(here / "0/samples.jsonl") != read_jsonl(here / "2/samples.jsonl")


def test_default_output_folder_tells_the_runs_apart(here):
    pspo.train.main([*FAST, "--run.max_steps=1", "--algorithm.surrogate=Clip"])
    (folder,) = (here / "runs").iterdir()
    assert re.fullmatch(r"tiny-base-arithmetic-clip-\d{8}-\d{6}", folder.name)


def test_max_tokens_ends_the_run(here):
    every = fast("--run.max_steps=8")
    limit = every[1]["tokens"]
    assert [line["step"] for line in every] == [2, 4, 6, 8]
    for max_tokens, rollouts in ((limit, 2), (limit + 1, 3), (1, 1)):
        metrics = fast("--run.max_steps=8", f"--run.max_tokens={max_tokens}", output=f"{max_tokens}")
        assert untimed(metrics) == untimed(every)[:rollouts]


def test_max_steps_may_end_the_run_inside_a_rollout(here):
    assert [line["step"] for line in fast("--run.max_steps=3")] == [2, 3]


# --- every option once ------------------------------------------------------------------------------------------------


def test_each_method_runs_by_one_override(here):
    (here / "length_reward.py").write_text(
        "from pspo.tasks import Reward\n"
        "class Length(Reward):\n"
        "    def __call__(self, completions, problems):\n"
        "        return [len(completion) / 100 for completion in completions]\n"
    )  # and not correctness, so that advantages differ from 0 whatever the model can do
    args = ("--reward.functions=[length_reward.Length]", "--rollout.temperature=1.5", "--rollout.top_p=1")
    losses = {}
    for name in ("PSPO", "Clip", "NoClip", "P3O", "SAPO", "TOPR"):
        (line,) = fast(f"--algorithm.surrogate={name}", *args, "--optimizer.lr=1e-4", output=name)
        assert line["step"] == 2
        assert line["step_skipped"] == 0
        assert line["grad_norm"] > 0
        assert all(math.isfinite(value) for value in line.values())
        losses[name] = line["loss"]
    assert len(set(losses.values())) == 6, losses


@pytest.mark.parametrize(
    "args",
    [
        ["--algorithm.beta=0.1"],
        ["--algorithm.mask_truncated=true"],
        ["--algorithm.mask_truncated=true", "--rollout.max_completion_tokens=3"],  # every completion is truncated
        ["--rollout.max_completion_tokens=1"],
        ["--rollout.min_completion_tokens=24"],
        ["--model.autocast=bf16"],
        ["--model.attn_implementation=eager"],
        ["--rollout.decoder=graphs"],
        ["--model.name_or_path=tiny-math"],
        ["--algorithm.epochs=1", "--algorithm.minibatches=2", "--optimizer.microbatch_tokens=1"],
        ["--algorithm.aggregation=grpo", "--algorithm.advantage_scale=group"],
        ["--algorithm.aggregation=dr_grpo", "--algorithm.advantage_scale=batch"],
        ["--optimizer.schedule=cosine", "--optimizer.warmup_steps=1"],
        ["--optimizer.max_grad_norm=0"],
        ["--rollout.temperature=1", "--rollout.top_p=1", "--rollout.top_k=5", "--rollout.repetition_penalty=1.1"],
        ["--rollout.max_rows=3"],
        ["--data.limit=1"],
        ["--data.system_prompt="],
        ["--run.samples=0"],
        ["--run.validate_every=2", "--run.validation_limit=2", "--run.test_limit=2"],
    ],
    ids=lambda args: " ".join(arg.partition(".")[2] for arg in args),
)
def test_option(here, args):
    (line,) = fast(*args)
    assert line["step"] == 2
    assert line["step_skipped"] == 0
    assert all(math.isfinite(value) for value in line.values())
    assert ("kl_reference" in line) == ("--algorithm.beta=0.1" in args)
    assert (here / "out/final/model.safetensors").is_file()


def test_gradient_checkpointing_changes_memory_and_not_the_numbers(here):
    (plain,), (checkpointed,) = fast(output="a"), fast("--model.gradient_checkpointing=true", output="b")
    for key in ("reward", "tokens", "completion_tokens"):
        assert checkpointed[key] == plain[key]
    for key in ("loss", "grad_norm", "ratio_max"):
        assert checkpointed[key] == pytest.approx(plain[key], rel=1e-3)


def test_warm_up_starts_at_zero(here):
    metrics = fast("--optimizer.warmup_steps=4", "--run.max_steps=4", "--optimizer.lr=1e-4")
    assert [line["lr"] for line in metrics] == pytest.approx([2.5e-5, 7.5e-5])  # of each rollout's second step


def test_own_data_own_surrogate_own_reward_and_the_evaluation_it_advises(here, capsys):
    (here / "own_plugins.py").write_text(
        """
from dataclasses import dataclass
import torch
from pspo.losses import Surrogate
from pspo.tasks import Reward

@dataclass(frozen=True)
class MyLoss(Surrogate):
    strength: float = 2.0

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return torch.where(mask, -self.strength * logprobs * advantages, 0.0)

@dataclass(frozen=True)
class Brevity(Reward):
    max_characters: int = 500

    def __call__(self, completions, problems):
        assert all(problem.source == "file" for problem in problems)
        return [float(len(completion) <= self.max_characters) for completion in completions]
"""
    )
    own_data(here / "my data", "question text", "gold")
    (line,) = fast(
        "--data.name=file", "--data.path=my data", "--data.prompt_column=question text", "--data.answer_column=gold",
        "--algorithm.surrogate=own_plugins.MyLoss", "--algorithm.surrogate.strength=3",
        "--reward.functions=[MathReward, own_plugins.Brevity]", "--reward.weights=[1, 0.5]", "--run.test_limit=4",
        "--run.validate_every=2",
    )  # fmt: skip
    assert line["reward/Brevity"] == 1
    assert line["reward"] == pytest.approx(line["reward/MathReward"] + 0.5)
    assert read_jsonl(here / "out/samples.jsonl")[0]["prompt"].startswith("Tom has")
    summary = json.loads((here / "out/summary.json").read_text())
    assert summary["after"]["n"] == 4

    out = capsys.readouterr().out
    assert "MyLoss(strength=3.0)" in out
    (command,) = re.findall(r"^evaluate it: python -m pspo\.evaluate (.*)$", out, re.MULTILINE)
    pspo.evaluate.__main__.main(shlex.split(command))
    results = json.loads(next((here / "out").rglob("results.json")).read_text())
    assert results["n"] == 4  # of 9, those that the run itself evaluated
    again = results["temperatures"]["0"]
    after = summary["after"]
    assert again["accuracy"] == {"value": after["accuracy"], "ci95": after["ci95"]}
    assert again["true_accuracy"] == {"value": after["true_accuracy"], "ci95": after["true_accuracy_ci95"]}
    for name in ("format_share", "truncated_share", "completion_tokens"):
        assert again[name] == after[name]


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate(here, capsys):
    args = ["--data.limit=6", "--eval.temperatures=[0, 0.8]", "--eval.samples=2", "--eval.max_completion_tokens=32"]
    pspo.evaluate.__main__.main([*args, "--run.output_dir=results"])
    out = capsys.readouterr().out
    assert re.search(r"^temperature +accuracy \[95%\] +true accuracy", out, re.MULTILINE)
    assert re.search(r"^0 +\d+\.\d% \[", out, re.MULTILINE)
    assert re.search(r"^0\.8 +\d+\.\d% \[", out, re.MULTILINE)
    assert "pass@2" in out

    folder = here / "results"
    results = json.loads((folder / "results.json").read_text())
    described = {"model": "tiny-base", "data": "arithmetic", "split": "test", "n": 6, "samples": 2, "top_p": 1.0,
                 "max_completion_tokens": 32, "seed": 0}  # fmt: skip
    assert {key: results[key] for key in described} == described
    assert set(results) == {*described, "temperatures"}
    assert list(results["temperatures"]) == ["0", "0.8"]
    completions = read_jsonl(folder / "completions.jsonl")
    for temperature, samples in ((0, 1), (0.8, 2)):
        mine = [completion for completion in completions if completion["temperature"] == temperature]
        keys = [(completion["problem"], completion["sample"]) for completion in mine]
        assert keys == [(n, sample) for n in range(6) for sample in range(samples)]
        result = results["temperatures"][f"{temperature}"]
        assert result["samples"] == samples
        for name, column in (("accuracy", "correct"), ("true_accuracy", "contains_gold")):
            value = sum(completion[column] for completion in mine) / len(mine)
            assert result[name]["value"] == pytest.approx(value)
            low, high = result[name]["ci95"]
            assert 0 <= low <= value <= high <= 1
        solved = [any(completion["correct"] for completion in mine if completion["problem"] == n) for n in range(6)]
        assert result[f"pass@{samples}"]["value"] == pytest.approx(sum(solved) / 6)
        assert sum(group["n"] for group in result["breakdown"]["level"].values()) == 6

    pspo.evaluate.__main__.main(["--config", str(folder / "config.yaml"), "--run.output_dir=again"])
    assert (here / "again/results.json").read_bytes() == (folder / "results.json").read_bytes()
    assert (here / "again/completions.jsonl").read_bytes() == (folder / "completions.jsonl").read_bytes()

    before = tree(here)
    capsys.readouterr()
    pspo.evaluate.__main__.main([*args, "--run.output_dir=results"])
    again = capsys.readouterr().out
    assert again.startswith("finished before, nothing to do: results/results.json\n")
    assert out.split("\n\nresults:")[0] in again  # the same tables
    assert tree(here) == before


def test_evaluate_refuses_to_mix_evaluations(here, capsys, monkeypatch):
    shutil.copytree(ASSETS / "tiny-base", here / "model")
    own_data(here / "mine")
    args = ["--model.name_or_path=./model", "--data.name=file", "--data.path=mine", "--eval.max_completion_tokens=4",
            "--run.output_dir=out"]  # fmt: skip
    pspo.evaluate.__main__.main(args)

    def line(*more: str) -> str:
        before = tree(here)
        said = refused(capsys, pspo.evaluate, *args, *more)
        assert tree(here) == before
        assert said.startswith("--run.output_dir out holds ")
        assert "choose another folder" in said
        return said

    for finished in (True, False):
        if not finished:
            (here / "out/results.json").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(pspo.evaluate, "load_tokenizer", lambda config: pytest.fail("loaded a tokenizer"))
            said = line("--eval.samples=3", "--eval.temperatures=[0.5]", "--data.limit=2")
        assert "--eval.samples is 1 there and 3 here" in said
        assert "--eval.temperatures is [0.0] there and [0.5] here" in said
        assert "--data.limit is None there and 2 here" in said
        assert "run.output_dir is" not in said

        weights = here / "model/model.safetensors"
        base = weights.read_bytes()
        weights.write_bytes((ASSETS / "tiny-math/model.safetensors").read_bytes())
        assert "other model weights under the same name" in line()
        weights.write_bytes(base)

        problems = here / "mine/test.jsonl"
        text = problems.read_text()
        problems.write_text(text.replace("Tom", "Tim"))
        assert "other problems under the same name" in line()
        problems.write_text(text)

    pspo.evaluate.__main__.main(args)
    (here / "out/fingerprint.json").unlink()
    assert "holds something else" in line()


def test_evaluate_a_model_without_keys_and_values(here, model_folder):
    config = transformers.Lfm2Config(
        vocab_size=559, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    folder = model_folder(transformers.Lfm2ForCausalLM(config))
    short = ("--data.limit=2", "--eval.max_completion_tokens=4", "--run.output_dir=results")
    pspo.evaluate.__main__.main([f"--model.name_or_path={folder}", *short])
    assert json.loads((here / "results/results.json").read_text())["n"] == 2


@pytest.mark.slow
def test_an_evaluation_leaves_a_training_run_alone(run, capsys):
    said = refused(capsys, pspo.evaluate, f"--run.output_dir={run[1]}")
    assert "holds something else, a training run perhaps" in said


@pytest.mark.slow
def test_evaluate_killed_and_started_again_ends_as_if_nothing_had_been(here, capsys):
    args = ["--data.limit=40", "--eval.temperatures=[0, 0.7]", "--eval.samples=3", "--eval.max_tokens=1000"]
    pspo.evaluate.__main__.main([*args, "--run.output_dir=whole"])
    total = len(read_jsonl(here / "whole/completions.jsonl"))
    assert total == 40 * 4

    kept, at = here / "out/completions.jsonl", []
    for wanted in (12, 90):  # in the middle of each temperature
        command = [sys.executable, "-m", "pspo.evaluate", *args, "--run.output_dir=out"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            while running.poll() is None and not (kept.exists() and kept.read_bytes().count(b"\n") >= wanted):
                time.sleep(0.002)
            running.kill()  # SIGKILL
        assert running.returncode == -signal.SIGKILL
        assert not (here / "out/results.json").exists()
        with kept.open("ab") as file:
            file.write(b'{"temperature": 0.0, "problem": 7, "sam')  # what a kill in the middle of a line leaves
        at.append(kept.read_bytes().count(b"\n"))
    assert wanted <= at[1] < total

    capsys.readouterr()
    pspo.evaluate.__main__.main([*args, "--run.output_dir=out"])
    assert f"going on with out: {at[1]} completions are there\n" in capsys.readouterr().out
    for name in ("completions.jsonl", "results.json"):
        assert (here / "out" / name).read_bytes() == (here / "whole" / name).read_bytes()


def test_an_evaluation_interrupted_by_hand_says_how_to_go_on(here, capsys, monkeypatch):
    args = ["--data.limit=4", "--eval.max_completion_tokens=4", "--eval.max_tokens=1", "--run.output_dir=out"]
    generate, calls = pspo.evaluate.__main__.generate, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(pspo.evaluate, "generate", interrupted)
    with pytest.raises(SystemExit) as exit_:
        pspo.evaluate.__main__.main(args)
    assert exit_.value.code == 130
    assert capsys.readouterr().err.endswith("\nstopped; the same command goes on with out\n")
    pspo.evaluate.__main__.main(args)
    assert len(calls) == 5  # two before, two after
    assert "going on with out: 2 completions are there" in capsys.readouterr().out


DATA = REPOSITORY.parent / "shared" / "data"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"development data not found at {DATA}")
@pytest.mark.parametrize(
    ("name", "parts"), [("gsm8k", set()), ("svamp", {"category"}), ("asdiv", {"category"}), ("math", {"level"})]
)
def test_evaluate_on_each_benchmark(here, name, parts):
    pspo.evaluate.__main__.main([
        f"--data.name={name}", f"--data.path={DATA}", "--data.limit=12",
        "--eval.max_completion_tokens=1", "--run.output_dir=out",
    ])  # fmt: skip
    results = json.loads((here / "out/results.json").read_text())
    completions = read_jsonl(here / "out/completions.jsonl")
    assert len(completions) == results["n"] > 0
    result = results["temperatures"]["0"]
    assert parts <= set(result["breakdown"]) <= {"category", "level"}
    for groups in result["breakdown"].values():
        assert sum(group["n"] for group in groups.values()) == results["n"]
        right = sum(group["n"] * group["accuracy"]["value"] for group in groups.values())
        assert right / results["n"] == pytest.approx(result["accuracy"]["value"])


# --- bad input --------------------------------------------------------------------------------------------------------


def refused(capsys, command, *args: str) -> str:
    """The one line on stderr with which a command refuses; nothing is left behind in the current folder."""
    before = sorted(Path().rglob("*"))
    name = command.__name__
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        command.main([*args])
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    assert err.startswith(f"{name}: error: ")
    assert sorted(Path().rglob("*")) == before
    return err.removeprefix(f"{name}: error: ").strip()


def test_missing_model_folder(here, capsys):
    for command in (pspo.train, pspo.evaluate):
        line = refused(capsys, command, "--model.name_or_path=./no/model")
        assert "--model.name_or_path" in line
        assert "does not exist" in line


def test_missing_model_folder_written_without_a_dot(here, capsys):
    line = refused(capsys, pspo.train, "--model.name_or_path=runs/my-run/best")  # no hub id has two slashes
    assert "--model.name_or_path" in line
    assert "does not exist" in line or "no such folder" in line, line


@pytest.mark.slow
def test_model_that_is_neither_here_nor_reachable(tmp_path):
    result = process(tmp_path, "pspo.train", "--model.name_or_path=nobody/no-such-model", "--run.output_dir=out")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "--model.name_or_path nobody/no-such-model" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_model_folder_without_config(here, capsys):
    (here / "empty").mkdir()
    for path in ("empty", "./empty", str(here / "empty")):
        line = refused(capsys, pspo.train, f"--model.name_or_path={path}")
        assert "--model.name_or_path" in line
        assert "config.json" in line


def test_model_folder_with_broken_weights(here, capsys):
    shutil.copytree(ASSETS / "tiny-base", here / "broken")
    (here / "broken/model.safetensors").write_bytes(b"half a file")
    assert "--model.name_or_path" in refused(capsys, pspo.train, "--model.name_or_path=./broken", "--data.limit=4")


def test_model_folder_without_tokenizer(here, capsys):
    shutil.copytree(ASSETS / "tiny-base", here / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    line = refused(capsys, pspo.train, "--model.name_or_path=./bare", "--data.limit=4")
    assert "bare" in line
    assert "tokenizer" in line


def test_tokenizer_without_chat_template(here, capsys):
    shutil.copytree(ASSETS / "tiny-base", here / "bare", ignore=shutil.ignore_patterns("chat_template.jinja"))
    for command in (pspo.train, pspo.evaluate):
        line = refused(capsys, command, "--model.name_or_path=./bare")
        assert "bare" in line
        assert "chat template" in line
        assert "chat_template.jinja" in line


@pytest.mark.parametrize("value", ["nonsense", "flash_attention_2"])
def test_attention_that_is_not_there(here, capsys, value):
    if value == "flash_attention_2" and torch.cuda.is_available():
        pytest.skip("may be there")
    line = refused(capsys, pspo.train, f"--model.attn_implementation={value}", "--data.limit=4")
    assert "--model.attn_implementation" in line


@pytest.mark.parametrize("command", [pspo.train, pspo.evaluate], ids=["train", "evaluate"])
def test_bad_data(here, capsys, command):
    def line(*args: str) -> str:
        return refused(capsys, command, "--data.name=file", *args)

    own_data(here / "other", "question", "answer")
    said = line("--data.path=other")
    assert "no column 'prompt'" in said
    assert "question" in said
    assert "--data.prompt_column" in said

    write_jsonl(here / "empty/train.jsonl", [])
    write_jsonl(here / "empty/test.jsonl", [])
    said = line("--data.path=empty")
    assert "holds no problems" in said
    assert "--data.path" in said

    (here / "hollow").mkdir()
    assert "--data.path" in line("--data.path=hollow")

    said = line("--data.path=not/there")
    assert "not/there" in said
    assert "--data.path" in said

    assert "--data.path" in line()
    assert "gsm9k" in line("--data.name=gsm9k")

    (here / "broken").mkdir()
    for split in ("train", "test"):
        (here / f"broken/{split}.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": \n')
    assert "line 2" in line("--data.path=broken")

    for split in ("train", "test"):
        write_jsonl(here / f"words/{split}.jsonl", [{"prompt": "a", "answer": "many"}] * 3)
    assert "numeric" in line("--data.path=words")


def test_own_data_without_a_split(here, capsys):
    own_data(here / "mine", splits=("train",))
    said = refused(capsys, pspo.train, "--data.name=file", "--data.path=mine")
    assert "no test split" in said
    assert "test.jsonl" in said
    said = refused(capsys, pspo.evaluate, "--data.name=file", "--data.path=mine")
    assert "no test split" in said

    own_data(here / "other", splits=("test",))
    said = refused(capsys, pspo.train, "--data.name=file", "--data.path=other")
    assert "no train split" in said
    assert "train.jsonl" in said


def test_own_data_without_test_trains_where_none_is_asked_for(here, capsys):
    own_data(here / "mine", splits=("train",))
    assert fast("--data.name=file", "--data.path=mine")[-1]["step"] == 2
    assert "pspo.evaluate" not in capsys.readouterr().out


def test_everything_too_long(here, capsys):
    for command in (pspo.train, pspo.evaluate):
        line = refused(capsys, command, "--data.max_prompt_tokens=3", "--data.limit=4")
        assert "longer than 3 tokens" in line
        assert "--data.max_prompt_tokens" in line


@pytest.mark.parametrize(
    ("command", "switch"),
    [(pspo.train, "--rollout.max_completion_tokens"), (pspo.evaluate, "--eval.max_completion_tokens")],
    ids=["train", "evaluate"],
)
def test_completions_longer_than_the_model_s_positions(here, capsys, command, switch):
    line = refused(capsys, command, f"{switch}=600", "--data.limit=4")  # of 512 positions
    assert switch in line
    assert "512" in line  # what it must stay below
    assert "than -" not in line  # a negative number of tokens tells nobody anything


BAD_CONFIGURATIONS = [
    (["--rollout.group_size=1"], ("rollout.group_size", "at least 2")),
    (["--run.max_steps=-1"], ("run.max_steps", "above 0")),
    (["--algorithm.surrogate=PSPO", "--algorithm.surrogate.alpha=4"], ("alpha", "[0, 1]")),
    (["--rollout.group_sise=4"], ("rollout.group_sise",)),
    (["--config=typo.yaml"], ("rollout", "group_sise")),
    (["--config=list.yaml"], ("list.yaml",)),
    (["--config=broken.yaml"], ("broken.yaml",)),
    (["--config=missing.yaml"], ("missing.yaml", "does not exist")),
    (["--reward.weights=[1, 2]"], ("reward.weights", "1 reward")),
    (["--algorithm.surrogate=no_such_module.MyLoss"], ("algorithm.surrogate", "no_such_module")),
    (["--reward.functions=[refusing_reward.Refuses]"], ("needs a moon", "efuses")),
    (["--run.seed=-1"], ("run.seed",)),
]


@pytest.mark.parametrize(("args", "named"), BAD_CONFIGURATIONS, ids=[args[-1] for args, _ in BAD_CONFIGURATIONS])
def test_bad_configuration_stops_before_any_loading(here, capsys, monkeypatch, args, named):
    (here / "typo.yaml").write_text("rollout:\n  group_sise: 4\n")
    (here / "list.yaml").write_text("- a\n- b\n")
    (here / "broken.yaml").write_text("a: [1, 2\n  b: }\n")
    (here / "refusing_reward.py").write_text(
        "from pspo.tasks import Reward\n"
        "class Refuses(Reward):\n"
        "    def __init__(self):\n"
        "        raise ValueError('needs a moon')\n"
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(pspo.train, "load_tokenizer", lambda config: pytest.fail("loaded a tokenizer"))
    monkeypatch.setattr(pspo.train, "load_across_ranks", lambda *args: pytest.fail("loaded a model"))
    line = refused(capsys, pspo.train, "--run.output_dir=out", *args)
    assert all(part in line for part in named), line


@pytest.mark.parametrize("command", [pspo.train, pspo.evaluate], ids=["train", "evaluate"])
def test_output_folder_that_cannot_be(here, capsys, command):
    (here / "file").write_text("mine")
    for output in ("file", "file/below", "file/far/below"):
        line = refused(capsys, command, f"--run.output_dir={output}", "--data.limit=4")
        assert "--run.output_dir" in line
        assert output in line
    assert (here / "file").read_text() == "mine"


@pytest.mark.slow
def test_bad_input_in_a_process_of_its_own(tmp_path):
    result = process(tmp_path, "pspo.evaluate", "--eval.samples=0")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "pspo.evaluate: error: --eval.samples must be above 0, got 0\n"
    assert list(tmp_path.iterdir()) == []
