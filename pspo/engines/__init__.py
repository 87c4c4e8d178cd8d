"""Engines that draw rollouts in place of transformers, one file each, as `pspo.rollout.types.Engine`."""

from typing import TYPE_CHECKING

import torch

from pspo.engines.vllm import VLLM, EngineError, check_vllm
from pspo.rollout.types import Engine

if TYPE_CHECKING:
    from pspo.config import TrainConfig


def make_engine(config: "TrainConfig", max_tokens: int, device: torch.device) -> Engine:
    """The engine of --rollout.engine, for prompts and completions of ``max_tokens`` together."""
    return VLLM(config, max_tokens, device)
