"""From problems to rollouts and advantages."""

from pspo.rollout.advantages import estimate_advantages, gdpo, group_relative_advantages
from pspo.rollout.prompts import Prompts, PromptStream, encode_prompts, load_prompts, prompt_order
from pspo.rollout.sampler import How, PolicySampler, Sampler, generate, left_pad, make_sampling
from pspo.rollout.types import Batch, Experience, Rollout, Sampling
