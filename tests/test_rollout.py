"""Sampling is what was asked for whatever the model's folder says; masks, texts, prompts and rows."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from pspo.config import SYSTEM_PROMPT, RolloutConfig
from pspo.hub.save import save_model
from pspo.model import token_logprobs
from pspo.rollout import Rollout, Sampling, encode_prompts, generate, make_sampling
from pspo.rollout.generate import left_pad

HOSTILE = {
    "sampling": {"do_sample": True, "top_k": 3, "top_p": 0.2, "temperature": 0.1, "repetition_penalty": 1.5},
    "greedy": {"do_sample": False, "temperature": 0.9, "top_p": 0.5, "min_p": 0.3, "typical_p": 0.5},
    "beams": {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "num_return_sequences": 2},
    "lengths": {"max_length": 5, "max_new_tokens": 2, "min_new_tokens": 11, "min_length": 15, "max_time": 1e-4},
    "tokens": {
        "bad_words_ids": [[5], [6, 7]],
        "suppress_tokens": list(range(8, 40)),
        "begin_suppress_tokens": [40, 41],
        "forced_bos_token_id": 3,
        "forced_eos_token_id": 4,
        "eos_token_id": list(range(64)),
        "pad_token_id": 1,
        "sequence_bias": [[[5], 10.0]],
    },
    "processors": {
        "no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.3,
        "exponential_decay_length_penalty": [2, 1.5],
        "epsilon_cutoff": 0.1,
        "eta_cutoff": 0.1,
        "guidance_scale": 3.0,
        "renormalize_logits": True,
        "remove_invalid_values": True,
    },
    "output": {"return_dict_in_generate": True, "output_scores": True, "use_cache": False, "stop_strings": ["a"]},
    "assisted": {"prompt_lookup_num_tokens": 3, "penalty_alpha": 0.6, "dola_layers": "low"},
}
DECODERS = ["pspo", "graphs", "hf"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9], [11]]
SAMPLING = Sampling(stop_ids=[60, 61], pad_id=62, temperature=0.9, top_p=0.85, max_completion_tokens=12)
GREEDY = replace(SAMPLING, temperature=0.0)


def argmax_loop(model, prompt, stop_ids, limit, minimum=0):
    """Greedy decoding of one unpadded prompt from whole forward passes, without a cache."""
    ids = list(prompt)
    for step in range(limit):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        if step < minimum:
            logits[list(stop_ids)] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def completions(rollout):
    return [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]


# ---------------------------------------------------------------- the sampled distribution


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Qwen3", "Gemma2", "GPT2"])
@torch.no_grad()
def test_greedy_is_the_argmax_of_the_plain_model(tiny_model, tokenizer, name, decoder):
    if (name, decoder) == ("Gemma2", "graphs"):
        pytest.skip("refused for its sliding windows")
    model = tiny_model(name)
    free = [argmax_loop(model, prompt, (), 12) for prompt in PROMPTS]
    stops = (free[0][4], free[1][7])  # so that some rows stop and others do not
    expected = [argmax_loop(model, prompt, stops, 12) for prompt in PROMPTS]
    rollout = generate(model, tokenizer, PROMPTS, replace(GREEDY, stop_ids=stops, decoder=decoder))
    assert completions(rollout) == expected
    assert rollout.terminated.tolist() == [row[-1] in stops for row in expected]
    assert rollout.terminated.any()
    assert (rollout.completion_ids[~rollout.completion_mask] == GREEDY.pad_id).all()
    ending = generate(model, tokenizer, PROMPTS[:2], replace(GREEDY, stop_ids=stops, decoder=decoder))
    assert ending.completion_ids.shape[1] == max(map(len, expected[:2])) < 12  # nothing is decoded beyond the last


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_generation_config_changes_nothing(tiny_model, model_folder, load, tokenizer, hostile, decoder):
    folder = model_folder(tiny_model())
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    model, clean = load(folder), tiny_model()
    theirs = model.generation_config
    assert theirs.to_dict().items() >= hostile.items()  # it was loaded

    greedy = generate(model, tokenizer, PROMPTS, replace(GREEDY, decoder=decoder))
    assert completions(greedy) == [argmax_loop(clean, prompt, GREEDY.stop_ids, 12) for prompt in PROMPTS]
    for sampling in (replace(SAMPLING, decoder=decoder), replace(SAMPLING, decoder=decoder, top_p=1.0)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            sampled = generate(model, tokenizer, PROMPTS, sampling, group_size=4)
            torch.manual_seed(5)
            expected = generate(clean, tokenizer, PROMPTS, sampling, group_size=4)
        assert torch.equal(sampled.completion_ids, expected.completion_ids)
        assert torch.equal(sampled.completion_mask, expected.completion_mask)
        assert len(set(sampled.texts)) > 4  # it did sample

    assert model.generation_config is theirs
    assert theirs.to_dict().items() >= hostile.items()
    save_model(model, tokenizer, folder.parent / "saved", "")
    assert json.loads((folder.parent / "saved" / "generation_config.json").read_text()).items() >= hostile.items()


def test_generation_settings_in_the_model_config_change_nothing(tiny_model, model_folder, load, tokenizer):
    """Folders of old have no generation_config.json but its entries in config.json."""
    folder = model_folder(
        tiny_model(),
        config={"top_k": 3, "repetition_penalty": 1.5, "do_sample": True, "temperature": 0.1},
        without=["generation_config.json"],
    )
    model = load(folder)
    assert model.generation_config.top_k == 3
    rollout = generate(model, tokenizer, PROMPTS, GREEDY)
    assert completions(rollout) == [argmax_loop(tiny_model(), prompt, GREEDY.stop_ids, 12) for prompt in PROMPTS]
    save_model(model, tokenizer, folder.parent / "saved", "")


@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_as_it_was(tiny_model, tokenizer, training):
    model = tiny_model().train(training)
    theirs = model.generation_config = GenerationConfig(top_k=3)
    generate(model, tokenizer, PROMPTS, SAMPLING)
    assert model.generation_config is theirs
    assert model.training == training
    with pytest.raises(IndexError):
        generate(model, tokenizer, [[64]], SAMPLING)  # no such token
    assert model.generation_config is theirs


def test_the_training_mode_comes_back_after_an_error(tiny_model, tokenizer):
    model = tiny_model().train()
    with pytest.raises(IndexError):
        generate(model, tokenizer, [[64]], SAMPLING)
    assert model.training


def nucleus(logits, temperature, top_p):
    """The exact distribution: the smallest set of likeliest tokens that holds top_p of the mass, renormalised."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    kept, mass = torch.zeros_like(probabilities), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token].item()
    return kept / kept.sum()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("vocab", [64, 100])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 0.85), (1.0, 1.0), (1.5, 0.98), (0.3, 1.0)])
