"""Metrics of one optimizer step, collected microbatch by microbatch and reduced over the ranks."""

from collections import defaultdict
from copy import deepcopy

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import AlgorithmConfig
from pspo.losses import Counts, correction_ratios, diagnose, diagnose_correction, kl_estimate, token_weights
from pspo.rollout.types import Batch, Rollout


class StepMetrics:
    """What one optimizer step measures. Every rank adds its microbatches, then all call `compute` together.

    Attributes:
        loss, kl_reference: scalars, sums over the microbatches so far.
        tokens: by name (logprobs, old_logprobs, advantages, weights, entropies; with a correction sampler_logprobs and
            correction_ratios) the values (n,) of each microbatch's unmasked tokens.
        places: what else `recorded` tells of these tokens; never sent to another rank.
    """

    def __init__(self, algorithm: AlgorithmConfig, step: int, counts: Counts, device: torch.device) -> None:
        self.algorithm, self.step, self.counts = algorithm, step, counts
        self.loss, self.kl_reference = torch.zeros(2, device=device)
        self.tokens: dict[str, list[Tensor]] = defaultdict(list)
        self.places: dict[str, list[Tensor]] = defaultdict(list)

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
        values = {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "weights": weights,
                  "entropies": entropies}  # fmt: skip
        if algorithm.correction != "none":
            sampler = batch.rollout.sampler_logprobs
            ratios = correction_ratios(old, sampler, mask, algorithm.correction)
            values |= {"sampler_logprobs": sampler, "correction_ratios": ratios}
        for name, value in values.items():
            self.tokens[name].append(value.expand_as(mask)[mask])
        places = {"row": batch.indices[:, None], "position": torch.arange(mask.shape[1], device=mask.device)}
        places |= {"sampler_logprob": batch.rollout.sampler_logprobs, "reference_logprob": batch.ref_logprobs}
        for name, value in places.items():
            if value is not None:
                self.places[name].append(value.expand_as(mask)[mask])

    def recorded(self) -> dict[str, Tensor]:
        """Values (n,) at this rank's tokens as `pspo.records.tokens` has them; to be called before `reduce`."""
        names = {"logprobs": "logprob", "old_logprobs": "old_logprob", "advantages": "advantage", "weights": "weight",
                 "entropies": "entropy"}  # fmt: skip
        values = {column: self.tokens[name] for name, column in names.items()} | self.places
        return {name: torch.cat(parts) for name, parts in values.items()}

    def reduce(self) -> bool:
        """Reduce over the ranks, rank 0 alone having all tokens; returns whether loss and log-probs are finite."""
        self.loss, self.kl_reference = dist.sum_over_ranks(torch.stack([self.loss, self.kl_reference]))
        stacked = torch.stack([torch.cat(values) for values in self.tokens.values()])  # (5 or 7, n)
        finite = torch.isfinite(self.loss + stacked[0].sum())
        self.tokens = dict(zip(self.tokens, dist.gather_columns(stacked), strict=True))
        return not dist.max_over_ranks(not finite)

    def compute(self) -> dict[str, float]:
        """`diagnose` and `diagnose_correction` over all ranks' tokens with A != 0, and the entropy over all tokens."""

        def over_all_tokens() -> dict[str, float]:
            tokens, correction = dict(self.tokens), {}
            entropies, active = tokens.pop("entropies"), tokens["advantages"] != 0
            entropy = {"entropy": (entropies.sum() / max(len(entropies), 1)).item()}
            sampler, ratios = tokens.pop("sampler_logprobs", None), tokens.pop("correction_ratios", None)
            if sampler is not None:
                cap = self.algorithm.correction_cap
                correction = diagnose_correction(tokens["old_logprobs"], sampler, ratios, active, cap)
            return diagnose(**tokens, mask=active) | entropy | correction

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
