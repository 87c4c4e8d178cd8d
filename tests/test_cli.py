"""The commands as a user meets them: a run's files, the same numbers again, one-line errors."""

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import ModelCard
from processes import metric_lines, one_layer

import pspo.config
import pspo.evaluate.__main__
import pspo.evaluate.evaluation
import pspo.run.run
from pspo.cli.parse import differences, parse, read_config
from pspo.config import TrainConfig
from pspo.evaluate.__main__ import load_evaluation as load
from pspo.evaluate.__main__ import model_step
from pspo.files import append_jsonl, read_json, read_jsonl
from pspo.model import ASSETS, load_tokenizer
from pspo.run.messages import model_card
from pspo.train import main

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads())}
SMALL = ("--run.max_steps=4", "--rollout.prompts=4", "--run.test_limit=16", "--run.validation_limit=8",
         "--run.validate_every=2", "--run.save_every=2", "--run.seed=1", "--data.limit=100")  # fmt: skip
FAST = ("--run.max_steps=2", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=0",
        "--run.validate_every=0", "--data.limit=20")  # fmt: skip
TINIEST = (f"--model.name_or_path={one_layer()}", "--rollout.max_completion_tokens=4")
train, evaluate = main, pspo.evaluate.__main__.main


def length(completions):
    return [len(completion) / 100 for completion in completions]


@pytest.fixture
def refused(capsys):
    """Returns the one line on stderr with which a command refuses; it leaves no file behind in the current folder."""

    def refuse(command: Callable, *args: str) -> str:
        before = files_of(Path())
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            command([*args])
        assert files_of(Path()) == before
        return re.fullmatch(r"pspo\.(?:train|evaluate): error: (.+)\n", capsys.readouterr().err)[1]

    return refuse


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fast(*args: str, output: str = "out") -> list[dict]:
    """The metrics of a short run in this process."""
    train([*FAST, f"--run.output_dir={output}", *args])
    return read_jsonl(Path(output) / "metrics.jsonl")


# --- one real run, looked at from all sides ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """Folder and output of `python -m pspo.train`."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "pspo.train", *SMALL, "--run.output_dir=out"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "out", done


def test_what_a_run_says_and_writes(run):
    folder, done = run
    for moment in ("before", r"after, step \d"):
        assert re.search(rf"^{moment} +\d\.\d+ \[.*\] +\d+\.\d% \[\d", done.stdout, re.MULTILINE)
    assert re.search(r"^[\d:]+  sample  .+  \(reward [01]\.\d\d\)$", done.stderr, re.MULTILINE)
    assert list(folder.parent.iterdir()) == [folder]
    assert "past_key_values" not in done.stderr  # which transformers calls old since 5.24
    final = {"test-final.jsonl"} if read_json(folder / "summary.json")["best_step"] != 4 else set()
    assert {path.name for path in folder.iterdir()} == final | {
        ".lock", "best", "checkpoints", "config.yaml", "environment.json", "final", "metrics.jsonl", "samples.jsonl",
        "summary.json", "test-after.jsonl", "test-before.jsonl", "tokens.parquet",
    }  # fmt: skip
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000002", "step-000004"}
    for model in (folder / "best", folder / "final", *(folder / "checkpoints").iterdir()):
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
    assert {"packages", "python", "commit", "device", "platform"} <= set(read_json(folder / "environment.json"))


