"""Sources of rollouts: `next() -> Experience` of a source hands out the next rollout to train on.

| --rollout.lag | draws | source | hands out |
|---|---|---|---|
| 0 | any | `Now` | a rollout of the next prompts, drawn and scored in `next` |
| above 0 | the policy, an environment, or with --rollout.resample | `Lagged` | the rollout drawn LAG rollouts ago |
| above 0 | an engine | `Ahead` | the same; meanwhile the engine draws the next rollout |
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pspo import distributed as dist
from pspo.config import AlgorithmConfig, TrainConfig, switches_with
from pspo.errors import UserCodeError
from pspo.rollout.advantages import estimate_advantages, group_relative_advantages
from pspo.rollout.engine import EngineSampler
from pspo.rollout.prompts import PromptStream
from pspo.rollout.sampler import How, Sampler
from pspo.rollout.types import Experience, join
from pspo.tasks.scoring import show_failures


@dataclass
class Now:
    """Draws and scores rollouts of the next prompts."""

    config: TrainConfig
    stream: PromptStream
    sampler: Sampler
    how: How
    learner: Any  # the run's `pspo.update.learner.Learner`
    phase: Callable[[str], AbstractContextManager[None]]  # times a phase: `Run.phase`
    logprobs: Callable[..., Tensor]  # (rollout, advantages, model) to (B, T), of rows that would be trained on
    failures: dict[str, str]  # of each reward function that has failed, the first failure in one line

    def next(self) -> Experience:
        """Draw a rollout of the next prompts, and score it."""
        experience = self.draw_groups(self.config.rollout.prompts)
        if self.config.rollout.resample > 0:
            experience = self.replace_groups(experience)
        if self.config.reward.on_error == "none":
            self.check_rewards(experience)
        return experience

    def check_rewards(self, experience: Experience) -> None:
        """Raise UserCodeError if no completion has a reward because reward functions failed."""
        with self.phase("reward"):
            is_unknown = all(dist.gather_objects(bool(experience.rewards.isnan().all())))
            if is_unknown and experience.reward_failed:
                raise UserCodeError(f"every completion of this rollout is without a reward: {self.failures}")

    def replace_groups(self, experience: Experience) -> Experience:
        """Replace groups without a signal by groups of new prompts, at most --rollout.resample times."""
        algorithm = self.config.algorithm
        for _ in range(self.config.rollout.resample):
            missing = dist.max_over_ranks(experience.has_signal(algorithm).count(False))
            if missing == 0:
                break
            fresh = self.draw_groups(missing * dist.world_size())
            experience = self.add_advantages(refill(experience, fresh, algorithm))
        return experience

    def draw_groups(self, n: int) -> Experience:
        """Draw and score a group for each of the next n prompts, which the ranks share."""
        indices, prompts = self.stream.next(n)
        gathered = dist.unsharded(self.how.model) if self.learner.is_sharded else nullcontext()
        with self.phase("generate"), gathered:
            group_size = self.config.rollout.group_size
            rollout = self.sampler.draw(prompts, group_size, self.how)
        with self.phase("reward"):
            problems = [problem for problem in prompts.problems for _ in range(group_size)]
            limit = self.config.rollout.max_completion_tokens
            scores = rollout.score(problems, group_size, self.config.reward, self.learner.steps, limit)
        if scores.failures:
            show_failures(scores.failures, self.failures)
        experience = Experience(
            prompt_indices=indices,
            rollout=rollout,
            rewards=torch.tensor(scores.totals, dtype=torch.float64),  # (B,)
            rewards_by_name=scores.by_function,
            logged=scores.logged,
            reward_failed=bool(scores.failures),
        )
        return self.add_advantages(experience)

    def settle(self) -> None:
        """Wait for a rollout that is being drawn ahead; a snapshot of the states needs it complete."""

    def add_advantages(self, experience: Experience) -> Experience:
        """The experience with advantages, (B,) or (B, T), by --algorithm.advantages."""
        estimator = self.config.algorithm.advantages
        group_size = self.config.rollout.group_size
        with self.phase("reward"):
            if callable(estimator) or estimator == "gdpo":
                advantages = self.estimate_advantages(experience)
            else:
                advantages = group_relative_advantages(experience.rewards.float(), group_size, estimator)
        return replace(experience, advantages=advantages)

    def estimate_advantages(self, experience: Experience) -> Tensor:
        """Advantages by "gdpo" or a user's function, which may ask for the reference model and its log-probs."""
        config = self.config
        prompts = self.stream.prompts.take(experience.prompt_indices)
        problems = [problem for problem in prompts.problems for _ in range(config.rollout.group_size)]
        every = torch.ones_like(experience.rollout.terminated)  # --algorithm.mask_truncated leaves out no row here
        rollout = replace(experience.rollout, terminated=every)
        with self.learner.reference_model() as reference:
            computed = {}
            if reference is not None:
                logprobs = partial(self.logprobs, rollout, every, reference)
                computed = {"reference": lambda: reference, "reference_logprobs": logprobs}
            settings = (config.algorithm.advantages, config.rollout.group_size, problems, config.reward.weights)
            return estimate_advantages(experience, *settings, computed)


