"""The loop of ``python -m pspo.train`` and `pspo.train(...)`.

    problems -> rollout -> rewards -> advantages -> (old log-probs) -> minibatch epochs
             -> surrogate -> aggregate -> backward -> optimizer step -> metrics / validation / saved model

`train` is that line, top to bottom; its second half, the optimizer steps of one rollout, is `pspo.update.step`.
Everything around the algorithm (records, checkpoints, resuming, signals) is the parts of a run, in `pspo.run`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pspo import distributed as dist
from pspo.cli.terminal import quiet_without_reader
from pspo.errors import RewardError
from pspo.rollout import Experience, Rollout, estimate_advantages, group_relative_advantages, refill
from pspo.run.command import train_command, train_from_python
from pspo.run.run import Run
from pspo.tasks.failures import show_failures
from pspo.update import drawn_logprobs, keep_logprobs, update


def train(run: Run) -> dict[str, Any]:
    """Train until the run ends; returns its summary, as written to ``summary.json``.

    Raises Stopped when a signal ends the run, which is saved once a step was taken; RunFailed when a reward raises,
    likewise saved, or after too many skipped steps in a row: then the last checkpoint is kept.
    """
    run.start()
    while run.begin_rollout():
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
    experience = draw_groups(run, config.rollout.prompts)
    if config.rollout.resample > 0:
        experience = resample(run, experience)
    if config.reward.on_error == "none":
        check_rewards_known(run, experience)
    if config.rollout.lag > 0 and config.algorithm.ratio_to == "behaviour":
        with run.phase("train"):
            rollout = keep_logprobs(run.learner, experience.rollout, experience.advantages, config)
        experience = replace(experience, rollout=rollout)
    return experience


def draw_groups(run: Run, n: int) -> Experience:
    """Draw a group for each of the next n prompts, all ranks' together, and score them."""
    indices, prompts = run.stream.next(n)
    with run.phase("generate"), run.gathered_weights():
        rollout = run.sampler.draw(prompts, run.config.rollout.group_size, run.how)
    return score(run, indices, rollout)


def score(run: Run, prompt_indices: list[int], rollout: Rollout) -> Experience:
    """Rewards of a rollout of these prompts, NaN where unknown (--reward.on_error none), and its advantages."""
    limit = run.config.rollout.max_completion_tokens
    with run.phase("reward"):
        scores = rollout.score(run.stream.problems(prompt_indices), run.config.reward, run.learner.steps, limit)
    if scores.failures:
        show_failures(scores.failures, run.recorder.failures)
    experience = Experience(
        prompt_indices=prompt_indices,
        rollout=rollout,
        rewards=torch.tensor(scores.totals, dtype=torch.float64),  # (B,)
        rewards_by_name=scores.by_function,
        logged=scores.logged,
        reward_failed=bool(scores.failures),
    )
    return add_advantages(run, experience)


def check_rewards_known(run: Run, experience: Experience) -> None:
    """Raise RewardError if none of a rollout's completions, all ranks', has a reward, because functions failed."""
    with run.phase("reward"):
        is_unknown = all(dist.gather_objects(bool(experience.rewards.isnan().all())))
        if is_unknown and experience.reward_failed:
            raise RewardError(f"every completion of this rollout is without a reward: {run.recorder.failures}")


def add_advantages(run: Run, experience: Experience) -> Experience:
    """The experience with advantages, (B,) or (B, T), by --algorithm.advantages."""
    estimator = run.config.algorithm.advantages
    group_size = run.config.rollout.group_size
    with run.phase("reward"):
        if callable(estimator) or estimator == "gdpo":
            problems = run.stream.problems(experience.prompt_indices)
            weights = run.config.reward.weights
            with run.learner.reference_model() as reference:
                logprobs = partial(drawn_logprobs, run.learner, experience.rollout, reference, run.config)
                computed = {} if reference is None else {"reference": lambda: reference, "reference_logprobs": logprobs}
                advantages = estimate_advantages(experience, estimator, group_size, problems, weights, computed)
        else:
            advantages = group_relative_advantages(experience.rewards.float(), group_size, estimator)
    return replace(experience, advantages=advantages)


def resample(run: Run, experience: Experience) -> Experience:
    """Replace groups without signal by fresh prompts', up to --rollout.resample times."""
    algorithm = run.config.algorithm
    for _ in range(run.config.rollout.resample):
        missing = dist.max_over_ranks(experience.has_signal(algorithm).count(False))
        if missing == 0:
            break
        fresh = draw_groups(run, missing * dist.world_size())
        experience = add_advantages(run, refill(experience, fresh, algorithm))
    return experience


# --- the command, and the call from Python


def main(args: Sequence[str] | None = None) -> None:
    """Train by a command's switches; exits with 1 if a run fails, 2 for errors of the user, 75 or 130 if stopped."""
    train_command(train, args)


class TrainModule(ModuleType):
    """This module, as a function: `pspo.train(...)`."""

    def __call__(
        self,
        model: str | dict[str, Any] | None = None,
        data: Any = None,
        reward: Any = None,
        algorithm: Any = None,
        rollout: dict[str, Any] | None = None,
        optimizer: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        distributed: dict[str, Any] | None = None,
        config: str | Path | None = None,
        on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None,
    ) -> dict[str, Any]:
        """Train as ``python -m pspo.train`` does; returns the summary, as in ``summary.json``.

        An argument is a section of the configuration: a dict of its switches, or its main one alone. ``--rollout.top_p
        0.9`` is ``rollout={"top_p": 0.9}``. The same call with the same ``run={"output_dir": ...}`` resumes.

        Args:
            model: embedded model ("tiny-base" unless given), local folder or hub id.
            data: a data set's name ("arithmetic" unless given); or problems: dicts with ``prompt``, ``answer`` and
                fields of your own, `Problem`, or a `datasets.Dataset`; or {"train": problems, "validation", "test",
                ...}. Of 50 training problems or more without the other splits a fifth is held out, and tested before
                and after.
            reward: a reward function, a `Reward` or a name, or a list of them.
            algorithm: a surrogate, by name or as an instance.
            rollout: {"prompts", "group_size", "max_completion_tokens", "temperature", "top_p", ...}.
            optimizer: {"lr", "schedule", "max_grad_norm", "microbatch_tokens", ...}.
            run: {"max_steps", "seed", "output_dir", "validate_every", "test_limit", "tracker", ...}.
            distributed: {"strategy"}, under torchrun.
            config: a YAML file or a method ("grpo", "ppo", "dr-grpo", "dapo", "rloo", "decoupled"), below all others.
            on_rollout: called after each rollout with its `Experience` and the metrics of its optimizer steps; only
                reads.

        Raises ValueError for a wrong setting, RunFailed for a run that cannot continue, Stopped for one that Ctrl-C
        ended.
        """
        sections = {
            "model": model,
            "data": data,
            "reward": reward,
            "algorithm": algorithm,
            "rollout": rollout,
            "optimizer": optimizer,
            "run": run,
            "distributed": distributed,
        }
        given = {name: section for name, section in sections.items() if section is not None}
        return train_from_python(train, config, given, on_rollout)


sys.modules[__name__].__class__ = TrainModule

if __name__ == "__main__":
    with quiet_without_reader():
        dist.run_main(main)
