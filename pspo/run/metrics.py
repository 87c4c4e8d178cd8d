"""Statistics of a rollout, for its line of metrics."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from pspo.tasks import matches_format


def rollout_metrics(rows: dict[str, list[Any]], drawn_rewards: list[float] | None = None) -> dict[str, float]:
    """Statistics of one rollout from its B rows' values; unknown rewards (NaN) are left out of the means.

    ``drawn_rewards`` are those of all rows that were drawn for it, if groups were resampled.
    """
    pairs = zip(rows["text"], rows["problem"], strict=True)
    formats = [matches_format(text) for text, problem in pairs if isinstance(problem.answer, Fraction)]
    metrics = {
        "reward": np.mean(drop_nan(rows["reward"])),
        "reward_std": np.std(drop_nan(rows["reward"])),
        **{name: np.mean(drop_nan(values)) for name, values in rows.items() if name.startswith("reward/")},
        "reward_unknown_share": np.isnan(rows["reward"]).mean(),
        "empty_share": np.mean([not text.strip() for text in rows["text"]]),
        "zero_advantage_share": np.mean([advantage == 0 for advantage in rows["advantage"]]),
        "completion_tokens": np.mean(rows["tokens"]),
        "completion_tokens_max": max(rows["tokens"]),
        "truncated_share": np.mean(rows["truncated"]),
        **({"turns": np.mean(rows["turns"])} if "turns" in rows else {}),
        **({"format_share": np.mean(formats)} if formats else {}),
        **{name: np.mean(numbers) for name, values in rows.items()
           if name.startswith("logged/") and (numbers := [x for x in values if isinstance(x, int | float)])},
    }  # fmt: skip
    if drawn_rewards is not None:
        metrics["resampled_share"] = (len(drawn_rewards) - len(rows["reward"])) / len(rows["reward"])
        metrics["reward_drawn"] = np.mean(drop_nan(drawn_rewards))
    return {name: float(value) for name, value in metrics.items()}


def sample(rows: dict[str, list[Any]], row: int, step: int, group_size: int) -> dict[str, Any]:
    """A completion's line of ``samples.jsonl``, of its values in the B rows."""
    names = ("reward", "advantage", "tokens", "truncated")
    by_name = {name.removeprefix("reward/"): values[row] for name, values in rows.items() if name.startswith("reward/")}
    logged = {name.removeprefix("logged/"): values[row] for name, values in rows.items() if name.startswith("logged/")}
    return {
        "step": step,
        "problem": rows["index"][row],
        "sample": row % group_size,
        **rows["problem"][row].record(),
        "completion": rows["episode"][row],
        **{name: rows[name][row] for name in names},
        "rewards": {name: None if math.isnan(value) else value for name, value in by_name.items()},
        **({"logged": logged} if logged else {}),
    }


def drop_nan(values: list[float]) -> list[float]:
    """Without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def status(line: dict[str, Any], steps: int, best: dict[str, Any], saved: str) -> str:
    """A rollout's line in a few numbers, the most telling first, for the progress bar or a line of a log.

    Of its steps the last one's, but all skipped ones; the best validation so far and the newest checkpoint.
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
    known = ["best so far"] if best["step"] == validation["step"] else describe_best(best)
    return "  ".join([f"validation {validation['validation_reward']:.3f}", f"greedy {greedy}", *known])


def describe_best(best: dict[str, Any]) -> list[str]:
    """The best validation, [] without any."""
    return [f"best {best['validation_reward']:.3f} at {best['step']}"] if best else []
