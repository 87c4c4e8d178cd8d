"""The README.md of a saved model, in the form that the Hugging Face hub reads."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from pspo import __version__
from pspo.config import RewardConfig, TrainConfig
from pspo.model import ASSETS
from pspo.run.results import percent
from pspo.tasks.datasets import SOURCES


def rewards(config: RewardConfig) -> str:
    """The weighted sum: 1 x MathReward(...) + -0.5 x Brevity."""
    weights = config.weights or [1.0] * len(config.functions)
    names = [repr(function) if is_dataclass(function) else type(function).__name__ for function in config.functions]
    return " + ".join(f"{weight:g} x {name}" for weight, name in zip(weights, names, strict=True))


def model_card(
    config: TrainConfig,
    command: str,
    *,
    problems: int,
    step: int,
    tokens: int,
    before: Mapping[str, Any],
    validation: Mapping[str, Any],
) -> str:
    """What a model is, what made it, and what was measured so far.

    Args:
        command: evaluates the model.
        problems: number of training problems.
        step, tokens: optimizer steps and rollout tokens behind it.
        before: `Evaluation.record` of the base model on the held-out problems; empty where not measured.
        validation: validation_reward, validation_accuracy and the "step" that they are of, which need not be this
            model's; empty where not measured.
    """
    base, method = config.model.name_or_path, type(config.algorithm.surrogate).__name__
    on_hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", base) and not any(
        path.is_dir() for path in (Path(base), ASSETS / base)
    )
    name = base if on_hub else Path(base).name  # no folder of somebody's machine
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if on_hub:
        front["base_model"] = base
    if hub_ids := [SOURCES[part].hub_id for part in config.data.name.split("+") if part in SOURCES]:
        front["datasets"] = hub_ids
    front["tags"] = list(dict.fromkeys(["pspo", "reinforcement-learning", method.lower()]))

    def listed(section: object) -> str:
        return ", ".join(f"{part.name} {getattr(section, part.name)}" for part in fields(section))

    made = {
        "base model": name,
        "data": f"{config.data.name}, {problems:,} problems",
        "reward": rewards(config.reward),
        "algorithm": listed(config.algorithm),
        "rollout": listed(config.rollout),
        "optimizer": listed(config.optimizer),
        "trained for": f"{step:,} optimizer steps, {tokens:,} rollout tokens, seed {config.run.seed}",
        "pspo": __version__,
    }
    measured = []
    if before:
        share = percent(before["accuracy"], before["ci95"])
        measured.append(f"| base model | greedy accuracy [95%] on {before['n']:,} held-out problems | {share} |")
    if validation:
        when, share = f"step {validation['step']:,}", percent(validation["validation_accuracy"])
        measured.append(f"| {when} | mean reward on validation problems | {validation['validation_reward']:.3f} |")
        measured.append(f"| {when} | greedy accuracy on validation problems | {share} |")
    system = [{"role": "system", "content": config.data.system_prompt}] if config.data.system_prompt else []
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}, trained with {method}",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in made.items())]),
        "## Evaluation so far",
        "\n".join(["| model | measure | value |", "|---|---|---|", *measured]) if measured else "None.",
        "## Use",
        f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/model")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/model")
messages = {[*system, {"role": "user", "content": "What is 2 + 3?"}]!r}
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
completion = model.generate(**prompt, max_new_tokens={config.rollout.max_completion_tokens}, do_sample=False)
print(tokenizer.decode(completion[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```""",
        f"```bash\n{command}\n```",
    ]
    return "\n\n".join(parts) + "\n"
