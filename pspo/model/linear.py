"""Fast products of linear layers: oneDNN multiplies on a CPU, and LoRA's adapters add to the output in place.

PyTorch multiplies float32 matrices by MKL, which on CPUs not made by Intel uses AVX2 at most: on an AMD EPYC MKL is
half as fast as oneDNN with AVX-512. Both compute in float32 throughout, and sum in different orders. PEFT takes three
passes over whole activations to cast, scale and add its adapters' output.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_MULTIPLICATIONS = 2**22  # fewest in a product by oneDNN: for fewer, the call costs more than it saves


def use_fast_products(model: nn.Module, has_adapters: bool) -> None:
    """Replace the forward passes of linear layers on a CPU with AVX-512, and of linear layers with PEFT's adapters."""
    adapted_class = None
    if has_adapters:
        from peft.tuners.lora import Linear as adapted_class
    by_onednn = has_avx512() and next(model.parameters()).device.type != "cuda"
    for module in model.modules():
        if type(module) is nn.Linear and by_onednn:
            module.forward = partial(onednn_linear, module)
        elif type(module) is adapted_class and type(module.base_layer) is nn.Linear:
            module.forward = partial(fused_forward, module)


@cache
def has_avx512() -> bool:
    """True if oneDNN can use AVX-512."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def onednn_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """x weight^T + bias of a linear layer, by oneDNN for a large product in float32 on a CPU."""
    if gains_by_onednn(x, module.weight) and not torch.is_autocast_enabled("cpu"):
        return OneDNNProduct.apply(x, module.weight, module.bias)
    return functional.linear(x, module.weight, module.bias)


def gains_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """True if oneDNN computes x weight^T faster than PyTorch's default."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return is_float32 and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS and has_avx512()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, (..., O), of x (..., I) and weight (O, I), without gradient; by oneDNN where faster."""
    if gains_by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


class OneDNNProduct(torch.autograd.Function):
    """`product` with its gradient: x weight^T + bias, (..., O), of x (..., I) and weight (O, I)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (N, O)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if needs_x else None,
            product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


def fused_forward(module: Any, x: Tensor) -> Tensor:
    """x W^T + bias + s (x A^T) B^T, for a frozen W with PEFT's adapters; in the dtype of autocast, or else of W."""
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
    """(..., O) from x (..., I), weight (O, I), bias (O,), a (R, I), b (O, R); weight and bias get no gradient."""

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
