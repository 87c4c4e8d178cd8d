"""PromptStream: the training prompts in the order in which a run draws them."""

from itertools import chain, islice
from typing import Any

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.rollout import Experience, Prompts, prompt_order
from pspo.tasks import Problem


class PromptStream:
    """Endless passes over the training prompts, each in a random order of --run.seed.

    With --rollout.order signal, prompts without signal, whose groups have no advantage, rest: after K such groups in a
    row they are left out of the next K passes.

    Attributes:
        position: places of the order passed so far, all ranks' together; without rests the prompts drawn.
        previous: the position before the last prompts were drawn.
        passes: with --rollout.order signal, by prompt the one that it was last drawn in.
        rests: by prompt without signal, its groups in a row, and the first pass that it is in again.
    """

    def __init__(self, prompts: Prompts, config: TrainConfig) -> None:
        self.prompts, self.config = prompts, config
        self.fingerprint, self.by_signal = prompts.fingerprint(), config.rollout.order == "signal"
        self.passes: dict[int, int] = {}
        self.rests: dict[int, tuple[int, int]] = {}
        self.seek(0)

    def next(self, n: int) -> tuple[list[int], Prompts]:
        """This rank's share of the next n prompts: their indices, and themselves."""
        minibatches = self.config.algorithm.minibatches if n == self.config.rollout.prompts else 1
        self.previous, drawn = self.position, []
        while len(drawn) < n:
            index, current = next(self.order), self.position // len(self.prompts)
            self.position += 1
            if current >= self.rests.get(index, (0, 0))[1]:
                drawn.append(index)
                if self.by_signal:
                    self.passes[index] = current
        indices = dist.take_rank_share(drawn, minibatches)
        return indices, self.prompts.take(indices)

    def note(self, experience: Experience) -> None:
        """Let prompts rest, or come back into every pass, by the signal of all ranks' groups."""
        if not self.by_signal:
            return
        groups = list(zip(experience.prompts, experience.signal, strict=True))
        for index, signal in chain(*dist.gather_objects(groups)):
            without, _ = self.rests.pop(index, (0, 0))
            if not signal:
                without += 1
                self.rests[index] = without, self.passes[index] + 1 + without

    def problems(self, indices: list[int]) -> list[Problem]:
        """The problem of each row of these prompts' groups."""
        return [self.prompts.problems[i] for i in indices for _ in range(self.config.rollout.group_size)]

    def seek(self, position: int) -> None:
        self.position = self.previous = position
        self.order = islice(prompt_order(len(self.prompts), self.config.run.seed), position, None)

    def state_dict(self) -> dict[str, Any]:
        rests = {"passes": self.passes.copy(), "rests": self.rests.copy()}
        return {"position": self.position, "fingerprint": self.fingerprint} | rests

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.by_signal:  # a fork may change it
            self.passes, self.rests = state["passes"].copy(), state["rests"].copy()
        self.seek(state["position"])
