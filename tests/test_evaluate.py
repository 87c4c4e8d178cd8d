"""Evaluation: statistics against known values, means and breakdowns by hand, chunks, seeds."""

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from pspo.config import RewardConfig
from pspo.evaluate.__main__ import render
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.statistics import Number, breakdown, interval, pass_at_k, read_numbers, summarise
from pspo.rollout import How, PolicySampler, Prompts, Rollout, Sampling, encode_prompts, left_pad
from pspo.tasks import ExactMatch, FormatReward, MathReward, MathVerifyReward, Problem, Reward, load_problems

# --- statistics -------------------------------------------------------------------------------------------------------


def wilson(successes, n):
    return interval(np.arange(n) < successes)


def test_wilson_gives_published_values():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)


def test_cluster_bootstrap():
    values = np.random.default_rng(5).choice([0.0, 0.5, 1.0], 400, p=[0.3, 0.3, 0.4])
    half = 1.96 * values.std() / math.sqrt(400)  # the normal limit
    assert interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    # The mean of two draws from {0, 1/2} is 0, 1/4 or 1/2, the ends with probability 1/4 each.
    assert interval(np.array([0.0, 0.5])) == (0.0, 0.5)
    assert interval(np.array([0.5])) is None


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    for n in range(1, 8):
        for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
            hits = [any(i < correct for i in subset) for subset in itertools.combinations(range(n), k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(hits) / len(hits), abs=1e-15)


# --- means and breakdowns ---------------------------------------------------------------------------------------------

SCRIPTED = PolicySampler(None)
HOW = How(Sampling(stop_ids=[7], pad_id=0, temperature=1.0, top_p=1.0, max_completion_tokens=6, max_rows=4))
LENGTHS = [3, 1, 5, 2, 4, 1, 2]
ABOUT = {"model": "m", "data": "d", "split": "test", "n": 7}  # in results.json
PROBLEMS = Prompts(  # problem i asks for 100 + i, and its prompt is a number of tokens i
    [Problem(f"problem {i}", Fraction(100 + i)) for i in range(7)], [[i] * n for i, n in enumerate(LENGTHS)]
)


@pytest.fixture
def scripted(monkeypatch):
    """Replaces sampling: scripted(say) has sample s of problem i say say(i, s), or be cut off at None.

    Returns the lengths of each call's prompts.
    """

    def script(say) -> list[list[int]]:
        calls, sample = [], [itertools.count() for _ in range(7)]

        def draw(sampler, prompts, group_size, how):
            calls.append([len(prompt) for prompt in prompts.ids])
            rows = [prompt for prompt in prompts.ids for _ in range(group_size)]
            said = [say(prompt[0], next(sample[prompt[0]])) for prompt in rows]
            texts = [text or "" for text in said]
            lengths = [6 if text is None else len(prompt) for text, prompt in zip(said, rows, strict=True)]
            ids, mask = (part.repeat_interleave(group_size, dim=0) for part in left_pad(prompts.ids, 0))
            completion_mask = torch.arange(6) < torch.tensor(lengths)[:, None]
            ended = torch.tensor([length < 6 for length in lengths])
            return Rollout(ids, mask, torch.ones(len(texts), 6, dtype=torch.int64), completion_mask, ended, texts)

        monkeypatch.setattr(PolicySampler, "draw", draw)
        return calls

    return script


def test_records_are_in_problem_order_although_decoded_by_length(scripted):
    calls = scripted(lambda i, sample: f"sample {sample}\n#### {100 + i}")
    completions = evaluate(SCRIPTED, HOW, PROBLEMS, RewardConfig(), samples=2, max_tokens=33)
    assert calls == [[1, 1], [2, 2], [3], [4], [5]]  # rows of at most 33 tokens together
    found = [(record["problem"], record["sample"], record["completion"]) for record in completions]
    assert found == [(i, sample, f"sample {sample}\n#### {100 + i}") for i in range(7) for sample in (0, 1)]
    for i, record in enumerate(completions[::2]):
        assert (record["prompt"], record["gold"], record["tokens"]) == (f"problem {i}", f"{100 + i}", LENGTHS[i])


def test_every_mean(scripted):
    """Right in form; right without form; wrong in form; gold mentioned only; nothing; cut off; right to the 1e-6."""
    says = ["#### 100", "101", "#### 5", "103 or 104", "", None, "#### 106.0000005"]
    scripted(lambda i, sample: says[i])
    completions = evaluate(SCRIPTED, HOW, PROBLEMS, RewardConfig())
    columns = {key: [record[key] for record in completions] for key in completions[0]}
    assert columns["correct"] == [True, True, False, False, False, False, True]
    assert columns["contains_gold"] == [True, True, False, True, False, False, True]
    assert columns["reward"] == [1.0, 1.0, 0.05, 0.0, 0.0, 0.0, 1.0]
    assert columns["truncated"] == [False] * 5 + [True, False]
    result = summarise(completions)
    assert (result["accuracy"], result["accuracy_ci95"]) == (pytest.approx(3 / 7), wilson(3, 7))
    assert (result["gold_anywhere"], result["gold_anywhere_ci95"]) == (pytest.approx(4 / 7), wilson(4, 7))
    assert result["mean_reward_ci95"] == interval(np.array(columns["reward"]))
    assert not [name for name in result if "@" in name]  # of one sample they are the accuracy
    assert result.items() >= summarise(completions, intervals=False).items()
    means = [result[name] for name in ("mean_reward", "format_share", "truncated_share", "completion_tokens")]
    assert means == pytest.approx([3.05 / 7, 3 / 7, 1 / 7, (3 + 1 + 5 + 2 + 4 + 6 + 2) / 7])


def test_several_samples_are_clusters_of_their_problem(scripted):
    right = np.array([0, 1, 2, 6, 3, 0, 6])  # of 6 samples
    scripted(lambda i, sample: f"#### {100 + i if sample < right[i] else 1}")
    result = read_numbers(summarise(evaluate(SCRIPTED, HOW, PROBLEMS, RewardConfig(), samples=6)))
    assert result["accuracy"] == Number(pytest.approx(18 / 42), interval(right / 6))
    rewards = (right + (6 - right) * 0.05) / 6
    assert result["mean_reward"] == Number(pytest.approx((18 + 24 * 0.05) / 42), pytest.approx(interval(rewards)))
    assert result["reward/MathReward"] == result["mean_reward"]
    ks = (1, 2, 4, 6)  # powers of 2, and all
    assert [name for name in result if "@" in name] == [*(f"pass@{k}" for k in ks), "maj@6"]
    for k in ks:
        each = np.array([pass_at_k(6, count, k) for count in right.tolist()])
        expected = interval(each) if k < 6 else wilson(5, 7)  # of 6 samples each problem is 0 or 1
        assert result[f"pass@{k}"] == Number(pytest.approx(each.mean()), expected)
    assert result["maj@6"].value == pytest.approx(2.5 / 7)  # two all right, one right in half of its samples


def test_breakdowns(scripted):
    kinds = zip(["add", "add", "divide", "divide", "add", "add", ""], "1212121", PROBLEMS.problems, strict=True)
    problems = [replace(problem, category=category, level=level) for category, level, problem in kinds]
    right = [2, 1, 0, 0, 2, 0, 1]  # of 2 samples
    scripted(lambda i, sample: f"#### {100 + i if sample < right[i] else 1}")
    completions = evaluate(SCRIPTED, HOW, Prompts(problems, PROBLEMS.ids), RewardConfig(), samples=2)
    result = breakdown(completions, problems)
    shares = {part: {kind: (of["n"], of["accuracy"]) for kind, of in groups.items()} for part, groups in result.items()}
    assert shares == {  # and not by source, for there is one only
        "category": {"": (1, 0.5), "add": (4, 0.625), "divide": (2, 0.0)},
        "level": {"1": (4, 0.625), "2": (3, pytest.approx(1 / 6))},
    }
    assert result["category"][""]["accuracy_ci95"] is None  # a single problem
    assert result["category"]["add"]["accuracy_ci95"] == interval(np.array([1, 0.5, 1, 0]))


class Length(Reward):
    """0.25 per letter of the completion; unknown for an empty one."""

    def __call__(self, completions, problems):
        return [len(text) / 4 if text else math.nan for text in completions]


def test_without_answers_there_are_rewards_alone_and_unknown_ones_are_left_out(scripted):
    problems = [replace(problem, answer=None) for problem in PROBLEMS.problems]
    scripted(lambda i, sample: "four" * i)
    config = RewardConfig([Length(), FormatReward()], [2.0, 1.0], on_error="none")
    completions = evaluate(SCRIPTED, HOW, Prompts(problems, PROBLEMS.ids), config)
    first, second = completions[:2]
    assert (first["reward"], first["rewards"]) == (None, {"Length": None, "FormatReward": 0.0})
    assert (second["reward"], second["rewards"]) == (2.0, {"Length": 1.0, "FormatReward": 0.0})
    assert (second["correct"], second["contains_gold"], second["format"], second["gold"]) == (None,) * 4
    result = summarise(completions)
    known = np.arange(1.0, 7)
    numbers = read_numbers(result)
    assert numbers["mean_reward"] == Number(7.0, interval(2 * known), 1)
    assert numbers["reward/Length"] == Number(3.5, interval(known), 1)
    assert numbers["reward/FormatReward"] == Number(0.0, wilson(0, 7))
    assert not {"accuracy", "mean_reward_left_out"} & numbers.keys()
    text = render(ABOUT | {"temperatures": {"0": result | {"breakdown": {}}}})
    assert re.search(r"^reward +7\.000 \[.*\] \(1 left out\)$", text, re.MULTILINE)
    nested = {"mean_reward": {"value": 7.0, "ci95": [1, 9], "left_out": 1}, "breakdown": {"level": {}}}
    assert read_numbers(nested) == {"mean_reward": Number(7.0, [1, 9], 1)}  # from results.json of earlier commits


@pytest.mark.parametrize(
    ("said", "gold", "share"),
    [
        (["0.3333333", "1/3", "0.33333333", "2", "2"], Fraction(1, 3), 1.0),
        (["0.9999991", "1.0000009", "2", "2"], Fraction(1), 0.5),  # each as near to the gold one as it may be
        (["", "", "1"], Fraction(1), 1.0), (["", ""], Fraction(1), 0.0),
    ],
)  # fmt: skip
def test_answers_within_the_tolerance_of_the_gold_one_vote_together(scripted, said, gold, share):
    scripted(lambda i, sample: said[sample] and f"#### {said[sample]}")
    prompts = Prompts([Problem("?", gold)], [[0]])
    result = summarise(evaluate(SCRIPTED, HOW, prompts, RewardConfig(), samples=len(said), max_tokens=10**6))
    assert result[f"maj@{len(said)}"] == share


def test_text_answers_vote_by_their_text(scripted):
    said = [["#### yes", "#### no", "#### yes ", ""], ["#### yes", "#### no", "####", "#### no"]]
    problems = [replace(problem, answer="yes") for problem in PROBLEMS.problems[:2]]
    scripted(lambda i, sample: said[i][sample])
    prompts = Prompts(problems, PROBLEMS.ids[:2])
    result = summarise(evaluate(SCRIPTED, HOW, prompts, RewardConfig([ExactMatch()]), samples=4))
    assert "format_share" not in result  # of numbers
    assert (result["accuracy"], result["maj@4"], result["maj@4_ci95"]) == (3 / 8, 0.5, wilson(1, 2))


def compares(completions, answer):
    return [float(str(gold) in text) for gold, text in zip(answer, completions, strict=True)]


@pytest.mark.parametrize(
    ("functions", "answer", "accuracy"),
    [
        ([MathReward()], Fraction(1), 1),
        ([MathReward(marker="first")], Fraction(1), 0),
        ([MathReward(0.01, marker="first")], Fraction(1), 1),
        ([compares], Fraction(1), 1),
        ([compares], "1", None),
        ([FormatReward()], Fraction(1), None),
        ([MathVerifyReward()], Fraction(1), 1),
        ([MathVerifyReward()], "1", None),  # a formula, which accuracy would compare as text
    ],
)
def test_accuracy_is_given_where_a_reward_compares_answers_by_its_rules(scripted, functions, answer, accuracy):
    scripted(lambda i, sample: "#### 1.01\nuser: more\n#### 1")
    prompts = Prompts([replace(PROBLEMS.problems[0], answer=answer)], PROBLEMS.ids[:1])
    result = summarise(evaluate(SCRIPTED, HOW, prompts, RewardConfig(functions)))
    assert (result.get("accuracy"), "gold_anywhere" in result) == (accuracy, accuracy is not None)


# --- real completions -------------------------------------------------------------------------


@pytest.fixture
def draw(load, tokenizer):
    """Evaluates tiny-base on four problems, three samples each; the arguments override."""
    policy, problems = load("tiny-base"), load_problems("arithmetic", "validation", limit=4)
    prompts = Prompts(problems, encode_prompts(tokenizer, [problem.prompt for problem in problems]))
    sampling = Sampling([tokenizer.eos_token_id], tokenizer.pad_token_id, 1.0, 1.0, max_completion_tokens=8)
    longest = max(map(len, prompts.ids)) + 8

    def run(seed=5, rows=2, temperature=1.0, **options):
        options = {"samples": 3, "max_tokens": rows * longest} | options
        how = How(replace(sampling, temperature=temperature), policy)
        return evaluate(PolicySampler(tokenizer), how, prompts, RewardConfig(), seed=seed, **options)

    return run


def test_a_seed_draws_the_same_completions_and_leaves_torch_alone(draw):
    def texts(seed, **how):
        return [record["completion"] for record in draw(seed, **how)]

    state = torch.get_rng_state()
    first = texts(0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert texts(0) == first != texts(1)
    assert any(len(set(first[i : i + 3])) > 1 for i in range(0, len(first), 3))  # samples of one problem differ
    assert texts(0, temperature=0.0) == texts(1, temperature=0.0)
