"""pspo's decoding loop against Hugging Face's own, and its sampler against the exact nucleus distribution."""

import os
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pspo.config import SYSTEM_PROMPT, ModelConfig
from pspo.model import load_policy, load_tokenizer, stop_token_ids, token_logprobs
from pspo.rollout import Sampling, encode_prompts, generate
from pspo.rollout.decode import _sample_by_rejection, _sample_sorted, sample_nucleus
from pspo.tasks import load_problems

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gemma2, sliding window 8": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, sliding_window=8, attn_implementation="eager")
    ),
}
PROMPTS = [[5, 6, 7], list(range(20, 40)), [9], list(range(50, 61)), [3, 3, 3, 3, 3]]


class NoTexts:
    """Stands in for a tokenizer where the texts do not matter."""

    def batch_decode(self, rows, **_):
        return [""] * len(rows)


@pytest.mark.parametrize("decoder", ["pspo", "graphs"])
@pytest.mark.parametrize("options", [{}, {"min_completion_tokens": 9}, {"repetition_penalty": 1.3}, {"max_rows": 4}])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_decoding_is_the_librarys_token_for_token(name, options, decoder):
    if decoder == "graphs" and name.startswith("gemma2"):
        pytest.skip("refused: see test_graphs_refuse_what_they_cannot_decode")
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():  # logits further apart than rounding, and not the same token for ever
        for parameter in model.parameters():
            parameter.mul_(3.0)
    ours = Sampling(stop_ids=[95], pad_id=0, temperature=0.0, max_completion_tokens=24, decoder=decoder, **options)
    endless = generate(model, NoTexts(), PROMPTS, replace(ours, decoder="hf")).completion_ids
    stops = sorted({endless[0, 4].item(), endless[1, 12].item(), endless[2, 9].item()})  # rows end at different times
    ours = replace(ours, stop_ids=stops)
    a = generate(model, NoTexts(), PROMPTS, ours, group_size=3)
    b = generate(model, NoTexts(), PROMPTS, replace(ours, decoder="hf"), group_size=3)
    assert a.completion_mask.tolist() == b.completion_mask.tolist()
    assert a.completion_ids[a.completion_mask].tolist() == b.completion_ids[b.completion_mask].tolist()
    assert a.terminated.tolist() == b.terminated.tolist()
    assert a.prompt_ids.tolist() == b.prompt_ids.tolist()
    lengths = a.completion_mask.sum(dim=1)
    assert len(set(lengths.tolist())) > 1  # otherwise no row was ever dropped
    assert lengths.min() > options.get("min_completion_tokens", 0)


@pytest.mark.parametrize("decoder", ["pspo", "graphs"])
@pytest.mark.parametrize("model", ["tiny-base", "tiny-math", "SmolLM2"])
def test_greedy_decoding_of_a_trained_model_is_the_librarys(model, decoder):
    """SmolLM2: a folder made by scripts/smollm2_from_gguf.py, named in the environment as PSPO_SMOLLM2."""
    limit = 40
    if model == "SmolLM2":
        model, limit = os.environ.get("PSPO_SMOLLM2"), 6
        if not model:
            pytest.skip("PSPO_SMOLLM2 names no model folder")
    config = ModelConfig(model)
    tokenizer, policy = load_tokenizer(config), load_policy(config, torch.device("cpu"))
    problems = load_problems("arithmetic", "test", limit=limit)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], SYSTEM_PROMPT)
    assert len({len(prompt) for prompt in prompts}) >= limit / 8
    ours = Sampling(stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, temperature=0.0, decoder=decoder)
    a = generate(policy, tokenizer, prompts, ours, group_size=2)
    b = generate(policy, tokenizer, prompts, replace(ours, decoder="hf"), group_size=2)
    assert a.texts == b.texts
    assert a.completion_ids[a.completion_mask].tolist() == b.completion_ids[b.completion_mask].tolist()


