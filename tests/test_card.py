"""The card beside each saved model: what the hub reads, the run's own numbers, and the command that evaluates it."""

import re
import shlex

import pytest
from huggingface_hub import ModelCard

import pspo.train
from pspo.cli.parse import parse
from pspo.config import SYSTEM_PROMPT, DataConfig, EvaluateConfig, RewardConfig, RolloutConfig, TrainConfig
from pspo.run.card import describe_rewards, evaluate_command, model_card
from pspo.cli.files import read_json, read_jsonl
from pspo.tasks import ExactMatch, FormatReward, MathReward

ARGS = ("--run.max_steps=4", "--rollout.prompts=2", "--rollout.max_completion_tokens=24", "--run.test_limit=4",
        "--run.validation_limit=4", "--run.validate_every=2", "--run.save_every=2", "--data.limit=20",
        "--rollout.temperature=1", "--optimizer.lr=3e-3", "--run.output_dir=out")  # fmt: skip


def card(*args: str, **measured) -> str:
    config, _ = parse(TrainConfig, "pspo.train", args)
    return model_card(config, problems=7000, step=10, tokens=12345, **{"tests": {}, "validations": []} | measured)


def cells(text: str) -> dict[str, str]:
    """Last cell of each row of the tables, by the others."""
    rows = (line.strip("| ").rpartition(" | ") for line in text.splitlines() if line.startswith("| "))
    return {others: last for others, _, last in rows}


def test_every_saved_model_has_a_card_with_its_numbers_and_a_command_that_parses(here):
    pspo.train.main(ARGS)
    run = here / "out"
    summary, metrics = read_json(run / "summary.json"), read_jsonl(run / "metrics.jsonl")
    metrics = {line["step"]: line for line in metrics}
    saved = {"final": 4, "best": summary["best_step"], "checkpoints/step-000002": 2, "checkpoints/step-000004": 4}
    for folder, step in saved.items():
        found = cells((run / folder / "README.md").read_text(encoding="utf-8"))
        assert found["data"] == "arithmetic, 20 problems"
        assert "PSPO(alpha=0.1)" in found["algorithm"]
        before = found["base model | greedy accuracy [95%] on 4 held-out problems"]
        assert before.startswith(f"{100 * summary['before']['accuracy']:.1f}% [")
        if step:
            tokens = metrics[step]["tokens"]
            assert found["trained for"] == f"{step} optimizer steps, {tokens:,} rollout tokens, seed 0"
            reward = found[f"step {step} | mean reward on validation problems"]
            assert reward == f"{metrics[step]['validation_reward']:.3f}"
        other = f"the best model, of step {summary['best_step']}"
        tested = {"best": {"this model": "after", "the final model, of step 4": "final"},
                  "final": {"this model": "final", other: "after"}}  # fmt: skip
        for name, test in tested.get(folder, {}).items():
            value = found[f"{name} | greedy accuracy [95%] on 4 held-out problems"]
            assert value.startswith(f"{100 * summary[test]['accuracy']:.1f}% [")
        assert ("this model | greedy accuracy [95%] on 4 held-out problems" in found) == (folder in tested)
        if folder in tested:
            for validation in summary["validation"].values():
                value = found[f"step {validation['step']} | mean reward on validation problems"]
                assert value == f"{validation['validation_reward']:.3f}"

    text = (run / "final/README.md").read_text().replace("path/to/this/model", "out/final")
    assert SYSTEM_PROMPT in text
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    config, _ = parse(EvaluateConfig, "pspo.evaluate", shlex.split(command)[3:])
    assert config.model.name_or_path == "out/final"
    assert (config.data.name, config.data.limit, config.eval.max_completion_tokens) == ("arithmetic", 4, 24)


