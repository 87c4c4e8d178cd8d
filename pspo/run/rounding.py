"""Steps of bfloat16 weights: rounded up or down at random, so that small ones are right on average.

A bfloat16 number has 8 significant bits: rounded to the nearest, a step below 1/512 of a weight would vanish.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class StochasticRounding(torch.optim.Optimizer):
    """Optimize bfloat16 weights by another optimizer, made by ``make``, which gets one after the other in float32.

    Every rank draws the same random numbers, so that replicated weights stay the same.
    """

    def __init__(self, weights: list[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        self.weights = weights
        self.exact = [nn.Parameter(torch.empty(0, device=weight.device)) for weight in weights]
        self.inner = make(self.exact)
        self.defaults = self.inner.defaults
        self.generator = torch.Generator(weights[0].device).manual_seed(0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for weight, exact in zip(self.weights, self.exact, strict=True):
            if weight.grad is not None:
                exact.data, exact.grad = weight.float(), weight.grad.float()
                self.inner.step()  # moves this weight alone: the others have no gradient
                mixed = weight.dtype == torch.float32  # some architectures keep a few
                weight.copy_(exact if mixed else round_stochastically(exact, self.generator))
                exact.data, exact.grad = exact.new_empty(0), None

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        self.generator.set_state(saved["generator"])


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Finite float32 values to one of the two nearest in bfloat16, each as likely as the value is near to it."""
    noise = torch.randint(2**16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = values.view(torch.int32).add(noise).bitwise_and(-(2**16))  # bfloat16 is the upper half of the bits
    return bits.view(torch.float32).bfloat16()