def test_first_tokens_come_from_the_exact_nucleus(tiny_model, tokenizer, temperature, top_p, vocab, decoder):
    n = 4000
    model = tiny_model(initializer_range=0.12, seed=3, vocab_size=vocab)
    exact = nucleus(model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].detach(), temperature, top_p)
    assert (exact > 0).sum() > 5
    assert ((exact > 0).sum() < vocab) == (top_p < 1)
    sampling = replace(SAMPLING, temperature=temperature, top_p=top_p, max_completion_tokens=1, decoder=decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rollout = generate(model, tokenizer, [PROMPTS[0]], sampling, group_size=n)
    observed = torch.bincount(rollout.completion_ids[:, 0], minlength=vocab).double()
    assert observed[exact == 0].sum() == 0
    common = n * exact >= 5  # the rest, if any, in one bin: the chi-square statistic needs 5 in each
    bins = torch.stack([observed, n * exact])  # (2, vocab)
    bins = torch.cat([bins[:, common], bins[:, ~common].sum(dim=1, keepdim=True)], dim=1)
    bins = bins[:, bins[1] > 0]
    chi_square, freedom = ((bins[0] - bins[1]) ** 2 / bins[1]).sum().item(), bins.shape[1] - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("decoder", DECODERS)
def test_later_tokens_come_from_the_exact_conditional(tiny_model, tokenizer, decoder):
    """The third token, given each of the likeliest beginnings: the cache and the groups' rows stay together."""
    model = tiny_model(initializer_range=0.25, seed=4)
    sampling = replace(SAMPLING, temperature=0.8, top_p=0.9, stop_ids=[63], max_completion_tokens=3, decoder=decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rollout = generate(model, tokenizer, PROMPTS[:2], replace(sampling, max_rows=6000), group_size=3000)
    tested = 0
    for prompt, rows in zip(PROMPTS, rollout.completion_ids.split(3000), strict=False):
        beginnings, counts = rows[:, :2].unique(dim=0, return_counts=True)
        for beginning, n in zip(beginnings.tolist(), counts.tolist(), strict=True):
            if n < 60 or 63 in beginning:
                continue
            tested += 1
            logits = model(input_ids=torch.tensor([prompt + beginning])).logits[0, -1].detach()
            exact = nucleus(logits, 0.8, 0.9)
            thirds = rows[(rows[:, :2] == torch.tensor(beginning)).all(dim=1), 2]
            observed = torch.bincount(thirds, minlength=64).double() / n
            assert observed[exact == 0].sum() == 0
            assert ((observed - exact).abs() < 5 * (exact * (1 - exact) / n).sqrt() + 3 / n).all()
    assert tested > 5


@pytest.mark.parametrize("decoder", DECODERS)
def test_top_k_and_repetition_penalty_act_where_asked_for(tiny_model, tokenizer, decoder):
    model = tiny_model(initializer_range=0.12, seed=3)
    logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].detach()
    flat = replace(SAMPLING, temperature=1.0, top_p=1.0, max_completion_tokens=1, decoder=decoder)
    rollout = generate(model, tokenizer, [PROMPTS[0]], replace(flat, top_k=7), group_size=1000)
    assert set(rollout.completion_ids.flatten().tolist()) == set(logits.topk(7).indices.tolist())

    seen = torch.tensor(sorted(set(PROMPTS[0])))
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 50, logits[seen] * 50)
    penalised = generate(model, tokenizer, PROMPTS[:1], replace(GREEDY, repetition_penalty=50.0, decoder=decoder))
    assert penalised.completion_ids[0, 0] == logits.argmax()


