"""Load a policy, check that its weights are what its configuration describes, make it ready to train; write models."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from pspo import distributed as dist
from pspo.config import DistributedConfig, ModelConfig, require
from pspo.model.adapters import adapter_config, add_adapters, fill_adapters, has_adapters, save_adapters
from pspo.model.device import casts_to_bf16, set_variables
from pspo.model.find import load_model_config, load_pretrained, resolve_adapters, stop_token_ids
from pspo.model.linear import use_fast_products

transformers.utils.logging.disable_progress_bar()  # its bar for loading weights would stand above ours


def load_policy(
    config: ModelConfig, device: torch.device | None = None, distributed: DistributedConfig | None = None
) -> PreTrainedModel:
    """The model, ready to train, by default on this process's GPU if it has one; with LoRA, only adapters train.

    It is in evaluation mode, without dropout, because old and new log-probs must come from one function. Weights are
    float32 by default, because a step of 1e-6 vanishes in bfloat16. Under fsdp2 each rank reads the whole model into
    host memory, and keeps its shards. Raises ValueError if the model cannot be found, or its weights are
    not those that its config.json describes.
    """
    config = resolve_adapters(config)
    device = device or dist.local_device()
    adapters = adapter_config(config) if config.has_adapters else None
    is_sharded = distributed is not None and distributed.strategy == "fsdp2"
    if is_sharded:
        trains_bf16 = config.dtype == "bfloat16" and not config.has_adapters
        require(not trains_bf16, "model.dtype", "must be float32 under fsdp2 unless LoRA is used", config.dtype)
    policy = read_policy(config, weights_dtype(config, device))
    if adapters is not None:
        add_adapters(policy, adapters)
    if is_sharded:
        dist.shard(policy, torch.bfloat16 if casts_to_bf16(config.autocast, device) else None)
    else:
        policy.to(device)
    prepare_policy(policy, config)
    if config.has_adapters:
        fill_adapters(policy, config.lora.name_or_path)
    return policy


def read_policy(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights on the CPU; ValueError if they are not those that its config.json describes."""
    options = {"config": load_model_config(config), "dtype": dtype, "attn_implementation": config.attn_implementation}
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    policy, loading = load_pretrained(AutoModelForCausalLM, config, **options)
    source = f"--model.name_or_path {config.name_or_path}"
    mismatched = [name for name, *_ in loading["mismatched_keys"]]
    broken = [name for name, weight in policy.named_parameters() if not weight.sum().isfinite()]  # NaN stays in a sum
    names = sorted({*loading["missing_keys"], *loading["unexpected_keys"], *mismatched, *broken})
    if names:
        fault = "its weights are not those that its config.json describes, or not finite"
        raise ValueError(f"{source}: {fault}: {', '.join(names[:3])}; download or save it again")
    if getattr(policy, "is_quantized", False):
        raise ValueError(f"{source} is quantised: use it unquantised")
    if has_adapters(policy):  # transformers has found adapters, and frozen them
        raise ValueError(f"{source} holds adapters: name them by a local folder")
    return policy


def weights_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of the weights; under LoRA, of the frozen weights."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.bfloat16 if casts_to_bf16(config.autocast, device) and config.has_adapters else torch.float32


def prepare_policy(policy: PreTrainedModel, config: ModelConfig) -> None:
    """Prepare a model for training in place: evaluation mode, fast products, checkpointed layers."""
    softcap = getattr(policy.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap and policy.config._attn_implementation == "sdpa":  # the default of transformers before 5.21
        raise ValueError("--model.attn_implementation sdpa leaves out the cap on attention's logits: set it to eager")
    policy.eval()
    if policy.device.type == "cpu":
        set_variables()
    use_fast_products(policy, config.has_adapters)
    if config.gradient_checkpointing:  # transformers' own switch would take the layers' cache away
        layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not layers:
            raise ValueError(f"--model.gradient_checkpointing does not support {type(policy).__name__}: leave it off")
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def write_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write tokenizer, and model or adapters, into a folder; ``weights`` are a sharded model's gathered weights."""
    if has_adapters(policy):
        save_adapters(policy, folder, weights)
    else:
        generation_config = policy.generation_config
        policy.generation_config = GenerationConfig()  # the library may refuse to save the model's own
        try:
            policy.save_pretrained(folder, state_dict=weights)
        finally:
            policy.generation_config = generation_config
        saved = copy.deepcopy(generation_config)
        stops = stop_token_ids(policy, tokenizer)
        if stops != [saved.eos_token_id]:
            saved.eos_token_id = stops  # completions end with a turn, which a base model's eos does not end
        saved.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)
