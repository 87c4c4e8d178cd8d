"""Delay: rollouts between being drawn and being trained on."""

from collections import deque
from typing import Any

from pspo.config import TrainConfig
from pspo.rollout import Drawing, Experience
from pspo.run.folders import RunFailed
from pspo.run.prompt_stream import PromptStream
from pspo.run.sampler import Sampler


class Delay:
    """Keeps this rank's rollouts for --rollout.lag, and has an engine draw the next one during the update.

    Attributes:
        waiting: drawn and scored, the oldest first.
        prefetched: the one drawn ahead, not scored yet; its rollout is None until `collect_prefetched`.
    """

    per_rank = True

    def __init__(self, config: TrainConfig, stream: PromptStream, sampler: Sampler) -> None:
        self.config = config
        self.stream = stream
        self.sampler = sampler
        self.waiting: deque[Experience] = deque()
        self.prefetched: Drawing | None = None

    def push(self, experience: Experience) -> Experience | None:
        """Keep a rollout, let an engine prefetch the next; return the one drawn --rollout.lag before it, if any."""
        self.waiting.append(experience)
        if self.config.draws_ahead:
            indices, prompts = self.stream.next(self.config.rollout.prompts)
            with self.sampler.engine_errors():
                self.sampler.engine.prefetch(prompts, self.config.rollout.group_size)
            self.prefetched = Drawing(indices)
        return self.waiting.popleft() if self._over_lag() else None

    def collect_prefetched(self) -> None:
        """Wait for the rollout that is being drawn ahead, if there is one.

        If the engine has failed, its prompts are given back: what is trained is saved, then the next draw raises.
        """
        if self.prefetched is None or self.prefetched.rollout is not None:
            return
        prompts = self.stream.prompts.take(self.prefetched.prompts)
        try:
            with self.sampler.engine_errors():
                self.prefetched.rollout = self.sampler.engine.collect(prompts, self.config.rollout.group_size)
        except RunFailed:
            self.prefetched = None
            self.stream.seek(self.stream.previous)

    def take_prefetched(self) -> Drawing | None:
        """The rollout that was drawn ahead; None if there is none."""
        prefetched, self.prefetched = self.prefetched, None
        return prefetched

    def _over_lag(self) -> bool:
        return len(self.waiting) + (self.prefetched is not None) > self.config.rollout.lag

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": list(self.waiting), "prefetched": self.prefetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rollouts; of a fork with a smaller lag the newest."""
        self.waiting, self.prefetched = deque(state["waiting"]), state["prefetched"]
        while self.waiting and self._over_lag():
            self.waiting.popleft()
        if self._over_lag():
            self.prefetched = None
