"""Optimizers, of weights in float32 or bfloat16, with moments in float32 or 8 bits."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from itertools import compress

import torch
import transformers

from pspo.config import OptimizerConfig
from pspo.run.rounding import StochasticRounding


def make_optimizer(policy: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are not frozen, at the peak learning rate.

    Weight decay is decoupled (Loshchilov & Hutter 2019), of matrices and embeddings; norms and biases have none.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    matrices = [parameter.dim() > 1 for parameter in trained]

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = new_optimizer(parameters, config)
        weight_decay = config.options.get("weight_decay", 0.0)
        if weight_decay > 0:
            decayed = list(compress(parameters, matrices))
            optimizer.register_step_pre_hook(lambda optimizer, *_: decay(decayed, optimizer, weight_decay))
        return optimizer

    return StochasticRounding(trained, make) if trained[0].dtype == torch.bfloat16 else make(trained)


def new_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer.name, without weight decay."""
    common = {"params": parameters, "lr": float(config.lr), "weight_decay": 0.0}  # plain, for checkpoints
    adam = {name: value for name, value in config.options.items() if name != "weight_decay"}
    if config.name == "sgd":
        return torch.optim.SGD(**common, **adam)
    if config.name == "adamw":
        return torch.optim.AdamW(**common, **adam, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    return (AdamW8bit if config.name == "adamw8bit" else PagedAdamW8bit)(**common, **adam)


@torch.no_grad()
def decay(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
    """Decoupled weight decay before a step, p <- (1 - lr weight_decay) p, of parameters that have a gradient."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.mul_(1 - optimizer.param_groups[0]["lr"] * weight_decay)


def check_optimizer(name: str) -> None:
    """Raise ValueError unless the library of --optimizer.name is there."""
    if "8bit" in name and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"--optimizer.name {name} needs bitsandbytes: pip install 'pspo[adamw8bit]'")


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Learning rates: a linear warm-up from 0, then constant, or to 0 at ``max_steps`` in a line or half a cosine.

    transformers' schedules are the same; importing them takes seconds if bitsandbytes is installed.
    """

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return step / config.warmup_steps
        decay = max(1, max_steps - config.warmup_steps)
        if config.schedule == "linear":
            return max(0.0, (max_steps - step) / decay)
        progress = (step - config.warmup_steps) / decay
        return max(0.0, 0.5 * (1 + math.cos(math.pi * progress))) if config.schedule == "cosine" else 1.0

    return schedule(optimizer, factor)


def schedule(
    optimizer: torch.optim.Optimizer, factor: Callable[[int], float], steps: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """The optimizer's own learning rate times ``factor(step)``, continued after ``steps`` steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # LambdaLR would take that of an earlier schedule
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, steps - 1)
