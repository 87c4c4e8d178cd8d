"""Statistics of a rollout, for its line of metrics."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from pspo.tasks import matches_format
from pspo.tasks.files import plain


def rollout_metrics(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Statistics of one rollout from its B rows' values by name; unknown rewards (NaN) are left out of the means."""
    metrics = {"reward": mean_of_known(rows["reward"]), "reward_std": np.std(drop_nan(rows["reward"]))}
    metrics |= {name: mean_of_known(values) for name, values in rows.items() if name.startswith("reward/")}
    metrics["reward_unknown_share"] = np.isnan(rows["reward"]).mean()
    metrics["empty_share"] = np.mean([not text.strip() for text in rows["text"]])
    metrics["trained_share"] = np.mean(rows["trained"])
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
    return {name: float(value) for name, value in metrics.items()}


def sample_record(
    values: dict[str, Any], problem: dict[str, Any], step: int, sample: int, completion: str
) -> dict[str, Any]:
    """The line of ``samples.jsonl`` of its group's completion number ``sample``, from a row's ``values`` by name."""
    record = {"step": step, "problem": values["index"], "sample": sample, **problem, "completion": completion}
    record |= {name: values[name] for name in ("reward", "advantage", "tokens", "truncated")} | {"rewards": {}}
    for column, value in values.items():
        kind, _, name = column.partition("/")
        if kind == "reward" and name:
            record["rewards"][name] = plain(value)
    return record


def drop_nan(values: list[float]) -> list[float]:
    """The values without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def mean_of_known(values: list[float]) -> float:
    """Mean of the values that are not NaN."""
    return float(np.mean(drop_nan(values)))


def status(line: dict[str, Any], steps: int, best: dict[str, Any]) -> str:
    """A rollout's line in a few numbers for the progress bar or a log, and the best validation so far."""
    seconds = sum(line[f"seconds/{phase}"] for phase in ("generate", "reward", "train"))
    text = (
        f"reward {line['reward']:.3f}  loss {line['loss']:.4f}  kl {line['kl_old_new']:.2g}  "
        f"grad {line['grad_norm']:.2g}  entropy {line['entropy']:.2g}  tokens {line['completion_tokens']:.0f}  "
        f"truncated {line['truncated_share']:.0%}  {seconds / steps:.1f} s/step"
    )
    return f"{text}  best {best['validation_reward']:.3f} at {best['step']}" if best else text
