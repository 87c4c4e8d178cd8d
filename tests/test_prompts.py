"""Prompts of a split: those that are too long are dropped, never cut, and counted."""

import json
import math

import pytest

from pspo.config import DataConfig, ModelConfig
from pspo.rollout import load_prompts, room_for_prompts


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
    assert prompts == everything.take(kept)
    for problem, ids in zip(prompts.problems, prompts.ids, strict=True):
        assert tokenizer.decode(ids).count("word") == problem.answer  # whole, and each with its own
    assert capsys.readouterr().out == f"file test: dropped {20 - len(kept)} of 20 prompts over 40 tokens\n"


def test_no_prompt_left(load_words):
    with pytest.raises(ValueError, match=r"--data\.max_prompt_tokens"):
        load_words(room=3)


def test_the_limit_counts_before_prompts_are_dropped(load_words):
    assert load_words(limit=20, room=40) == load_words(room=40)
    everything = load_words(room=40)
    assert load_words(limit=19, room=40) == everything.take(range(len(everything) - 1))


def test_room_beside_a_completion(tmp_path):
    switch = "rollout.max_completion_tokens"
    assert [room_for_prompts(ModelConfig(), limit, switch) for limit in (128, 511)] == [512 - 128, 1]
    for limit in (512, 9999):
        with pytest.raises(ValueError, match=rf"--rollout\.max_completion_tokens .* 512 .* got {limit}$"):
            room_for_prompts(ModelConfig(), limit, switch)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))  # no positions
    assert room_for_prompts(ModelConfig(name_or_path=str(tmp_path)), 9999, switch) == math.inf
