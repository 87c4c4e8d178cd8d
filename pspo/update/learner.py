"""Learner: the models, optimizer and schedule that optimizer steps use and change."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pspo import distributed as dist
from pspo.config import LoraConfig, ModelConfig, TrainConfig
from pspo.model import StartingAdapters, default_microbatch_tokens, has_adapters, load_policy, shares_prompts
from pspo.model.find import load_model_config, load_pretrained, resolve_adapters
from pspo.update.optimizers import make_optimizer, make_scheduler
from pspo.update.tokens import TokenRecord


@dataclass
class Learner:
    """Policy, optimizer, schedule and reference model: everything that `pspo.update.update` steps.

    ``state_dict`` leaves out the policy's weights: a checkpoint saves them as a model.
    """

    policy: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR | None = None  # None for a constant learning rate
    reference: transformers.PreTrainedModel | StartingAdapters | None = None
    steps: int = 0  # number of optimizer steps taken
    reference_rollouts: int = 0  # rollouts with this reference, for --algorithm.reference_every
    microbatch_tokens: int | None = None  # limit, lowered when memory runs out; None for the configuration's
    record: TokenRecord | None = None  # collects every step's results at tokens

    def __post_init__(self) -> None:
        self.n_ranks = dist.world_size()
        self.is_sharded = dist.is_sharded(self.policy)
        self.shares_prompts = shares_prompts(self.policy)  # if a pass computes each group's prompt once

    def reference_model(self) -> AbstractContextManager[transformers.PreTrainedModel | None]:
        """The reference model, for a `with` block; under LoRA the policy itself, with its stored adapters."""
        return self.reference if isinstance(self.reference, StartingAdapters) else nullcontext(self.reference)

    def reference_weights(self) -> list[Tensor]:
        """The reference model's weights; under LoRA only its adapters'."""
        by_adapters = isinstance(self.reference, StartingAdapters)
        return self.reference.start if by_adapters else [*self.reference.state_dict().values()]

    @torch.no_grad()
    def set_reference(self, weights: list[Tensor]) -> None:
        for stored, new in zip(self.reference_weights(), weights, strict=True):
            stored.copy_(new)

    def refresh_reference(self, every: int) -> None:
        """Count a rollout; if ``every`` rollouts were counted before it, make the policy the reference first."""
        if self.reference_rollouts == every:
            by_adapters = isinstance(self.reference, StartingAdapters)
            self.set_reference(self.reference.adapters if by_adapters else [*self.policy.state_dict().values()])
            self.reference_rollouts = 0
        self.reference_rollouts += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "reference_rollouts": self.reference_rollouts,
            "reference": self.reference_weights() if self.reference_rollouts > 0 else None,
            "microbatch_tokens": self.microbatch_tokens,  # a resumed run computes in the same shapes
            "optimizer": self.optimizer.state_dict(),
        }

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
        """Return the parts of a parent's state that fit; raises ValueError if adapters would be scaled differently."""
        alpha = changes.get("model.lora.alpha")
        if alpha and has_adapters(self.policy):
            raise ValueError(f"the parent's adapters have --model.lora.alpha {alpha[0]:g}: fork with the same")
        is_same_kind = state["optimizer"].keys() == self.optimizer.state_dict().keys()  # differs for bfloat16 weights
        has_same_moments = is_same_kind and not changes.keys() & {"optimizer.name", "optimizer.options"}
        moments = state["optimizer"] if has_same_moments else None
        has_other_reference = changes.keys() & {"algorithm.reference", "algorithm.reference_every"}
        rollouts = 0 if has_other_reference or self.reference is None else state["reference_rollouts"]
        own = {"microbatch_tokens": self.microbatch_tokens, "reference_rollouts": rollouts}
        return state | own | {"optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything but the weights; the optimizer keeps its learning rate and options, not the saved ones."""
        self.steps = state["steps"]
        self.microbatch_tokens = state["microbatch_tokens"]
        self.reference_rollouts = state["reference_rollouts"]
        if self.reference_rollouts > 0:
            self.set_reference(state["reference"])
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if state["optimizer"] is not None:
            dist.load_optimizer_state(self.optimizer, state["optimizer"])
        for group, made in zip(self.optimizer.param_groups, options, strict=True):
            group.update(made | {"lr": self.optimizer.defaults["lr"]})
        if self.scheduler is not None:
            self.scheduler = LambdaLR(self.optimizer, self.scheduler.lr_lambdas[0], self.steps - 1)


def reference_config(config: TrainConfig) -> ModelConfig:
    """Configuration of --algorithm.reference; bfloat16 if its checkpoint is, but not under fsdp2, else float32."""
    model = replace(config.model, name_or_path=config.algorithm.reference, revision=None, lora=LoraConfig())
    is_bfloat16 = load_model_config(model).dtype == torch.bfloat16 and config.distributed.strategy != "fsdp2"
    return replace(model, dtype="bfloat16" if is_bfloat16 else "float32")


def check_reference(config: TrainConfig, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raise ValueError if --algorithm.reference is set, but not to a model with the policy's vocabulary."""
    name = config.algorithm.reference
    if name is None:
        return
    try:
        reference = resolve_adapters(reference_config(config))
        vocabulary = load_pretrained(transformers.AutoTokenizer, reference).get_vocab()
    except ValueError as error:
        raise ValueError(f"--algorithm.reference {name}: {error}") from error
    if vocabulary != tokenizer.get_vocab():
        raise ValueError(f"--algorithm.reference {name} has another vocabulary than {config.model.name_or_path}")


def make_learner(config: TrainConfig, device: torch.device) -> Learner:
    """Load the policy; make the optimizer and its schedule.

    Load the reference model, frozen: --algorithm.reference, or the initial model if beta is above 0.
    """
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a skipped first step is no mistake
    policy = load_policy(config.model, device, config.distributed)
    reference = None
    if config.algorithm.reference is not None:
        reference = load_policy(reference_config(config), device, config.distributed).requires_grad_(False)
    elif config.algorithm.beta > 0 and has_adapters(policy):
        reference = StartingAdapters(policy)  # no second copy of the model
    elif config.algorithm.beta > 0:
        reference = load_policy(config.model, device, config.distributed).requires_grad_(False)
    optimizer = make_optimizer(policy, config.optimizer)
    scheduler = make_scheduler(optimizer, config.optimizer, config.run.max_steps)
    tokens = config.optimizer.microbatch_tokens
    tokens = tokens or default_microbatch_tokens(policy, config.model.gradient_checkpointing)
    return Learner(policy, optimizer, scheduler, reference, microbatch_tokens=tokens)
