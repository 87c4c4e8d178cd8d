"""Masks, texts, prompts and rows of rollouts; what is drawn stands in `test_decode.py`."""

from dataclasses import replace

import pytest
import torch
from batches import completions
from tokenizers.processors import TemplateProcessing

from pspo.config import RolloutConfig
from pspo.rollout import Rollout, Sampling, encode_prompts, generate, make_sampling
from pspo.tasks import math_reward

SAMPLING = Sampling(stop_ids=[7, 8], pad_id=0, max_completion_tokens=5, decoder="hf")  # the model's own method


# ---------------------------------------------------------------- masks


class Scripted:
    """Stands in for a model: its `generate` appends the given completions, row by row."""

    device, training, generation_config = torch.device("cpu"), False, None

    def __init__(self, rows):
        self.rows, self.seen = rows, []

    def eval(self):
        pass

    def train(self, mode):
        pass

    def generate(self, input_ids, attention_mask, generation_config, stopping_criteria):
        part, self.rows = self.rows[: len(input_ids)], self.rows[len(input_ids) :]
        self.seen.append((input_ids, attention_mask))
        width = max(map(len, part))
        pad = generation_config.pad_token_id
        return torch.cat([input_ids, torch.tensor([row + [pad] * (width - len(row)) for row in part])], dim=1)


@pytest.mark.parametrize(
    ("pad_id", "rows", "lengths"),
    [
        (0, [[1, 2, 7], [8], [1, 8, 7, 8, 7], [7, 8], [1, 2, 3, 4, 5], [1, 2, 3, 4, 8]], [3, 1, 2, 1, 5, 5]),
        (7, [[1, 7], [7], [1, 2, 3, 4, 5], [1, 2, 3, 7]], [2, 1, 5, 4]),  # the pad token is a stop token
        (0, [[0, 1, 0, 7], [0, 0, 0, 0, 0]], [4, 5]),  # a sampled pad token is a token like any other
        (0, [[7], [1, 7], [1, 2, 3, 4, 5], [2, 7], [8]], [1, 2, 5, 2, 1]),  # parts of different width are joined
    ],
)
@pytest.mark.parametrize("max_rows", [1, 2, 100])
def test_masks_reach_through_the_first_stop_token(tokenizer, pad_id, rows, lengths, max_rows):
    sampling = replace(SAMPLING, pad_id=pad_id, max_rows=max_rows)
    rollout = generate(Scripted(rows), tokenizer, [[1]] * len(rows), sampling)
    expected = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    assert completions(rollout) == expected
    assert rollout.terminated.tolist() == [row[-1] in (7, 8) for row in expected]
    assert rollout.completion_ids.shape[1] == 5


@pytest.mark.parametrize(("max_rows", "at_a_time"), [(1, 1), (4, 4), (5, 4), (100, 6)])  # groups stay whole if they can
def test_rows_of_one_prompt_are_adjacent_and_columns_of_padding_never_reach_the_model(tokenizer, max_rows, at_a_time):
    model = Scripted([[1, 7], [2, 2, 2, 7], [7], [3, 7], [4, 7], [5, 5, 7]])
    rollout = generate(model, tokenizer, [[1, 2], [3], [4, 5, 6]], replace(SAMPLING, max_rows=max_rows), group_size=2)
    assert max(len(ids) for ids, _ in model.seen) == at_a_time
    for ids, mask in model.seen:
        assert mask[:, 0].any()
        assert (ids[mask == 0] == 0).all()
    assert rollout.prompt_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 3], [0, 0, 3], [4, 5, 6], [4, 5, 6]]
    assert rollout.prompt_mask.tolist() == (rollout.prompt_ids != 0).tolist()
    assert completions(rollout) == [[1, 7], [2, 2, 2, 7], [7], [3, 7], [4, 7], [5, 5, 7]]
    assert len(rollout) == len(rollout.texts) == 6


