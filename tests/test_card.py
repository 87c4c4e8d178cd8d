"""The card of each saved model: what the hub reads, the numbers; the command that evaluates it."""

import shlex

import pytest
from huggingface_hub import ModelCard

from pspo.cli.files import read_json
from pspo.cli.parse import parse
from pspo.cli.python import config_from_python
from pspo.config import SYSTEM_PROMPT, EvaluateConfig, TrainConfig
from pspo.run.card import model_card
from pspo.run.describe import evaluate_command
from pspo.tasks import ExactMatch
from pspo.train import main

ARGS = ("--run.max_steps=4", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=4",
        "--run.validation_limit=4", "--run.validate_every=2", "--run.save_every=2", "--data.limit=20",
        "--rollout.temperature=1", "--optimizer.lr=3e-3", "--run.output_dir=out")  # fmt: skip


UNMEASURED = {"before": {}, "after": {}, "final": {}, "validation": {}, "best_step": 10, "optimizer_steps": 10}


def card(*args: str) -> str:
    return str(model_card(*parse(TrainConfig, "pspo.train", args), 10, UNMEASURED))


def test_the_card_has_the_run_in_numbers(here):
    main(ARGS)
    run = here / "out"
    summary = read_json(run / "summary.json")
    for folder, step in {"final": 4, "best": summary["best_step"]}.items():
        text = (run / folder / "README.md").read_text(encoding="utf-8")
        assert f"{step} optimizer steps of `PSPO(alpha=0.1)` on `arithmetic`" in text
        assert "optimizer.lr 0.003" in text
        assert "rollout.top_p" not in text  # the default
        for test in ("before", "after"):
            assert f"{100 * summary[test]['accuracy']:.1f}% [" in text
        assert f"System prompt: `{SYSTEM_PROMPT}`" in text


@pytest.mark.parametrize(
    ("args", "base_model", "datasets"),
    [
        (["--model.name_or_path=Qwen/Qwen2.5-0.5B-Instruct", "--data.name=gsm8k+math"],
         "Qwen/Qwen2.5-0.5B-Instruct", ["openai/gsm8k", "EleutherAI/hendrycks_math"]),
        (["--model.name_or_path=/home/me/secret/my-model", "--data.name=file"], None, None),
        (["--model.name_or_path=my-folder"], None, None),  # of a hub id's form, but a folder here
    ],
)  # fmt: skip
def test_the_hub_reads_its_front_matter(here, args, base_model, datasets):
    (here / "my-folder").mkdir()
    text = card(*args, "--algorithm.surrogate=Clip")
    data = ModelCard(text).data
    assert (data.base_model, data.datasets, data.library_name) == (base_model, datasets, "transformers")
    assert {"pspo", "clip"} <= set(data.tags)
    assert "/home/me" not in text


def test_values_of_the_configuration_are_shown_and_do_nothing():
    text = card("--data.name=a|b](http://c)<img>", "--data.system_prompt=# no\n```\n<b>heading {{ 1 + 1 }}")
    assert "`a|b](http://c)<img>`, seed 0" in text
    assert "`# no ''' <b>heading {{ 1 + 1 }}`" in text


def test_the_evaluation_command_measures_the_runs_own_reward():
    config, settings = config_from_python(
        reward={"functions": [ExactMatch(ignore_case=True), shlex.quote], "weights": [1, 0.2]},
        rollout={
            "stop_strings": ["\n\n", "it's"], "stop_tokens": ["<|im_end|>"], "max_completion_tokens": 24,
        },
        data={"name": "letters", "chat_template": {"enable_thinking": False}},
        run={"test_limit": 4},
    )  # fmt: skip
    words = shlex.split(evaluate_command(settings, "runs/mine/best"))
    assert words[:3] == ["python", "-m", "pspo.evaluate"]
    parsed, _ = parse(EvaluateConfig, "pspo.evaluate", words[3:])
    assert (parsed.model.name_or_path, parsed.data.name, parsed.data.limit) == ("runs/mine/best", "letters", 4)
    assert parsed.reward == config.reward
    assert parsed.data.chat_template == {"enable_thinking": False}
    assert (parsed.eval.stop_strings, parsed.eval.stop_tokens) == (["\n\n", "it's"], ["<|im_end|>"])
    assert parsed.eval.max_completion_tokens == 24
