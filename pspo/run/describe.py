"""A run in words: its results, its settings, the command that evaluates its model."""

import functools
import shlex
from pathlib import Path

from pspo.cli.files import Settings, argument_text, flat
from pspo.cli.parse import make_config
from pspo.config import EvaluateConfig, ModelConfig, TrainConfig, switches_with
from pspo.evaluate.statistics import ESTIMATES, MEANS, Record, from_record, measure_name, table
from pspo.model.find import find_default_lr
from pspo.tasks.files import plain


def describe_results(summary: Record) -> str:
    """The held-out problems' measures of the model before training, of the best and of the final one; validations.

    The reward that was trained comes first.
    """
    best_step = summary["best_step"]
    steps = summary["optimizer_steps"]
    names = [name for name in ("mean_reward", "accuracy", "gold_anywhere", *MEANS) if name in summary["after"]]
    models = {"before": "before", "after": f"after, step {best_step}"}
    if best_step != steps:
        models["final"] = f"final, step {steps}"
    columns = {}
    for name in names:
        header = f"{measure_name(name)} [95%]" if name in ESTIMATES else measure_name(name)
        columns[header] = {
            model: from_record(summary[test], name) for test, model in models.items() if name in summary[test]
        }
    validations = {}
    for record in summary["validation"].values():
        if record:
            validations[record["step"]] = plain(record["validation_reward"])  # None where no reward was known
    rewards = []
    for step, reward in sorted(validations.items()):
        rewards.append(f"{'unknown' if reward is None else format(reward, '.3f')} at step {step}")
    lines = [table("greedy, held-out", columns)] if names else []
    if rewards:
        lines.append(f"validation reward {', '.join(rewards)}; the model of step {best_step} is returned")
    if best_step == 0:
        lines.append("No trained step was better than the untrained model, which is returned")
    return "\n".join(lines)


@functools.cache
def default_values(config_class: type) -> Settings:
    """The default of every switch."""
    _, settings = make_config(config_class, "pspo", [], {})
    return flat(settings)


def changed_switches(model: ModelConfig, settings: Settings) -> list[str]:
    """Such as "optimizer.lr 0.003", for each switch of the run's setting that is not at its default, paths aside."""
    hidden = switches_with("no setting") | switches_with("path")
    defaults = default_values(TrainConfig) | {"optimizer.lr": find_default_lr(model)}
    changed = []
    for switch, value in flat(settings).items():
        if switch not in hidden and value != defaults.get(switch):
            name = switch.removesuffix(".class_path").replace(".init_args.", ".")
            changed.append(f"{name} {argument_text(value)}")
    return changed


def evaluate_command(settings: Settings, model: str) -> str:
    """The command that evaluates a trained model on the same data, prompts and lengths."""
    values = flat({name: settings[name] for name in ("model", "data", "reward")})
    for name in ("max_completion_tokens", "environment", "stop_tokens", "stop_strings"):
        values[f"eval.{name}"] = settings["rollout"][name]
    values["model.name_or_path"] = model
    values["data.limit"] = settings["run"]["test_limit"] or None  # the held-out problems of the run itself
    if settings["data"]["path"] and not settings["run"]["test_limit"]:  # files that may have no test problems
        values["eval.split"] = "validation"
    values["run.output_dir"] = str(Path(model).parent / "evaluation")
    defaults = default_values(EvaluateConfig)
    words = ["python", "-m", "pspo.evaluate"]
    for switch, value in values.items():
        is_first_model = switch == "model.revision" or switch.startswith("model.lora.")
        if value != defaults[switch] and not is_first_model:
            words += [f"--{switch}", shlex.quote(argument_text(value))]
    return " ".join(words)
