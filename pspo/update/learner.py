"""Learner: what an optimizer step changes."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model import StartingAdapters, default_microbatch_tokens, has_adapters, load_policy, shares_prompts
from pspo.update.optimizers import make_optimizer, make_scheduler
from pspo.update.tokens import TokenRecord


@dataclass
class Learner:
    """Policy, optimizer, schedule and reference model: everything that `pspo.update.update` steps.

    Its state holds no weights: a checkpoint saves them as a model. Shards are saved with the optimizer's state, which
    is then left out here, too.

    Attributes:
        scheduler: None for a constant learning rate.
        reference: None if beta is 0.
        steps: optimizer steps taken.
        microbatch_tokens: the most in a microbatch, fewer once memory has run out; None until the first update.
        record: gets what every step computes at tokens; None to record nothing.
    """

    policy: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR | None = None
    reference: transformers.PreTrainedModel | StartingAdapters | None = None
    steps: int = 0
    microbatch_tokens: int | None = None
    record: TokenRecord | None = None

    def __post_init__(self) -> None:
        self.n_ranks = dist.world_size()
        self.is_sharded = dist.is_sharded(self.policy)
        self.shares_prompts = shares_prompts(self.policy)  # a pass computes a prompt once

    def reference_model(self) -> AbstractContextManager[transformers.PreTrainedModel | None]:
        """The reference model, for a `with` block; under LoRA the policy itself, with the adapters it started from."""
        return self.reference if isinstance(self.reference, StartingAdapters) else nullcontext(self.reference)

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "microbatch_tokens": self.microbatch_tokens,  # a resumed run computes in the same shapes
            "optimizer": None if self.is_sharded else self.optimizer.state_dict(),
        }

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
        """What fits of a parent's state: other optimizers have other moments, this memory its own microbatches.

        Raises ValueError for adapters that would count more or less.
        """
        alpha = changes.get("model.lora.alpha")
        if alpha and has_adapters(self.policy):
            raise ValueError(f"the parent's adapters have --model.lora.alpha {alpha[0]:g}: fork with the same")
        old_options, options = changes.get("optimizer.options", ({}, {}))
        is_amsgrad_same = bool(old_options.get("amsgrad")) == bool(options.get("amsgrad"))
        has_same_moments = is_amsgrad_same and not changes.keys() & {"optimizer.name", "model.dtype"}
        moments = state["optimizer"] if has_same_moments else None
        return state | {"microbatch_tokens": self.microbatch_tokens, "optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything but the weights; learning rate and other options stay as this optimizer was made."""
        self.steps = state["steps"]
        self.microbatch_tokens = state["microbatch_tokens"]
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        for group, made in zip(self.optimizer.param_groups, options, strict=True):
            group.update(made | {"lr": self.optimizer.defaults["lr"]})
        if self.scheduler is not None:
            self.scheduler = LambdaLR(self.optimizer, self.scheduler.lr_lambdas[0], self.steps - 1)


def make_learner(config: TrainConfig, device: torch.device) -> Learner:
    """Load the policy, and the reference if there is one, and make the optimizer."""
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step is no mistake
    policy = load_policy(config.model, device, config.distributed)
    reference = None
    if config.algorithm.beta > 0 and has_adapters(policy):
        reference = StartingAdapters(policy)  # no second copy of the model
    elif config.algorithm.beta > 0:
        reference = load_policy(config.model, device, config.distributed).requires_grad_(False)
    optimizer = make_optimizer(policy, config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, config.run.max_steps)
    by_memory = default_microbatch_tokens(policy, config.model.gradient_checkpointing)
    tokens = config.optimizer.microbatch_tokens or by_memory
    return Learner(policy, optimizer, scheduler, reference, microbatch_tokens=tokens)
