"""Intervals and pass@k against known values and enumeration; evaluation's order, seed and prompts."""

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pspo.evaluate
from pspo.config import DataConfig, ModelConfig, RewardConfig
from pspo.evaluate import Prompts, evaluate, load_prompts, pass_at_k, percent, room_for_prompts, table
from pspo.metrics import cluster_bootstrap, wilson
from pspo.rollout import Rollout, Sampling, encode_prompts
from pspo.rollout.generate import left_pad
from pspo.tasks import Problem, load_problems

# ---------------------------------------------------------------- statistics


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(n=st.integers(1, 2000), share=st.floats(0, 1), z=st.floats(0.5, 4))
def test_wilson_is_the_oracles(n, share, z):
    successes = round(share * n)
    assert wilson(successes, n, z) == pytest.approx(reference.wilson_interval(successes, n, z), abs=1e-12)
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n + 1e-12
    assert successes / n - 1e-12 <= high <= 1


@pytest.mark.parametrize(  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", method 3
    ("successes", "n", "interval"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (1, 29, (0.0061, 0.1718))],
)
def test_wilson_gives_published_values(successes, n, interval):
    assert wilson(successes, n) == pytest.approx(interval, abs=5e-5)
    mirrored = wilson(n - successes, n)
    assert mirrored == pytest.approx((1 - interval[1], 1 - interval[0]), abs=5e-5)


def test_wilson_of_nothing_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


def test_cluster_bootstrap():
    assert cluster_bootstrap(np.full(30, 0.25)) == (0.25, 0.25)
    values = np.random.default_rng(5).choice([0.0, 0.5, 1.0], 400, p=[0.3, 0.3, 0.4])
    low, high = cluster_bootstrap(values)
    half = 1.96 * values.std() / math.sqrt(400)  # the normal limit
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    assert cluster_bootstrap(values) == (low, high)
    assert cluster_bootstrap(values, seed=1) != (low, high)
    # Two clusters: the mean of two draws from {0, 1} is 0, 1/2 or 1, the ends with probability 1/4 each.
    assert cluster_bootstrap(np.array([0.0, 1.0])) == (0.0, 1.0)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    for n in range(1, 8):
        for correct in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(range(n), k))
                share = sum(any(i < correct for i in subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-15)
    assert pass_at_k(1024, 1, 1) == 1 / 1024


def test_percent_and_table():
    assert percent(0.42) == "42.0%"
    assert percent(0.42, (0.3768, 0.4643)) == "42.0% [37.7, 46.4]"
    assert table([("a", "longer"), ("wider", 1)]) == "a      longer\nwider       1"


# ---------------------------------------------------------------- evaluate

SAMPLING = Sampling(stop_ids=[7], pad_id=0, max_completion_tokens=6, max_rows=4)


def scripted_generate(monkeypatch, say):
    """Replaces the sampling: each row says say(prompt ids, how often this prompt has spoken), or is cut off at None."""
    calls, spoken = [], {}

    def generate(policy, tokenizer, prompts, sampling, group_size=1):
        calls.append([list(prompt) for prompt in prompts])
        texts, lengths = [], []
        for prompt in prompts:
            for _ in range(group_size):
                turn = spoken[tuple(prompt)] = spoken.get(tuple(prompt), -1) + 1
                text = say(prompt, turn)
                texts.append(text or "")
                lengths.append(6 if text is None else len(prompt))
        ids, mask = (part.repeat_interleave(group_size, dim=0) for part in left_pad(prompts, 0))
        completion_mask = torch.arange(6) < torch.tensor(lengths)[:, None]
        ended = torch.tensor([length < 6 for length in lengths])
        return Rollout(ids, mask, torch.ones(len(texts), 6, dtype=torch.int64), completion_mask, ended, texts)

    monkeypatch.setattr(pspo.evaluate, "generate", generate)
    return calls


class NoPolicy:
    device = torch.device("cpu")


LENGTHS = [3, 1, 5, 2, 4, 1, 2]
PROBLEMS = Prompts(
    [Problem(f"problem {i}", Fraction(100 + i)) for i in range(7)], [[i + 1] * n for i, n in enumerate(LENGTHS)]
)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_results_are_in_problem_order_although_decoded_by_length(monkeypatch, samples):
    calls = scripted_generate(monkeypatch, lambda prompt, turn: f"sample {turn}\n#### {99 + prompt[0]}")
    result = evaluate(NoPolicy(), None, PROBLEMS, SAMPLING, RewardConfig(), samples=samples)
    decoded = [len(prompt) for call in calls for prompt in call]
    assert decoded == sorted(LENGTHS)
    assert max(map(len, calls)) == {1: 4, 2: 2, 5: 1}[samples]  # max_rows of 4, problems whole
    expected = [(i, f"sample {turn}\n#### {100 + i}") for i in range(7) for turn in range(samples)]
    assert [(record["problem"], record["completion"]) for record in result.completions] == expected
    assert [record["gold"] for record in result.completions[::samples]] == [str(100 + i) for i in range(7)]
    assert [record["prompt"] for record in result.completions[::samples]] == [f"problem {i}" for i in range(7)]
    assert [record["tokens"] for record in result.completions[::samples]] == LENGTHS
    assert result.accuracy == result.true_accuracy == result.mean_reward == result.format_share == 1.0
    assert result.completion_tokens == pytest.approx(np.mean(LENGTHS))
    assert (result.n, result.samples, result.truncated_share) == (7, samples, 0.0)


def test_every_mean(monkeypatch):
    """Right in form; right without form; wrong in form; gold mentioned only; nothing; cut off; right to the 1e-6."""
    says = ["#### 100", "101", "#### 5", "103 or 104", "", None, "#### 106.0000005"]
    scripted_generate(monkeypatch, lambda prompt, turn: says[prompt[0] - 1])
    result = evaluate(NoPolicy(), None, PROBLEMS, SAMPLING, RewardConfig())
    assert [record["correct"] for record in result.completions] == [True, True, False, False, False, False, True]
    assert [record["reward"] for record in result.completions] == [1.0, 1.0, 0.05, 0.0, 0.0, 0.0, 1.0]
    assert [record["truncated"] for record in result.completions] == [False] * 5 + [True, False]
    assert result.accuracy == pytest.approx(3 / 7)
    assert result.ci95 == pytest.approx(reference.wilson_interval(3, 7), abs=1e-12)
    contains = [record["contains_gold"] for record in result.completions]
    assert contains[:6] == [True, True, False, True, False, False]
    assert result.true_accuracy == pytest.approx(sum(contains) / 7)
    assert result.true_accuracy_ci95 == pytest.approx(reference.wilson_interval(sum(contains), 7), abs=1e-12)
    assert result.mean_reward == pytest.approx(3.05 / 7)
    assert result.format_share == pytest.approx(3 / 7)
    assert result.truncated_share == pytest.approx(1 / 7)
    assert result.pass_at_k == {1: pytest.approx(3 / 7)}
    assert "completions" not in result.record()
    assert json.loads(json.dumps(result.record()))["n"] == 7


def test_several_samples_are_clusters_of_their_problem(monkeypatch):
    right = {1: 0, 2: 1, 3: 2, 4: 4, 5: 3, 6: 0, 7: 4}  # of 4 samples, by prompt
    scripted_generate(monkeypatch, lambda p, turn: f"#### {99 + p[0] if turn < right[p[0]] else 1}")
    result = evaluate(NoPolicy(), None, PROBLEMS, SAMPLING, RewardConfig(), samples=4)
    shares = np.array(list(right.values())) / 4
    assert result.accuracy == pytest.approx(shares.mean())
    assert result.ci95 == cluster_bootstrap(shares)
    assert result.mean_reward == pytest.approx(shares.mean() + 0.05 * (1 - shares.mean()))
    assert result.pass_at_k == {
        k: pytest.approx(np.mean([pass_at_k(4, count, k) for count in right.values()])) for k in (1, 2, 4)
    }
    assert result.pass_at_k[4] == pytest.approx(5 / 7)


@pytest.fixture
def few(tokenizer):
    problems = load_problems("arithmetic", "validation", limit=4)
    return Prompts(problems, encode_prompts(tokenizer, [problem.prompt for problem in problems]))


def test_the_same_seed_draws_the_same_and_leaves_torch_alone(load, tokenizer, few):
    policy = load("tiny-base")
    sampling = Sampling([tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_tokens=8, max_rows=7)

    def texts(seed, **changes):
        result = evaluate(policy, tokenizer, few, replace(sampling, **changes), RewardConfig(), samples=3, seed=seed)
        return [record["completion"] for record in result.completions]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        state = torch.get_rng_state()
        first = texts(0)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
        assert texts(0) == first
        assert texts(1) != first
        assert any(len(set(first[i : i + 3])) > 1 for i in range(0, len(first), 3))  # samples of one problem differ
        assert texts(0, temperature=0.0) == texts(1, temperature=0.0)


# ---------------------------------------------------------------- prompts


def test_room_for_prompts(tmp_path):
    switch = "rollout.max_completion_tokens"
    assert room_for_prompts(ModelConfig(), 128, switch) == 512 - 128
    assert room_for_prompts(ModelConfig(), 511, switch) == 1
    for limit in (512, 9999):
        with pytest.raises(ValueError, match=rf"^--rollout\.max_completion_tokens .* 512 positions, got {limit}$"):
            room_for_prompts(ModelConfig(), limit, switch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert room_for_prompts(ModelConfig(name_or_path=str(tmp_path)), 9999, switch) == math.inf


@pytest.fixture
def data(tmp_path):
    """Prompts of 1 to 20 times "word ", with the number of words as the answer."""
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"prompt": "word " * n, "answer": n}) + "\n" for n in range(1, 21)))
    return DataConfig(name="file", path=str(file), system_prompt="")


