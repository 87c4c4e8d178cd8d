"""Prompts of a split, of texts and chats: those that are too long are dropped, never cut, and counted."""

import copy
import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest

from pspo.config import SYSTEM_PROMPT, DataConfig, ModelConfig
from pspo.hub.models import room_for_prompts
from pspo.rollout import Prompts, encode_prompts, load_prompts
from pspo.rollout import prompts as prompts_module
from pspo.rollout.prompts import EncodedTexts, encode, most_tokens, render_prompts
from pspo.tasks import Problem


@pytest.fixture
def load_words(tokenizer, tmp_path):
    """Loads prompts of 20 down to 1 times "word ", with the number of words as the answer."""
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"prompt": "word " * n, "answer": n}) + "\n" for n in range(20, 0, -1)))

    def load(limit=None, room=math.inf, **settings):
        config = DataConfig(name="file", path=str(file), system_prompt="", **settings)
        return load_prompts(config, tokenizer, "test", limit, room)

    return load


@pytest.mark.parametrize("how", [{"max_prompt_tokens": 40}, {"room": 40}])
def test_long_prompts_are_dropped_and_counted(load_words, tokenizer, capsys, how):
    everything = load_words()
    assert len(everything) == 20
    assert capsys.readouterr().out == ""
    kept = [i for i, ids in enumerate(everything.ids) if len(ids) <= 40]
    assert 0 < len(kept) < 20
    prompts = load_words(**how)
    expected = everything.take(kept)
    assert (prompts.problems, list(prompts.ids)) == (expected.problems, expected.ids)
    for problem, ids in zip(prompts.problems, prompts.ids, strict=True):
        assert tokenizer.decode(ids).count("word") == problem.answer  # whole, and each with its own
    assert capsys.readouterr().out == f"file test: dropped {20 - len(kept)} of 20 prompts over 40 tokens\n"


def test_no_prompt_left(load_words):
    with pytest.raises(ValueError, match=r"--data\.max_prompt_tokens"):
        load_words(room=3)


def test_the_limit_counts_before_prompts_are_dropped(load_words):
    everything = load_words(room=40)
    assert load_words(limit=20, room=40).problems == everything.problems
    assert len(load_words(limit=19, room=40)) in (len(everything), len(everything) - 1)


def test_only_prompts_that_are_used_or_may_be_too_long_are_encoded(tokenizer, monkeypatch):
    encoded = []
    monkeypatch.setattr(prompts_module, "encode", lambda _, texts: encoded.extend(texts) or encode(tokenizer, texts))
    prompts = load_prompts(DataConfig(), tokenizer, "train", room=384)
    assert len(prompts) == 10_000
    assert sum("<|im_start|>" in text for text in encoded) == 0
    assert prompts.take([3, 4]).ids == encode_prompts(tokenizer, [problem.prompt for problem in prompts.problems[3:5]])
    prompts.fingerprint()
    assert sum("<|im_start|>" in text for text in encoded) == 4


@pytest.mark.parametrize(
    "text", ["", "3 + 4 = 7", "x" * 99, "Wert: 3 €", "\u0958" * 9, "<|im_end|><|im_start|>", "<|im_end", " \n \t" * 9]
)
def test_upper_bounds_of_tokens(tokenizer, text):
    texts = render_prompts(tokenizer, ["Hi", text, "3 + 4"])
    bounds = most_tokens(tokenizer, texts)
    assert all(len(ids) <= bound for ids, bound in zip(encode(tokenizer, texts), bounds, strict=True))
    assert (bounds[1] == math.inf) == (not text.isascii())  # other characters may be several tokens


USER, SYSTEM = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
ANSWERED = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]


def rendered(*turns: dict) -> str:
    whole = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return f"{whole}<|im_start|>assistant\n"


@pytest.mark.parametrize("system_prompt", [SYSTEM_PROMPT, ""])
def test_the_system_prompt_precedes_chats_that_have_none(tokenizer, system_prompt):
    text = "  <b>2 + 2</b>\nHow many? "
    chats = [text, [USER], [SYSTEM, USER], ANSWERED, [USER, {"role": "tool", "content": "17"}]]
    before = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked = {"role": "user", "content": text}
    expected = [[*before, asked], [*before, USER], chats[2], [*before, *ANSWERED], [*before, *chats[4]]]
    ids = encode_prompts(tokenizer, chats, system_prompt)
    assert [tokenizer.decode(each) for each in ids] == [rendered(*turns) for turns in expected]
    assert ANSWERED[0] is USER  # what came in is as it was
    assert encode_prompts(tokenizer, chats) == encode_prompts(tokenizer, chats, SYSTEM_PROMPT)  # as the command
    for chat in ([], ANSWERED[:2], [SYSTEM], ["Hi"], [{"role": "user"}]):
        with pytest.raises(ValueError, match=r"must end with a turn of role user or tool|turn 1 of the list must be"):
            encode_prompts(tokenizer, ["Hi", chat])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SYSTEM_PROMPT),
        ({"answer_kind": "text"}, ""),
        ({"answer_kind": "none"}, ""),
        ({"answer_kind": "text", "system_prompt": "Be brief."}, "Be brief."),
        ({"system_prompt": ""}, ""),
    ],
)
def test_the_papers_system_prompt_is_the_default_for_numbers(tokenizer, tmp_path, settings, expected):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"prompt": "3 + 4", "answer": 7}))
    prompts = load_prompts(DataConfig(name="file", path=str(file), **settings), tokenizer, "test", None, math.inf)
    assert list(prompts.ids) == encode_prompts(tokenizer, ["3 + 4"], expected)
    assert prompts.problems[0].answer == {"text": "7", "none": None}.get(settings.get("answer_kind"), 7)


def test_fingerprint_covers_prompts_tokenizer_answers_and_fields(tokenizer):
    def fingerprint(ids=((5, 6),), **changed):
        problem = Problem("p", Fraction(7, 2), source="file", category="sums", level="3")
        return Prompts([replace(problem, **changed)], ids).fingerprint()

    assert fingerprint() == fingerprint()
    changes = [{}, {"answer": "7/2"}, {"answer": None}, {"answer": "None"}, {"answer": Fraction(7)}]
    changes += [{"fields": fields} for fields in ({"x": 1}, {"x": 2}, {"y": 1}, {"x": [{"z": b"1"}]})]
    other = copy.deepcopy(tokenizer)
    other.add_tokens("zyx")
    prompts = [(tokenizer, "p"), (tokenizer, "q"), (other, "p")]
    changes += [{"ids": EncodedTexts(with_tokenizer, [text])} for with_tokenizer, text in prompts]
    assert len({fingerprint(**changed) for changed in changes}) == len(changes)


def test_room_beside_a_completion(tmp_path):
    switch = "rollout.max_completion_tokens"
    assert [room_for_prompts(ModelConfig(), limit, switch) for limit in (128, 511)] == [512 - 128, 1]
    for limit in (512, 9999):
        with pytest.raises(ValueError, match=rf"--rollout\.max_completion_tokens .* 512 .* got {limit}$"):
            room_for_prompts(ModelConfig(), limit, switch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))  # no positions
    assert room_for_prompts(ModelConfig(name_or_path=str(tmp_path)), 9999, switch) == math.inf
