"""Memory that a run needs, before its weights are loaded: parameters are counted, two layers measured, the rest added.

The two layers have the model's width and dtypes and run on the run's device, so that their activations are those of its
attention, its precision and its adapters.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from bisect import bisect
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from pspo import distributed as dist
from pspo.config import ModelConfig, TrainConfig
from pspo.hub.models import without_dropout
from pspo.model import autocast, casts_to_bf16, has_adapters
from pspo.model.load import ready, weights_dtype
from pspo.model.logprobs import CHUNK_BYTES, CHUNK_TOKENS
from pspo.records.files import as_argument
from pspo.records.folders import nearest

GB = 2**30
USABLE = 0.9  # of the device's memory: the rest is fragments, buffers and the libraries' own
SAMPLER_BYTES = 36  # per logit of a decoding step, where the vocabulary is sorted
STATES = {"adamw": 8, "adamw8bit": 2, "paged_adamw8bit": 2, "sgd": 0}  # bytes of a parameter's moments

Needs = dict[str, dict[str, float]]  # bytes by phase and part
AUTO = {"rollout.max_rows": "rollout", "optimizer.microbatch_tokens": "training"}  # and the phase whose need they set


class Planner:
    """Plans the memory of runs with one model, which is measured once; ``prompt_tokens`` are the longest prompt's."""

    def __init__(self, config: ModelConfig, prompt_tokens: int, device: torch.device):
        self.config, self.prompt_tokens = config.resolved(), prompt_tokens
        self.policy, self.cast = empty_policy(self.config, device), casts_to_bf16(config.autocast, device)
        self.layer, self.rest, self.keys = measure_layers(self.config, device)

    def needs(self, config: TrainConfig) -> Needs:
        """Bytes that a rank needs in its rollouts, in the passes of its training, and in its optimizer's step."""
        text, parameters = self.policy.config.get_text_config(), list(self.policy.parameters())
        layers, vocab, residual = text.num_hidden_layers, text.vocab_size, 4 * text.hidden_size
        weights = sum(p.numel() * p.element_size() for p in parameters)
        trained = [p for p in parameters if p.requires_grad]
        gradients = sum(p.numel() * p.element_size() for p in trained)
        copies = gradients if self.config.has_adapters else weights  # of the reference
        resting = {
            "weights": weights + (copies if config.algorithm.beta > 0 else 0),
            "optimizer": STATES[config.optimizer.name] * sum(p.numel() for p in trained),
        }
        linear = [m.weight for m in self.policy.modules() if isinstance(m, nn.Linear)]
        cast_copies = sum(2 * w.numel() for w in linear if w.dtype == torch.float32) if self.cast else 0
        head = self.policy.get_output_embeddings().weight
        chunk = max(CHUNK_TOKENS * vocab, CHUNK_BYTES // 4)  # logits at a time
        decoded = min(rows_to_decode(config), max(config.rollout.max_rows, config.rollout.group_size))
        tokens, rows = fullest_microbatch(config, self.prompt_tokens)
        checkpointed = layers * residual + self.layer
        activations = self.rest + (checkpointed if self.config.gradient_checkpointing else layers * self.layer)
        float32 = 20 * max(p.numel() for p in trained) if trained[0].dtype == torch.bfloat16 else 0
        length = self.prompt_tokens + config.rollout.max_completion_tokens
        return {
            "rollout": resting | {
                "bf16 copies": cast_copies,
                "cache": decoded * length * layers * self.keys,
                "sampler": SAMPLER_BYTES * decoded * vocab,
            },
            "training": resting | {
                # They come while activations go; at the beginning there are those of one layer's activations.
                "gradients": max(gradients, tokens * self.layer),
                "bf16 copies": cast_copies,
                "activations": tokens * activations + rows * self.prompt_tokens * layers * self.keys,
                "head": 8 * chunk + (head.numel() * (6 if self.cast else 4) if head.requires_grad else 0),
            },
            "step": resting | {"gradients": gradients, "float32 of one tensor": float32},
        }  # fmt: skip


def largest_that_fit(config: TrainConfig, prompt_tokens: int, device: torch.device) -> dict[str, int]:
    """By switch that is ``auto``, the largest number that fits; ValueError if the model cannot be measured."""
    switches, there = auto_switches(config), available_memory(config, device)
    config = replace_switches(config, dict.fromkeys(switches, 1))
    try:
        planner = Planner(config.model, prompt_tokens, device)
    except Exception as error:  # see say_needs
        raise ValueError(f"--{switches[0]} auto: the model cannot be measured ({error}); give a number") from error
    rollout, groups = config.rollout, -(-rank_prompts(config) // config.algorithm.minibatches)
    minibatch = groups * (prompt_tokens + rollout.group_size * rollout.max_completion_tokens)
    most = {"rollout.max_rows": rows_to_decode(config), "optimizer.microbatch_tokens": minibatch}

    def too_much(switch: str, number: int) -> bool:
        return sum(planner.needs(replace_switches(config, {switch: number}))[AUTO[switch]].values()) > USABLE * there

    return {name: max(1, bisect(range(1, most[name] + 1), False, key=partial(too_much, name))) for name in switches}


def auto_switches(config: TrainConfig) -> list[str]:
    return [switch for switch in AUTO if attrgetter(switch)(config) == "auto"]


def replace_switches(config: Any, values: dict[str, Any]) -> Any:
    """The configuration, or one section, with other values of these switches."""
    for switch, value in values.items():
        name, _, rest = switch.partition(".")
        config = replace(config, **{name: replace_switches(getattr(config, name), {rest: value}) if rest else value})
    return config


def rank_prompts(config: TrainConfig) -> int:
    return -(-config.rollout.prompts // dist.world_size())


def rows_to_decode(config: TrainConfig) -> int:
    """The most rows that a rank has in a rollout or an evaluation."""
    run = config.run
    evaluated = max(run.test_limit, run.validation_limit if run.validate_every else 0)
    return max(rank_prompts(config) * config.rollout.group_size, -(-evaluated // dist.world_size()))


def empty_policy(config: ModelConfig, device: torch.device, layers: int = 0) -> transformers.PreTrainedModel:
    """The policy without memory, on the meta device; or random on the device, with so many layers and 8 tokens."""
    model_config = without_dropout(config)
    if layers:
        text = model_config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = layers, 8, None
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    with torch.device(device if layers else "meta"), torch.random.fork_rng(devices=[]):
        options = {"dtype": weights_dtype(config, device), "attn_implementation": config.attn_implementation}
        options["trust_remote_code"] = config.trust_remote_code
        return ready(AutoModelForCausalLM.from_config(model_config, **options), config)


def measure_layers(config: ModelConfig, device: torch.device) -> tuple[float, float, float]:
    """Bytes per token of a layer's activations, of the other activations, of a layer's keys and values."""
    plain = replace(config, gradient_checkpointing=False)
    per_token = []
    for layers in (1, 2):
        policy = empty_policy(plain, device, layers)
        few, many = (saved_bytes(policy, tokens, config, device) for tokens in (64, 128))
        per_token.append((many - few) / (4 * 64))
    layer = per_token[1] - per_token[0]
    cache, ids = DynamicCache(config=policy.config), torch.zeros(1, 64, dtype=torch.long, device=device)
    with torch.no_grad(), autocast(config.autocast, device):
        policy.base_model(ids, past_key_values=cache, use_cache=True)
    keys = sum(states.numel() * states.element_size() for states in (cache.layers[0].keys, cache.layers[0].values)) / 64
    return layer, per_token[0] - layer, keys


def saved_bytes(policy: transformers.PreTrainedModel, width: int, config: ModelConfig, device: torch.device) -> int:
    """Bytes that the forward pass of 4 rows keeps for the backward pass, parameters aside."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # which keeps the address its own
        return tensor.detach()  # itself it would keep its own graph, for ever if it is an operation's output

    ids = torch.zeros(4, width, dtype=torch.long, device=device)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(config.autocast, device):
        policy.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    for parameter in policy.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def fullest_microbatch(config: TrainConfig, prompt_tokens: int) -> tuple[int, int]:
    """Tokens of the fullest training microbatch, a group's prompt once, and its rows."""
    rollout, limit = config.rollout, config.optimizer.microbatch_tokens
    group = prompt_tokens + rollout.group_size * rollout.max_completion_tokens
    groups = min(max(1, limit // group), -(-rank_prompts(config) // config.algorithm.minibatches))
    if group <= limit:
        return groups * group, groups * rollout.group_size
    row = prompt_tokens + rollout.max_completion_tokens
    rows = max(1, min(rollout.group_size, limit // row))
    return rows * row, rows


def available_memory(config: TrainConfig, device: torch.device) -> float:
    """Bytes of a GPU's memory that are free, less an engine's; of a CPU's all, divided by the ranks that share it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return max(0.0, free - (config.rollout.engine_memory * total if config.rollout.external else 0))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def say_needs(config: TrainConfig, prompt_tokens: int, device: torch.device) -> None:
    """Print the memory that the run needs; if it will not fit, how much every part takes, and what would help."""
    try:
        planner = Planner(config.model, prompt_tokens, device)
        needs = planner.needs(config)
    except Exception:  # of an architecture whose layers cannot be cut off: the run itself may be fine
        return
    there, sizes = available_memory(config, device) / GB, {key: sum(of.values()) / GB for key, of in needs.items()}
    most, has = max(sizes, key=sizes.get), f"{there:.1f} GB of {device.type} memory"
    if sizes[most] <= USABLE * there:
        training = max(sizes["training"], sizes["step"])
        print(f"memory  {sizes['rollout']:.1f} GB in rollouts, {training:.1f} GB in training, of {has}")
        return
    parts = ", ".join(f"{part} {size / GB:.1f}" for part, size in needs[most].items() if size)
    print(f"memory  {sizes[most]:.1f} GB in its {most} ({parts}), of {has}: it will probably not fit. "
          f"With {', '.join(advice(config, planner, device, sizes[most]))}")  # fmt: skip


def advice(config: TrainConfig, planner: Planner, device: torch.device, now: float) -> list[str]:
    """Switches that lower the highest need of any phase, which is now so many GB; the lowest first."""
    changes: dict[str, Any] = {
        "model.gradient_checkpointing": True,
        "optimizer.microbatch_tokens": max(config.optimizer.microbatch_tokens // 4, 1),
        "rollout.max_rows": max(config.rollout.max_rows // 4, 1),
        "model.dtype": "bfloat16",
        "optimizer.name": "adamw8bit",
    }
    if find_spec("peft"):
        changes["model.lora.rank"] = 16
    sizes = {}
    for switch, value in changes.items():
        with contextlib.suppress(ValueError):  # a switch that this model does not take
            changed = replace_switches(config, {switch: value})
            other = Planner(changed.model, planner.prompt_tokens, device) if changed.model != config.model else planner
            size = max(sum(parts.values()) for parts in other.needs(changed).values()) / GB
            if size < now:
                sizes[f"--{switch} {as_argument(value)} {size:.1f} GB"] = size
    return sorted(sizes, key=sizes.get)


def check_disk(config: TrainConfig, policy: nn.Module, output: Path) -> None:
    """Raise ValueError if the disk has no room for the run's checkpoints and models; an older one is removed last."""
    run, trained = config.run, [p for p in policy.parameters() if p.requires_grad]
    model = sum(p.numel() * p.element_size() for p in (trained if has_adapters(policy) else policy.parameters()))
    checkpoint = model + STATES[config.optimizer.name] * sum(p.numel() for p in trained)
    checkpoint += model if config.algorithm.reference_every else 0
    saves = 1 + (run.max_steps // run.save_every if run.save_every else 0)
    held = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    needed = min(run.keep + 1, saves) * checkpoint + 3 * model - held  # the best, a better one, the final one
    if needed > (free := shutil.disk_usage(nearest(output)).free):
        what = f"--run.keep {run.keep} needs {needed / GB:.2g} GiB for checkpoints and models"
        raise ValueError(f"{what}, {output} has {free / GB:.2g} GiB free: lower it, or set another --run.output_dir")


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far: of the GPU's tensors, or of the whole process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return peak / (GB if sys.platform == "darwin" else 2**20)
