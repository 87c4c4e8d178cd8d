"""Per-token results of optimizer steps: as columns, as metrics of a step, and for ``tokens.parquet``."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.losses import Counts, LossInputs, diagnose, diagnose_correction, kl_estimate
from pspo.model import token_index
from pspo.token_table import token_texts


@dataclass(frozen=True)
class Visit:
    """Results of an optimizer step for b rows, without gradient."""

    inputs: LossInputs  # (b, t)
    loss: Tensor  # scalar, the rows' share of the minibatch's loss
    weights: Tensor  # (b, t), d(surrogate's loss) / d(logprob) of each token, before terms and aggregation
    rows: Tensor  # (b,) int64, the rows' numbers in the rollout, on the CPU
    mask: Tensor  # (b, t) bool, the inputs' mask, on the CPU


def token_columns(visits: list[Visit]) -> dict[str, Tensor]:
    """Columns, named as in `COLUMNS`, with the values (n,) at this rank's unmasked tokens, on the CPU."""
    parts = []
    for visit in visits:
        x = visit.inputs
        index = token_index(visit.mask, x.mask.device)
        columns = {
            "logprob": x.logprobs,
            "old_logprob": x.old_logprobs,
            "advantage": x.advantages,
            "weight": visit.weights,
            "entropy": x.entropies,
            "sampler_logprob": x.sampler_logprobs,
            "reference_logprob": x.ref_logprobs,
        }
        columns = {name: value for name, value in columns.items() if value is not None}
        parts.append(torch.stack([value.expand_as(x.mask).flatten()[index] for value in columns.values()]))
    values = torch.cat(parts, dim=1).cpu()  # one wait for a GPU
    rows = torch.cat([visit.rows[:, None].expand_as(visit.mask)[visit.mask] for visit in visits])
    positions = torch.cat([visit.mask.nonzero()[:, 1] for visit in visits])
    return dict(zip(columns, values, strict=True)) | {"row": rows, "position": positions}


def concat_columns(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """`token_columns` of all ranks together, with rows numbered over all ranks."""
    rows = tokens["row"] * dist.world_size() + dist.rank()
    columns = torch.stack([*(tokens | {"row": rows}).values()], dim=1)  # (n, m)
    return dict(zip(tokens, dist.concat_over_ranks(columns).unbind(dim=1), strict=True))


def step_metrics(tokens: dict[str, Tensor], counts: Counts, config: TrainConfig) -> dict[str, float]:
    """Statistics of a step over all ranks' tokens: `diagnose`, entropy in rows with a signal, and `term_metrics`."""
    is_active = tokens["advantage"] != 0
    active = {name: values[is_active] for name, values in tokens.items()}
    metrics = diagnose(active["logprob"], active["old_logprob"], active["advantage"], active["weight"], active["row"])
    is_trained = torch.isin(tokens["row"], active["row"])
    entropies = tokens["entropy"][is_trained] if is_trained.any() else tokens["entropy"]  # all if no row has a signal
    metrics["entropy"] = entropies.sum().item() / max(len(entropies), 1)
    return metrics | term_metrics(tokens, counts, config) if config.loss_terms else metrics


def term_metrics(tokens: dict[str, Tensor], counts: Counts, config: TrainConfig) -> dict[str, float]:
    """Statistics of the KL penalty and of the correction, if on, over all ranks' tokens."""
    algorithm = config.algorithm
    metrics = {}
    is_active = tokens["advantage"] != 0
    old_logprobs = tokens["old_logprob"]
    if algorithm.beta > 0:
        logprobs = (tokens["logprob"], tokens["reference_logprob"])
        kl = kl_estimate(*logprobs, torch.ones_like(is_active), algorithm.kl_estimator, old_logprobs)
        metrics["kl_reference"] = kl.sum().item() / max(counts.tokens, 1)
    if config.correction != "none":
        bounds = (config.correction, algorithm.correction_cap, algorithm.correction_floor)
        metrics |= diagnose_correction(old_logprobs, tokens["sampler_logprob"], tokens["row"], is_active, *bounds)
    return metrics


class TokenRecord:
    """Collects the results of optimizer steps at the tokens of this rank's first ``rows`` rows of a rollout."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.visits: list[dict[str, np.ndarray]] = []

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        """Add a step's `token_columns`: values (n,) by name, with each token's ``row`` and ``position``."""
        is_recorded = values["row"] < self.rows
        visit = {name: value[is_recorded].numpy() for name, value in values.items()}
        self.visits.append(visit | {"step": np.full(len(visit["row"]), step)})

    def take(self, tokenizer: PreTrainedTokenizerBase, experience: Any, group_size: int) -> dict[str, Any]:
        """Return the columns collected for a `pspo.rollout.Experience`, and forget them."""
        columns = {name: np.concatenate([visit[name] for visit in self.visits]) for name in self.visits[0]}
        self.visits = []
        rows = columns["row"]
        positions = columns["position"]
        ids = experience.rollout.completion_ids[: self.rows].cpu().numpy()
        texts = {}
        for row in set(rows):
            length = positions[rows == row].max() + 1
            texts[row] = token_texts(tokenizer, ids[row, :length].tolist())
        columns["problem"] = np.array(experience.prompt_indices)[rows // group_size]
        columns["sample"] = rows % group_size
        columns["token_id"] = ids[rows, positions]
        columns["text"] = [texts[row][position] for row, position in zip(rows, positions, strict=True)]
        columns["row"] = rows + dist.rank() * len(experience.rollout)
        return columns
