"""Engines that draw rollouts in place of transformers, one file each, as `pspo.rollout.types.Engine`."""

from typing import TYPE_CHECKING

import torch

from pspo.engines.vllm import VLLM
from pspo.rollout.types import Engine

if TYPE_CHECKING:
    from pspo.config import TrainConfig


def make_engine(config: "TrainConfig", max_tokens: int, device: torch.device) -> Engine | None:
    """The engine of --rollout.engine, for prompts and completions of ``max_tokens``; None for transformers."""
    return None if config.rollout.engine == "transformers" else VLLM(config, max_tokens, device)
