"""Metrics of one optimizer step, collected microbatch by microbatch and reduced over the ranks."""

from collections import defaultdict
from copy import deepcopy

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import AlgorithmConfig
from pspo.losses import Counts, correction_ratios, diagnose, diagnose_correction, kl_estimate, token_weights
from pspo.rollout.types import Batch, Rollout

MEASURED = ("logprob", "old_logprob", "advantage", "weight", "entropy")
CORRECTED = ("sampler_logprob", "correction_ratio")


class StepMetrics:
    """What one optimizer step measures. Every rank adds its microbatches, then all call `compute` together.

    Attributes:
        loss, kl_reference: scalars, sums over the microbatches so far.
        tokens: by name the values (n,) of each microbatch's unmasked tokens; of them `reduce` sends MEASURED, and with
            a correction CORRECTED, to rank 0.
    """

    def __init__(self, algorithm: AlgorithmConfig, step: int, counts: Counts, device: torch.device) -> None:
        self.algorithm, self.step, self.counts = algorithm, step, counts
        self.loss, self.kl_reference = torch.zeros(2, device=device)
        self.tokens: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, batch: Batch, logprobs: Tensor, entropies: Tensor, loss: Tensor) -> None:
        """Add a microbatch, without gradients: the policy's log-probs and entropies (b, t), its share of the loss."""
        algorithm, mask, old = self.algorithm, batch.rollout.loss_mask, batch.old_logprobs  # (b, t)
        self.loss += loss
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs, mask, algorithm.kl_estimator)
            self.kl_reference += kl.sum() / max(self.counts.tokens, 1)
        advantages = batch.advantages[:, None]  # (b, 1)
        surrogate = deepcopy(algorithm.surrogate).at(self.step)  # metrics change no state
        weights = token_weights(surrogate, logprobs, old, advantages, mask)
        sampler, position = batch.rollout.sampler_logprobs, torch.arange(mask.shape[1], device=mask.device)
        values = {"logprob": logprobs, "old_logprob": old, "advantage": advantages, "weight": weights,
                  "entropy": entropies, "sampler_logprob": sampler, "reference_logprob": batch.ref_logprobs,
                  "row": batch.indices[:, None], "position": position}  # fmt: skip
        if algorithm.correction != "none":
            values["correction_ratio"] = correction_ratios(old, sampler, mask, algorithm.correction)
        for name, value in values.items():
            if value is not None:
                self.tokens[name].append(value.expand_as(mask)[mask])

    def recorded(self) -> dict[str, Tensor]:
        """Values (n,) at this rank's tokens, for `pspo.records.tokens`; to be called before `reduce`."""
        return {name: torch.cat(values) for name, values in self.tokens.items()}

    def reduce(self) -> bool:
        """Reduce over the ranks, rank 0 alone having all tokens; returns whether loss and log-probs are finite."""
        self.loss, self.kl_reference = dist.sum_over_ranks(torch.stack([self.loss, self.kl_reference]))
        names = MEASURED + (CORRECTED if self.algorithm.correction != "none" else ())
        stacked = torch.stack([torch.cat(self.tokens[name]) for name in names])
        finite = torch.isfinite(self.loss + stacked[0].sum())
        self.measured = dist.gather_columns(stacked)  # in the order of the names
        return not dist.max_over_ranks(not finite)

    def compute(self) -> dict[str, float]:
        """`diagnose` and `diagnose_correction` over all ranks' tokens with A != 0, and the entropy over all tokens."""

        def over_all_tokens() -> dict[str, float]:
            logprobs, old, advantages, weights, entropies, *correction = self.measured
            active = advantages != 0
            found = diagnose(logprobs, old, advantages, weights, active)
            found["entropy"] = (entropies.sum() / max(len(entropies), 1)).item()
            if correction:
                found |= diagnose_correction(old, *correction, active, self.algorithm.correction_cap)
            return found

        metrics = {"loss": self.loss.item()}
        if self.algorithm.beta > 0:
            metrics["kl_reference"] = self.kl_reference.item()
        return metrics | dist.run_on_main(over_all_tokens)


def nucleus_mass(rollout: Rollout) -> dict[str, float]:
    """Mean probability, before the cut, of the nuclei that tokens were drawn from; {} if they were not kept."""
    if rollout.nucleus is None:
        return {}
    mass = rollout.nucleus.mass
    total, tokens = dist.sum_over_ranks(torch.stack([mass.sum(), mass.count_nonzero()]))
    return {"nucleus_mass": (total / tokens).item()}
