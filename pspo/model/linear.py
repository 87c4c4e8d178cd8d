"""Matrix products in float32 on a CPU by oneDNN, which uses AVX-512 on every maker's CPUs.

PyTorch multiplies float32 matrices by MKL, which uses AVX2 at most on other makers' CPUs: on an AMD EPYC it is half
as fast as oneDNN. Same arithmetic, float32 throughout; the order of the sums differs.
"""

import os
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

WORTHWHILE = 2**22  # multiplications of a product; for fewer, the call costs more than it saves


def use_onednn(model: nn.Module) -> None:
    """Make a model's linear layers compute their float32 products by oneDNN, if the CPU has AVX-512."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    if not on_gpu and has_avx512():
        # oneDNN and PyTorch's layer above it cache primitives of 1,024 shapes each: hundreds of MB for rows of all
        # lengths. A pass with LoRA has some 30. Both read these variables once, at first use.
        for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(capacity, "48")
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDNNLinear


@cache
def has_avx512() -> bool:
    """True if oneDNN can use AVX-512."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def is_worthwhile(x: Tensor, weight: Tensor) -> bool:
    """True if oneDNN is faster: for a large product in float32 on a CPU."""
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return plain and x.numel() * weight.shape[0] >= WORTHWHILE


class OneDNNLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if is_worthwhile(input, self.weight) and not torch.is_autocast_enabled("cpu"):
            return _Product.apply(input, self.weight, self.bias)
        return super().forward(input)


class _Product(torch.autograd.Function):
    """x (..., I) and weight (O, I) to x weight^T + bias, (..., O)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, O), (N, I)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if needs_x else None,
            _product(rows.t(), inputs.t()) if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (N, I) and weight (O, I) to x weight^T + bias, (N, O), by oneDNN where it is faster; without gradient."""
    fast = has_avx512() and is_worthwhile(x, weight)
    return _product(x, weight, bias) if fast else functional.linear(x, weight, bias)
