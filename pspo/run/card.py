"""The README.md of a trained model, in the form that the Hugging Face hub reads, and the command that evaluates it."""

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pspo import __version__
from pspo.cli.escape import in_markdown
from pspo.cli.files import as_argument, import_spec
from pspo.config import EvalConfig, RewardConfig, TrainConfig
from pspo.evaluate.results import Record, as_text, from_record, label
from pspo.model.find import ASSETS
from pspo.tasks.rewards import reward_name
from pspo.tasks.sources import SOURCES

SECTIONS = ("data", "reward", "rollout", "algorithm", "optimizer")
PRIVATE = ("data.path", "data.chat_template")  # may be paths of this machine
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/model")
model = AutoModelForCausalLM.from_pretrained("path/to/this/model")
messages = {messages}
inputs = tokenizer.apply_chat_template(messages, {arguments}add_generation_prompt=True, return_dict=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens={max_tokens})[0]))"""  # noqa: E501 (a line of the card)


def model_card(config: TrainConfig, step: int, summary: Record) -> str:
    """The model after ``step`` optimizer steps: how it was trained, the run's tests and validations, and its use."""
    base = config.model.name_or_path
    is_folder = Path(base).is_dir() or (ASSETS / base).is_dir()
    is_on_hub = not is_folder and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", base) is not None
    name = base if is_on_hub else Path(base).name  # no folder of somebody's machine
    surrogate = config.algorithm.surrogate
    settings = changed_settings(config, SECTIONS, PRIVATE)
    system = [{"role": "system", "content": config.data.system_text}] if config.data.system_text else []
    messages = json.dumps([*system, {"role": "user", "content": "..."}], ensure_ascii=False)
    template = config.data.chat_template
    arguments = "".join(f"{name}={value!r}, " for name, value in template.items()) if isinstance(template, dict) else ""
    use = USE.format(messages=messages, arguments=arguments, max_tokens=config.rollout.max_completion_tokens)
    sources = [SOURCES[part].hub_id if part in SOURCES else part for part in config.data.name.split("+")]
    front_matter = ModelCardData(
        library_name="peft" if config.model.resolved().has_adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,
        datasets=[source for source in sources if "/" in source] or None,
        tags=["pspo", "reinforcement-learning", type(surrogate).__name__.lower()],
    )
    return f"""---
{front_matter.to_yaml()}
---

# {in_markdown(name)}, trained with {type(surrogate).__name__}

{step:,} optimizer steps of {in_markdown(str(surrogate))} on {in_markdown(config.data.name)}, seed {config.run.seed}, by
pspo {__version__}. Settings that differ from its defaults: {in_markdown(", ".join(settings)) or "none"}.

## Evaluation

| model | measure | value |
|---|---|---|
{evaluation_rows(summary)}

## Use

````python
{use}
````
"""  # four: a system prompt may hold three


def evaluation_rows(summary: Record) -> str:
    """Rows of the evaluation's table: one for each test and each validation."""
    rows = []
    models = {
        "before": "before training",
        "after": f"returned model, step {summary['best_step']:,}",
        "final": f"final model, step {summary['optimizer_steps']:,}",
    }
    for test, model in models.items():
        record = summary[test]
        measure = "accuracy" if "accuracy" in record else "mean_reward"
        if measure in record:
            description = f"greedy {label(measure)} [95%] on {record['n']:,} held-out problems"
            rows.append(f"| {model} | {description} | {from_record(record, measure)} |")
    for step, validation in {record["step"]: record for record in summary["validation"].values() if record}.items():
        reward = as_text("mean_reward", validation["validation_reward"])
        rows.append(f"| step {step:,} | mean reward on validation problems | {reward} |")
    return "\n".join(rows)


def changed_settings(config: TrainConfig, sections: Iterable[str], left_out: Iterable[str] = ()) -> list[str]:
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


def evaluate_command(config: TrainConfig, model: str) -> str:
    """The command that evaluates a trained model on the same data, prompts and lengths."""
    switches = {"model.name_or_path": model, "data.name": config.data.name}
    for name, section in (("model", config.model), ("data", config.data)):
        for part in fields(section):
            value = getattr(section, part.name)
            is_default = value == getattr(type(section)(), part.name)
            if not is_default and part.name not in ("name_or_path", "revision", "lora", "limit"):
                switches[f"{name}.{part.name}"] = value
    if config.reward.functions != RewardConfig().functions:
        switches["reward.functions"] = [import_spec(function) for function in config.reward.functions]
    if config.reward.weights:
        switches["reward.weights"] = config.reward.weights
    if config.run.test_limit:
        switches["data.limit"] = config.run.test_limit  # the held-out problems of the run itself
    for name in ("max_completion_tokens", "environment", "stop_tokens", "stop_strings"):
        if getattr(config.rollout, name) != getattr(EvalConfig(), name):
            switches[f"eval.{name}"] = getattr(config.rollout, name)
    switches["run.output_dir"] = str(Path(model).parent / "evaluation")
    words = [f"--{name} {shlex.quote(as_argument(value))}" for name, value in switches.items()]
    return " ".join(["python -m pspo.evaluate", *words])
