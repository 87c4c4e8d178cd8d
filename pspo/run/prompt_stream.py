"""PromptStream: the training prompts in the order in which a run draws them."""

from itertools import islice
from typing import Any

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.rollout import Prompts, prompt_order
from pspo.tasks import Problem


class PromptStream:
    """Endless passes over the training prompts, each in a random order of --run.seed.

    Attributes:
        position: prompts drawn so far, all ranks' together.
    """

    def __init__(self, prompts: Prompts, config: TrainConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.fingerprint = prompts.fingerprint()
        self.seek(0)

    def next(self, n: int) -> tuple[list[int], Prompts]:
        """Indices and prompts of this rank's share of the next n."""
        minibatches = self.config.algorithm.minibatches if n == self.config.rollout.prompts else 1
        self.position += n
        indices = dist.take_rank_share(list(islice(self.order, n)), minibatches)
        return indices, self.prompts.take(indices)

    def peek(self, n: int) -> tuple[list[int], Prompts]:
        """What `next` will return."""
        position = self.position
        share = self.next(n)
        self.seek(position)
        return share

    def problems(self, indices: list[int]) -> list[Problem]:
        """The problem of each row of these prompts' groups."""
        return [self.prompts.problems[i] for i in indices for _ in range(self.config.rollout.group_size)]

    def seek(self, position: int) -> None:
        self.position = position
        self.order = islice(prompt_order(len(self.prompts), self.config.run.seed), position, None)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seek(state["position"])
