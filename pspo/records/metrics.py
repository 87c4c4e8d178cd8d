"""Statistics of a rollout, for its line of metrics."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from pspo.tasks import matches_format


def rollout_metrics(rows: dict[str, list[Any]]) -> dict[str, float]:
    """Statistics of one rollout from its B rows' values; unknown rewards (NaN) are left out of the means."""
    pairs = zip(rows["text"], rows["problem"], strict=True)
    formats = [matches_format(text) for text, problem in pairs if isinstance(problem.answer, Fraction)]
    metrics = {
        "reward": np.mean(known(rows["reward"])),
        "reward_std": np.std(known(rows["reward"])),
        **{name: np.mean(known(values)) for name, values in rows.items() if name.startswith("reward/")},
        "reward_unknown_share": np.isnan(rows["reward"]).mean(),
        "empty_share": np.mean([not text.strip() for text in rows["text"]]),
        "zero_advantage_share": np.mean([advantage == 0 for advantage in rows["advantage"]]),
        "completion_tokens": np.mean(rows["tokens"]),
        "completion_tokens_max": max(rows["tokens"]),
        "truncated_share": np.mean(rows["truncated"]),
        **({"turns": np.mean(rows["turns"])} if "turns" in rows else {}),
        **({"format_share": np.mean(formats)} if formats else {}),
    }
    return {name: float(value) for name, value in metrics.items()}


def known(values: list[float]) -> list[float]:
    """Without NaN; a single NaN if there is nothing else."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


def status(line: dict[str, Any]) -> str:
    """A rollout's line in a few numbers, for the progress bar or a line of a log."""
    parts = [f"reward {line['reward']:.2f}", f"loss {line['loss']:.4f}", f"kl {line['kl_old_new']:.2g}"]
    parts += [f"kl to initial {line['kl_reference']:.2g}"] if "kl_reference" in line else []
    parts += [f"truncated {line['truncated_share']:.0%}"]
    return "  ".join([*parts, *([f"format {line['format_share']:.0%}"] if "format_share" in line else [])])