def test_the_card_of_each_model_has_the_run_in_numbers(run):
    summary = read_json(run[0] / "summary.json")
    for folder, step in {"final": 4, "best": summary["best_step"]}.items():
        text = ModelCard.load(run[0] / folder / "README.md").text
        assert f"PSPO(alpha=0.1), {step} optimizer steps on arithmetic, seed 1\n    changed: data.limit 100" in text
        for test in ("before", "after"):
            assert f"{100 * summary[test]['accuracy']:.1f}% [" in text


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "/home/me/secret/my-model"])
def test_a_card_has_front_matter_for_the_hub_and_no_path_and_leaves_texts_alone(model):
    words = [f"--model.name_or_path={model}", "--data.system_prompt=# no\n```\n<b>heading {{ 1 + 1 }}"]
    unmeasured = {"before": {}, "after": {}, "final": {}, "validation": {}, "best_step": 10, "optimizer_steps": 10}
    text = model_card(*parse(TrainConfig, "pspo.train", [*words, "--optimizer.lr=1"]), 10, unmeasured)
    data = ModelCard(text).data
    assert (data.base_model, data.library_name) == (None if model[0] == "/" else model, "transformers")
    assert "/home/me" not in text
    assert "    system prompt: # no ``` <b>heading {{ 1 + 1 }}\n" in text


def test_metrics_samples_and_summary(run):
    metrics = read_jsonl(run[0] / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [2, 4]  # two epochs per rollout
    assert 0 < metrics[0]["tokens"] < metrics[1]["tokens"]
    expected = {"reward_std", "trained_share", "zero_advantage_share", "truncated_share", "format_share", "loss",
                "grad_norm", "ratio_mean", "ess", "zero_weight_share", "validation_reward", "validation_accuracy",
                "seconds/generate", "seconds/train", "seconds/validate"}  # fmt: skip
    for line in metrics:
        assert expected <= set(line)
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values())
        assert 0 <= line["reward"] == line["reward/MathReward"] <= 1
        assert 0 < line["completion_tokens"] <= line["completion_tokens_max"] <= 128
        assert (line["lr"], line["step_skipped"]) == (3e-5, 0)

    samples, summary = read_jsonl(run[0] / "samples.jsonl"), read_json(run[0] / "summary.json")
    groups = [(step, sample) for step in (2, 4) for _ in range(2) for sample in range(4)]
    assert [(sample["step"], sample["sample"]) for sample in samples] == groups
    for sample in samples:
        assert set(sample) == {"step", "problem", "sample", "prompt", "gold", "completion", "reward", "advantage",
                               "tokens", "truncated", "rewards"}  # fmt: skip
        group = [other["reward"] for other in samples if other["problem"] == sample["problem"]]
        assert sample["advantage"] == pytest.approx(sample["reward"] - sum(group) / 4, abs=1e-6)
        assert sample["rewards"] == {"MathReward": sample["reward"]}
        assert sample["reward"] in (0, 0.05, 1)
        assert "<|im" not in sample["completion"]
    for moment in ("before", "after"):
        low, high = summary[moment]["accuracy_ci95"]
        assert summary[moment]["n"] == 16
        assert 0 <= low <= summary[moment]["accuracy"] <= high <= 1
    assert summary["tokens"] == metrics[-1]["tokens"]
    assert (summary["optimizer_steps"], summary["best_model"]) == (4, "out/best")


def test_a_collapse_cannot_hide_behind_the_best_model(here, capsys):
    args = ["--model.name_or_path=tiny-math", "--optimizer.lr=3e-2", "--rollout.prompts=8", "--run.test_limit=16",
            "--rollout.max_completion_tokens=64", "--data.limit=100"]  # fmt: skip
    train([*args, "--run.max_steps=4", "--run.validate_every=2", "--run.validation_limit=16", "--run.output_dir=out"])
    summary, said = read_json(here / "out/summary.json"), capsys.readouterr().out
    assert (summary["best_step"], summary["best_model"]) == (0, "out/best")
    assert summary["after"] == summary["before"]
    assert summary["final"]["accuracy"] < 0.2 < summary["after"]["accuracy"]
    right = sum(record["correct"] for record in read_jsonl(here / "out/test-final.jsonl"))
    assert right == 16 * summary["final"]["accuracy"]
    lines = {line["step"]: line["validation_reward"] for line in read_jsonl(here / "out/metrics.jsonl")}
    found = {name: (of["step"], of["validation_reward"]) for name, of in summary["validation"].items()}
    assert found["untrained"] == found["best"] > (0, max(lines.values()))
    assert found["best_trained"] == (max(lines, key=lines.get), max(lines.values()))
    assert found["final"] == (4, lines[4])
    assert "the model of step 0 is returned\n" in said
    assert "no trained step was better; the untrained model: out/best" in said


