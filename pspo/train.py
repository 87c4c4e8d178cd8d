"""Train a model: ``python -m pspo.train``; ``pspo.train(...)`` from Python, see `pspo.api`.

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
from pspo.rollout import Drawing, Experience, estimate_advantages
from pspo.run.command import train_command
from pspo.run.run import Run
from pspo.tasks import total_rewards
from pspo.update import keep_logprobs, update


def train(run: Run) -> dict[str, Any]:
    """Train until the run ends; returns its summary, as written to ``summary.json``.

    Raises Stopped if a signal ended the run, saved unless in its first test or validation; RunFailed, saved, if a
    reward raised, or after too many skipped steps in a row.
    """
    run.start()
    while not run.ended():
        experience = run.delay.push(draw(run))  # returns the one drawn --rollout.lag rollouts ago; with 0 this one
        if experience is None:
            continue
        with run.phase("train"):
            steps = update(run.learner, experience.rollout, experience.advantages, run.config)  # epochs x minibatches
        run.delay.collect_prefetched()
        run.recorder.begin_line(experience, steps)
        run.conclude_rollout()  # validate, write, save
        run.tell(experience, steps)
    return run.finish()


def draw(run: Run) -> Experience:
    """Draw, score and resample a rollout; with a lag it keeps the log-probs of the policy that drew it."""
    config = run.config
    experience = score(run, run.delay.take_prefetched() or draw_prompts(run, config.rollout.prompts))
    run.require_some_reward(experience.rewards)
    experience = resample(run, experience)
    if config.rollout.lag == 0 or config.algorithm.ratio_to != "behaviour":
        return experience
    with run.phase("train"):
        rollout = keep_logprobs(run.learner, experience.rollout, experience.advantages, config)
    return replace(experience, rollout=rollout)


def draw_prompts(run: Run, n: int) -> Drawing:
    """Draw a group of completions for each of the next n prompts, all ranks' together."""
    indices, prompts = run.stream.next(n)
    with run.phase("generate"):
        return Drawing(indices, run.sampler.draw(prompts, run.config.rollout.group_size))


def score(run: Run, drawing: Drawing) -> Experience:
    """Rewards of a rollout, NaN if unknown (--reward.on_error none), and its advantages."""
    config, rollout, logged = run.config, drawing.rollout, {}
    problems, limit = run.stream.problems(drawing.prompts), config.rollout.max_completion_tokens
    with run.phase("reward"):
        totals, by_name = total_rewards(
            completions=rollout.texts, problems=problems, step=run.learner.steps, max_completion_tokens=limit,
            logged=logged, **vars(config.reward), **rollout.reward_inputs,
        )  # fmt: skip
    rewards = torch.tensor(totals, dtype=torch.float64, device=rollout.completion_ids.device)  # (B,)
    scored = Experience(drawing.prompts, rollout, rewards, by_name, totals, rollout.tokens, logged)
    return with_advantages(run, scored)


def with_advantages(run: Run, experience: Experience) -> Experience:
    """The experience with advantages, (B,) or (B, T), by --algorithm.advantages."""
    config, problems = run.config, run.stream.problems(experience.prompts)
    how = (config.algorithm.advantages, config.rollout.group_size, problems, config.reward.weights)
    with run.phase("reward"):
        return replace(experience, advantages=estimate_advantages(experience, *how))


def resample(run: Run, experience: Experience) -> Experience:
    """Replace groups without signal by fresh prompts', up to --rollout.resample times."""
    for _ in range(run.config.rollout.resample):
        missing = dist.max_over_ranks(experience.signal.count(False))
        if missing == 0:
            break
        fresh = score(run, draw_prompts(run, missing * dist.world_size()))
        experience = with_advantages(run, experience.refill(fresh))
    return experience


def main(args: Sequence[str] | None = None) -> None:
    train_command(train, args)


if __name__ == "__main__":
    run_main(main)
