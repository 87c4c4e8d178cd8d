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
    on_gpu = next(model.parameters()).device.type == "cuda"
    if on_gpu or not has_avx512():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(onednn_linear, module)


@cache
def has_avx512() -> bool:
    """True if oneDNN can use AVX-512."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def onednn_linear(module: nn.Linear, x: Tensor) -> Tensor:
    """x weight^T + bias of a linear layer, by oneDNN for a large product in float32 on a CPU."""
    is_float32 = x.dtype == module.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if is_float32 and x.device.type == "cpu" and x.numel() * module.out_features >= MIN_MULTIPLICATIONS:
        return OneDNNProduct.apply(x, module.weight, module.bias)
    return functional.linear(x, module.weight, module.bias)


class OneDNNProduct(torch.autograd.Function):
    """x (..., I) and weight (O, I) to x weight^T + bias, (..., O)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])  # (N, O)
        inputs = x.reshape(-1, x.shape[-1])  # (N, I)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        product = torch.ops.mkldnn._linear_pointwise
        return (
            product(gradient, weight.t(), None, "none", [], "") if needs_x else None,
            product(rows.t(), inputs.t(), None, "none", [], "") if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (N, I) and weight (O, I) to x weight^T + bias, (N, O), by oneDNN where it is faster; without gradient."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if is_float32 and x.numel() * weight.shape[0] >= MIN_MULTIPLICATIONS and has_avx512():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)