def test_a_run_s_configuration_runs_as_it_is_and_gives_the_same_numbers(run, here):
    train(["--config", str(run[0] / "config.yaml"), "--run.output_dir=again"])
    again = here / "again"
    assert metric_lines(again) == metric_lines(run[0])
    for name in ("samples.jsonl", "final/model.safetensors"):
        assert (again / name).read_bytes() == (run[0] / name).read_bytes()
    one, other = (read_config(folder / "config.yaml") for folder in (run[0], again))
    assert differences(one, other) == {"run.output_dir": ("out", "again")}


def test_steps_and_tokens_end_a_run(here):
    every = fast(*TINIEST, "--run.max_steps=7")
    assert [line["step"] for line in every] == [2, 4, 6, 7]  # the last inside a rollout
    for max_tokens, rollouts in ((every[1]["tokens"], 2), (every[1]["tokens"] + 1, 3)):
        fast(*TINIEST, "--run.max_steps=7", f"--run.max_tokens={max_tokens}", output=f"{max_tokens}")
        assert metric_lines(Path(f"{max_tokens}")) == metric_lines(Path("out"))[:rollouts]


@pytest.mark.parametrize(
    "args",
    [
        "algorithm.mask_truncated=true rollout.max_completion_tokens=3",  # which truncates every completion
        "rollout.max_completion_tokens=1 model.gradient_checkpointing=true model.attn_implementation=eager",
        "data.limit=1 data.system_prompt= run.record_tokens=0 run.validate_every=2 run.validation_limit=2",
    ],
)
def test_the_smallest_settings(here, args):
    (line,) = fast(TINIEST[0], "--reward.functions=[test_cli.length]", *(f"--{arg}" for arg in args.split()))
    assert (line["step"], line["step_skipped"]) == (2, 0)
    assert all(math.isfinite(value) for value in line.values())


def test_texts_in_a_file_need_their_kind_and_a_reward_by_its_name(here, refused, capsys):
    records = [{"messages": [{"role": "user", "content": f"Spell {word} backwards."}], "answer": word} for word in
               ("ab", "cde", "fg", "hij", "kl", "mno")]  # fmt: skip
    (here / "mine").mkdir()
    for split in ("train", "test"):
        append_jsonl(here / f"mine/{split}.jsonl", *records)
    args = [*FAST, "--data.path=mine", "--reward.functions=[test_cli.length]", "--run.test_limit=4",
            "--run.validate_every=2", "--run.output_dir=out"]  # fmt: skip
    assert "give --data.answer_kind text for texts" in refused(train, *args)
    train([*args, "--data.answer_kind=text"])
    data = read_config(here / "out/config.yaml")["data"]
    assert (data["name"], data["answer_kind"]) == ("file", "text")
    printed = capsys.readouterr()
    assert re.search(r"^greedy, held-out +reward .* +truncated +tokens$", printed.out, re.MULTILINE)  # no accuracy
    assert "validation greedy reward" in printed.err
    assert "WARNING: 3 training prompts are also in validation or test" in printed.err