@pytest.mark.parametrize(("switch", "room"), [(True, math.inf), (False, 40)])
def test_long_prompts_are_dropped_and_counted(tokenizer, data, capsys, switch, room):
    everything = load_prompts(data, tokenizer, "test", None, math.inf)
    assert len(everything) == 20
    assert "dropped" not in "".join(capsys.readouterr())
    config = replace(data, max_prompt_tokens=40) if switch else data
    prompts = load_prompts(config, tokenizer, "test", None, room)
    kept = [i for i, ids in enumerate(everything.ids) if len(ids) <= 40]
    assert 0 < len(kept) < 20
    assert max(map(len, prompts.ids)) == max(len(ids) for ids in everything.ids if len(ids) <= 40)
    assert prompts.ids == [everything.ids[i] for i in kept]
    assert prompts.problems == [everything.problems[i] for i in kept]
    for problem, ids in zip(prompts.problems, prompts.ids, strict=True):
        assert tokenizer.decode(ids).count("word") == problem.answer  # whole, and each with its own
    assert "".join(capsys.readouterr()) == f"file test: dropped {20 - len(kept)} of 20 prompts over 40 tokens\n"


@pytest.mark.parametrize("room", [1, 3])
def test_no_prompt_left(tokenizer, data, room):
    with pytest.raises(ValueError, match=r"all 20 test prompts of file are longer than \d+ tokens") as error:
        load_prompts(data, tokenizer, "test", None, room)
    assert "--data.max_prompt_tokens" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_limit_counts_before_prompts_are_dropped(tokenizer, data):
    assert len(load_prompts(data, tokenizer, "test", 5, math.inf)) == 5
