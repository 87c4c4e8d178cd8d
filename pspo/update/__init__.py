"""The optimizer steps of one rollout: `update` takes them, and a `Learner` is what they change."""

from pspo.update.learner import Learner
from pspo.update.old import drawn_logprobs
from pspo.update.step import update