def test_stop_tokens_by_name(tiny_model, tokenizer):
    config, model = RolloutConfig(stop_tokens=["####", "<|im_end|>"]), tiny_model(vocab_size=600)
    named = tokenizer.convert_tokens_to_ids(config.stop_tokens)
    assert make_sampling(model, tokenizer, config).stop_ids == sorted(named)
    assert make_sampling(model, tokenizer, replace(config, stop_tokens=[])).stop_ids == []
    message = r"^--rollout.stop_tokens: the tokenizer has no '<end>'; stop_strings takes any text$"
    with pytest.raises(ValueError, match=message):
        make_sampling(model, tokenizer, replace(config, stop_tokens=["<|im_end|>", "<end>"]))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("opened", "drawn", "gold", "value"),
    [
        ("<think>\n", "two and three\n</think>\n#### 5", 5, 1.0),
        ("", "<think>maybe #### 5</think>I do not know.", 5, 0.0),
        ("", "<think>#### 7 is wrong</think>It is 5", 5, 1.0),
        ("", "<answer>#### 5</answer><|im_start|>", 5, 1.0),
    ],
)
def test_rewards_see_tags_whether_they_are_special_or_not(tokenizer, special, opened, drawn, gold, value):
    tokenizer.add_tokens(["<think>", "</think>", "<answer>", "</answer>"], special_tokens=special)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    ids = tokenizer(drawn)["input_ids"]
    assert (ids[0] > 500) == (opened == "")  # a tag is one token
    prompt = tokenizer(f"<|im_start|>assistant\n{opened}")["input_ids"]
    sampling = replace(SAMPLING, stop_ids=[end], pad_id=pad, max_completion_tokens=40)
    (text,) = generate(Scripted([[*ids, pad, end]]), tokenizer, [prompt], sampling).texts
    assert text == opened.strip() + drawn
    assert math_reward(text, gold) == value


# ---------------------------------------------------------------- rollouts and their rows


def test_rows_trim_both_sides_and_keep_the_values():
    prompt_mask = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    completion_mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    ids, terminated = (torch.arange(16).view(4, 4), torch.arange(100, 120).view(4, 5)), torch.arange(4) < 2
    rollout = Rollout(ids[0], prompt_mask, ids[1], completion_mask, terminated, ["a", "b", "c", "d"])
    assert rollout.tokens == (1 + 3 + 2 + 4) + (2 + 1 + 5 + 0)
    rows = rollout.rows(torch.tensor([2, 0]))
    assert rows.prompt_ids.tolist() == [[10, 11], [2, 3]]
    assert rows.prompt_mask.tolist() == [[True, True], [False, True]]
    assert rows.completion_ids.tolist() == [[110, 111, 112, 113, 114], [100, 101, 102, 103, 104]]
    assert rows.completion_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert rows.terminated.tolist() == [False, True]
    assert rows.texts == ["c", "a"]

    empty = rollout.rows(torch.tensor([3]))  # one column is left of a completion that is masked altogether
    assert empty.completion_ids.tolist() == [[115]]
    assert empty.completion_mask.tolist() == [[False]]
    assert empty.tokens == 4


# ---------------------------------------------------------------- prompts


def test_a_template_that_asks_for_the_date_is_told_the_same_one_every_day(tokenizer):
    tokenizer.chat_template = "{% set today = strftime_now('%d %b %Y') %}\n{{ today }}|{{ messages[0]['content'] }}"
    (ids,) = encode_prompts(tokenizer, ["3 + 4"], "")
    assert tokenizer.decode(ids) == "26 Jul 2024|3 + 4"
    assert "macro" not in tokenizer.chat_template  # what is saved with the model is its own


def test_exactly_one_bos(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert tokenizer("3")["input_ids"][0] == bos  # so text rendered first and encoded after that would get two
    for system in ("Be brief.", ""):
        for ids in encode_prompts(tokenizer, ["3 + 4", "5"], system):
            assert (ids[0], ids.count(bos)) == (bos, 1)
