"""Intervals and pass@k against known values and enumeration; evaluation's order, seed and prompts."""

import itertools
import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pspo.evaluate.__main__
from pspo.config import DataConfig, ModelConfig, RewardConfig
from pspo.evaluate.__main__ import Chunk, Prompts, chunks, evaluate, fingerprint, load_prompts, room_for_prompts
from pspo.rollout import Rollout, Sampling, encode_prompts
from pspo.rollout.generate import left_pad
from pspo.run.records import append_jsonl, cluster_bootstrap, read_jsonl, wilson
from pspo.run.results import pass_at_k, percent, render, summarise, table
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
    result = evaluate(NoPolicy(), None, PROBLEMS, SAMPLING, RewardConfig(), samples=samples, max_tokens=33)
    expected = {  # 4, 4, 4, 4, 3, 3, 3 rows of 6 completion tokens and a prompt of 1, 1, 2, 2, 3, 4, 5 tokens
        1: [[1, 1, 2, 2], [3, 4, 5]],
        2: [[1, 1], [2, 2], [3], [4], [5]],
        5: [[length] for length in (1, 1, 2, 2, 3, 4, 5) for _ in range(2)],  # and 5 samples in two turns
    }[samples]
    assert [[len(prompt) for prompt in call] for call in calls] == expected
    expected = [(i, turn, f"sample {turn}\n#### {100 + i}") for i in range(7) for turn in range(samples)]
    found = [(record["problem"], record["sample"], record["completion"]) for record in result.completions]
    assert found == expected
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
    for k in (1, 2, 4):
        each = np.array([pass_at_k(4, count, k) for count in right.values()])
        assert result.pass_at_k_ci95[k] == cluster_bootstrap(each)
    assert result.pass_at_k_ci95[1] == result.ci95
    contains = np.array([np.mean([r["contains_gold"] for r in result.completions[i : i + 4]]) for i in range(0, 28, 4)])
    assert result.true_accuracy_ci95 == cluster_bootstrap(contains)


def test_pass_at_all_samples_is_there_where_their_number_is_no_power_of_2(monkeypatch):
    scripted_generate(monkeypatch, lambda p, turn: f"#### {99 + p[0] if turn == 0 else 1}")  # 1 of 6 is right
    result = evaluate(NoPolicy(), None, PROBLEMS, SAMPLING, RewardConfig(), samples=6)
    assert result.pass_at_k == {k: pytest.approx(k / 6) for k in (1, 2, 4, 6)}
    assert result.pass_at_k_ci95 == {k: pytest.approx((k / 6, k / 6)) for k in (1, 2, 4, 6)}