def refill(experience: Experience, fresh: Experience, algorithm: AlgorithmConfig) -> Experience:
    """Replace groups without a signal by groups of ``fresh`` with one, as far as these go.

    The result has no advantages: some estimators need all rows.
    """
    n_groups = len(experience.prompt_indices)
    group_size = len(experience.rewards) // n_groups
    has_signal = experience.has_signal(algorithm) + fresh.has_signal(algorithm)
    spare = [group for group in range(n_groups, len(has_signal)) if has_signal[group]]
    groups = [spare.pop(0) if spare and not has_signal[group] else group for group in range(n_groups)]
    prompt_indices = experience.prompt_indices + fresh.prompt_indices
    rows = [group * group_size + i for group in groups for i in range(group_size)]
    indices = torch.tensor(rows)

    def select(values: dict[str, list], fresh_values: dict[str, list]) -> dict[str, list]:
        """By name, the values of the selected rows; None where a row has no value."""
        selected = {}
        for name in values | fresh_values:
            first = values.get(name, [None] * len(experience.rewards))
            joined = first + fresh_values.get(name, [None] * len(fresh.rewards))
            selected[name] = [joined[row] for row in rows]
        return selected

    return Experience(
        prompt_indices=[prompt_indices[group] for group in groups],
        rollout=join([experience.rollout, fresh.rollout]).rows(indices),
        rewards=torch.cat([experience.rewards, fresh.rewards])[indices],
        rewards_by_name=select(experience.rewards_by_name, fresh.rewards_by_name),
        logged=select(experience.logged, fresh.logged),
        reward_failed=experience.reward_failed or fresh.reward_failed,
        drawn_rewards=(experience.drawn_rewards or experience.rewards.tolist()) + fresh.rewards.tolist(),
        drawn_tokens=(experience.drawn_tokens or experience.rollout.tokens) + fresh.rollout.tokens,
    )


@dataclass
class Lagged(Now):
    """Hands each rollout out --rollout.lag rollouts late; ``waiting`` are this rank's rollouts, the oldest first."""

    per_rank = True
    waiting: deque[Experience] = field(default_factory=deque)
    n_ahead = 0  # rollouts that are being drawn while one is handed out

    def next(self) -> Experience:
        while True:
            experience = super().next()
            if self.config.algorithm.ratio_to == "behaviour":
                with self.phase("train"):
                    experience = self.keep_logprobs(experience)
            self.waiting.append(experience)
            with self.phase("generate"):
                self.prefetch()
            if len(self.waiting) + self.n_ahead > self.config.rollout.lag:
                return self.waiting.popleft()

    def keep_logprobs(self, experience: Experience) -> Experience:
        """Give a rollout just drawn the log-probs that later ratios divide by: the policy's, or the engine's."""
        rollout = experience.rollout
        if self.config.algorithm.ratios_to_engine(self.config.rollout):
            old = rollout.sampler_logprobs
        else:
            old = self.logprobs(rollout, experience.advantages, self.learner.policy)
        return replace(experience, rollout=replace(rollout, behaviour_logprobs=old))

    def prefetch(self) -> None:
        """Begin to draw the next rollout, if an engine draws."""

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": list(self.waiting)}

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any] | None:
        """The parent run's rollouts; None if a change of the configuration may ask for different rollouts."""
        free = switches_with("free")
        is_harmless = all(switch in free or switch.startswith(("optimizer.", "run.")) for switch in changes)
        return state if is_harmless else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = deque(state["waiting"])


@dataclass
class Ahead(Lagged):
    """Has an engine draw the next rollout while the run trains."""

    sampler: EngineSampler
    n_ahead = 1

    def prefetch(self) -> None:
        rollout = self.config.rollout
        _, prompts = self.stream.peek(rollout.prompts)
        self.sampler.begin(prompts, rollout.group_size, self.how)

    def settle(self) -> None:
        self.sampler.settle()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"prefetched": self.sampler.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.sampler.drawn = state["prefetched"]


def find_source(config: TrainConfig) -> type[Now]:
    """The source that a run's lag and engine ask for."""
    if config.rollout.lag == 0:
        return Now
    draws_ahead = config.rollout.draws_by_engine and config.rollout.resample == 0  # resampling needs rewards first
    return Ahead if draws_ahead else Lagged