@pytest.mark.parametrize("decoder", ["pspo", "graphs"])
def test_under_autocast_keys_and_values_are_kept_as_attention_takes_them(decoder):
    torch.manual_seed(0)
    model, seen = MODELS["qwen2"]().eval(), set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        seen.add((key.dtype, value.dtype))
        return attention(query, key, value, **options)

    sampling = Sampling(
        stop_ids=[95], pad_id=0, temperature=0.7, max_completion_tokens=9, decoder=decoder, logprobs=True
    )
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        rollout = generate(model, NoTexts(), PROMPTS, sampling, group_size=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = token_logprobs(model, *rollout.token_ids, 0.7)
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    torch.testing.assert_close(rollout.sampler_logprobs, expected.detach(), rtol=0, atol=0.1)


def test_a_model_without_keys_and_values_needs_the_librarys_loop():
    config = transformers.Lfm2Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM.*choose hf"):
        generate(model, NoTexts(), PROMPTS, Sampling(stop_ids=[95], pad_id=0))
    sampling = Sampling(stop_ids=[95], pad_id=0, temperature=0.0, max_completion_tokens=5, decoder="hf")
    rollout = generate(model, NoTexts(), [PROMPTS[1]] * 2, sampling)
    alone = rollout.rows(torch.tensor([0]))
    both = token_logprobs(model, *rollout.token_ids)
    torch.testing.assert_close(both[:1], token_logprobs(model, *alone.token_ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2, sliding window 8", "eager"])
def test_graphs_refuse_what_they_cannot_decode(name):
    model = MODELS["qwen2"]() if name == "eager" else MODELS[name]()
    if name == "eager":
        model.set_attn_implementation("eager")
    sampling = Sampling(stop_ids=[95], pad_id=0, decoder="graphs")
    with pytest.raises(ValueError, match=r"--rollout\.decoder graphs needs .* choose pspo"):
        generate(model, NoTexts(), PROMPTS, sampling)


@pytest.mark.parametrize("decoder", ["pspo", "graphs"])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"min_completion_tokens": 9}, {"max_rows": 4}, {"temperature": 0.0}]
)
def test_log_probs_of_sampled_tokens_are_the_models_own(options, decoder):
    """At the temperature, and before nucleus, top_k and the ban on stop tokens take anything away."""
    torch.manual_seed(0)
    model = MODELS["qwen2"]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    settings = {"temperature": 0.7, "top_p": 0.8, "max_completion_tokens": 16} | options
    sampling = Sampling(stop_ids=[5, 60, 70], pad_id=0, decoder=decoder, logprobs=True, **settings)
    rollout = generate(model, NoTexts(), PROMPTS, sampling, group_size=3)
    expected = token_logprobs(model, *rollout.token_ids, settings["temperature"] or 1.0)
    torch.testing.assert_close(rollout.sampler_logprobs, expected.detach(), rtol=0, atol=2e-5)
    assert expected.min() < -0.01
    some = torch.tensor([4, 1])
    assert torch.equal(rollout.rows(some).sampler_logprobs,
                       rollout.sampler_logprobs[some, : rollout.rows(some).completion_ids.shape[1]])  # fmt: skip
    assert generate(model, NoTexts(), PROMPTS, replace(sampling, logprobs=False)).sampler_logprobs is None


@pytest.mark.parametrize("settings", [{"decoder": "hf"}, {"repetition_penalty": 1.1}])
def test_the_librarys_loop_has_no_log_probs_to_give(settings):
    with pytest.raises(ValueError, match="logprobs"):
        Sampling(stop_ids=[1], pad_id=0, logprobs=True, **settings)