# ---------------------------------------------------------------- masks


class Scripted:
    """Stands in for a model: its `generate` appends the given completions, row by row."""

    device, training, generation_config = torch.device("cpu"), False, None

    base_model = torch.nn.Identity()

    def __init__(self, rows):
        self.rows, self.seen = rows, []

    def eval(self):
        pass

    def train(self, mode):
        pass

    def generate(self, input_ids, attention_mask, generation_config, stopping_criteria, synced_gpus):
        part, self.rows = self.rows[: len(input_ids)], self.rows[len(input_ids) :]
        self.seen.append((input_ids, attention_mask))
        width = max(map(len, part))
        pad = generation_config.pad_token_id
        return torch.cat([input_ids, torch.tensor([row + [pad] * (width - len(row)) for row in part])], dim=1)


def scripted(rows, tokenizer, **settings):
    settings = {"stop_ids": [7, 8], "pad_id": 0, "max_completion_tokens": 5, **settings}
    sampling = replace(SAMPLING, **settings, decoder="hf")  # the loop that is the model's own method
    return generate(Scripted(rows), tokenizer, [[1]] * len(rows), sampling)


def test_masks_reach_through_the_first_stop_token(tokenizer):
    rollout = scripted([[1, 2, 7], [8], [1, 8, 7, 8, 7], [7, 8], [1, 2, 3, 4, 5], [1, 2, 3, 4, 8]], tokenizer)
    assert rollout.completion_mask.sum(dim=1).tolist() == [3, 1, 2, 1, 5, 5]
    assert completions(rollout) == [[1, 2, 7], [8], [1, 8], [7], [1, 2, 3, 4, 5], [1, 2, 3, 4, 8]]
    assert rollout.terminated.tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("decoder", DECODERS)
