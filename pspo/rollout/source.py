"""Who draws the next rollout that is trained on: a source, by its `next() -> Experience`.

| --rollout.lag | draws | source | hands out |
|---|---|---|---|
| 0 | any | `Now` | the next prompts' rollout, drawn and scored when it is asked for |
| above 0 | the policy, an environment, or with --rollout.resample | `Lagged` | that of LAG rollouts ago |
| above 0 | an engine | `Ahead` | the same; the engine draws the next one meanwhile |
"""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.config import TrainConfig, switches_with
from pspo.errors import RewardError
from pspo.rollout.advantages import estimate_advantages, group_relative_advantages
from pspo.rollout.engine import EngineSampler
from pspo.rollout.experience import Experience, refill
from pspo.rollout.prompts import Prompts, PromptStream
from pspo.rollout.sampler import How, Sampler
from pspo.rollout.types import Rollout
from pspo.tasks.failures import show_failures


@dataclass
class Now:
    """Draws and scores rollouts of the next prompts.

    Attributes:
        learner: of which scoring takes the optimizer steps taken, and advantages the reference model.
        phase: a context that times "generate", "reward" or "train", and ends all ranks together.
        keep_logprobs: gives a rollout those of the policy that drew it; called where `Lagged` needs them.
        drawn_logprobs: those of a rollout by a model.
        failures: of each reward that has failed, the first one in one line.
    """

    config: TrainConfig
    stream: PromptStream
    sampler: Sampler
    how: How
    learner: Any
    phase: Callable[[str], AbstractContextManager[None]]
    keep_logprobs: Callable[[Rollout, Tensor], Rollout]
    drawn_logprobs: Callable[[Rollout, PreTrainedModel], Tensor]
    failures: dict[str, str]

    def next(self) -> Experience:
        """The experience to train on next."""
        return self.draw()

    def draw(self) -> Experience:
        """Draw a rollout of the next prompts, score it, and replace groups without signal, --rollout.resample times."""
        config = self.config
        experience = self.draw_groups(config.rollout.prompts)
        for _ in range(config.rollout.resample):
            missing = dist.max_over_ranks(experience.has_signal(config.algorithm).count(False))
            if missing == 0:
                break
            fresh = self.draw_groups(missing * dist.world_size())
            experience = self.add_advantages(refill(experience, fresh, config.algorithm))
        if config.reward.on_error == "none":
            self.check_rewards_known(experience)
        return experience

    def draw_groups(self, n: int) -> Experience:
        """Draw a group for each of the next n prompts, all ranks' together, and score them."""
        indices, prompts = self.stream.next(n)
        with self.phase("generate"), dist.unsharded(self.how.model):
            rollout = self.draw_rollout(prompts)
        return self.score(indices, rollout)

    def draw_rollout(self, prompts: Prompts) -> Rollout:
        return self.sampler.draw(prompts, self.config.rollout.group_size, self.how)

    def score(self, prompt_indices: list[int], rollout: Rollout) -> Experience:
        """Rewards of a rollout of these prompts, NaN where unknown (--reward.on_error none), and its advantages."""
        limit = self.config.rollout.max_completion_tokens
        with self.phase("reward"):
            problems = self.stream.problems(prompt_indices)
            scores = rollout.score(problems, self.config.reward, self.learner.steps, limit)
        if scores.failures:
            show_failures(scores.failures, self.failures)
        experience = Experience(
            prompt_indices=prompt_indices,
            rollout=rollout,
            rewards=torch.tensor(scores.totals, dtype=torch.float64),  # (B,)
            rewards_by_name=scores.by_function,
            logged=scores.logged,
            reward_failed=bool(scores.failures),
        )
        return self.add_advantages(experience)

    def check_rewards_known(self, experience: Experience) -> None:
        """Raise RewardError if none of a rollout's completions, all ranks', has a reward, because functions failed."""
        with self.phase("reward"):
            is_unknown = all(dist.gather_objects(bool(experience.rewards.isnan().all())))
            if is_unknown and experience.reward_failed:
                raise RewardError(f"every completion of this rollout is without a reward: {self.failures}")

    def add_advantages(self, experience: Experience) -> Experience:
        """The experience with advantages, (B,) or (B, T), by --algorithm.advantages."""
        estimator = self.config.algorithm.advantages
        group_size = self.config.rollout.group_size
        with self.phase("reward"):
            if callable(estimator) or estimator == "gdpo":
                problems = self.stream.problems(experience.prompt_indices)
                weights = self.config.reward.weights
                with self.learner.reference_model() as reference:
                    computed = {}
                    if reference is not None:
                        logprobs = partial(self.drawn_logprobs, experience.rollout, reference)
                        computed = {"reference": lambda: reference, "reference_logprobs": logprobs}
                    advantages = estimate_advantages(experience, estimator, group_size, problems, weights, computed)
            else:
                advantages = group_relative_advantages(experience.rewards.float(), group_size, estimator)
        return replace(experience, advantages=advantages)


