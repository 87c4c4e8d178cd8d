"""LoRA's linear layers without PEFT's passes over whole activations: it casts, scales and adds in a pass each."""

from __future__ import annotations

from functools import partial

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from pspo.model.linear import product


def fuse_adapters(model: nn.Module) -> None:
    """Make PEFT's adapters of linear layers add their output in place."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = partial(fused_forward, module)


def fused_forward(module: Linear, x: Tensor) -> Tensor:
    """x W^T + bias + s (x A^T) B^T of a frozen W, in the dtype of autocast, or of W."""
    base = module.base_layer
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else base.weight.dtype
    return LoraProduct.apply(
        x.to(dtype),
        base.weight.to(dtype),
        None if base.bias is None else base.bias.to(dtype),
        module.lora_A["default"].weight.to(dtype),
        module.lora_B["default"].weight.to(dtype),
        module.scaling["default"],
    )


class LoraProduct(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O,), a (R, I) and b (O, R) to (..., O); no gradient of weight and bias."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # (N, I)
        inner = rows @ a.t()  # (N, R)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scale = scale
        return product(rows, weight, bias).addmm_(inner, b.t(), alpha=scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, a, b = ctx.saved_tensors
        g = gradient.reshape(-1, gradient.shape[-1])  # (N, O)
        g_inner = ctx.scale * (g @ b)  # (N, R)
        g_x = None
        if ctx.needs_input_grad[0]:
            g_x = product(g, weight.t()).addmm_(g_inner, a).view(*gradient.shape[:-1], -1)
        return g_x, None, None, g_inner.t() @ rows, ctx.scale * (g.t() @ inner), None
