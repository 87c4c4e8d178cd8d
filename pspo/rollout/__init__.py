"""From problems to rollouts and advantages."""

from pspo.rollout.advantages import group_relative_advantages
from pspo.rollout.generate import Sampling, encode_prompts, generate
from pspo.rollout.types import Batch, Rollout

__all__ = ["Batch", "Rollout", "Sampling", "encode_prompts", "generate", "group_relative_advantages"]
