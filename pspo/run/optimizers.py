"""Optimizers, of weights in float32 or bfloat16, with moments in float32 or 8 bits."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

from pspo.config import OptimizerConfig
from pspo.run.rounding import StochasticRounding


def make_optimizer(policy: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are not frozen, at the peak learning rate.

    --optimizer.options may have a weight_decay, of matrices and embeddings; norms and biases have none.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = []
        for is_matrix, decay in ((True, config.options.get("weight_decay", 0.0)), (False, 0.0)):
            group = [
                given for given, weight in zip(parameters, trained, strict=True) if (weight.dim() > 1) == is_matrix
            ]
            if group:
                groups.append({"params": group, "weight_decay": decay})
        return new_optimizer(groups, config)

    if trained[0].dtype == torch.bfloat16:
        return StochasticRounding(trained, make)
    return make(trained)


def new_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer.name of groups of parameters, each with its own weight_decay."""
    options = config.options | {"lr": float(config.lr)}  # plain, for checkpoints
    if config.name == "sgd":
        return torch.optim.SGD(groups, **options)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **options)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    return (AdamW8bit if config.name == "adamw8bit" else PagedAdamW8bit)(groups, **options)


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ValueError unless the library of --optimizer.name is there and takes --optimizer.options."""
    if "8bit" in config.name and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"--optimizer.name {config.name} needs bitsandbytes: pip install 'pspo[adamw8bit]'")
    try:
        new_optimizer([{"params": [torch.nn.Parameter(torch.zeros(1))]}], config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--optimizer.options {config.options}: {error}") from error


def make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int) -> LambdaLR | None:
    """Learning rates: a linear warm-up from 0, then constant, or to 0 at ``max_steps`` in a line or half a cosine.

    None for a rate that is constant from the first step.
    """
    if config.schedule == "constant" and config.warmup_steps == 0:
        return None

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        decay = max(1, max_steps - config.warmup_steps)
        if config.schedule == "linear":
            return max(0.0, (max_steps - step) / decay)
        if config.schedule == "cosine":
            progress = (step - config.warmup_steps) / decay
            return max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
        return 1.0

    return LambdaLR(optimizer, factor)


def advance_scheduler(scheduler: LambdaLR, steps: int) -> LambdaLR:
    """The schedule after ``steps`` steps."""
    for group in scheduler.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return LambdaLR(scheduler.optimizer, scheduler.lr_lambdas[0], steps - 1)
