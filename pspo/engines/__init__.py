"""Engines that draw rollouts in place of transformers, one file each."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pspo.engines.vllm import VLLM, EngineError, check_vllm
from pspo.rollout import Sampling
from pspo.rollout.types import Nucleus

if TYPE_CHECKING:
    from pspo.config import TrainConfig


class Engine(Protocol):
    """Draws completions in place of transformers, with weights of its own."""

    tolerance: float  # nats by which its log-probs may differ from the policy's on average

    def push(self, policy: PreTrainedModel, version: int) -> None:
        """Take over the policy's weights; a version is pushed once."""

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Begin to draw what `complete` is asked for next, while the caller does other things."""

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int
    ) -> tuple[Tensor, Tensor | None, Nucleus | None]:
        """(N * group_size, T) completions, as `pspo.rollout.decode.decode`'s."""

    def close(self) -> None: ...


def make_engine(config: "TrainConfig", max_tokens: int, device: torch.device) -> Engine:
    """The engine of --rollout.engine, for prompts and completions of ``max_tokens`` together."""
    return VLLM(config, max_tokens, device)
