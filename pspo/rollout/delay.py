"""Delay: rollouts between being drawn and being trained on, in a run with --rollout.lag."""

from collections import deque
from typing import Any

from pspo.config import RolloutConfig
from pspo.rollout.engine import EngineSampler
from pspo.rollout.experience import Experience
from pspo.rollout.prompts import PromptStream


class Delay:
    """Keeps this rank's rollouts for --rollout.lag.

    Args:
        engine: draws the next rollout during each update; None if rollouts are drawn on time.

    Attributes:
        waiting: drawn and scored, the oldest first.
    """

    per_rank = True

    def __init__(self, config: RolloutConfig, stream: PromptStream, engine: EngineSampler | None = None) -> None:
        self.config = config
        self.stream = stream
        self.engine = engine
        self.waiting: deque[Experience] = deque()

    def push(self, experience: Experience) -> Experience | None:
        """Keep a rollout and have the next one drawn ahead; return the one that is due, if any."""
        self.waiting.append(experience)
        pending = 0
        if self.engine is not None:
            _, prompts = self.stream.peek(self.config.prompts)
            self.engine.prefetch(prompts, self.config.group_size)
            pending = 1
        return self.waiting.popleft() if len(self.waiting) + pending > self.config.lag else None

    def state_dict(self) -> dict[str, Any]:
        """The rollouts, after waiting for the one that is being drawn ahead."""
        prefetched = None
        if self.engine is not None:
            self.engine.collect()
            prefetched = self.engine.prefetched
        return {"waiting": list(self.waiting), "prefetched": prefetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = deque(state["waiting"])
        if self.engine is not None:
            self.engine.prefetched = state["prefetched"]
