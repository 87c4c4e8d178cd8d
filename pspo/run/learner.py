"""Learner: what an optimizer step changes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

from pspo import distributed as dist
from pspo.config import AlgorithmConfig
from pspo.losses import adapt_coef
from pspo.model.adapters import StartingAdapters
from pspo.run.optimizers import schedule
from pspo.run.tokens import TokenRecord


@dataclass
class Learner:
    """Policy, optimizer, schedule and reference model: everything that `pspo.update.update` steps.

    Its state is that of a checkpoint without the weights, which are saved as a model; of a sharded one without the
    optimizer's, which is saved with them.

    Attributes:
        scheduler: None for a constant learning rate.
        reference: None if beta is 0.
        one_pass: where the loss allows, form gradients while the logits are there; False for the plain step.
        steps: optimizer steps taken.
        entropy_coef, entropy_weight: under --algorithm.entropy_target, the coefficient and the next step's weight.
        microbatch_limit: tokens; below --optimizer.microbatch_tokens once memory has run out.
        record: gets what every step computes at tokens.
    """

    policy: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
    reference: transformers.PreTrainedModel | StartingAdapters | None = None
    one_pass: bool = True
    steps: int = 0
    entropy_coef: float = 0.0
    entropy_weight: float = 0.0
    microbatch_limit: int | None = None
    record: TokenRecord = field(default_factory=TokenRecord)

    def __post_init__(self) -> None:
        if self.scheduler is None:
            self.scheduler = schedule(self.optimizer, lambda _: 1.0)

    def reference_model(self) -> AbstractContextManager[transformers.PreTrainedModel | None]:
        """The reference model, for a `with` block; under LoRA the policy itself, with the adapters it started from."""
        return self.reference if isinstance(self.reference, StartingAdapters) else nullcontext(self.reference)

    def adapted(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """The configuration with the weight that the entropy bonus has at this step."""
        return algorithm if algorithm.entropy_target is None else replace(algorithm, entropy_coef=self.entropy_weight)

    def follow(self, algorithm: AlgorithmConfig, entropy: float, skipped: bool) -> dict[str, float]:
        """After a step of this mean entropy, unless skipped, adapt the bonus's weight.

        Returns metrics.
        """
        metrics = {} if algorithm.entropy_target is None else {"entropy_weight": self.entropy_weight}
        if skipped:
            return metrics
        if algorithm.entropy_target is not None:
            how = (algorithm.entropy_target, algorithm.entropy_coef)
            self.entropy_coef, self.entropy_weight = adapt_coef(self.entropy_coef, entropy, *how)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "microbatch_limit": self.microbatch_limit,  # a resumed run computes in the same shapes
            "optimizer": None if dist.is_sharded(self.policy) else self.optimizer.state_dict(),
            "entropy": (self.entropy_coef, self.entropy_weight),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything but the weights; learning rate and other options stay as this optimizer was made."""
        self.steps = state["steps"]
        self.microbatch_limit = state["microbatch_limit"]
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.entropy_coef, self.entropy_weight = state["entropy"]
        for group, made in zip(self.optimizer.param_groups, options, strict=True):
            group.update(made | {"lr": self.optimizer.defaults["lr"]})
        self.scheduler = schedule(self.optimizer, self.scheduler.lr_lambdas[0], self.steps)