def test_stop_strings_end_completions_and_are_part_of_them(load, tokenizer, decoder):
    """Where a string first ends in the decoded text; over tokens' borders, and not where it begins in the prompt."""
    policy, strings = load("tiny-base"), ["= 1", "\n#", "packs"]
    prompts = encode_prompts(tokenizer, [f"Tom has {n} packs of 4. He eats 3. How many?" for n in range(2, 12)])
    prompts[0] = [*prompts[0], *tokenizer("2 * 4 =")["input_ids"]]  # the string's own beginning
    sampling = replace(SAMPLING, stop_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id, decoder=decoder)
    sampling = replace(sampling, max_completion_tokens=24, temperature=0.0)
    free = generate(policy, tokenizer, prompts, sampling, 2)
    cut = generate(policy, tokenizer, prompts, replace(sampling, stop_strings=strings), 2)
    expected = []
    for ids, mask in zip(free.completion_ids, free.completion_mask, strict=True):
        ids = ids[mask].tolist()
        texts = [tokenizer.decode(ids[: t + 1], skip_special_tokens=False) for t in range(len(ids))]
        found = [t for t, text in enumerate(texts) if any(string in text for string in strings)]
        expected.append(ids[: found[0] + 1] if found else ids)
    assert completions(cut) == expected
    assert sum(map(len, expected)) < free.completion_mask.sum()
    assert cut.terminated.all()
    assert all(any(string in text for text in cut.texts) for string in strings[:2])


def test_stop_tokens_by_name(tiny_model, tokenizer):
    config, model = RolloutConfig(stop_tokens=["####", "<|im_end|>"]), tiny_model(vocab_size=600)
    named = tokenizer.convert_tokens_to_ids(config.stop_tokens)
    assert make_sampling(model, tokenizer, config).stop_ids == sorted(named)
    assert make_sampling(model, tokenizer, replace(config, stop_tokens=[])).stop_ids == []
    with pytest.raises(
        ValueError, match=r"^--rollout.stop_tokens: the tokenizer has no '<end>'; stop_strings takes any text$"
    ):
        make_sampling(model, tokenizer, replace(config, stop_tokens=["<|im_end|>", "<end>"]))


def test_masks_come_from_lengths_when_pad_is_a_stop_token(tokenizer):
    rollout = scripted([[1, 7], [7], [1, 2, 3, 4], [1, 2, 3, 7]], tokenizer, pad_id=7, max_completion_tokens=4)
    assert completions(rollout) == [[1, 7], [7], [1, 2, 3, 4], [1, 2, 3, 7]]
    assert rollout.terminated.tolist() == [True, True, False, True]


def test_a_sampled_pad_token_is_a_token_like_any_other(tokenizer):
    rollout = scripted([[0, 1, 0, 7], [0, 0, 0, 0, 0]], tokenizer)
    assert completions(rollout) == [[0, 1, 0, 7], [0, 0, 0, 0, 0]]
    assert rollout.terminated.tolist() == [True, False]


def test_parts_of_different_width_are_joined(tokenizer):
    rollout = scripted([[7], [1, 7], [1, 2, 3, 4, 5], [2, 7], [8]], tokenizer, max_rows=2)
    assert rollout.completion_ids.tolist() == [
        [7, 0, 0, 0, 0],
        [1, 7, 0, 0, 0],
        [1, 2, 3, 4, 5],
        [2, 7, 0, 0, 0],
        [8, 0, 0, 0, 0],
    ]
    assert completions(rollout) == [[7], [1, 7], [1, 2, 3, 4, 5], [2, 7], [8]]


def test_columns_of_padding_never_reach_the_model(tokenizer):
    prompts = [[1, 2], [3], [4, 5, 6, 7, 8], [9, 9]]
    model = Scripted([[7]] * 4)
    rollout = generate(model, tokenizer, prompts, replace(SAMPLING, stop_ids=[7], pad_id=0, max_rows=2, decoder="hf"))
    assert [(ids.tolist(), mask.tolist()) for ids, mask in model.seen] == [
        ([[1, 2], [0, 3]], [[1, 1], [0, 1]]),
        ([[4, 5, 6, 7, 8], [0, 0, 0, 9, 9]], [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]),
    ]
    assert rollout.prompt_ids.tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 3], [4, 5, 6, 7, 8], [0, 0, 0, 9, 9]]
    assert [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)] == prompts