def exact_nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The distribution by its definition: sort, keep while the mass above is under top_p, renormalise; float64."""
    probs, order = logits.double().softmax(dim=-1).sort(descending=True)
    kept = torch.where(probs.cumsum(dim=-1) - probs < top_p, probs, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum())


SHAPES = [(20, 1.0), (64, 0.5), (400, 3.0), (400, 0.3), (1000, 0.1)]  # vocabulary, spread of the logits


@pytest.mark.parametrize(
    ("sampler", "vocabulary", "spread", "top_p"),
    [
        *((_sample_by_rejection, *shape, top_p) for shape in SHAPES for top_p in (0.3, 0.85, 1.0)),
        (_sample_by_rejection, 400, 0.3, 0.05),
        (_sample_by_rejection, 400, 0.1, 0.02),  # of which half the rows are sorted after `MAX_TRIES`
        *((_sample_sorted, *shape, 0.85) for shape in SHAPES),
        *((_sample_sorted, 64, 0.5, top_p) for top_p in (0.3, 1.0)),
    ],
)
def test_sampled_frequencies_are_the_exact_nucleus(sampler, vocabulary, spread, top_p):
    torch.manual_seed(vocabulary)
    logits = spread * torch.randn(vocabulary)
    expected = exact_nucleus(logits, top_p)
    draws, rows = 20_000, 10_000
    seen = torch.zeros(vocabulary, dtype=torch.float64)
    for _ in range(draws // rows):
        probs = logits.expand(rows, -1).softmax(dim=1)
        seen += torch.bincount(sampler(probs, top_p if top_p < 1 else float("inf")), minlength=vocabulary)
    assert seen[expected == 0].sum() == 0
    inside = expected > 0
    if inside.sum() == 1:
        return  # one possible token, and no other was drawn
    chi2 = ((seen - draws * expected)[inside].square() / (draws * expected[inside])).sum().item()
    freedom = int(inside.sum()) - 1
    # Wilson-Hilferty: the cube root of chi2 / freedom is normal; 4.5 standard deviations is once in 300,000
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 4.5, f"chi2 {chi2:.0f} at {freedom} degrees of freedom"


@pytest.mark.parametrize("sampler", [_sample_by_rejection, _sample_sorted])
@pytest.mark.parametrize(("probs", "top_p", "nucleus"), [
    ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1, 2, 3}),
    ([0.1, 0.4, 0.1, 0.3, 0.1], 0.75, {0, 1, 2, 3, 4}),  # 0.4 and 0.3 are 0.7: one of the 0.1s, and so all
    ([0.1, 0.4, 0.1, 0.3, 0.1], 0.65, {1, 3}),
])  # fmt: skip
def test_equally_likely_tokens_at_the_edge_belong_together(sampler, probs, top_p, nucleus):
    drawn = sampler(torch.tensor([probs]).expand(2000, -1), top_p)
    assert set(drawn.tolist()) == nucleus


def test_nothing_is_left_out_at_top_p_1():
    """Tokens so rare that the mass above them rounds to 1; a float32 sum of probabilities would never reach them."""
    logits = torch.zeros(1, 50_000)
    logits[0, 0] = 17.0
    drawn = torch.cat([sample_nucleus(logits.expand(100, -1), 1.0) for _ in range(20)])
    expected = 49_999 / (49_999 + 2.718281828459045**17)  # 0.2%
    assert abs((drawn != 0).float().mean().item() - expected) < 5 * (expected / len(drawn)) ** 0.5
    assert (drawn != 0).any()


def test_logits_that_are_not_numbers_end_the_sampling():
    tokens = sample_nucleus(torch.full((3, 100), torch.nan), 0.85)
    assert tokens.shape == (3,)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_rows_with_narrow_and_wide_nuclei_keep_apart():
    torch.manual_seed(0)
    peaked = torch.full((1000,), -30.0)
    peaked[17] = 0.0
    wide = 0.01 * torch.randn(1000)
    tokens = sample_nucleus(torch.stack([peaked, wide] * 500), 0.85)
    assert set(tokens[::2].tolist()) == {17}
    assert len(set(tokens[1::2].tolist())) > 300