def test_results_and_their_tables(monkeypatch):
    """Two categories and two levels of one source; the numbers by hand."""
    kinds = [("add", "1"), ("add", "2"), ("divide", "1"), ("divide", "2"), ("add", "1"), ("add", "2"), ("", "1")]
    problems = [Problem(p.prompt, p.answer, "file", *kind) for p, kind in zip(PROBLEMS.problems, kinds, strict=True)]
    right = [2, 1, 0, 0, 2, 0, 1]  # of 2 samples
    scripted_generate(monkeypatch, lambda p, turn: f"#### {99 + p[0] if turn < right[p[0] - 1] else 1}")
    result = evaluate(NoPolicy(), None, Prompts(problems, PROBLEMS.ids), SAMPLING, RewardConfig(), samples=2)
    results = json.loads(json.dumps(result.results()))
    assert {"samples", "accuracy", "true_accuracy", "pass@1", "pass@2", "mean_reward", "format_share",
            "truncated_share", "completion_tokens", "breakdown"} == set(results)  # fmt: skip
    assert results["accuracy"] == {"value": 3 / 7, "ci95": list(cluster_bootstrap(np.array(right) / 2))}
    assert results["pass@2"]["value"] == pytest.approx(4 / 7)
    assert results["pass@2"]["ci95"] == list(cluster_bootstrap((np.array(right) > 0).astype(float)))

    breakdown = results["breakdown"]
    assert set(breakdown) == {"category", "level"}  # not by source: there is one only
    shares = {part: {value: (group["n"], group["accuracy"]["value"]) for value, group in groups.items()}
              for part, groups in breakdown.items()}  # fmt: skip
    assert shares == {
        "category": {"": (1, 0.5), "add": (4, 0.625), "divide": (2, 0.0)},
        "level": {"1": (4, 0.625), "2": (3, pytest.approx(1 / 6))},
    }
    assert breakdown["category"]["add"]["accuracy"]["ci95"] == list(cluster_bootstrap(np.array([1, 0.5, 1, 0])))
    assert breakdown["category"]["divide"]["true_accuracy"] == {"value": 0.0, "ci95": [0.0, 0.0]}

    mixed = [replace(problem, source=source) for problem, source in zip(problems, ["a", *"bbbbbb"], strict=True)]
    breakdown = summarise(mixed, result.completions, samples=2).breakdown
    assert {source: group["n"] for source, group in breakdown["source"].items()} == {"a": 1, "b": 6}
    assert breakdown["source"]["a"]["accuracy"] == {"value": 1.0, "ci95": (1.0, 1.0)}

    greedy = evaluate(NoPolicy(), None, Prompts(problems, PROBLEMS.ids), SAMPLING, RewardConfig()).results()
    assert greedy["breakdown"]["level"]["1"]["accuracy"] == {"value": 0.0, "ci95": wilson(0, 4)}  # turns went on to 2
    head = {"model": "m", "data": "file", "split": "test", "n": 7, "samples": 2}
    lines = render(head | {"temperatures": {"0": greedy, "0.6": results}}).splitlines()
    assert lines[0] == "m on 7 problems of file test"
    assert lines[1].split("  ")[0] == "temperature"
    assert lines[3].startswith("0.6          42.9% [")
    (passes,) = [line for line in lines if "pass@1 of 2 [95%]  " in line]
    assert re.search(r"^0\.6 +42\.9% \[.*\] +57\.1% \[", lines[lines.index(passes) + 1])
    assert any(re.search(r"^add +4 +0\.0% \[0\.0, 49\.0\] +62\.5% \[", line) for line in lines)
    assert any(re.search(r"^- +1 +", line) for line in lines)


# ---------------------------------------------------------------- chunks, and going on


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    samples=st.integers(1, 9),
    limit=st.integers(1, 40),
    max_tokens=st.integers(1, 600),
)
def test_chunks_draw_every_sample_once_within_the_budget(lengths, samples, limit, max_tokens):
    parts = chunks(lengths, samples, limit, max_tokens)
    drawn = [(i, sample) for chunk in parts for i in chunk.problems for sample in chunk.samples]
    assert sorted(drawn) == [(i, sample) for i in range(len(lengths)) for sample in range(samples)]
    for chunk in parts:
        rows = len(chunk.problems) * len(chunk.samples)
        assert rows * (max(lengths[i] for i in chunk.problems) + limit) <= max_tokens or rows == 1
        assert len(chunk.problems) == 1 or chunk.samples == range(samples)
    for one, after in itertools.pairwise(parts):  # none could have taken the next problem in, too
        if after.problems != one.problems:
            rows = (len(one.problems) + 1) * samples
            assert rows * (lengths[after.problems[0]] + limit) > max_tokens