@dataclass
class Lagged(Now):
    """Hands rollouts out --rollout.lag rollouts late.

    Attributes:
        waiting: this rank's rollouts, the oldest first.
    """

    per_rank = True
    waiting: deque[Experience] = field(default_factory=deque)
    n_ahead = 0  # rollouts that are being drawn while one is handed out

    def next(self) -> Experience:
        while True:
            experience = self.draw()
            if self.config.algorithm.ratio_to == "behaviour":
                with self.phase("train"):
                    rollout = self.keep_logprobs(experience.rollout, experience.advantages)
                experience = replace(experience, rollout=rollout)
            self.waiting.append(experience)
            with self.phase("generate"):
                self.prefetch()
            if len(self.waiting) + self.n_ahead > self.config.rollout.lag:
                return self.waiting.popleft()

    def prefetch(self) -> None:
        """Begin to draw the next rollout, if something else than the policy draws."""

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": list(self.waiting), "prefetched": None}

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any] | None:
        """A parent's rollouts, if nothing has changed that may ask for different ones."""
        harmless = switches_with("free") | switches_with("may grow") | {"run.fork_from"}
        return None if changes.keys() - harmless else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = deque(state["waiting"])


@dataclass
class Ahead(Lagged):
    """Has an engine draw the next rollout while one is trained on.

    Attributes:
        prefetched: the rollout of the next prompts, if it is complete.
    """

    sampler: EngineSampler
    prefetched: Rollout | None = None
    n_ahead = 1

    def prefetch(self) -> None:
        rollout = self.config.rollout
        _, prompts = self.stream.peek(rollout.prompts)
        self.sampler.begin(prompts, rollout.group_size, self.how)

    def collect(self) -> None:
        """Wait for what is being drawn ahead. If that fails on a rank, all drop it, and draw those prompts again."""
        if not self.sampler.is_drawing:
            return
        try:
            self.prefetched = self.sampler.complete()
        except Exception as error:  # of an engine of a user's, too
            tqdm.write(f"the engine failed to draw ahead, and is asked again: {error}", file=sys.stderr)
        if dist.max_over_ranks(self.prefetched is None):
            self.prefetched = None

    def draw_rollout(self, prompts: Prompts) -> Rollout:
        """What was drawn ahead for these prompts; otherwise they are drawn now."""
        self.collect()
        rollout = self.prefetched
        self.prefetched = None
        if rollout is not None and rollout.is_of(prompts.ids):
            return rollout
        return super().draw_rollout(prompts)

    def state_dict(self) -> dict[str, Any]:
        """The rollouts, after waiting for the one that is being drawn ahead."""
        self.collect()
        return {"waiting": list(self.waiting), "prefetched": self.prefetched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.prefetched = state["prefetched"]


def make_source(config: TrainConfig, *parts: Any) -> Now:
    """The source that a run's lag and engine ask for, of the fields of `Now`."""
    if config.rollout.lag == 0:
        return Now(config, *parts)
    return (Ahead if config.draws_ahead else Lagged)(config, *parts)
