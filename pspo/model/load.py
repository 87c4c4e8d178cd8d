"""Load a policy and its tokenizer, ready to train, and check that both are what the trainer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from pspo import distributed as dist
from pspo.config import DistributedConfig, ModelConfig
from pspo.model.adapters import add_adapters, fill_adapters
from pspo.model.device import casts_to_bf16
from pspo.model.find import from_pretrained, load_errors, weight_folder, without_dropout
from pspo.model.linear import use_onednn

transformers.utils.logging.disable_progress_bar()  # its bar for loading weights would stand above ours
UNEXPECTED = "its config.json describes a model without its weights"


def load_policy(
    config: ModelConfig, device: torch.device | None = None, distributed: DistributedConfig | None = None
) -> transformers.PreTrainedModel:
    """The model, ready to train, by default on this process's GPU if it has one; with LoRA all but adapters is frozen.

    Under fsdp2 it is spread over the ranks, and each reads its own rows.

    Dropout is off (in what is saved, too), because old and new log-probs must come from one function. The weights are
    of --model.dtype, whatever the checkpoint's: by default float32, because a step of 1e-6 vanishes in bfloat16.

    Raises ValueError for a model that cannot be found, for weights that are not those its config.json describes, or not
    finite. Whether it computes what the trainer takes it to compute, is for `pspo.model.exactness` to check.
    """
    device, config = device or dist.local_device(), config.resolved()
    sharded = distributed is not None and distributed.sharded
    policy = _sharded_policy(config, device, distributed.shard) if sharded else _whole_policy(config, device)
    if config.has_adapters:
        fill_adapters(policy, config.lora.name_or_path)
    sums = {name: dist.local_shard(weight).sum() for name, weight in policy.named_parameters()}  # NaN and inf stay
    broken = [name for name, total in sums.items() if not total.isfinite()]
    refuse("not all numbers are finite in its weights", broken, config)
    if config.compile:
        policy.base_model.compile(dynamic=True)
    return policy


def _whole_policy(config: ModelConfig, device: torch.device) -> transformers.PreTrainedModel:
    options = {"attn_implementation": config.attn_implementation, "output_loading_info": True}
    options |= {"dtype": weights_dtype(config, device), "config": without_dropout(config)}
    policy, loading = from_pretrained(AutoModelForCausalLM, config, ignore_mismatched_sizes=True, **options)
    refuse("its weights lack", loading["missing_keys"], config)  # they would be random
    refuse("its config.json describes other shapes of", [name for name, *_ in loading["mismatched_keys"]], config)
    refuse(UNEXPECTED, loading["unexpected_keys"], config)  # a layer, say
    return ready(policy.to(device), config)


def refuse(what: str, names: Iterable[str], config: ModelConfig, fix: str = "") -> None:
    """Raise ValueError if there are such weights."""
    if names := sorted(names):
        listed = ", ".join(names[:3]) + " ..." * (len(names) > 3)
        raise ValueError(f"--model.name_or_path {config.name_or_path}: {what} {listed}{fix}")


def weights_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of the weights; of the frozen ones under LoRA."""
    auto = "bfloat16" if config.has_adapters and casts_to_bf16(config.autocast, device) else "float32"
    return getattr(torch, auto if config.dtype == "auto" else config.dtype)


def _sharded_policy(config: ModelConfig, device: torch.device, ranks: int | None) -> transformers.PreTrainedModel:
    """Shard a model that has no memory yet, then read each rank's rows of the weights from its safetensors files."""
    dist.run_on_main(lambda: weight_folder(config))  # downloads once, before the other ranks look
    folder, policy = weight_folder(config), empty_policy(config, device)
    with load_errors(config):
        if (folder / "generation_config.json").exists():
            policy.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    dist.shard(policy, torch.bfloat16 if casts_to_bf16(config.autocast, device) else None, ranks)
    missing, unexpected = dist.fill(policy, folder, device)
    fix = "; load it in one process and save it with save_pretrained"
    refuse("its files lack", [name for name in missing if "lora_" not in name], config, fix)
    loading = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected)
    policy._adjust_missing_and_unexpected_keys(loading)  # as `from_pretrained`'s loading info; transformers 5.23
    refuse(UNEXPECTED, loading.unexpected_keys, config)
    return policy


def empty_policy(config: ModelConfig, device: torch.device, layers: int = 0) -> transformers.PreTrainedModel:
    """The policy without memory, on the meta device; or random on the device, with so many layers and 8 tokens."""
    model_config = without_dropout(config)
    if layers:
        text = model_config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = layers, 8, None
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    options = {"dtype": weights_dtype(config, device), "attn_implementation": config.attn_implementation}
    with torch.device(device if layers else "meta"), torch.random.fork_rng(devices=[]):
        with load_errors(config):
            model = AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=config.trust_remote_code, **options
            )
        return ready(model, config)


def ready(policy: transformers.PreTrainedModel, config: ModelConfig) -> transformers.PreTrainedModel:
    """Prepare a model for training in place: adapters, evaluation mode, oneDNN's products, checkpointed layers."""
    softcap = getattr(policy.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap and policy.config._attn_implementation == "sdpa":  # the default of transformers before 5.21
        what = f"leaves out the cap that {config.name_or_path} puts on attention's logits"
        raise ValueError(f"--model.attn_implementation sdpa {what}: set it to eager")
    if config.has_adapters:
        add_adapters(policy, config)
    policy.eval()
    use_onednn(policy)
    if config.has_adapters:
        from pspo.model.lora import fuse_adapters

        fuse_adapters(policy)
    if config.gradient_checkpointing:
        checkpoint_activations(policy)
    return policy


def checkpoint_activations(policy: transformers.PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass, also of layers that fill a cache (`PassCache`).

    By transformers' own switch layers would lose their cache, and so the prompts that rows share.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"--model.gradient_checkpointing does not support {type(policy).__name__}: leave it off")
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
