"""The README.md of a saved model, in the form that the Hugging Face hub reads, and the command that evaluates it."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from textwrap import indent

from huggingface_hub import ModelCardData

from pspo import __version__
from pspo.cli.escape import in_markdown
from pspo.cli.files import as_argument, as_setting
from pspo.config import EvalConfig, RewardConfig, TrainConfig
from pspo.evaluate.results import Record, as_text, from_record, label
from pspo.model.find import ASSETS
from pspo.tasks.datasets import SOURCES
from pspo.tasks.rewards import reward_name

VALIDATION = {"validation_reward": "mean reward", "validation_accuracy": "greedy accuracy",
              "validation_greedy_reward": "greedy reward"}  # fmt: skip


def model_card(
    config: TrainConfig,
    *,
    problems: int,
    step: int,
    tokens: int,
    tests: dict[str, Record],
    validations: Iterable[Record],
    changes: str = "",
) -> str:
    """The model, how it was trained, and its evaluation so far.

    Args:
        problems: number of training problems.
        step, tokens: optimizer steps and rollout tokens up to this model.
        tests: `Evaluation.record` by the model's name, empty if not measured.
        validations: such as `Progress.validated`, each shown once.
        changes: those on the way, as `describe_changes` puts them.
    """
    lora = config.model.resolved().lora
    adapters = f"rank {lora.rank}, alpha {lora.alpha:g}, {lora.target_modules}" if lora.rank else ""
    adapters = f"from {Path(lora.name_or_path).name}" if lora.name_or_path else adapters
    base, method = config.model.name_or_path, type(config.algorithm.surrogate).__name__
    is_folder = any(path.is_dir() for path in (Path(base), ASSETS / base))
    on_hub = not is_folder and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", base)
    name = base if on_hub else Path(base).name  # no folder of somebody's machine
    parts = [part for part in config.data.name.split("+") if part in SOURCES or "/" in part]
    front = ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base if on_hub else None,
        datasets=[SOURCES[part].hub_id if part in SOURCES else part for part in parts] or None,
        tags=list(dict.fromkeys(["pspo", "reinforcement-learning", method.lower()])),
    )

    def listed(section: object) -> str:
        return ", ".join(f"{part.name} {getattr(section, part.name)}" for part in fields(section))

    made = {
        "base model": name,
        "adapters": adapters,
        "data": f"{config.data.name}, {problems:,} problems",
        "reward": describe_rewards(config.reward),
        "algorithm": listed(config.algorithm),
        "rollout": listed(config.rollout),
        "optimizer": listed(config.optimizer),
        "trained for": f"{step:,} optimizer steps, {tokens:,} rollout tokens, seed {config.run.seed}",
        "changed on the way": changes,
        "pspo": __version__,
    }
    measured = []
    for model, test in tests.items():
        for measure in [measure for measure in ("accuracy", "mean_reward") if measure in test][:1]:
            what = f"greedy {label(measure)} [95%] on {test['n']:,} held-out problems"
            measured.append(f"| {model} | {what} | {from_record(test, measure)} |")
    for validation in {of["step"]: of for of in validations if of}.values():
        for measure in [name for name in VALIDATION if name in validation]:
            value = as_text(measure, validation[measure])
            measured.append(f"| step {validation['step']:,} | {VALIDATION[measure]} on validation problems | {value} |")
    arguments = config.data.chat_template
    given = f", with {in_markdown(as_argument(arguments))}" if isinstance(arguments, dict) else ""
    template = f"\n\nChat template: the saved one{given}"
    template = template if arguments else ""
    # no path of this machine; the model has the template
    data = replace(config.data, path=config.data.path and "path/to/data")
    if isinstance(arguments, str):
        data = replace(data, chat_template=None)
    command = evaluate_command(replace(config, data=data), "path/to/this/model")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`*", command))))  # which nothing in the command closes
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {in_markdown(name)}, trained with {method}",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {in_markdown(text)} |" for key, text in made.items() if text)]),
        "## Evaluation",
        "\n".join(["| model | measure | value |", "|---|---|---|", *measured]) if measured else "None.",
        f"## Use\n\nSystem prompt:\n\n{indent(config.data.system_text or 'none', '    ')}{template}",  # as code
        f"{fence}bash\n{command}\n{fence}",
    ]
    return "\n\n".join(parts) + "\n"


def describe_rewards(config: RewardConfig) -> str:
    """The weighted sum, such as 1 x MathReward(...) + -0.5 x Brevity."""
    weights = config.weights or [1.0] * len(config.functions)
    names = [repr(f) if is_dataclass(f) else reward_name(f) for f in config.functions]
    return " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, names, strict=True))


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
        switches["reward.functions"] = [as_setting(function) for function in config.reward.functions]
        if config.reward.weights:
            switches["reward.weights"] = config.reward.weights
    if config.run.test_limit:
        switches["data.limit"] = config.run.test_limit  # the held-out problems of the run itself
    for part in ("max_completion_tokens", "environment", "stop_tokens", "stop_strings"):
        if getattr(config.rollout, part) != getattr(EvalConfig(), part):
            switches[f"eval.{part}"] = getattr(config.rollout, part)
    switches["run.output_dir"] = str(Path(model).parent / "evaluation")
    words = [f"--{name} {shlex.quote(as_argument(value))}" for name, value in switches.items()]
    return " ".join(["python -m pspo.evaluate", *words])