# --- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate(here, refused, monkeypatch):
    shutil.copytree(ASSETS / "tiny-base", "best")
    Path("best/validation.json").write_text('{"step": 40}')
    args = ["--data.limit=6", "--eval.temperatures=[0, 0.8]", "--eval.samples=2", "--eval.max_completion_tokens=32",
            "--model.name_or_path=best", "--run.output_dir=results"]  # fmt: skip
    with monkeypatch.context() as disk:
        disk.setattr(pspo.files, "to_jsonl", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(SystemExit, match="1"):
            evaluate(args)
    evaluate(args)  # nothing of the first try is left
    results, completions = read_json(here / "results/results.json"), read_jsonl(here / "results/completions.jsonl")
    assert results.items() >= {"model": "best", "step": 40, "data": "arithmetic", "split": "test", "n": 6,
                               "samples": 2, "top_p": 1.0, "max_completion_tokens": 32, "seed": 0}.items()  # fmt: skip
    keys = [(completion["temperature"], completion["problem"], completion["sample"]) for completion in completions]
    assert keys == [(0, n, 0) for n in range(6)] + [(0.8, n, sample) for n in range(6) for sample in (0, 1)]
    for mine, result in zip((completions[:6], completions[6:]), results["temperatures"].values(), strict=True):
        assert result["accuracy"] == pytest.approx(sum(record["correct"] for record in mine) / len(mine))

    assert "--run.output_dir results is there already: choose a new folder" in refused(evaluate, *args)
    with monkeypatch.context() as beside:  # another evaluation writes the folder in the meantime
        beside.setattr(pspo.evaluate.__main__, "load_evaluation", lambda *args: Path("again").mkdir() or load(*args))
        evaluate(["--config", "results/config.yaml", "--run.output_dir=again"])
    for name in ("results.json", "completions.jsonl"):
        assert (here / "again-2" / name).read_bytes() == (here / "results" / name).read_bytes()
    assert not list(Path("again").iterdir())
    Path("summary.json").write_text('{"optimizer_steps": 100}')
    assert [model_step(Path(model)) for model in ("final", "merged", "best")] == [100, None, 40]
    assert "/proc/results" in refused(evaluate, *args, "--run.output_dir=/proc/results")


# --- bad input: one line that names the switch, exit code 2, nothing left behind --------------------------------------


@pytest.fixture(scope="module")
def bad_input(tmp_path_factory) -> Path:
    """A folder of a model and data with something missing."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copytree(ASSETS / "tiny-base", folder / "cut")
    (folder / "cut/model.safetensors").write_bytes(b"half a file")
    shutil.copytree(ASSETS / "tiny-base", folder / "image")
    tokenizer = load_tokenizer(pspo.config.ModelConfig())
    tokenizer.add_tokens("<image>")
    tokenizer.save_pretrained(folder / "image")
    (folder / "columns").mkdir()
    append_jsonl(folder / "columns/train.jsonl", {"question": "Tom has 3 apples. How many?", "answer": 3})
    return folder


@pytest.mark.parametrize(
    ("command", "switches", "named"),
    [
        (train, "model.name_or_path=runs/my-run/best", "--model.name_or_path"),  # no hub id has two slashes
        (evaluate, "model.name_or_path=./cut", "--model.name_or_path"),
        (train, "model.name_or_path=./image data.system_prompt=<image>", "do not include '<image>' (id 559): resize"),
        (train, "data.name=file data.path=columns", "--data.columns"),
        (evaluate, "eval.max_completion_tokens=600", "max_completion_tokens must be below 512"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(bad_input, monkeypatch, refused, command, switches, named):
    monkeypatch.chdir(bad_input)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert named in refused(command, "--data.limit=4", *(f"--{switch}" for switch in switches.split()))


@pytest.mark.parametrize("switch", ["run.max_steps=-1", "rollout.group_sise=4", "run.output_dir=thesis.tex/below"])
def test_a_bad_configuration_stops_before_anything_is_loaded(here, refused, monkeypatch, switch):
    (here / "thesis.tex").write_text("mine")
    monkeypatch.setattr(pspo.inputs, "load_tokenizer", lambda config: pytest.fail("loaded a tokenizer"))
    assert switch.partition("=")[0] in refused(train, f"--{switch}")


@pytest.mark.slow
def test_the_console_script_finds_a_users_code_beside_it(tmp_path):
    script = Path(sys.executable).with_name("pspo")
    if not script.exists():
        pytest.skip("pspo is not installed")
    (tmp_path / "own_loss.py").write_text("from pspo.losses import NoClip\n\n\nclass Own(NoClip): ...\n")
    command = [script, "train", "--algorithm.surrogate=own_loss.Own", "--print_config"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "own_loss.Own" in done.stdout
