"""Statistics of a rollout, for its line of metrics."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from pspo.tasks import matches_format


def rollout_metrics(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Statistics of one rollout from its B rows' values by name; unknown rewards (NaN) are left out of the means."""
    metrics = {"reward": mean_of_known(rows["reward"]), "reward_std": np.std(drop_nan(rows["reward"]))}
    for name, values in rows.items():
        if name.startswith("reward/"):
            metrics[name] = mean_of_known(values)
    metrics["reward_unknown_share"] = np.isnan(rows["reward"]).mean()
    metrics["empty_share"] = np.mean([not text.strip() for text in rows["text"]])
    metrics["zero_advantage_share"] = np.mean([advantage == 0 for advantage in rows["advantage"]])
    metrics["completion_tokens"] = np.mean(rows["tokens"])
    metrics["completion_tokens_max"] = max(rows["tokens"])
    metrics["truncated_share"] = np.mean(rows["truncated"])
    if "turns" in rows:
        metrics["turns"] = np.mean(rows["turns"])
    pairs = zip(rows["text"], rows["problem"], strict=True)
    formats = [matches_format(text) for text, problem in pairs if isinstance(problem.answer, Fraction)]
    if formats:
        metrics["format_share"] = np.mean(formats)
    for name, values in rows.items():
        numbers = [value for value in values if isinstance(value, int | float)]
        if name.startswith("logged/") and numbers:
            metrics[name] = np.mean(numbers)
    return {name: float(value) for name, value in metrics.items()}


def sample_record(values: dict[str, Any], step: int, sample: int, completion: str) -> dict[str, Any]:
    """A completion's line of ``samples.jsonl``, from a row's ``values`` by name.

    Args:
        sample: its number in its group.
        completion: its text; of an episode all turns.
    """
    rewards = {}
    logged = {}
    for name, value in values.items():
        kind, _, function = name.partition("/")
        if kind == "reward" and function:
            rewards[function] = None if math.isnan(value) else value
        elif kind == "logged":
            logged[function] = value
    record = {"step": step, "problem": values["index"], "sample": sample}
    record |= values["problem"].record()
    record["completion"] = completion
    for name in ("reward", "advantage", "tokens", "truncated"):
        record[name] = values[name]
    record["rewards"] = rewards
    return record | ({"logged": logged} if logged else {})


def drop_nan(values: list[float]) -> list[float]:
    """The values without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def mean_of_known(values: list[float]) -> float:
    """Mean of the values that are not NaN."""
    return float(np.mean(drop_nan(values)))


def status(line: dict[str, Any], steps: int, best: dict[str, Any], saved: str) -> str:
    """A rollout's line in a few numbers, the most telling first, for the progress bar or a line of a log.

    Loss and the like are the last step's; the best validation so far and the newest checkpoint follow.
    """
    parts = [f"reward {line['reward']:.2f}", f"loss {line['loss']:.4f}", f"kl {line['kl_old_new']:.2g}"]
    parts += [f"kl to initial {line['kl_reference']:.2g}"] if "kl_reference" in line else []
    parts += [f"skipped {line['steps_skipped']:.0f} of {steps}"] if line["steps_skipped"] else []
    parts += [f"grad {line['grad_norm']:.2g}", f"entropy {line['entropy']:.2g}"]
    parts += [f"tokens {line['completion_tokens']:.0f}", f"truncated {line['truncated_share']:.0%}"]
    parts += [f"format {line['format_share']:.0%}"] if "format_share" in line else []
    parts += [f"lr {line['lr']:.2g}", *describe_best(best), f"saved {Path(saved).name}"]
    seconds = sum(line[f"seconds/{phase}"] for phase in ("generate", "reward", "train"))
    return "  ".join([*parts, f"{seconds / steps:.1f} s/step"])


def validation_status(validation: dict[str, Any], best: dict[str, Any]) -> str:
    """A validation in a few numbers, sampled and greedy, and the best so far."""
    greedy = f"{validation['validation_accuracy']:.1%}" if "validation_accuracy" in validation else ""
    greedy = greedy or f"{validation['validation_greedy_reward']:.3f}"
    best_text = ["best so far"] if best["step"] == validation["step"] else describe_best(best)
    return "  ".join([f"validation {validation['validation_reward']:.3f}", f"greedy {greedy}", *best_text])


def describe_best(best: dict[str, Any]) -> list[str]:
    """The best validation, [] without any."""
    return [f"best {best['validation_reward']:.3f} at {best['step']}"] if best else []