@pytest.mark.parametrize(
    ("args", "base_model", "datasets"),
    [
        (["--model.name_or_path=Qwen/Qwen2.5-0.5B-Instruct", "--data.name=gsm8k+math"],
         "Qwen/Qwen2.5-0.5B-Instruct", ["openai/gsm8k", "EleutherAI/hendrycks_math"]),
        (["--model.name_or_path=gpt2", "--data.name=svamp", "--data.path=/home/me/data"], "gpt2", ["ChilleD/SVAMP"]),
        (["--model.name_or_path=/home/me/secret/my-model", "--data.name=file"], None, None),
        (["--model.name_or_path=my-folder"], None, None),  # of a hub id's form, but a folder here
        ([], None, None),
    ],
)  # fmt: skip
def test_the_hub_reads_its_front_matter(here, args, base_model, datasets):
    (here / "my-folder").mkdir()
    text = card(*args, "--algorithm.surrogate=Clip")
    data = ModelCard(text).data
    assert (data.base_model, data.datasets, data.library_name) == (base_model, datasets, "transformers")
    assert {"pspo", "clip"} <= set(data.tags)
    assert "/home/me" not in text


def test_only_what_was_measured_is_there():
    assert "%" not in card()
    text = card(tests={"base model": {"accuracy": 0.5, "ci95": (0.4, 0.6), "n": 9}})
    assert "\n# tiny-base, trained with PSPO\n" in text
    assert cells(text)["base model | greedy accuracy [95%] on 9 held-out problems"] == "50.0% [40.0, 60.0]"
    rewards = {"step": 10, "validation_reward": -2.0, "validation_greedy_reward": 1.5}  # of a task without answers
    test = {"mean_reward": 0.5, "mean_reward_ci95": (0.4, 0.6), "n": 9}
    text = card(tests={"this model": test}, validations=[{}, rewards, rewards])
    assert cells(text)["this model | greedy reward [95%] on 9 held-out problems"] == "0.500 [0.400, 0.600]"
    assert cells(text)["step 10 | greedy reward on validation problems"] == "1.500"
    assert text.count("greedy reward on validation problems") == 1


def test_values_of_the_configuration_are_shown_and_do_nothing():
    text = card("--data.name=a|b](http://c)<img>", "--data.system_prompt=# no\n```\n<b>heading")
    assert cells(text)["data"] == "a\\|b\\](http://c)&lt;img&gt;, 7,000 problems"
    assert "System prompt:\n\n    # no\n    ```\n    <b>heading\n" in text  # a block of code
    assert text.count("\n````") == 2  # a longer fence
    assert "\n````bash\n" in text


def test_the_reward_is_its_weighted_sum():
    described = describe_rewards(RewardConfig([MathReward(format_bonus=0.0), FormatReward()], [1.0, -0.5]))
    assert re.fullmatch(r"1 x MathReward\(.*format_bonus=0.0.*\) \+ -0.5 x FormatReward\(\)", described)


def test_the_evaluation_command_measures_the_runs_own_reward():
    reward = RewardConfig(functions=[ExactMatch(ignore_case=True), shlex.quote], weights=[1, 0.2])
    rollout = RolloutConfig(stop_strings=["\n\n", "it's"], stop_tokens=["<|im_end|>"])
    data = DataConfig(name="letters", chat_template={"enable_thinking": False}, chat_template_file="/home/me/my.jinja")
    config = TrainConfig(reward=reward, data=data, rollout=rollout)
    card = model_card(config, problems=1, step=1, tokens=1, tests={}, validations=[])
    assert 'Chat template: the saved one, with {"enable_thinking": false}' in card
    assert "my.jinja" not in card
    words = shlex.split(evaluate_command(config, "runs/mine/best"))
    assert words[:3] == ["python", "-m", "pspo.evaluate"]
    parsed, _ = parse(EvaluateConfig, "pspo.evaluate", words[3:])
    assert parsed.reward == reward
    assert parsed.data.chat_template == data.chat_template
    assert (parsed.eval.stop_strings, parsed.eval.stop_tokens) == (rollout.stop_strings, rollout.stop_tokens)
