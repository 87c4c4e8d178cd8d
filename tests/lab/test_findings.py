"""The doctor: every rule finds the run that has its fault, and is silent on healthy ones."""

import numpy as np
import pandas as pd
import pytest

from pspo_lab.findings import find

N = 50
CONFIG = {"rollout.max_completion_tokens": 128, "algorithm.epochs": 2, "algorithm.minibatches": 1,
          "reward.functions": '[{"class_path": "pspo.tasks.MathReward"}]'}  # fmt: skip
RISING, FALLING = np.linspace(0.3, 0.9, N), np.linspace(0.9, 0.3, N)
HEALTHY = {
    "step": 2 * np.arange(1, N + 1), "steps_skipped": 0, "reward_unknown_share": 0.0, "zero_advantage_share": 0.5,
    "reward": RISING, "format_share": 0.95, "truncated_share": 0.01, "completion_tokens": 24.0,
    "completion_tokens_max": 40.0, "kl_old_new": 1e-4, "ratio_p1": 0.95, "ratio_p99": 1.05, "zero_weight_share": 0.01,
    "entropy": 0.1, "validation_reward": RISING, "validation_accuracy": RISING,
}  # fmt: skip
FAULTS = {
    "skipped_steps": ({"steps_skipped": [0] * (N - 4) + [2] * 4}, "8 of 100 optimizer steps were skipped"),
    "unknown_rewards": ({"reward_unknown_share": 0.25}, "25.0% of the completions had no reward"),
    "no_signal": ({"zero_advantage_share": 0.9, "reward": 0.05}, "90% of the completions have no advantage"),
    "format_never_learnt": ({"format_share": 0.02}, "2% of the last completions end in the format"),
    "truncated": ({"truncated_share": 0.9}, "90% of the last completions hit the limit of 128 tokens"),
    "nothing_moves": ({"kl_old_new": 1e-9}, "the steps of a rollout move nothing"),
    "far_off_policy": ({"ratio_p1": 0.2, "ratio_p99": 3.0}, "1% of the last tokens have a ratio below 0.20"),
    "clipped": ({"zero_weight_share": 0.3}, "30% of the last tokens with an advantage have no gradient"),
    "entropy_collapses": ({"entropy": np.linspace(1, 0.01, N), "reward": 0.5}, "entropy fell from 0.909 to"),
    "reward_falls": ({"reward": np.where(np.arange(N) % 3, FALLING, np.nan)}, "the reward fell from"),
    "reward_without_accuracy": ({"validation_accuracy": FALLING}, "the validation reward rose from"),
    "longer_without_reward": (
        {"completion_tokens": np.linspace(20, 60, N), "reward": 0.5}, "completions grew from 24 to 56 tokens"),
    "sampler_apart": ({"kl_sampler_old": 0.05}, "what drew the rollouts and the policy that is trained are 0.05 nats"),
}  # fmt: skip


def found(metrics: dict) -> list:
    return find(pd.DataFrame(HEALTHY | metrics), CONFIG)


def test_a_healthy_run_has_no_findings():
    assert found({}) == []
    rng = np.random.default_rng(0)
    falls = 0
    for n in (5, 50):  # noise alone, also where a window is one rollout
        for _ in range(100):
            metrics = pd.DataFrame(HEALTHY | {"reward": 0.5 + 0.15 * rng.standard_normal(N)}).iloc[:n]
            falls += any("the reward fell" in finding.text for finding in find(metrics, CONFIG))
    assert falls < 5  # 1% of 200, and luck
    assert found({"zero_advantage_share": np.linspace(0.3, 0.95, N)}) == []  # it has learnt its problems
    assert found({"steps_skipped": np.nan, "kl_sampler_old": np.nan}) == []
    assert found({"zero_advantage_share": np.nan}) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(name):
    metrics, text = FAULTS[name]
    findings = found(metrics)
    assert [finding.text for finding in findings if finding.text.startswith(text)], findings
    assert all(finding.advice for finding in findings)
    for finding in find(pd.DataFrame(HEALTHY | metrics), CONFIG | {"trainer": "trl"}):
        assert "--" not in finding.advice  # switches that TRL has not


def test_advice_fits_the_run():
    config = CONFIG | {"reward.functions": '["mine.in_a_box"]'}
    assert find(pd.DataFrame(HEALTHY | {"format_share": 0.0}), config) == []  # another format
    for every in (0, 20):
        config = CONFIG | {"run.validate_every": every}
        (advice,) = (finding.advice for finding in find(pd.DataFrame(HEALTHY | {"reward": FALLING}), config))
        assert ("best/" in advice) == (every > 0)
