"""The card of each saved model: what the hub reads, the numbers, code that loads it; the command that evaluates it."""

import re
import shlex

import pytest
from huggingface_hub import ModelCard

import pspo.train
from pspo.cli.files import read_json, read_jsonl
from pspo.cli.parse import parse
from pspo.config import SYSTEM_PROMPT, DataConfig, EvaluateConfig, RewardConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.run.card import describe_rewards, evaluate_command, model_card
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
    return {others: last.strip("`") for others, _, last in rows}


def test_every_saved_model_has_a_card_with_its_numbers_and_code_that_loads_it(here, capsys):
    pspo.train.main(ARGS)
    run = here / "out"
    summary, metrics = read_json(run / "summary.json"), read_jsonl(run / "metrics.jsonl")
    metrics = {line["step"]: line for line in metrics}
    best = summary["best_step"]
    saved = {"final": 4, "best": best, "checkpoints/step-000002": 2, "checkpoints/step-000004": 4}
    for folder, step in saved.items():
        table = cells((run / folder / "README.md").read_text(encoding="utf-8"))
        assert table["data"] == "arithmetic, 20 problems"
        assert table["surrogate"] == "PSPO(alpha=0.1)"
        assert "optimizer.lr 0.003" in table["other settings"]
        assert "rollout.top_p" not in table["other settings"]  # the default
        before = table["before training | greedy accuracy [95%] on 4 held-out problems"]
        assert before.startswith(f"{100 * summary['before']['accuracy']:.1f}% [")
        if step:
            tokens = metrics[step]["tokens"]
            assert table["trained for"] == f"{step} optimizer steps, {tokens:,} rollout tokens, seed 0"
            reward = table[f"step {step} | mean reward on validation problems"]
            assert reward == f"{metrics[step]['validation_reward']:.3f}"
        tested = folder in ("final", "best")
        final = "final model, step 4 | greedy accuracy [95%] on 4 held-out problems"
        assert (final in table) == tested
        if tested:
            assert table[final].startswith(f"{100 * summary['final']['accuracy']:.1f}% [")
            if best != 4:
                value = table[f"best model, step {best} | greedy accuracy [95%] on 4 held-out problems"]
                assert value.startswith(f"{100 * summary['after']['accuracy']:.1f}% [")
            for validation in summary["validation"].values():
                value = table[f"step {validation['step']} | mean reward on validation problems"]
                assert value == f"{validation['validation_reward']:.3f}"

    text = (run / "final/README.md").read_text().replace("path/to/this/model", "out/final")
    (code,) = re.findall(r"````python\n(.*?)````", text, re.DOTALL)
    assert SYSTEM_PROMPT in code
    capsys.readouterr()
    exec(code, {})
    assert SYSTEM_PROMPT in capsys.readouterr().out  # the conversation, with the model's answer


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
    text = card(tests={"before training": {"accuracy": 0.5, "ci95": (0.4, 0.6), "n": 9}})
    assert "\n# tiny-base, trained with PSPO\n" in text
    assert cells(text)["before training | greedy accuracy [95%] on 9 held-out problems"] == "50.0% [40.0, 60.0]"
    rewards = {"step": 10, "validation_reward": -2.0, "validation_greedy_reward": 1.5}  # of a task without answers
    test = {"mean_reward": 0.5, "mean_reward_ci95": (0.4, 0.6), "n": 9}
    text = card(tests={"this model": test}, validations=[{}, rewards, rewards])
    assert cells(text)["this model | greedy reward [95%] on 9 held-out problems"] == "0.500 [0.400, 0.600]"
    assert cells(text)["step 10 | greedy reward on validation problems"] == "1.500"
    assert text.count("greedy reward on validation problems") == 1


def test_values_of_the_configuration_are_shown_and_do_nothing():
    text = card("--data.name=a|b](http://c)<img>", "--data.system_prompt=# no\n```\n<b>heading")
    assert cells(text)["data"] == "a\\|b](http://c)<img>, 7,000 problems"
    assert r"'# no\n```\n<b>heading'" in text.partition("````python")[2].partition("````")[0]


def test_the_reward_is_its_weighted_sum():
    described = describe_rewards(RewardConfig([MathReward(format_bonus=0.0), FormatReward()], [1.0, -0.5]))
    assert re.fullmatch(r"1 x MathReward\(.*format_bonus=0.0.*\) \+ -0.5 x FormatReward\(\)", described)


def test_the_evaluation_command_measures_the_runs_own_reward():
    reward = RewardConfig(functions=[ExactMatch(ignore_case=True), shlex.quote], weights=[1, 0.2])
    rollout = RolloutConfig(stop_strings=["\n\n", "it's"], stop_tokens=["<|im_end|>"], max_completion_tokens=24)
    data = DataConfig(name="letters", chat_template={"enable_thinking": False})
    config = TrainConfig(reward=reward, data=data, rollout=rollout, run=RunConfig(test_limit=4))
    card = model_card(config, problems=1, step=1, tokens=1, tests={}, validations=[])
    assert "apply_chat_template(messages, enable_thinking=False, add_generation_prompt=True" in card
    words = shlex.split(evaluate_command(config, "runs/mine/best"))
    assert words[:3] == ["python", "-m", "pspo.evaluate"]
    parsed, _ = parse(EvaluateConfig, "pspo.evaluate", words[3:])
    assert (parsed.model.name_or_path, parsed.data.name, parsed.data.limit) == ("runs/mine/best", "letters", 4)
    assert parsed.reward == reward
    assert parsed.data.chat_template == data.chat_template
    assert (parsed.eval.stop_strings, parsed.eval.stop_tokens) == (rollout.stop_strings, rollout.stop_tokens)
    assert parsed.eval.max_completion_tokens == 24


def test_a_chat_templates_file_is_not_named_in_the_card():
    data = DataConfig(chat_template="/home/me/my.jinja")
    text = model_card(TrainConfig(data=data), problems=1, step=1, tokens=1, tests={}, validations=[])
    assert "my.jinja" not in text
