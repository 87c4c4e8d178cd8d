"""Optimizers for float32 or bfloat16 weights, with moments in float32 or 8 bits, and learning-rate schedules."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from pspo.config import OptimizerConfig, require
from pspo.model.adapters import trained_parameters


def make_optimizer(policy: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of all parameters that are not frozen, at the peak learning rate.

    A weight_decay in --optimizer.options applies to matrices and embeddings, not to norms and biases.
    """
    weights = list(trained_parameters(policy).values())
    is_bfloat16 = any(weight.dtype == torch.bfloat16 for weight in weights)
    optimized = weights
    if is_bfloat16:  # float32 copies, each empty except while its weight is stepped
        optimized = [nn.Parameter(torch.empty(0, device=weight.device)) for weight in weights]
    decayed = []
    others = []
    for weight, parameter in zip(weights, optimized, strict=True):
        (decayed if weight.dim() > 1 else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.options.get("weight_decay", 0.0)},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = new_optimizer([group for group in groups if group["params"]], config)
    return StochasticRounding(weights, optimized, optimizer) if is_bfloat16 else optimizer


def new_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that --optimizer.name selects, for groups of parameters with a weight_decay each."""
    require(config.lr is not None, "optimizer.lr", "must be set: its default depends on the model", config.lr)
    lr = float(config.lr)  # a plain float, for checkpoints
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, **config.options)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True, **config.options)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    optimizer = AdamW8bit if config.name == "adamw8bit" else PagedAdamW8bit
    return optimizer(groups, lr=lr, **config.options)


def check_optimizer(config: OptimizerConfig) -> None:
    """Raise ValueError unless --optimizer.name's library is installed and takes --optimizer.options."""
    if "8bit" in config.name and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"--optimizer.name {config.name} needs bitsandbytes: pip install 'pspo[adamw8bit]'")
    try:
        new_optimizer([{"params": [nn.Parameter(torch.zeros(1))]}], config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--optimizer.options {config.options}: {error}") from error


class StochasticRounding(torch.optim.Optimizer):
    """Optimize bfloat16 weights one at a time: step a float32 copy, then round it up or down at random.

    Rounding to the nearest would lose a step below 1/512 of a weight: bfloat16 has 8 significant bits. Every rank
    draws the same random numbers, so that replicated weights stay the same.
    """

    def __init__(self, weights: list[nn.Parameter], copies: list[nn.Parameter], inner: torch.optim.Optimizer):
        self.weights = weights
        self.copies = copies
        self.inner = inner
        self.defaults = inner.defaults
        self.generator = torch.Generator(weights[0].device).manual_seed(0)
        for weight in weights:
            weight.grad_dtype = torch.float32  # a bfloat16 sum over microbatches would lose small gradients

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if weight.grad is not None:
                copy.data = weight.float()
                copy.grad = weight.grad
                self.inner.step()  # moves this weight alone: the others have no gradient
                is_exact = weight.dtype == torch.float32  # some architectures keep a few weights in float32
                weight.copy_(copy if is_exact else round_stochastically(copy, self.generator))
                copy.data = copy.new_empty(0)
                copy.grad = None

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        self.generator.set_state(saved["generator"])


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite float32 values to a bfloat16 neighbour, at random, such that the mean is the value."""
    noise = torch.randint(2**16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = values.view(torch.int32).add(noise).bitwise_and(-(2**16))  # bfloat16 is the upper half of the bits
    return bits.view(torch.float32).bfloat16()


def make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizerConfig, max_steps: int) -> LambdaLR | None:
    """Warm up linearly from 0, then stay constant or decay to 0 at ``max_steps``; None if always constant."""
    if config.schedule == "constant" and config.warmup_steps == 0:
        return None
    from transformers.optimization import get_scheduler  # slow to import

    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    return get_scheduler(name, optimizer, config.warmup_steps, max_steps)
