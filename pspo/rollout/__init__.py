"""From problems to rollouts and advantages."""

from pspo.rollout.advantages import group_relative_advantages
from pspo.rollout.generate import Sampling, check_decoder, encode_prompts, generate
from pspo.rollout.types import Batch, Rollout, to_device

__all__ = [
    "Batch",
    "Rollout",
    "Sampling",
    "check_decoder",
    "encode_prompts",
    "generate",
    "group_relative_advantages",
    "to_device",
]