def test_chunks_of_two_lengths():
    assert chunks([5, 2, 5, 2], 2, 3, 20) == [Chunk([1, 3], range(2)), Chunk([0], range(2)), Chunk([2], range(2))]
    assert chunks([5, 2], 3, 3, 16) == [Chunk([1], range(3)), Chunk([0], range(2)), Chunk([0], range(2, 3))]
    pairs = [Chunk([1, 3], range(1)), Chunk([4, 0], range(1)), Chunk([2], range(1))]
    assert chunks([5, 2, 9, 2, 3], 1, 3, 10**6, max_rows=2) == pairs


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("stop", [1, 3, 6])
def test_going_on_draws_what_is_missing_and_ends_the_same(load, tokenizer, few, tmp_path, monkeypatch, stop, torn):
    policy, file = load("tiny-base"), tmp_path / "completions.jsonl"
    sampling = Sampling([tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_tokens=8)
    drawn = []
    generate = pspo.evaluate.__main__.generate
    monkeypatch.setattr(pspo.evaluate, "generate", lambda *args: drawn.append(args[2]) or generate(*args))
    longest = max(map(len, few.ids)) + 8

    def run(done, save):
        return evaluate(
            policy, tokenizer, few, sampling, RewardConfig(), samples=3, seed=5, max_tokens=2 * longest, done=done,
            save=save,
        )  # fmt: skip

    whole = run([], lambda records: None)
    everything = list(drawn)
    assert len(everything) == 8  # 4 problems, 2 + 1 samples each

    class Killed(Exception):
        pass

    def save(records):
        append_jsonl(file, *records)
        if len(drawn) == stop:
            if torn:  # the last chunk, so that it has to be drawn again
                file.write_bytes(file.read_bytes()[:-7])
            raise Killed

    drawn.clear()
    with pytest.raises(Killed):
        run([], save)
    drawn.clear()
    torch.rand(3)
    again = run(read_jsonl(file), lambda records: append_jsonl(file, *records))
    assert drawn == everything[stop - torn :]
    assert again == whole
    drawn.clear()
    assert run(read_jsonl(file), None) == whole
    assert drawn == []


def test_a_torn_line_is_cut_off_and_other_damage_is_named(tmp_path):
    file = tmp_path / "completions.jsonl"
    assert read_jsonl(file) == []
    records = [{"a": "\u2028\r\n\x85 #### é"}, {"a": 0.1, "b": float("nan")}]
    append_jsonl(file, *records)
    whole = file.read_bytes()
    expected = [records[0], {"a": 0.1, "b": None}]
    assert read_jsonl(file) == expected
    for cut in range(1, len(whole) - whole.index(b"\n") - 1):
        file.write_bytes(whole[:-cut])
        assert read_jsonl(file) == expected[:1]
        assert file.read_bytes() == whole[: whole.index(b"\n") + 1]
    file.write_bytes(b"{]\n" + whole)
    with pytest.raises(ValueError, match=r"completions\.jsonl is damaged .* delete it to start again"):
        read_jsonl(file)


def test_each_chunk_of_each_seed_draws_its_own_numbers(load, tokenizer, few):
    policy = load("tiny-base")
    sampling = Sampling([tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_tokens=1)

    def seeds(seed):
        drawn = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "manual_seed", drawn.append)
            evaluate(policy, tokenizer, few, sampling, RewardConfig(), samples=3, seed=seed, max_tokens=1)
        return drawn

    every = [seeds(seed) for seed in (0, 1, 2, 2**32 - 1)]
    assert [drawn[0] for drawn in every] == [0, 1, 2, 2**32 - 1]
    assert [len(drawn) for drawn in every] == [12] * 4  # 4 problems, 3 samples each, one at a time
    assert len({seed for drawn in every for seed in drawn}) == 48
    assert all(0 <= seed < 2**32 for drawn in every for seed in drawn)  # else torch would cut it, and they might meet
    assert seeds(1) == every[1]


def test_fingerprint_tells_weights_and_problems_apart(tiny_model):
    policy, prompts = tiny_model(), Prompts(PROBLEMS.problems[:2], PROBLEMS.ids[:2])
    first = fingerprint(policy, prompts)
    assert fingerprint(tiny_model(), prompts) == first
    other = fingerprint(policy, Prompts(PROBLEMS.problems[1:3], PROBLEMS.ids[:2]))  # the same prompts, other answers
    assert (other["model weights"] == first["model weights"], other["problems"] == first["problems"]) == (True, False)
    with torch.no_grad():
        next(policy.parameters()).view(-1)[3] += 1e-6
    other = fingerprint(policy, prompts)
    assert (other["model weights"] == first["model weights"], other["problems"] == first["problems"]) == (False, True)


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
