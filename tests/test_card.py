"""The card beside each saved model: what the hub reads, the run's own numbers, and commands that run."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import pspo
import pspo.train
from pspo.config import EvaluateConfig, RewardConfig, TrainConfig
from pspo.run.card import model_card, rewards
from pspo.run.cli import parse
from pspo.tasks.rewards import FormatReward, MathReward

ARGS = (
    "--run.max_steps=4", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=4",
    "--run.validation_limit=4", "--run.validate_every=2", "--run.save_every=2", "--data.limit=20",
    "--run.output_dir=out",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    with contextlib.chdir(folder):
        pspo.train.main(ARGS)
    return folder / "out"


def table_of(card: str) -> dict[str, str]:
    """Cells by the others of their row."""
    rows = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("|")]
    return {" | ".join(row[:-1]): row[-1] for row in rows}


def test_the_reward_is_its_weighted_sum():
    functions = [MathReward(format_bonus=0.0), FormatReward()]
    assert rewards(RewardConfig(functions)).startswith("1 x MathReward(")
    assert "format_bonus=0.0" in rewards(RewardConfig(functions))
    assert rewards(RewardConfig(functions, [1.0, -0.5])).endswith(f" + -0.5 x {FormatReward()!r}")


def test_every_saved_model_has_a_card_with_the_numbers_of_its_moment(run):
    summary = json.loads((run / "summary.json").read_text())
    metrics = {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    saved = {"final": 4, "best": summary["best_step"], "checkpoints/step-000002": 2, "checkpoints/step-000004": 4}
    for folder, step in saved.items():
        cells = table_of((run / folder / "README.md").read_text(encoding="utf-8"))
        tokens = metrics[step]["tokens"] if step else 0
        assert cells["trained for"] == f"{step} optimizer steps, {tokens:,} rollout tokens, seed 0"
        assert cells["base model"] == "tiny-base"
        assert cells["data"] == "arithmetic, 20 problems"
        assert cells["algorithm"].startswith("surrogate PSPO(alpha=0.1), epochs 2, minibatches 1, ")
        assert "lr 3e-05" in cells["optimizer"]
        assert "temperature 0.6, top_p 0.85" in cells["rollout"]
        assert cells["pspo"] == pspo.__version__
        before = cells["base model | greedy accuracy [95%] on 4 held-out problems"]
        assert before.startswith(f"{100 * summary['before']['accuracy']:.1f}% [")
        if step:
            reward = cells[f"step {step} | mean reward on validation problems"]
            assert reward == f"{metrics[step]['validation_reward']:.3f}"
            accuracy = cells[f"step {step} | greedy accuracy on validation problems"]
            assert accuracy == f"{100 * metrics[step]['validation_accuracy']:.1f}%"


def test_what_the_card_tells_to_run_runs(run, capsys, monkeypatch):
    monkeypatch.chdir(run)
    text = (run / "final/README.md").read_text(encoding="utf-8").replace("path/to/this/model", "final")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert "####" in printed.getvalue()
    assert "<|im" not in printed.getvalue()
    (command,) = re.findall(r"```bash\npython -m pspo\.evaluate (.*?)\n```", text, re.DOTALL)
    config, _ = parse(EvaluateConfig, "pspo.evaluate", shlex.split(command))
    assert config.model.name_or_path == "final"
    assert (config.data.name, config.data.limit, config.eval.max_completion_tokens) == ("arithmetic", 4, 24)


def card(*args: str, **measured) -> str:
    config, _ = parse(TrainConfig, "pspo.train", args)
    measured = {"before": {}, "validation": {}} | measured
    return model_card(config, "python -m pspo.evaluate", problems=7000, step=10, tokens=12345, **measured)


@pytest.mark.parametrize(
    ("args", "base_model", "datasets"),
    [
        (["--model.name_or_path=Qwen/Qwen2.5-0.5B-Instruct", "--data.name=gsm8k+math"],
         "Qwen/Qwen2.5-0.5B-Instruct", ["openai/gsm8k", "EleutherAI/hendrycks_math"]),
        (["--model.name_or_path=gpt2", "--data.name=svamp", "--data.path=/home/me/data"], "gpt2", ["ChilleD/SVAMP"]),
        (["--model.name_or_path=/home/me/secret-place/my-model", "--data.name=file"], None, None),
        (["--model.name_or_path=runs/one/best"], None, None),
        ([], None, None),
    ],
)  # fmt: skip
def test_the_hub_reads_its_front_matter(args, base_model, datasets):
    text = card(*args, "--algorithm.surrogate=Clip")
    data = ModelCard(text).data
    assert data.base_model == base_model
    assert data.datasets == datasets
    assert data.library_name == "transformers"
    assert data.tags == ["pspo", "reinforcement-learning", "clip"]
    front = yaml.safe_load(text.split("---\n")[1])
    assert ("base_model" in front, "datasets" in front) == (base_model is not None, datasets is not None)
    assert "/home/me" not in text


def test_what_was_not_measured_is_not_there():
    text = card()
    assert "## Evaluation so far\n\nNone.\n" in text
    assert "%" not in text
    assert table_of(text)["trained for"] == "10 optimizer steps, 12,345 rollout tokens, seed 0"
    text = card(before={"accuracy": 0.5, "ci95": (0.4, 0.6), "n": 1319})
    assert table_of(text)["base model | greedy accuracy [95%] on 1,319 held-out problems"] == "50.0% [40.0, 60.0]"
    assert "validation problems" not in text


def test_a_folder_here_of_a_hub_id_s_form_is_no_base_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    assert ModelCard(card("--model.name_or_path=my-model")).data.base_model is None
    assert table_of(card("--model.name_or_path=my-model"))["base model"] == "my-model"