@pytest.mark.parametrize("max_rows", [1, 4, 5, 100])
def test_rows_of_one_prompt_are_adjacent(tokenizer, max_rows):
    model = Scripted([[1, 7], [2, 2, 2, 7], [7], [3, 7], [4, 7], [5, 5, 7]])
    sampling = replace(SAMPLING, stop_ids=[7], pad_id=0, max_rows=max_rows, decoder="hf")
    rollout = generate(model, tokenizer, [[1, 2], [3], [4, 5, 6]], sampling, group_size=2)
    assert max(len(ids) for ids, _ in model.seen) == {1: 2, 4: 4, 5: 4, 100: 6}[max_rows]  # groups stay whole
    assert rollout.prompt_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 3], [0, 0, 3], [4, 5, 6], [4, 5, 6]]
    assert completions(rollout) == [[1, 7], [2, 2, 2, 7], [7], [3, 7], [4, 7], [5, 5, 7]]
    assert len(rollout) == len(rollout.texts) == 6


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], [[1, 2, 3], [4, 5, 6]]], ids=["one prompt", "of one length"])
def test_prompts_without_padding(tiny_model, tokenizer, prompts, decoder):
    """transformers hands a mask of ones on as None."""
    model = tiny_model()
    rollout = generate(model, tokenizer, prompts, replace(GREEDY, decoder=decoder), group_size=2)
    expected = [argmax_loop(model, prompt, GREEDY.stop_ids, 12) for prompt in prompts for _ in range(2)]
    assert completions(rollout) == expected


def test_left_pad():
    ids, mask = left_pad([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True] * 3, [False, False, True]]
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("max_rows", [1, 3])
def test_max_rows_changes_nothing_greedily(tiny_model, tokenizer, max_rows, decoder):
    model = tiny_model()
    stops = argmax_loop(model, PROMPTS[1], (), 6)[3:4]
    sampling = replace(GREEDY, stop_ids=stops, decoder=decoder)
    whole = generate(model, tokenizer, PROMPTS, sampling)
    parts = generate(model, tokenizer, PROMPTS, replace(sampling, max_rows=max_rows))
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "terminated"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    assert parts.texts == whole.texts


@pytest.mark.parametrize("decoder", DECODERS)
@torch.no_grad()
def test_min_completion_tokens_makes_stop_tokens_impossible_before(tiny_model, tokenizer, decoder):
    model = tiny_model()
    stops = sorted({argmax_loop(model, prompt, (), 1)[0] for prompt in PROMPTS})  # what would come first
    eager = replace(GREEDY, stop_ids=stops, decoder=decoder)
    assert generate(model, tokenizer, PROMPTS, eager).completion_mask.sum(dim=1).tolist() == [1, 1, 1, 1]
    rollout = generate(model, tokenizer, PROMPTS, replace(eager, min_completion_tokens=5))
    assert completions(rollout) == [argmax_loop(model, prompt, stops, 12, minimum=5) for prompt in PROMPTS]
    assert rollout.completion_mask.sum(dim=1).min() > 5
    whole = generate(model, tokenizer, PROMPTS, replace(eager, min_completion_tokens=12))
    assert whole.completion_mask.all()
    assert not whole.terminated.any()


def test_texts_have_no_special_tokens(tokenizer):
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    said = tokenizer("So 3 + 4 = 7.\n#### 7")["input_ids"]
    rollout = scripted([[*said, end], said[:3], [pad, *said[:2], pad, end]], tokenizer, stop_ids=[end], pad_id=pad)
    texts = [tokenizer.decode(said), tokenizer.decode(said[:3]), tokenizer.decode(said[:2])]
    assert rollout.texts == texts
    assert texts[0] == "So 3 + 4 = 7.\n#### 7"


# ---------------------------------------------------------------- rollouts and their rows


def make_rollout():
    prompt_mask = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    completion_mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    return Rollout(
        torch.arange(16).view(4, 4),
        prompt_mask,
        torch.arange(100, 120).view(4, 5),
        completion_mask,
        torch.tensor([True, True, False, False]),
        ["a", "b", "c", "d"],
    )


def test_tokens_count_what_is_not_padding():
    assert make_rollout().tokens == (1 + 3 + 2 + 4) + (2 + 1 + 5 + 0)
    assert len(make_rollout()) == 4


