"""The README.md of a saved model, in the form that the Hugging Face hub reads, and the command that evaluates it."""

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pspo import __version__
from pspo.cli.escape import one_line
from pspo.cli.files import argument_text
from pspo.cli.python import import_spec
from pspo.config import EvalConfig, RewardConfig, TrainConfig
from pspo.evaluate.results import Record, as_text, from_record, label
from pspo.model.find import ASSETS
from pspo.tasks.rewards import reward_name
from pspo.tasks.sources import SOURCES

VALIDATION = {
    "validation_reward": "mean reward",
    "validation_accuracy": "greedy accuracy",
    "validation_greedy_reward": "greedy reward",
}
ROWS = ("data.name", "algorithm.surrogate", "reward.functions", "reward.weights")  # rows of a card's table themselves
PRIVATE = ("data.path", "data.chat_template", "model.name_or_path")  # may be paths of this machine
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/model")
model = AutoModelForCausalLM.from_pretrained("path/to/this/model")
messages = [{system}{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(messages, {arguments}add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={max_tokens})[0]))"""  # noqa: E501 (a line of the card)


def model_card(
    config: TrainConfig,
    *,
    problems: int,
    step: int,
    tokens: int,
    tests: dict[str, Record],
    validations: Iterable[Record],
) -> str:
    """The model, how it was trained, and its evaluation so far.

    Args:
        problems: number of training problems.
        step, tokens: optimizer steps and rollout tokens up to this model.
        tests: `Evaluation.record` by the model's name, empty if not measured.
        validations: such as `Validator.validated`, each shown once.
    """
    base = config.model.name_or_path
    is_folder = Path(base).is_dir() or (ASSETS / base).is_dir()
    is_on_hub = not is_folder and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", base) is not None
    name = base if is_on_hub else Path(base).name  # no folder of somebody's machine
    method = type(config.algorithm.surrogate).__name__
    others = changed_settings(config, ("model", "data", "rollout", "algorithm", "optimizer"), (*ROWS, *PRIVATE))
    table = {
        "base model": name,
        "data": f"{config.data.name}, {problems:,} problems",
        "reward": describe_rewards(config.reward),
        "surrogate": str(config.algorithm.surrogate),
        "other settings": ", ".join(others),
        "trained for": f"{step:,} optimizer steps, {tokens:,} rollout tokens, seed {config.run.seed}",
        "pspo": __version__,
    }
    rows = [f"| {key} | {code_span(text)} |" for key, text in table.items() if text]
    evaluation = evaluation_rows(tests, validations)
    return "\n\n".join(
        [
            f"---\n{front_matter(config, base if is_on_hub else None).to_yaml()}\n---",
            f"# {one_line(name)}, trained with {method}",
            "\n".join(["| | |", "|---|---|", *rows]),
            "## Evaluation",
            "\n".join(["| model | measure | value |", "|---|---|---|", *evaluation]) if evaluation else "None.",
            "## Use",
            f"````python\n{use_code(config)}\n````",  # four: a system prompt may hold three
        ]
    ) + "\n"  # fmt: skip


def code_span(text: str) -> str:
    """Text that a cell of a Markdown table shows as it is."""
    text = one_line(text).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"


def front_matter(config: TrainConfig, base_model: str | None) -> ModelCardData:
    """What the hub shows and searches."""
    names = [part for part in config.data.name.split("+") if part in SOURCES or "/" in part]
    tags = ["pspo", "reinforcement-learning", type(config.algorithm.surrogate).__name__.lower()]
    return ModelCardData(
        library_name="peft" if config.model.resolved().has_adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base_model,
        datasets=[SOURCES[name].hub_id if name in SOURCES else name for name in names] or None,
        tags=list(dict.fromkeys(tags)),
    )


def evaluation_rows(tests: dict[str, Record], validations: Iterable[Record]) -> list[str]:
    """Rows of the evaluation's table: one for each test and each measure of each validation."""
    rows = []
    for model, test in tests.items():
        measure = "accuracy" if "accuracy" in test else "mean_reward"
        if measure in test:
            description = f"greedy {label(measure)} [95%] on {test['n']:,} held-out problems"
            rows.append(f"| {model} | {description} | {from_record(test, measure)} |")
    by_step = {validation["step"]: validation for validation in validations if validation}
    for step, validation in by_step.items():
        for measure, description in VALIDATION.items():
            if measure in validation:
                value = as_text(measure, validation[measure])
                rows.append(f"| step {step:,} | {description} on validation problems | {value} |")
    return rows


def changed_settings(config: TrainConfig, sections: Iterable[str], left_out: Collection[str]) -> list[str]:
    """Such as "optimizer.lr 0.003", for each switch of the sections that is not at its default."""
    settings = []
    for section_name in sections:
        section = getattr(config, section_name)
        defaults = type(section)()
        for part in fields(section):
            value = getattr(section, part.name)
            switch = f"{section_name}.{part.name}"
            is_default = value in (getattr(defaults, part.name), "none")  # a correction's default is resolved to none
            if not is_default and switch not in left_out:
                settings.append(f"{switch} {describe_value(value)}")
    return settings


def describe_value(value: Any) -> str:
    if isinstance(value, list):
        return " + ".join(describe_value(item) for item in value)
    if callable(value) and not is_dataclass(value):
        return reward_name(value)
    return str(value)


def describe_rewards(config: RewardConfig) -> str:
    """The weighted sum, such as 1 x MathReward(...) + -0.5 x Brevity."""
    weights = config.weights or [1.0] * len(config.functions)
    names = [repr(function) if is_dataclass(function) else reward_name(function) for function in config.functions]
    return " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, names, strict=True))


def use_code(config: TrainConfig) -> str:
    """Python that loads the model and asks it."""
    system = config.data.system_text
    system = f'{{"role": "system", "content": {system!r}}}, ' if system else ""
    template = config.data.chat_template
    arguments = "".join(f"{name}={value!r}, " for name, value in template.items()) if isinstance(template, dict) else ""
    return USE.format(system=system, arguments=arguments, max_tokens=config.rollout.max_completion_tokens)


def evaluate_command(config: TrainConfig, model: str) -> str:
    """The command that evaluates a trained model on the same data, prompts and lengths."""
    switches = {"model.name_or_path": model, "data.name": config.data.name}
    for name, section in (("model", config.model), ("data", config.data)):
        defaults = type(section)()
        for part in fields(section):
            value = getattr(section, part.name)
            is_set = value != getattr(defaults, part.name)
            if is_set and part.name not in ("name_or_path", "revision", "lora", "limit"):
                switches[f"{name}.{part.name}"] = value
    if config.reward.functions != RewardConfig().functions:
        switches["reward.functions"] = [import_spec(function) for function in config.reward.functions]
        if config.reward.weights:
            switches["reward.weights"] = config.reward.weights
    if config.run.test_limit:
        switches["data.limit"] = config.run.test_limit  # the held-out problems of the run itself
    for part in ("max_completion_tokens", "environment", "stop_tokens", "stop_strings"):
        if getattr(config.rollout, part) != getattr(EvalConfig(), part):
            switches[f"eval.{part}"] = getattr(config.rollout, part)
    switches["run.output_dir"] = str(Path(model).parent / "evaluation")
    words = [f"--{name} {shlex.quote(argument_text(value))}" for name, value in switches.items()]
    return " ".join(["python -m pspo.evaluate", *words])
