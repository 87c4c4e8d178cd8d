"""The doctor: what is wrong with a run, in plain sentences with their numbers and what to try, worst first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pspo.records.files import flat, read_config, read_jsonl


class Finding(NamedTuple):
    """What is wrong, what to try, and how bad it is: 3 spoils the run, 2 costs results, 1 costs time."""

    severity: int
    text: str
    advice: str


Rule = Callable[[pd.DataFrame, dict[str, Any], dict[str, Any]], Finding | None]
RULES: list[Rule] = []
FEWEST = 5  # rollouts, before which a trend says nothing


def rule(check: Rule) -> Rule:
    """Add a rule: of the metrics by rollout, the switches and the summary ({} while the run trains)."""
    RULES.append(check)
    return check


def find(metrics: pd.DataFrame, config: dict[str, Any], summary: dict[str, Any]) -> list[Finding]:
    """Findings about a run, worst first."""
    if len(metrics) < FEWEST:
        return []
    found = [finding for check in RULES if (finding := check(metrics, config, summary)) is not None]
    return sorted(found, key=lambda finding: -finding.severity)


def find_in(run: Path, summary: dict[str, Any]) -> list[Finding]:
    """Findings about the run in a folder."""
    metrics = pd.DataFrame(read_jsonl(run / "metrics.jsonl"))
    return find(metrics.apply(pd.to_numeric, errors="coerce"), flat(read_config(run / "config.yaml")), summary)


def ends(metrics: pd.DataFrame, name: str) -> tuple[float, float]:
    """Means of a metric over the first and the last fifth of the rollouts that have it; NaN without any."""
    values = metrics[name].dropna().to_numpy() if name in metrics else np.array([])
    n = max(1, len(values) // 5)
    return (float(values[:n].mean()), float(values[-n:].mean())) if len(values) else (np.nan, np.nan)


@rule
def skipped_steps(metrics, config, summary):
    skipped, steps = int(metrics["steps_skipped"].sum()), int(metrics["step"].max())
    if skipped:
        severity = 3 if skipped > steps / 20 else 2
        text = f"{skipped} of {steps} optimizer steps were skipped: loss, gradient or log-probs were not finite"
        return Finding(severity, text, "lower --optimizer.lr; check the surrogate and the reward")


@rule
def unknown_rewards(metrics, config, summary):
    share = metrics["reward_unknown_share"].mean()
    if share > 0:
        text = f"{share:.1%} of the completions had no reward, and taught nothing"
        return Finding(
            3 if share > 0.2 else 2, text, "look at the first failure on stderr; --reward.timeout may be short"
        )


@rule
def no_signal(metrics, config, summary):
    (first, last), reward = ends(metrics, "zero_advantage_share"), ends(metrics, "reward")[1]
    if first > 0.8 or (last > 0.8 and reward < 0.8):  # a run that has learnt its problems ends without signal
        hard = "problems are too hard, or the format is never met" if reward < 0.5 else "problems are too easy"
        text = f"{max(first, last):.0%} of the completions have no advantage: their group's rewards are equal ({hard})"
        return Finding(
            2, text, "--rollout.resample 2, a larger --rollout.group_size, or problems of another difficulty"
        )


@rule
def format_never_learnt(metrics, config, summary):
    if ends(metrics, "format_share")[1] < 0.1:
        text = f"{ends(metrics, 'format_share')[1]:.0%} of the last completions end in the format '#### <number>'"
        return Finding(3, text, "a --data.system_prompt with an example, or an instruct model")


@rule
def truncated(metrics, config, summary):
    _, share = ends(metrics, "truncated_share")
    if share > 0.3:
        limit = config["rollout.max_completion_tokens"]
        text = f"{share:.0%} of the last completions hit the limit of {limit} tokens"
        return Finding(3 if share > 0.8 else 2, text, "raise --rollout.max_completion_tokens, or check the stop tokens")


@rule
def limit_far_off(metrics, config, summary):
    longest, limit = metrics["completion_tokens_max"].max(), int(config["rollout.max_completion_tokens"])
    if longest < limit / 8:
        text = f"the longest completion has {longest:.0f} tokens, and the limit is {limit}"
        return Finding(1, text, f"--rollout.max_completion_tokens {2 * longest:.0f} plans less memory")


@rule
def nothing_moves(metrics, config, summary):
    if config["algorithm.epochs"] * config["algorithm.minibatches"] > 1:
        kl = metrics["kl_old_new"].median()
        if kl < 1e-7:
            text = f"the steps of a rollout move nothing: KL(old || new) is {kl:.1g} at its last step"
            return Finding(2, text, "raise --optimizer.lr: the ratio stays 1, where most surrogates are the same")


@rule
def far_off_policy(metrics, config, summary):
    _, low = ends(metrics, "ratio_p1")
    _, high = ends(metrics, "ratio_p99")
    if high > 2 or low < 0.5:
        text = f"1% of the last tokens have a ratio below {low:.2f}, 1% above {high:.2f}: far past a clip range of 0.2"
        return Finding(2, text, "a lower --optimizer.lr, or fewer --algorithm.epochs")


@rule
def clipped(metrics, config, summary):
    _, share = ends(metrics, "zero_weight_share")
    if share > 0.1:
        text = f"{share:.0%} of the last tokens with an advantage have no gradient: the surrogate cuts them off"
        return Finding(2, text, "lower --optimizer.lr or --algorithm.epochs, or widen the clip range")


@rule
def entropy_collapses(metrics, config, summary):
    first, last = ends(metrics, "entropy")
    reward = ends(metrics, "reward")
    if last < 0.2 * first and reward[1] < 0.9:
        text = f"entropy fell from {first:.3f} to {last:.3f} nats a token: groups will come out equal"
        return Finding(2, text, "a lower --optimizer.lr, fewer --algorithm.epochs, or --algorithm.beta above 0")


@rule
def reward_falls(metrics, config, summary):
    values = metrics["reward"].rolling(max(1, len(metrics) // 5)).mean().dropna()
    peak, last = values.max(), values.iloc[-1]
    if peak > 0 and last < 0.8 * peak and values.idxmax() != values.index[-1]:
        text = f"the reward fell from {peak:.2f} to {last:.2f}"
        return Finding(3, text, "a lower --optimizer.lr or fewer --algorithm.epochs; `best/` has the better model")


@rule
def reward_without_accuracy(metrics, config, summary):
    rewards, accuracies = ends(metrics, "validation_reward"), ends(metrics, "validation_accuracy")
    if rewards[1] > rewards[0] + 0.05 and accuracies[1] < accuracies[0] - 0.05:
        text = (f"the validation reward rose from {rewards[0]:.2f} to {rewards[1]:.2f} while its accuracy fell from "
                f"{accuracies[0]:.2f} to {accuracies[1]:.2f}")  # fmt: skip
        return Finding(3, text, "the policy may be exploiting the reward: read its best-paid completions")


@rule
def longer_without_reward(metrics, config, summary):
    lengths, rewards = ends(metrics, "completion_tokens"), ends(metrics, "reward")
    if lengths[1] > 1.5 * lengths[0] and rewards[1] < rewards[0] + 0.02:
        text = (f"completions grew from {lengths[0]:.0f} to {lengths[1]:.0f} tokens, and the reward went from "
                f"{rewards[0]:.2f} to {rewards[1]:.2f}")  # fmt: skip
        return Finding(2, text, "a reward for length (SoftOverlong), or --algorithm.aggregation dr_grpo")


@rule
def best_early(metrics, config, summary):
    best, final = summary.get("best_step"), summary.get("optimizer_steps", 0)
    validation = summary.get("validation") or {}
    if best is not None and validation.get("final") and best < final / 2:
        rewards = [validation[name]["validation_reward"] for name in ("best", "final")]
        if rewards[1] < rewards[0] - 0.02:
            text = f"the best model is step {best}'s ({rewards[0]:.3f}); step {final}'s has {rewards[1]:.3f}"
            return Finding(2, text, "fewer steps, or a lower --optimizer.lr")


@rule
def sampler_apart(metrics, config, summary):
    _, apart = ends(metrics, "kl_sampler_old")
    if apart > 0.01:
        text = f"what drew the rollouts and the policy that is trained are {apart:.2g} nats apart (KL per token)"
        return Finding(2, text, "--algorithm.correction token_truncate, a smaller --rollout.lag, or the engine's dtype")