def test_rows_trim_both_sides_and_keep_the_values():
    rollout = make_rollout()
    rows = rollout.rows(torch.tensor([2, 0]))
    assert rows.prompt_ids.tolist() == [[10, 11], [2, 3]]
    assert rows.prompt_mask.tolist() == [[True, True], [False, True]]
    assert rows.completion_ids.tolist() == [[110, 111, 112, 113, 114], [100, 101, 102, 103, 104]]
    assert rows.completion_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert rows.terminated.tolist() == [False, True]
    assert rows.texts == ["c", "a"]

    short = rollout.rows(torch.tensor([1, 0]))
    assert short.prompt_ids.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert short.completion_ids.tolist() == [[105, 106], [100, 101]]
    assert short.completion_mask.tolist() == [[True, False], [True, True]]

    empty = rollout.rows(torch.tensor([3]))  # one column is left of a completion that is masked altogether
    assert empty.completion_ids.tolist() == [[115]]
    assert empty.completion_mask.tolist() == [[False]]
    assert empty.tokens == 4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_a_rollout_equal_the_unpadded_ones(load, tokenizer, temperature):
    model = load("tiny-base")
    prompts = encode_prompts(tokenizer, ["Tom has 3 apples.", "Ann buys 4 pens and then 12 more. How many?"] * 2, "")
    stop = tokenizer.eos_token_id
    sampling = Sampling([stop], tokenizer.pad_token_id, temperature=1.0, max_completion_tokens=24)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        rollout = generate(model, tokenizer, prompts, sampling)
    assert rollout.prompt_mask.sum(dim=1).unique().numel() == 2
    parts = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    logprobs = token_logprobs(model, *parts, temperature)
    for row, (prompt, completion) in enumerate(zip(prompts, completions(rollout), strict=True)):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, dim=-1)[range(len(completion)), completion]
        torch.testing.assert_close(logprobs[row, : len(completion)], expected, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- prompts

LLAMA_STYLE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role!') }}{% endif %}" + LLAMA_STYLE


def test_the_system_prompt_is_the_papers():
    assert SYSTEM_PROMPT == (
        "You are a careful math solver. Think through the solution and show the steps. Use English only. End the "
        "response with the final answer only in the format: '#### <final numeric answer only>'"
    )


def test_prompts_are_the_rendered_template(tokenizer):
    texts = ["Tom has 3 apples.\nHow many?", "  <b>2 + 2</b> "]
    for text, ids in zip(texts, encode_prompts(tokenizer, texts, SYSTEM_PROMPT), strict=True):
        assert tokenizer.decode(ids) == (
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
    for text, ids in zip(texts, encode_prompts(tokenizer, texts, ""), strict=True):
        assert tokenizer.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompts(tokenizer, texts) == encode_prompts(tokenizer, texts, SYSTEM_PROMPT)  # as the command


def test_a_template_that_asks_for_the_date_is_told_the_same_one_every_day(tokenizer):
    plain = "{{ messages[0]['content'] }}"
    tokenizer.chat_template = "{% set today = strftime_now('%d %b %Y') %}\n{{ today }}|" + plain
    (ids,) = encode_prompts(tokenizer, ["3 + 4"], "")
    assert tokenizer.decode(ids) == "26 Jul 2024|3 + 4"
    assert "macro" not in tokenizer.chat_template  # what is saved with the model is its own


def test_exactly_one_bos(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = LLAMA_STYLE
    assert tokenizer("3")["input_ids"][0] == bos  # so text rendered first and encoded after that would get two
    for system in ("Be brief.", ""):
        for ids in encode_prompts(tokenizer, ["3 + 4", "5"], system):
            assert ids.count(bos) == 1
            assert ids[0] == bos


def test_a_template_without_system_turn(tokenizer):
    tokenizer.chat_template = NO_SYSTEM
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    with pytest.raises(ValueError, match=r"no system role!.*--data\.system_prompt") as error:
        encode_prompts(tokenizer, ["3 + 4"], "Be brief.")
    assert "\n" not in str(error.value)
    assert tokenizer.decode(encode_prompts(tokenizer, ["3 + 4"], "")[0]) == "<s>[user]3 + 4[assistant]"


def test_long_prompts_are_not_cut(tokenizer):
    (ids,) = encode_prompts(tokenizer, ["one two three " * 400])
    assert len(ids) > tokenizer.model_max_length
    assert tokenizer.decode(ids).count("three") == 400
