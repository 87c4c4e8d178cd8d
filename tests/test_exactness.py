"""Models are exact or refused: log-probs of padded batches, and decoded tokens, are those of each row alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
from architectures import OUTCOMES, each, tiny
from processes import run_command
from test_logprobs import gradients, make_groups, make_rows

from pspo.config import ModelConfig, RolloutConfig
from pspo.model import CACHE_ARGUMENT, takes_visible_columns, token_logprobs
from pspo.model.find import room_for_prompts
from pspo.rollout import generate, make_sampling
from pspo.rollout.sampler import check_decoding
from pspo.train import main

IN_CI = "bart bloom cohere deepseek_v3 gemma3_text gpt2 gpt_oss gptj lfm2 llama llama4_text mamba mixtral qwen3_next"
PROMPTS = [list(range(20, 70)), [7, 8, 9]]


def check(policy, tokenizer):
    """`check_decoding` with the decoder that the model takes; returns the sampling."""
    sampling = make_sampling(policy, tokenizer, RolloutConfig(max_completion_tokens=12))
    check_decoding(policy, tokenizer, sampling, SimpleNamespace(ids=PROMPTS), "none")
    return sampling


@each(*OUTCOMES, in_ci=IN_CI.split())
def test_exact_or_refused(model_folder, load, tokenizer, name):
    (outcome,) = (outcome for outcome, names in OUTCOMES.items() if name in names)
    policy = load(model_folder(tiny(name)))
    if outcome not in ("pspo", "hf"):
        with pytest.raises(ValueError, match=rf"^--model.name_or_path: {type(policy).__name__} {outcome}") as error:
            check(policy, tokenizer)
        assert "\n" not in str(error.value)
        return
    sampling = check(policy, tokenizer)
    assert sampling.decoder == outcome
    for decoder in {outcome, "graphs"} if takes_visible_columns(policy) else {outcome}:
        greedy = replace(sampling.greedy(), decoder=decoder)
        drawn = generate(policy, tokenizer, [[60, 61, 62, 63, 64, 65, 66, 67, 68], [5]], greedy, group_size=2)
        for i in range(len(drawn)):
            likeliest = reference.vocabulary_logprobs(policy, drawn.token_ids, i).amax(dim=1)
            own = reference.row_logprobs(policy, drawn.token_ids, i)
            torch.testing.assert_close(own, likeliest, rtol=1e-4, atol=1e-3)
    for rows in (make_groups((9, 3, 6)), make_rows((30, 12, 3, 40), (20, 1, 30, 9))):
        rows = [rows[0] + 10, rows[1], rows[2] + 10, rows[3]]  # no special tokens
        actual, expected = token_logprobs(policy, *rows), reference.batch_logprobs(policy, rows)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
        slope = gradients(policy, expected)
        torch.testing.assert_close(gradients(policy, actual), slope, rtol=0, atol=1e-3 * slope.abs().max().item())


@pytest.mark.parametrize(
    ("ignored", "dtype"),
    [("attention_mask", torch.bfloat16), ("position_ids", torch.float32), (CACHE_ARGUMENT, torch.float32)],
)
def test_a_body_that_ignores_an_input_is_refused(monkeypatch, load, tokenizer, ignored, dtype):
    policy = load("tiny-base").to(dtype)
    check(policy, tokenizer)
    original = policy.base_model.forward
    monkeypatch.setattr(policy.base_model, "forward", lambda *args, **named: original(*args, **named | {ignored: None}))
    found = "fails on a small batch" if ignored == CACHE_ARGUMENT else "other log-probs in a padded batch"
    with pytest.raises(ValueError, match=found):
        check(policy, tokenizer)


def test_refused_before_a_run_begins(model_folder, tmp_path, capsys):
    folder, output = model_folder(tiny("bart")), tmp_path / "run"
    switches = ("--model.name_or_path", str(folder), "--run.output_dir", str(output), "--run.quiet", "--data.limit=9")
    assert run_command(main, *switches) == 2
    assert "BartForCausalLM gives a row other log-probs in a padded batch than alone" in capsys.readouterr().err
    assert not output.exists()


def test_room_beside_a_completion_ends_where_longrope_switches(model_folder):
    switch = "rollout.max_completion_tokens"
    assert [room_for_prompts(ModelConfig(), limit, switch) for limit in (128, 511)] == [512 - 128, 1]
    with pytest.raises(ValueError, match=r"--rollout\.max_completion_tokens .* 512 .* got 512$"):
        room_for_prompts(ModelConfig(), 512, switch)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    model = tiny("phi3", original_max_position_embeddings=64, rope_parameters=rope)
    assert room_for_prompts(ModelConfig(str(model_folder(model))), 20, switch) == 44
    assert room_for_prompts(ModelConfig(str(model_folder(tiny("phi3")))), 20, switch) == 236
