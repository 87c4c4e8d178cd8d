"""Delay: rollouts between being drawn and being trained on, in a run with --rollout.lag."""

from collections import deque
from collections.abc import Callable
from typing import Any

from pspo.rollout.engine import EngineSampler
from pspo.rollout.experience import Experience


class Delay:
    """Keeps this rank's rollouts for --rollout.lag; with an engine, the next one is drawn during the update.

    Args:
        lag: rollouts that are drawn between a rollout and its training, at least 1.
        ahead: the sampler that draws ahead; None for sampling on time.
        prefetch: has it begin to draw the next rollout.

    Attributes:
        waiting: drawn and scored, the oldest first.
    """

    per_rank = True

    def __init__(
        self, lag: int, ahead: EngineSampler | None = None, prefetch: Callable[[], None] | None = None
    ) -> None:
        self.lag = lag
        self.ahead = ahead
        self.prefetch = prefetch
        self.waiting: deque[Experience] = deque()

    def push(self, experience: Experience) -> Experience | None:
        """Keep a rollout and have the next one drawn ahead; return the one that is due, if any."""
        self.waiting.append(experience)
        pending = 0
        if self.prefetch is not None:
            self.prefetch()
            pending = 1
        return self.waiting.popleft() if len(self.waiting) + pending > self.lag else None

    def state_dict(self) -> dict[str, Any]:
        """The rollouts, after waiting for the one that is being drawn ahead."""
        prefetched = None
        if self.ahead is not None:
            self.ahead.collect()
            prefetched = self.ahead.prefetched
        return {"waiting": list(self.waiting), "prefetched": prefetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = deque(state["waiting"])
        if self.ahead is not None:
            self.ahead.prefetched = state["prefetched"]
