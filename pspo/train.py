"""Train a model: ``python -m pspo.train``, or `pspo.train(...)` from Python.

    problems -> rollout -> rewards -> advantages -> (old log-probs) -> minibatch epochs
             -> surrogate -> aggregate -> backward -> optimizer step -> metrics / validation / saved model

`train` is that line, top to bottom; its second half, the optimizer steps of one rollout, is `pspo.update`. Everything
around the algorithm (records, checkpoints, resuming, signals) is the parts of a run, in `pspo.run`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pspo import distributed as dist
from pspo.distributed import run_main
from pspo.rollout import Experience, Rollout, estimate_advantages, group_relative_advantages, refill
from pspo.run.command import train_command
from pspo.run.run import Run
from pspo.tasks import total_rewards
from pspo.tasks.failures import FIRST_FAILURES, RewardError
from pspo.update import keep_logprobs, update


def train(run: Run) -> dict[str, Any]:
    """Train until the run ends; returns its summary, as written to ``summary.json``.

    Raises Stopped if a signal ended the run, saved unless in its first test or validation; RunFailed, saved, if a
    reward raised, or after too many skipped steps in a row.
    """
    run.start()
    while not run.ended():
        experience = draw(run)
        if run.delay is not None:
            with run.phase("generate"):  # an engine may begin to draw ahead
                experience = run.delay.push(experience)  # returns the one drawn --rollout.lag rollouts ago
            if experience is None:
                continue
        with run.phase("train"):
            steps = update(run.learner, experience.rollout, experience.advantages, run.config)  # epochs x minibatches
        run.conclude_rollout(experience, steps)  # record, validate, save
    return run.finish()


def draw(run: Run) -> Experience:
    """Draw a rollout of the next prompts and score it; with a lag, keep the log-probs of the policy that drew it."""
    config = run.config
    indices, prompts = run.stream.next(config.rollout.prompts)
    with run.phase("generate"):
        rollout = run.sampler.draw(prompts, config.rollout.group_size)
    experience = score(run, indices, rollout)
    if config.rollout.resample > 0:
        experience = resample(run, experience)
    if config.rollout.lag > 0 and config.algorithm.ratio_to == "behaviour":
        with run.phase("train"):
            rollout = keep_logprobs(run.learner, experience.rollout, experience.advantages, config)
        experience = replace(experience, rollout=rollout)
    return experience


def score(run: Run, prompts: list[int], rollout: Rollout) -> Experience:
    """Rewards of a rollout of these prompts, NaN where unknown (--reward.on_error none), and its advantages."""
    reward = run.config.reward
    inputs = rollout.reward_inputs
    logged: dict[str, list[Any]] = {}
    with run.phase("reward"):
        totals, rewards_by_name = total_rewards(
            reward.functions,
            reward.weights,
            rollout.texts,
            run.stream.problems(prompts),
            timeout=reward.timeout,
            on_error=reward.on_error,
            workers=reward.workers,
            completion_ids=inputs["completion_ids"],
            truncated=inputs["truncated"],
            step=run.learner.steps,
            max_completion_tokens=run.config.rollout.max_completion_tokens,
            environment_rewards=inputs.get("environment_rewards"),
            logged=logged,
        )
        rewards = torch.tensor(totals, dtype=torch.float64, device=rollout.completion_ids.device)  # (B,)
        if FIRST_FAILURES and rewards.isnan().all():
            raise RewardError(f"every completion of this rollout is without a reward: {FIRST_FAILURES}")
    experience = Experience(prompts, rollout, rewards, rewards_by_name, totals, rollout.tokens, logged)
    return add_advantages(run, experience)


def add_advantages(run: Run, experience: Experience) -> Experience:
    """The experience with advantages, (B,) or (B, T), by --algorithm.advantages."""
    estimator = run.config.algorithm.advantages
    group_size = run.config.rollout.group_size
    with run.phase("reward"):
        if callable(estimator) or estimator == "gdpo":
            problems = run.stream.problems(experience.prompts)
            advantages = estimate_advantages(experience, estimator, group_size, problems, run.config.reward.weights)
        else:
            advantages = group_relative_advantages(experience.rewards.float(), group_size, estimator)
    return replace(experience, advantages=advantages)


def resample(run: Run, experience: Experience) -> Experience:
    """Replace groups without signal by fresh prompts', up to --rollout.resample times."""
    for _ in range(run.config.rollout.resample):
        missing = dist.max_over_ranks(experience.signal.count(False))
        if missing == 0:
            break
        indices, prompts = run.stream.next(missing * dist.world_size())
        with run.phase("generate"):
            rollout = run.sampler.draw(prompts, run.config.rollout.group_size)
        fresh = score(run, indices, rollout)
        experience = add_advantages(run, refill(experience, fresh))
    return experience


def main(args: Sequence[str] | None = None) -> None:
    train_command(train, args)


if __name__ == "__main__":
    run_main(main)
