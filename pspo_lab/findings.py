"""The doctor: what is wrong with a run, in plain sentences with their numbers and what to try, worst first."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

FEWEST = 5  # rollouts; a trend of fewer says nothing
NOISE_ERRORS = 4  # standard errors that a fall must exceed: the peak is the highest of many

RECORDED = ["step", "steps_skipped", "reward_unknown_share", "zero_advantage_share", "reward", "format_share",
            "truncated_share", "completion_tokens", "kl_old_new", "ratio_p1", "ratio_p99", "zero_weight_share",
            "entropy", "kl_sampler_old", "validation_reward", "validation_accuracy"]  # fmt: skip


class Finding(NamedTuple):
    """A fault, how severe it is (3 spoils the run, 2 costs results), and what to try."""

    severity: int
    text: str
    advice: str


class Course(NamedTuple):
    """`RECORDED` metrics by rollout, and each metric's mean over the first and the last fifth of its values."""

    rollouts: pd.DataFrame
    first: pd.Series
    last: pd.Series


def find(metrics: pd.DataFrame, config: dict[str, Any]) -> list[Finding]:
    """Findings about a run, worst first, from its metrics by rollout and its switches."""
    if len(metrics) < FEWEST:
        return []
    rollouts = metrics.reindex(columns=RECORDED)
    known = {name: rollouts[name].dropna() for name in RECORDED}
    first = {name: values.head(max(1, len(values) // 5)).mean() for name, values in known.items()}
    last = {name: values.tail(max(1, len(values) // 5)).mean() for name, values in known.items()}
    course = Course(rollouts, pd.Series(first), pd.Series(last))
    findings: list[Finding] = []
    for check in (check_failures, check_signal, check_completions, check_movement, check_rewards):
        findings += check(course, config)
    if "trainer" in config:  # another trainer, whose switches have different names
        findings = [finding._replace(advice=re.sub(r"--\w+\.", "", finding.advice)) for finding in findings]
    return sorted(findings, key=lambda finding: -finding.severity)


def check_failures(course: Course, config: dict[str, Any]) -> Iterator[Finding]:
    """Steps that were skipped, rewards that failed."""
    skipped = course.rollouts.steps_skipped.sum()
    steps = course.rollouts.step.max()
    if skipped:
        text = f"{skipped:.0f} of {steps:.0f} optimizer steps were skipped: loss or gradient was not finite"
        advice = "lower --optimizer.lr; check the surrogate and the reward"
        yield Finding(3 if skipped > steps / 20 else 2, text, advice)
    unknown = course.rollouts.reward_unknown_share.mean()
    if unknown > 0:
        text = f"{unknown:.1%} of the completions had no reward, and taught nothing"
        advice = "look at the first failure on stderr; --reward.timeout may be short"
        yield Finding(3 if unknown > 0.2 else 2, text, advice)


def check_signal(course: Course, config: dict[str, Any]) -> Iterator[Finding]:
    """Groups of equal rewards, which have no advantage."""
    ends = [course.first] if course.last.reward >= 0.8 else [course.first, course.last]  # success leaves no signal
    share, reward = max((end.zero_advantage_share, end.reward) for end in ends)
    if reward < 0.2:
        reason, cure = "problems are too hard, or the format is never met", "problems of another difficulty"
    elif reward > 0.8:
        reason, cure = "problems are too easy", "problems of another difficulty"
    else:
        reason, cure = "its completions are too much alike", "a higher --rollout.temperature"
    if share > 0.8:
        text = f"{share:.0%} of the completions have no advantage: mostly groups of equal rewards ({reason})"
        yield Finding(2, text, f"--rollout.resample 2, a larger --rollout.group_size, or {cure}")


def check_completions(course: Course, config: dict[str, Any]) -> Iterator[Finding]:
    """Format, truncation and length of completions."""
    first, last = course.first, course.last
    rewards = config.get("reward.functions", "")  # others than these two may read another format
    if last.format_share < 0.1 and ("MathReward" in rewards or "FormatReward" in rewards):
        text = f"{last.format_share:.0%} of the last completions end in the format '#### <number>'"
        yield Finding(3, text, "a --data.system_prompt with an example, or an instruct model")
    limit = config.get("rollout.max_completion_tokens", np.nan)
    if last.truncated_share > 0.3:
        text = f"{last.truncated_share:.0%} of the last completions hit the limit of {limit} tokens"
        advice = "raise --rollout.max_completion_tokens, or check the stop tokens"
        yield Finding(3 if last.truncated_share > 0.8 else 2, text, advice)
    if last.completion_tokens > 1.5 * first.completion_tokens and last.reward < first.reward + 0.02:
        text = f"completions grew from {first.completion_tokens:.0f} to {last.completion_tokens:.0f} tokens"
        text += f", and the reward went from {first.reward:.2f} to {last.reward:.2f}"
        yield Finding(2, text, "a reward for length (SoftOverlong), or --algorithm.aggregation dr_grpo")


def check_movement(course: Course, config: dict[str, Any]) -> Iterator[Finding]:
    """How far the steps of a rollout move the policy, and how far the policy is from what drew the rollout."""
    steps = config.get("algorithm.epochs", 1) * config.get("algorithm.minibatches", 1)
    kl = course.rollouts.kl_old_new.median()
    if steps > 1 and kl < 1e-7:
        text = f"the steps of a rollout move nothing: KL(old || new) is {kl:.1g} at its last step"
        yield Finding(2, text, "raise --optimizer.lr: the ratio stays 1, where most surrogates are the same")
    first, last = course.first, course.last
    if last.ratio_p99 > 2 or last.ratio_p1 < 0.5:
        text = f"1% of the last tokens have a ratio below {last.ratio_p1:.2f}, 1% above {last.ratio_p99:.2f}: "
        text += "far past a clip range of 0.2"
        yield Finding(2, text, "a lower --optimizer.lr, or fewer --algorithm.epochs")
    if last.zero_weight_share > 0.1:
        text = f"{last.zero_weight_share:.0%} of the last tokens with an advantage have no gradient: "
        text += "the surrogate cuts them off"
        yield Finding(2, text, "lower --optimizer.lr or --algorithm.epochs, or widen the clip range")
    if last.entropy < 0.2 * first.entropy and last.reward < 0.9:
        text = f"entropy fell from {first.entropy:.3f} to {last.entropy:.3f} nats a token: groups will come out equal"
        yield Finding(2, text, "a lower --optimizer.lr, fewer --algorithm.epochs, or --algorithm.beta above 0")
    if last.kl_sampler_old > 0.01:
        text = "what drew the rollouts and the policy that is trained are "
        text += f"{last.kl_sampler_old:.2g} nats apart (KL per token)"
        yield Finding(2, text, "--algorithm.correction token_truncate, a smaller --rollout.lag, or the engine's dtype")


def check_rewards(course: Course, config: dict[str, Any]) -> Iterator[Finding]:
    """A reward that falls, or that rises without the accuracy."""
    rewards = course.rollouts.reward.dropna()
    window = max(1, len(rewards) // 5)
    peak = rewards.rolling(window).mean().max()
    end = course.last.reward  # the last such window's
    noise = rewards.diff().std() / window**0.5  # of the difference of two windows, trends aside
    if peak > 0 and end < min(0.8 * peak, peak - NOISE_ERRORS * noise):
        advice = "a lower --optimizer.lr or fewer --algorithm.epochs"
        if config.get("run.validate_every", 0):
            advice += "; `best/` has the better model"
        yield Finding(3, f"the reward fell from {peak:.2f} to {end:.2f}", advice)
    first, last = course.first, course.last
    gain = last.validation_reward - first.validation_reward
    if gain > 0.05 and last.validation_accuracy < first.validation_accuracy - 0.05:
        text = f"the validation reward rose from {first.validation_reward:.2f} to {last.validation_reward:.2f}"
        text += f" while its accuracy fell from {first.validation_accuracy:.2f} to {last.validation_accuracy:.2f}"
        yield Finding(3, text, "the policy may be exploiting the reward: read its best-paid completions")
