"""`update` takes the optimizer steps of one rollout, which change a `Learner`."""

from pspo.update.learner import Learner
from pspo.update.old import drawn_logprobs
from pspo.update.step import update
