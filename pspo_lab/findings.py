"""The doctor: what is wrong with a run, in plain sentences with their numbers and what to try, worst first."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

FEWEST = 5  # rollouts, before which a trend says nothing
NOISE_ERRORS = 4  # standard errors that a fall must exceed: the peak is the highest of many


class Finding(NamedTuple):
    """A fault, what to try, and its gravity: 3 spoils the run, 2 costs results."""

    severity: int
    text: str
    advice: str


class Metrics(dict[str, pd.Series]):
    """The metrics of a run's rollouts; one that was not recorded is NaN throughout."""

    def __missing__(self, name: str) -> pd.Series:
        return self["step"] * np.nan

    def ends(self, name: str) -> tuple[float, float]:
        """Means of a metric over the first and the last fifth of the rollouts that have it; NaN without any."""
        values = self[name].dropna().to_numpy()
        if not len(values):
            return np.nan, np.nan
        n = max(1, len(values) // 5)
        return float(values[:n].mean()), float(values[-n:].mean())


def find(metrics: pd.DataFrame, config: dict[str, Any], summary: dict[str, Any]) -> list[Finding]:
    """Findings about a run, worst first, from its metrics by rollout, switches, and summary ({} while it trains)."""
    if len(metrics) < FEWEST:
        return []
    metrics = Metrics(metrics)
    findings: list[Finding] = []
    for check in (check_failures, check_signal, check_completions, check_movement, check_rewards):
        findings += check(metrics, config)
    findings += check_best_model(summary)
    if "trainer" in config:  # another one, whose switches have different names
        findings = [finding._replace(advice=re.sub(r"--\w+\.", "", finding.advice)) for finding in findings]
    return sorted(findings, key=lambda finding: -finding.severity)


def check_failures(metrics: Metrics, config: dict[str, Any]) -> Iterator[Finding]:
    """Steps that were skipped, rewards that failed."""
    skipped = metrics["steps_skipped"].sum()
    steps = metrics["step"].max()
    if skipped:
        text = f"{skipped:.0f} of {steps:.0f} optimizer steps were skipped: loss, gradient or log-probs were not finite"
        advice = "lower --optimizer.lr; check the surrogate and the reward"
        yield Finding(3 if skipped > steps / 20 else 2, text, advice)
    unknown = metrics["reward_unknown_share"].mean()
    if unknown > 0:
        text = f"{unknown:.1%} of the completions had no reward, and taught nothing"
        advice = "look at the first failure on stderr; --reward.timeout may be short"
        yield Finding(3 if unknown > 0.2 else 2, text, advice)


def check_signal(metrics: Metrics, config: dict[str, Any]) -> Iterator[Finding]:
    """Groups whose rewards are equal, which have no advantage."""
    begin, end = zip(metrics.ends("zero_advantage_share"), metrics.ends("reward"), strict=True)
    if end[1] >= 0.8:  # a run that has learnt its problems ends without signal
        end = begin
    share, reward = max(begin, end)
    if reward < 0.2:
        reason, cure = "problems are too hard, or the format is never met", "problems of another difficulty"
    elif reward > 0.8:
        reason, cure = "problems are too easy", "problems of another difficulty"
    else:
        reason, cure = "its completions are too much alike", "a higher --rollout.temperature"
    if share > 0.8:
        text = f"{share:.0%} of the completions have no advantage: mostly groups of equal rewards ({reason})"
        yield Finding(2, text, f"--rollout.resample 2, a larger --rollout.group_size, or {cure}")


def check_completions(metrics: Metrics, config: dict[str, Any]) -> Iterator[Finding]:
    """Format, truncation and length of completions."""
    _, in_format = metrics.ends("format_share")
    rewards = config.get("reward.functions", "")
    if in_format < 0.1 and ("MathReward" in rewards or "FormatReward" in rewards):  # others may read another format
        text = f"{in_format:.0%} of the last completions end in the format '#### <number>'"
        yield Finding(3, text, "a --data.system_prompt with an example, or an instruct model")
    _, truncated = metrics.ends("truncated_share")
    limit = config.get("rollout.max_completion_tokens", np.nan)
    if truncated > 0.3:
        text = f"{truncated:.0%} of the last completions hit the limit of {limit} tokens"
        advice = "raise --rollout.max_completion_tokens, or check the stop tokens"
        yield Finding(3 if truncated > 0.8 else 2, text, advice)
    first, last = metrics.ends("completion_tokens")
    first_reward, last_reward = metrics.ends("reward")
    if last > 1.5 * first and last_reward < first_reward + 0.02:
        text = f"completions grew from {first:.0f} to {last:.0f} tokens"
        text += f", and the reward went from {first_reward:.2f} to {last_reward:.2f}"
        yield Finding(2, text, "a reward for length (SoftOverlong), or --algorithm.aggregation dr_grpo")


def check_movement(metrics: Metrics, config: dict[str, Any]) -> Iterator[Finding]:
    """The distance by which the steps of a rollout move the policy, and that from the policy that drew it."""
    steps = config.get("algorithm.epochs", 1) * config.get("algorithm.minibatches", 1)
    kl = metrics["kl_old_new"].median()
    if steps > 1 and kl < 1e-7:
        text = f"the steps of a rollout move nothing: KL(old || new) is {kl:.1g} at its last step"
        yield Finding(2, text, "raise --optimizer.lr: the ratio stays 1, where most surrogates are the same")
    _, low = metrics.ends("ratio_p1")
    _, high = metrics.ends("ratio_p99")
    if high > 2 or low < 0.5:
        text = f"1% of the last tokens have a ratio below {low:.2f}, 1% above {high:.2f}: far past a clip range of 0.2"
        yield Finding(2, text, "a lower --optimizer.lr, or fewer --algorithm.epochs")
    _, cut_off = metrics.ends("zero_weight_share")
    if cut_off > 0.1:
        text = f"{cut_off:.0%} of the last tokens with an advantage have no gradient: the surrogate cuts them off"
        yield Finding(2, text, "lower --optimizer.lr or --algorithm.epochs, or widen the clip range")
    first, last = metrics.ends("entropy")
    _, last_reward = metrics.ends("reward")
    if last < 0.2 * first and last_reward < 0.9:
        text = f"entropy fell from {first:.3f} to {last:.3f} nats a token: groups will come out equal"
        yield Finding(2, text, "a lower --optimizer.lr, fewer --algorithm.epochs, or --algorithm.beta above 0")
    _, apart = metrics.ends("kl_sampler_old")
    if apart > 0.01:
        text = f"what drew the rollouts and the policy that is trained are {apart:.2g} nats apart (KL per token)"
        advice = "--algorithm.correction token_truncate, a smaller --rollout.lag, or the engine's dtype"
        yield Finding(2, text, advice)


def check_rewards(metrics: Metrics, config: dict[str, Any]) -> Iterator[Finding]:
    """A reward that falls, or that rises without the accuracy."""
    rewards = metrics["reward"]
    window = max(1, len(rewards) // 5)
    smooth = rewards.rolling(window).mean().ffill()
    peak = smooth.max()
    last = smooth.iloc[-1]
    noise = rewards.diff().std() / window**0.5  # of the difference of two windows, trends aside
    if peak > 0 and last < min(0.8 * peak, peak - NOISE_ERRORS * noise):
        advice = "a lower --optimizer.lr or fewer --algorithm.epochs"
        if config.get("run.validate_every", 0):
            advice += "; `best/` has the better model"
        yield Finding(3, f"the reward fell from {peak:.2f} to {last:.2f}", advice)
    first_reward, last_reward = metrics.ends("validation_reward")
    first, last = metrics.ends("validation_accuracy")
    if last_reward > first_reward + 0.05 and last < first - 0.05:
        text = f"the validation reward rose from {first_reward:.2f} to {last_reward:.2f}"
        text += f" while its accuracy fell from {first:.2f} to {last:.2f}"
        yield Finding(3, text, "the policy may be exploiting the reward: read its best-paid completions")


def check_best_model(summary: dict[str, Any]) -> Iterator[Finding]:
    """A best model from long before the end."""
    step = summary.get("best_step")
    validation = summary.get("validation") or {}
    if step is None or not validation.get("final") or step >= summary.get("optimizer_steps", 0) / 2:
        return
    best, final = (validation[name]["validation_reward"] for name in ("best", "final"))
    if None not in (best, final) and final < best - 0.02:  # None: no reward was known
        text = f"the best model is step {step}'s ({best:.3f}); step {summary['optimizer_steps']}'s has {final:.3f}"
        yield Finding(2, text, "fewer steps, or a lower --optimizer.lr")
