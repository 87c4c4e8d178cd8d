"""How the gradients of one rollout differ from prompt to prompt, and from epoch to epoch; on request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model import is_out_of_memory
from pspo.optimizers.learner import Learner
from pspo.rollout.batching import Minibatch


class GradientMetrics:
    """Measures the gradients of a rollout in which a multiple of --run.gradients_every steps is crossed.

    The noise takes a pass over the rollout, prompt by prompt; all of it memory for three gradients in float32.
    """

    def __init__(self, learner: Learner, config: TrainConfig) -> None:
        self.learner, self.config, self.sharded = learner, config, dist.is_sharded(learner.policy)
        self.steps = 0
        self.first: Tensor | None = None  # the first epoch's gradient
        self.epoch: Tensor | None = None  # this epoch's so far

    @classmethod
    def if_due(cls, learner: Learner, config: TrainConfig) -> GradientMetrics | None:
        every, steps = config.run.gradients_every, config.algorithm.epochs * config.algorithm.minibatches
        due = every > 0 and learner.steps // every < (learner.steps + steps) // every
        return cls(learner, config) if due else None

    def noise(self, minibatches: list[Minibatch], backward: Callable[..., object]) -> dict[str, float]:
        """`_noise`, or {} if memory runs out, with a warning: it must not change how the run goes on."""
        try:
            return self._noise(minibatches, backward)
        except RuntimeError as error:
            if not is_out_of_memory(error) or dist.world_size() > 1:  # the other ranks would wait
                raise
        self.learner.optimizer.zero_grad()
        torch.cuda.empty_cache()  # does nothing without a GPU
        tqdm.write("WARNING: out of memory: this rollout's gradient noise is not measured", file=sys.stderr)
        return {}

    def _noise(self, minibatches: list[Minibatch], backward: Callable[..., object]) -> dict[str, float]:
        """Size and noise of a minibatch's gradient at the policy before the rollout's first step; unbiased.

        With g_1, ..., g_n the gradients of n prompts' shares of the loss, independent and alike, and G their sum:

        * ``gradient_norm2``: |E G|^2 by (|G|^2 - sum |g|^2) n / (n - 1)
        * ``gradient_variance``: trace of the covariance of n g, by (n sum |g|^2 - |G|^2) n / (n - 1)

        Their quotient is the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162) in prompts; {} for one
        prompt. Sharded, a g is of one prompt of every rank: still unbiased and in prompts, with more noise.

        Args:
            backward: `pspo.update.backward` or `pspo.update.one_pass`.
        """
        config = replace(self.config, algorithm=deepcopy(self.config.algorithm))  # a loss's state stays
        group_size, prompts = config.rollout.group_size, sum(counts.sequences for counts, _ in minibatches)
        prompts, total, squares = prompts // group_size, self._gradient(), 0.0
        own = np.array_split(np.arange(prompts // dist.world_size()), len(minibatches))  # this rank's
        for (counts, batches), indices in zip(minibatches, own, strict=True):
            for prompt in indices:
                rows = [(batch, (batch.indices // group_size == prompt).nonzero().flatten()) for batch in batches]
                parts = [batch.rows(of_prompt) for batch, of_prompt in rows if len(of_prompt)]  # [] without a gradient
                if self.sharded:  # every rank must run the same number of passes
                    parts = dist.pad_to_longest(parts, batches[0].masked_row())
                for part in dist.communicate_once(self.learner.policy, parts, config.distributed.gather):
                    backward(self.learner, part, counts, config)
                gradient = self._gradient()
                total += gradient
                squares += dot(gradient, gradient)
                self.learner.optimizer.zero_grad()
                del gradient
        total = total if self.sharded else dist.sum_over_ranks(total)
        size = dist.world_size() if self.sharded else 1  # of a part, in prompts
        if (n := prompts // size) < 2:
            return {}
        norm2, squares = self._dot(total, total), dist.sum_over_shards(squares, self.learner.policy).item()
        scale = n / (n - 1) / len(minibatches) ** 2
        return {
            "gradient_norm2": scale * (norm2 - squares),
            "gradient_variance": scale * (n * squares - norm2) * size,
        }

    def cosine(self) -> dict[str, float]:
        """At the last step of an epoch but the first, ``gradient_cosine`` of its gradient and the first epoch's.

        {} where either has none.

        To be called at every step, when its gradient is there, clipped and of all ranks; an epoch's is the sum.
        """
        epoch, self.steps = self._gradient(), self.steps + 1
        if self.epoch is not None:
            epoch += self.epoch
        whole = self.steps % self.config.algorithm.minibatches == 0
        self.epoch = None if whole else epoch
        if not whole:
            return {}
        if self.first is None:
            self.first = epoch
            return {}
        both, *norms2 = (self._dot(*pair) for pair in ((self.first, epoch), (self.first, self.first), (epoch, epoch)))
        return {} if 0 in norms2 else {"gradient_cosine": both / math.prod(norms2) ** 0.5}

    def _gradient(self) -> Tensor:
        """(D,) float32: of all trained weights, or of this rank's shards of them."""
        weights = [weight for weight in self.learner.policy.parameters() if weight.requires_grad]
        gradients = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights)
        return torch.cat([dist.local_shard(gradient).flatten().float() for gradient in gradients])

    def _dot(self, one: Tensor, other: Tensor) -> float:
        product = dot(one, other)
        return (dist.sum_over_shards(product, self.learner.policy) if self.sharded else product).item()


def dot(one: Tensor, other: Tensor) -> Tensor:
    """Inner product of vectors in float64, without whole copies in float64."""
    parts = zip(one.split(2**20), other.split(2**20), strict=True)
    return torch.stack([(x * y).sum(dtype=torch.float64) for x, y in parts]).sum()
