"""The doctor: what is wrong with a run, in plain sentences with their numbers and what to try, worst first."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from pspo.cli.files import flat, read_config, read_jsonl

FEWEST = 5  # rollouts, before which a trend says nothing


class Finding(NamedTuple):
    """What is wrong, what to try, and how bad it is: 3 spoils the run, 2 costs results, 1 costs time."""

    severity: int
    text: str
    advice: str


def find_in(run: Path, summary: dict[str, Any]) -> list[Finding]:
    """Findings about the run in a folder."""
    metrics = pd.DataFrame(read_jsonl(run / "metrics.jsonl"))
    return find(metrics.apply(pd.to_numeric, errors="coerce"), flat(read_config(run / "config.yaml")), summary)


def find(metrics: pd.DataFrame, config: dict[str, Any], summary: dict[str, Any]) -> list[Finding]:
    """Findings about a run, worst first."""
    findings = check(metrics, config, summary) if len(metrics) >= FEWEST else ()
    return sorted(findings, key=lambda finding: -finding.severity)


def ends(metrics: pd.DataFrame, name: str) -> tuple[float, float]:
    """Means of a metric over the first and the last fifth of the rollouts that have it; NaN without any."""
    values = metrics[name].dropna().to_numpy() if name in metrics else np.array([])
    n = max(1, len(values) // 5)
    return (float(values[:n].mean()), float(values[-n:].mean())) if len(values) else (np.nan, np.nan)


def check(metrics: pd.DataFrame, config: dict[str, Any], summary: dict[str, Any]) -> Iterator[Finding]:
    """Yield what each rule finds in the metrics by rollout, the switches and the summary ({} while the run trains)."""
    skipped, steps = int(metrics["steps_skipped"].sum()), int(metrics["step"].max())
    if skipped:
        text = f"{skipped} of {steps} optimizer steps were skipped: loss, gradient or log-probs were not finite"
        advice = "lower --optimizer.lr; check the surrogate and the reward"
        yield Finding(3 if skipped > steps / 20 else 2, text, advice)

    unknown = metrics["reward_unknown_share"].mean()
    if unknown > 0:
        text = f"{unknown:.1%} of the completions had no reward, and taught nothing"
        advice = "look at the first failure on stderr; --reward.timeout may be short"
        yield Finding(3 if unknown > 0.2 else 2, text, advice)

    (first, last), (first_reward, last_reward) = ends(metrics, "zero_advantage_share"), ends(metrics, "reward")
    if first > 0.8 or (last > 0.8 and last_reward < 0.8):  # a run that has learnt its problems ends without signal
        share, reward = max((first, first_reward), (last, last_reward))
        why, other = "its completions are too much alike", "a higher --rollout.temperature"
        if not 0.2 <= reward <= 0.8:
            hard, other = "problems are too hard, or the format is never met", "problems of another difficulty"
            why = hard if reward < 0.2 else "problems are too easy"
        text = f"{share:.0%} of the completions have no advantage: their group's rewards are equal ({why})"
        advice = f"--rollout.resample 2, a larger --rollout.group_size, or {other}"
        yield Finding(2, text, advice)

    _, in_format = ends(metrics, "format_share")
    if in_format < 0.1:
        text = f"{in_format:.0%} of the last completions end in the format '#### <number>'"
        yield Finding(3, text, "a --data.system_prompt with an example, or an instruct model")

    _, truncated = ends(metrics, "truncated_share")
    limit = config["rollout.max_completion_tokens"]
    if truncated > 0.3:
        text = f"{truncated:.0%} of the last completions hit the limit of {limit} tokens"
        advice = "raise --rollout.max_completion_tokens, or check the stop tokens"
        yield Finding(3 if truncated > 0.8 else 2, text, advice)

    longest = metrics["completion_tokens_max"].max()
    if longest < int(limit) / 8:
        text = f"the longest completion has {longest:.0f} tokens, and the limit is {limit}"
        yield Finding(1, text, f"--rollout.max_completion_tokens {2 * longest:.0f} plans less memory")

    several_steps = config["algorithm.epochs"] * config["algorithm.minibatches"] > 1
    if several_steps and (kl := metrics["kl_old_new"].median()) < 1e-7:
        text = f"the steps of a rollout move nothing: KL(old || new) is {kl:.1g} at its last step"
        yield Finding(2, text, "raise --optimizer.lr: the ratio stays 1, where most surrogates are the same")

    (_, low), (_, high) = ends(metrics, "ratio_p1"), ends(metrics, "ratio_p99")
    if high > 2 or low < 0.5:
        text = f"1% of the last tokens have a ratio below {low:.2f}, 1% above {high:.2f}: far past a clip range of 0.2"
        yield Finding(2, text, "a lower --optimizer.lr, or fewer --algorithm.epochs")

    _, cut_off = ends(metrics, "zero_weight_share")
    if cut_off > 0.1:
        text = f"{cut_off:.0%} of the last tokens with an advantage have no gradient: the surrogate cuts them off"
        yield Finding(2, text, "lower --optimizer.lr or --algorithm.epochs, or widen the clip range")

    first, last = ends(metrics, "entropy")
    if last < 0.2 * first and last_reward < 0.9:
        text = f"entropy fell from {first:.3f} to {last:.3f} nats a token: groups will come out equal"
        yield Finding(2, text, "a lower --optimizer.lr, fewer --algorithm.epochs, or --algorithm.beta above 0")

    smooth = metrics["reward"].rolling(max(1, len(metrics) // 5)).mean().dropna()
    peak, last = smooth.max(), smooth.iloc[-1]
    if peak > 0 and last < 0.8 * peak and smooth.idxmax() != smooth.index[-1]:
        text = f"the reward fell from {peak:.2f} to {last:.2f}"
        yield Finding(3, text, "a lower --optimizer.lr or fewer --algorithm.epochs; `best/` has the better model")

    rewards, accuracies = ends(metrics, "validation_reward"), ends(metrics, "validation_accuracy")
    if rewards[1] > rewards[0] + 0.05 and accuracies[1] < accuracies[0] - 0.05:
        fell = f"while its accuracy fell from {accuracies[0]:.2f} to {accuracies[1]:.2f}"
        text = f"the validation reward rose from {rewards[0]:.2f} to {rewards[1]:.2f} {fell}"
        yield Finding(3, text, "the policy may be exploiting the reward: read its best-paid completions")

    first, last = ends(metrics, "completion_tokens")
    if last > 1.5 * first and last_reward < first_reward + 0.02:
        text = f"completions grew from {first:.0f} to {last:.0f} tokens"
        text += f", and the reward went from {first_reward:.2f} to {last_reward:.2f}"
        yield Finding(2, text, "a reward for length (SoftOverlong), or --algorithm.aggregation dr_grpo")

    step, validation = summary.get("best_step"), summary.get("validation") or {}
    if step is not None and validation.get("final") and step < summary.get("optimizer_steps", 0) / 2:
        best, final = (validation[name]["validation_reward"] for name in ("best", "final"))
        if final < best - 0.02:
            text = f"the best model is step {step}'s ({best:.3f}); step {summary['optimizer_steps']}'s has {final:.3f}"
            yield Finding(2, text, "fewer steps, or a lower --optimizer.lr")

    _, apart = ends(metrics, "kl_sampler_old")
    if apart > 0.01:
        text = f"what drew the rollouts and the policy that is trained are {apart:.2g} nats apart (KL per token)"
        advice = "--algorithm.correction token_truncate, a smaller --rollout.lag, or the engine's dtype"
        yield Finding(2, text, advice)
