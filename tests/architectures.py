"""Tiny random models of 157 architectures that transformers can train causally, and what pspo does with each."""

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {  # those that an architecture's configuration has
    32: "hidden_size d_model n_embd embed_dim embedding_size input_embedding_size output_embedding_size",
    48: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank",
    8: "state_size mamba_d_state v_head_dim",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim sliding_window rotary_dim""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads
        num_experts_per_tok expansion_ratio eos_token_id""",
    1: "bos_token_id",
    0: "pad_token_id",
    576: "vocab_size",
    0.3: "initializer_range init_std",  # far from uniform, so that wrong positions and masks show
}
SIZES = {field: size for size, fields in SIZES.items() for field in fields.split()}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
OWN = {  # by architectures; None for a size that one refuses
    "axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu": {"num_key_value_heads": 4},
    "bailing_hybrid kimi_linear": {"layer_types": LINEAR["layer_types"], "num_key_value_heads": 4},
    "bamba": MAMBA | {"head_dim": 8, "attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gemma gemma3_text helium hunyuan_v1_dense hunyuan_v1_moe ministral qwen3": {"head_dim": 8},
    "gemma2": {
        "head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0,
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"initializer_range": 0.02},  # a recurrence, which amplifies rounding
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2 lfm2_moe lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen3_next qwen3_5_text qwen3_5_moe_text": LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"],
        "n_mamba_heads": 4, "mamba_headdim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
OWN = {name: settings for names, settings in OWN.items() for name in names.split()}

OUTCOMES = {
    "pspo": """afmoe apertus arcee aria_text beam biogpt bitnet bloom codegen ctrl cwm deepseek_v2 deepseek_v3 diffllama
        doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma gemma2 gemma3_text
        gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
        gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum mimo_v2_flash
        minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmoe
        opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
        vaultgemma whisper xglm youtu""",
    "hf": """axk2 bailing_hybrid bamba deepseek_v32 deepseek_v4 falcon_h1 falcon_mamba glm_moe_dsa granitemoehybrid
        hy_v4 inkling2_text jamba kimi_linear lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid
        qwen3_5_moe_text qwen3_5_text qwen3_next zamba2 zaya""",
    "does more to its logits": """bert bert-generation big_bird camembert cohere cohere2 cohere2_moe data2vec-text
        electra ernie inkling_text megatron-bert minicpm3 modernbert-decoder rembert roberta roberta-prelayernorm
        roformer xlm-roberta xlm-roberta-xl xmod""",
    "gives a row other log-probs": """bart bigbird_pegasus blenderbot blenderbot-small marian mbart moshi mvp pegasus
        plbart recurrent_gemma trocr""",
    "fails on a small batch": "cpmant llama4_text openai-gpt prophetnet rwkv xlm xlnet xlstm",
}  # exact, by a decoder; or refused, with words of the message
OUTCOMES = {outcome: names.split() for outcome, names in OUTCOMES.items()}


def each(*outcomes: str, in_ci: Sequence[str]) -> pytest.MarkDecorator:
    """Runs a test with the name of each architecture of these outcomes, nightly but for those named."""
    names = [name for outcome in outcomes for name in OUTCOMES[outcome]]
    cases = [pytest.param(name, marks=() if name in in_ci else pytest.mark.nightly) for name in names]
    return pytest.mark.parametrize("name", cases)


def tiny(name: str, seed: int = 0, **settings) -> PreTrainedModel:
    default = AutoConfig.for_model(name)
    sizes = {field: size for field, size in SIZES.items() if hasattr(default, field)}
    sizes |= OWN.get(name, {}) | settings
    config = AutoConfig.for_model(name, **{field: size for field, size in sizes.items() if size is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()
