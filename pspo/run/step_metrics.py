"""Metrics of one optimizer step, from what its microbatches computed, over all ranks (`pspo.losses.diagnostics`)."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import AlgorithmConfig
from pspo.losses import Counts, LossInputs, corrected_tokens, diagnose, diagnose_correction, kl_estimate
from pspo.model import select_tokens

DIAGNOSED = ("logprob", "old_logprob", "advantage", "weight", "row")


@dataclass(frozen=True)
class Visit:
    """What an optimizer step computed of b rows, without gradient.

    Attributes:
        inputs: of the loss, (b, t).
        loss: scalar, their share of the minibatch's loss.
        weights: (b, t), d surrogate's loss / d logprob of each token, before terms and aggregation.
        rows: (b,) int64, their numbers in the rollout, on the CPU.
        mask: (b, t) bool, that of the inputs, on the CPU.
    """

    inputs: LossInputs
    loss: Tensor
    weights: Tensor
    rows: Tensor
    mask: Tensor


def token_columns(visits: list[Visit], algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """By name the values (n,) at this rank's unmasked tokens, on the CPU, with the names of `pspo.run.tokens`."""
    columns = defaultdict(list)
    for visit in visits:
        x = visit.inputs
        values = {
            "logprob": x.logprobs,
            "old_logprob": x.old_logprobs,
            "advantage": x.advantages,
            "weight": visit.weights,
            "entropy": x.entropies,
            "sampler_logprob": x.sampler_logprobs,
            "reference_logprob": x.ref_logprobs,
        }
        if algorithm.correction != "none":
            corrected = corrected_tokens(
                x.old_logprobs, x.sampler_logprobs, x.mask, algorithm.correction, algorithm.correction_cap
            )
            values["corrected"] = corrected.to(x.old_logprobs.dtype)
        for name, value in values.items():
            if value is not None:
                columns[name].append(select_tokens(value.expand_as(x.mask), visit.mask))
    values = torch.stack([torch.cat(parts) for parts in columns.values()]).cpu()  # one wait for a GPU
    rows = torch.cat([visit.rows[:, None].expand_as(visit.mask)[visit.mask] for visit in visits])
    positions = torch.cat([visit.mask.nonzero()[:, 1] for visit in visits])
    return dict(zip(columns, values, strict=True)) | {"row": rows, "position": positions}


def step_metrics(tokens: dict[str, Tensor], counts: Counts, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Statistics over all ranks' tokens, from this rank's `token_columns`: `diagnose`, entropy, and those of terms."""
    if dist.world_size() > 1:
        rows = tokens["row"] * dist.world_size() + dist.rank()  # numbers among all ranks' rows
        columns = torch.stack(list((tokens | {"row": rows}).values()), dim=1)  # (n, m)
        tokens = dict(zip(tokens, dist.concat_over_ranks(columns).unbind(dim=1), strict=True))
    logprobs = tokens["logprob"]
    old_logprobs = tokens["old_logprob"]
    is_active = tokens["advantage"] != 0
    metrics = diagnose(*(tokens[name][is_active] for name in DIAGNOSED))
    metrics["entropy"] = tokens["entropy"].sum().item() / max(len(logprobs), 1)
    if algorithm.beta > 0:
        everywhere = torch.ones_like(is_active)
        kl = kl_estimate(logprobs, tokens["reference_logprob"], everywhere, algorithm.kl_estimator, old_logprobs)
        metrics["kl_reference"] = kl.sum().item() / max(counts.tokens, 1)
    if algorithm.correction != "none":
        metrics |= diagnose_correction(old_logprobs, tokens["sampler_logprob"], tokens["corrected"], is_active)
    return metrics
