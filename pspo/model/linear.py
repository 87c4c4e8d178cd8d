"""Matrix products in float32 on a CPU by oneDNN, which uses AVX-512 on every maker's CPUs.

PyTorch multiplies float32 matrices by MKL, which uses AVX2 at most on other makers' CPUs: on an AMD EPYC it is half
as fast as oneDNN. Same arithmetic, float32 throughout; the order of the sums differs.
"""

from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_MULTIPLICATIONS = 2**22  # of a product: for fewer, the call costs more than it saves


def use_onednn(model: nn.Module) -> None:
    """Make a model's linear layers compute their float32 products by oneDNN, if the CPU has AVX-512."""
    if has_avx512() and next(model.parameters()).device.type != "cuda":
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = partial(onednn_linear, module)


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
    """True if oneDNN computes x weight^T faster."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return is_float32 and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS and has_avx512()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) and weight (O, I) to x weight^T + bias, (..., O), by oneDNN where it is faster; without gradient."""
    if gains_by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


class OneDNNProduct(torch.autograd.Function):
    """x (..., I) and weight (O, I) to x weight^T + bias, (..., O)."""

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
