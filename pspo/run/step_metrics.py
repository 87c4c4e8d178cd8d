"""Metrics of one optimizer step (`pspo.losses.diagnostics`), collected over microbatches and reduced over ranks."""

from copy import deepcopy

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import AlgorithmConfig
from pspo.losses import Counts, corrected_tokens, diagnose, diagnose_correction, kl_estimate, token_weights
from pspo.rollout.types import Batch, Rollout


class StepMetrics:
    """What one optimizer step measures: every rank adds its microbatches, then all call `reduce`.

    Attributes:
        loss, kl_reference: scalars, sums over the microbatches so far.
    """

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        step: int,
        counts: Counts,
        device: torch.device,
    ) -> None:
        self.algorithm, self.step, self.counts = algorithm, step, counts
        self.loss, self.kl_reference = torch.zeros(2, device=device)
        self.parts: list[dict[str, Tensor]] = []

    def add(self, batch: Batch, loss: Tensor, logprobs: Tensor, entropies: Tensor) -> None:
        """Add a microbatch, without gradients: its share of the loss, the policy's log-probs and entropies (b, t)."""
        algorithm, mask, old = self.algorithm, batch.rollout.loss_mask, batch.old_logprobs  # (b, t)
        self.loss += loss
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs, mask, algorithm.kl_estimator, old)
            self.kl_reference += kl.sum() / max(self.counts.tokens, 1)
        surrogate = deepcopy(algorithm.surrogate).at(self.step)  # metrics change no state
        weights = token_weights(surrogate, logprobs, old, batch.advantages, mask)
        sampler, position = batch.rollout.sampler_logprobs, torch.arange(mask.shape[1], device=mask.device)
        values = {"logprob": logprobs, "old_logprob": old, "advantage": batch.advantages, "weight": weights,
                  "entropy": entropies, "sampler_logprob": sampler, "reference_logprob": batch.ref_logprobs,
                  "row": batch.indices[:, None], "position": position}  # fmt: skip
        if algorithm.correction != "none":
            how = (algorithm.correction, algorithm.correction_cap, algorithm.correction_floor)
            values["corrected"] = corrected_tokens(old, sampler, mask, *how).to(old.dtype)
        self.parts.append({name: value.expand_as(mask)[mask] for name, value in values.items() if value is not None})

    def tokens(self) -> dict[str, Tensor]:
        """By name the values (n,) at this rank's unmasked tokens, as `pspo.run.tokens` takes them."""
        return {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}

    def reduce(self) -> tuple[dict[str, float], bool]:
        """Metrics over all ranks' tokens, and whether loss and log-probs are finite. To be called before the step.

        Metrics are those of `diagnose` and `diagnose_correction` over tokens with A != 0, the entropy over all.
        """
        corrected = self.algorithm.correction != "none"
        names = ["logprob", "old_logprob", "advantage", "weight", "row", "entropy"]
        names += ["sampler_logprob", "corrected"] if corrected else []
        tokens = self.tokens()
        tokens["row"] = tokens["row"] * dist.world_size() + dist.rank()  # of all ranks' rows
        values = dist.gather_columns(torch.stack([tokens[name] for name in names]))  # on rank 0 all ranks'
        loss, kl_reference = dist.sum_over_ranks(torch.stack([self.loss, self.kl_reference]))

        def on_main() -> tuple[dict[str, float], bool]:
            logprobs, old, advantages, weights, rows, entropies, *correction = values
            active = advantages != 0
            metrics = diagnose(logprobs, old, advantages, weights, active, rows)
            metrics["entropy"] = (entropies.sum() / max(len(entropies), 1)).item()
            if corrected:
                metrics |= diagnose_correction(old, *correction, active)
            return metrics, bool(torch.isfinite(loss + logprobs.sum()))

        metrics, finite = dist.run_on_main(on_main)
        kl = {"kl_reference": kl_reference.item()} if self.algorithm.beta > 0 else {}
        return {"loss": loss.item()} | kl | metrics, finite


def nucleus_mass(rollout: Rollout) -> dict[str, float]:
    """Mean probability, before the cut, of the nuclei that tokens were drawn from; {} if they were not kept."""
    if rollout.nucleus is None:
        return {}
    mass = rollout.nucleus.mass
    total, tokens = dist.sum_over_ranks(torch.stack([mass.sum(), mass.count_nonzero()]))
    return {"nucleus_mass": (total / tokens).item()}
