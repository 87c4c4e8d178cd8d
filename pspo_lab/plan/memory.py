"""Memory that a run needs, before its weights are loaded: parameters are counted, two layers measured, the rest added.

The two layers have the model's width and dtypes and run on the run's device, so that their activations are those of its
attention, its precision and its adapters.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from bisect import bisect
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from pspo import distributed as dist
from pspo.cli.files import as_argument
from pspo.config import ModelConfig, TrainConfig
from pspo.model import autocast, casts_to_bf16, has_adapters
from pspo.model.device import GIB, peak_memory_gb
from pspo.model.find import config_without_dropout
from pspo.model.load import empty_policy, prepare_policy, weights_dtype
from pspo.model.logprobs import CHUNK_BYTES, CHUNK_TOKENS
from pspo.run.folders import nearest_existing

USABLE = 0.9  # of the memory that is free: a plan is a sum, not a measurement
LATER = 0.1 * GIB  # of a process: what it imports after the plan, to write tables
FRAGMENTS = 0.3  # of what passes, held by a CPU allocator
ROLLOUT_BYTES = 24  # per token of a rollout that is kept: ids, masks, log-probs, text
SAMPLER_BYTES = 36  # per logit of a decoding step, where the vocabulary is sorted
# Bytes of a parameter's moments; paged ones go to the CPU's memory.
STATES = {"adamw": 8, "adamw8bit": 2, "paged_adamw8bit": 0, "sgd": 0}

Needs = dict[str, dict[str, float]]  # bytes by phase and part
AUTO = {"rollout.max_rows": "rollout", "optimizer.microbatch_tokens": "training"}  # and the phase whose need they set


class Planner:
    """Plans the memory of runs with one model, which is measured once.

    ``prompt_tokens`` are the longest prompt's, ``shared_tokens`` those with which all begin.
    """

    def __init__(self, config: ModelConfig, prompt_tokens: int, device: torch.device, shared_tokens: int = 0):
        self.config, self.device = config.resolved(), device
        self.prompt_tokens, self.shared_tokens = prompt_tokens, shared_tokens
        self.policy, self.cast = empty_policy(self.config, device), casts_to_bf16(config.autocast, device)
        self.parameters = list(self.policy.parameters())
        self.trained = [p for p in self.parameters if p.requires_grad]

    @cached_property
    def layers(self) -> tuple[float, float, float]:
        return measure_layers(self.config, self.device)

    @cached_property
    def process(self) -> float:
        """Bytes of the process before there is a model, and of what it will import."""
        return resident_memory() + LATER

    def certain(self, config: TrainConfig) -> dict[str, float]:
        """Bytes of what every run of this configuration has, however short its prompts and completions are."""
        ranks = shard_ranks(config)
        weights = sum(p.nbytes for p in self.parameters) / ranks
        gradients = sum(p.nbytes for p in self.trained) / ranks
        copies = gradients if self.config.has_adapters else weights  # of the reference
        rows = (1 + config.rollout.lag) * rank_prompts(config) * config.rollout.group_size
        return {
            "weights": weights + (copies if config.algorithm.beta > 0 else 0),
            "optimizer": STATES[config.optimizer.name] * sum(p.numel() for p in self.trained) / ranks,
            "gradients": gradients,
            "rollouts": ROLLOUT_BYTES * rows * (self.prompt_tokens + config.rollout.max_completion_tokens),
        }

    def needs(self, config: TrainConfig) -> Needs:
        """Bytes of a rank's tensors in its rollouts, in the passes of its training, and in its optimizer's step."""
        resting, (layer, rest, keys) = self.certain(config), self.layers
        gradients, ranks = resting.pop("gradients"), shard_ranks(config)
        text, parameters, trained = self.policy.config.get_text_config(), self.parameters, self.trained
        layers, vocab, residual = text.num_hidden_layers, text.vocab_size, 4 * text.hidden_size
        linear = [m.weight for m in self.policy.modules() if isinstance(m, nn.Linear)]
        cast_copies = sum(2 * w.numel() for w in linear if w.dtype == torch.float32) if self.cast else 0
        head = self.policy.get_output_embeddings().weight
        chunk = max(CHUNK_TOKENS * vocab, CHUNK_BYTES // 4)  # logits at a time
        decoded = min(rows_to_decode(config), max(config.rollout.max_rows, config.rollout.group_size))
        tokens, rows = fullest_microbatch(config, self.prompt_tokens, self.shared_tokens)
        checkpointed = layers * residual + layer
        activations = rest + (checkpointed if self.config.gradient_checkpointing else layers * layer)
        float32 = 20 * max(p.numel() for p in trained) if trained[0].dtype == torch.bfloat16 else 0
        length = self.prompt_tokens + config.rollout.max_completion_tokens
        tests_best = config.run.validate_every and config.run.test_limit and not self.config.has_adapters
        whole = passing = {"bf16 copies": cast_copies}
        if config.sharded:
            every, width = sum(p.numel() for p in parameters), 2 if self.cast else 4
            outer = sum({id(w): w.numel() for w in (head, self.policy.get_input_embeddings().weight)}.values())
            some = every if config.distributed.gather == "step" else outer + 2 * (every - outer) / layers
            whole = {"gathered weights": width * (every if config.distributed.rollout == "gathered" else some)}
            passing = {"gathered weights and gradients": 2 * width * some}
        return {
            "rollout": resting | whole | {
                "best model": sum(p.nbytes for p in parameters) / ranks if tests_best else 0,  # beside the final one
                "cache": decoded * length * layers * keys,
                "sampler": SAMPLER_BYTES * decoded * vocab,
            },
            "training": resting | passing | {
                # They come while activations go; at the beginning there are those of one layer's activations.
                "gradients": max(gradients, tokens * layer),
                "activations": tokens * activations + rows * self.prompt_tokens * layers * keys,
                "measured gradients": 12 * sum(p.numel() for p in trained) / ranks if config.run.gradients_every else 0,
                "head": 8 * chunk + (head.numel() * (6 if self.cast else 4) if head.requires_grad else 0),
            },
            "step": resting | {"gradients": gradients, "float32 of one tensor": float32},
        }  # fmt: skip

    def plan(self, config: TrainConfig) -> Needs:
        """Bytes that a rank needs of its device: on a GPU its tensors, on a CPU the whole process.

        A CPU's allocator holds what activations leave: in pieces, and beneath the temporaries of the step.
        """
        needs = self.needs(config)
        if self.device.type == "cuda":
            return needs
        training, temporaries = needs["training"], needs.pop("step")["float32 of one tensor"]
        passing = sum(training[part] for part in ("activations", "gradients", "head")) + needs["rollout"]["sampler"]
        held = FRAGMENTS * passing
        training |= {"fragments": held, "float32 of one tensor": temporaries}
        return {phase: {"process": self.process} | parts for phase, parts in needs.items()}


def largest_that_fit(
    config: TrainConfig, prompt_tokens: int, device: torch.device, shared_tokens: int = 0
) -> dict[str, int]:
    """By switch that is ``auto``, the largest number that fits; ValueError if the model cannot be measured."""
    switches, there = auto_switches(config), available_memory(config, device)
    config = replace_switches(config, dict.fromkeys(switches, 1))
    try:
        planner = Planner(config.model, prompt_tokens, device, shared_tokens)
        planner.plan(config)
    except Exception as error:  # see plan_memory
        raise ValueError(f"--{switches[0]} auto: the model cannot be measured ({error}); give a number") from error
    rollout, groups = config.rollout, -(-rank_prompts(config) // config.algorithm.minibatches)
    minibatch = groups * (prompt_tokens + rollout.group_size * rollout.max_completion_tokens)
    most = {"rollout.max_rows": rows_to_decode(config), "optimizer.microbatch_tokens": minibatch}

    def too_much(switch: str, number: int) -> bool:
        return sum(planner.plan(replace_switches(config, {switch: number}))[AUTO[switch]].values()) > USABLE * there

    return {name: max(1, bisect(range(1, most[name] + 1), False, key=partial(too_much, name))) for name in switches}


def auto_switches(config: TrainConfig) -> list[str]:
    return [switch for switch in AUTO if attrgetter(switch)(config) == "auto"]


def replace_switches(config: Any, values: dict[str, Any]) -> Any:
    """The configuration, or one section, with other values of these switches."""
    for switch, value in values.items():
        name, _, rest = switch.partition(".")
        config = replace(config, **{name: replace_switches(getattr(config, name), {rest: value}) if rest else value})
    return config


def shard_ranks(config: TrainConfig) -> int:
    """How many ranks a model is spread over."""
    return config.distributed.shard or dist.world_size() if config.sharded else 1


def rank_prompts(config: TrainConfig) -> int:
    return -(-config.rollout.prompts // dist.world_size())


def rows_to_decode(config: TrainConfig) -> int:
    """The most rows that a rank has in a rollout or an evaluation."""
    run = config.run
    evaluated = max(run.test_limit, run.validation_limit if run.validate_every else 0)
    return max(rank_prompts(config) * config.rollout.group_size, -(-evaluated // dist.world_size()))


def measure_layers(config: ModelConfig, device: torch.device) -> tuple[float, float, float]:
    """Bytes per token of a layer's activations, of the other activations, of a layer's keys and values."""
    plain = replace(config, gradient_checkpointing=False)
    per_token = []
    for layers in (1, 2):
        policy = small_policy(plain, device, layers)
        few, many = (saved_bytes(policy, tokens, config, device) for tokens in (64, 128))
        per_token.append((many - few) / (4 * 64))
    layer = per_token[1] - per_token[0]
    cache, ids = DynamicCache(config=policy.config), torch.zeros(1, 64, dtype=torch.long, device=device)
    with torch.no_grad(), autocast(config.autocast, device):
        policy.base_model(ids, past_key_values=cache, use_cache=True)
    keys = sum(states.numel() * states.element_size() for states in (cache.layers[0].keys, cache.layers[0].values)) / 64
    return layer, per_token[0] - layer, keys


def small_policy(config: ModelConfig, device: torch.device, layers: int) -> transformers.PreTrainedModel:
    """The policy with random weights, few layers and 8 tokens."""
    model_config = config_without_dropout(config)
    text = model_config.get_text_config()
    text.num_hidden_layers = layers
    text.vocab_size = 8
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.device(device), torch.random.fork_rng(devices=[]):
        policy = AutoModelForCausalLM.from_config(
            model_config,
            trust_remote_code=config.trust_remote_code,
            dtype=weights_dtype(config, device),
            attn_implementation=config.attn_implementation,
        )
        return prepare_policy(policy, config)


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


def fullest_microbatch(config: TrainConfig, prompt_tokens: int, shared_tokens: int = 0) -> tuple[int, int]:
    """Tokens of the fullest training microbatch's passes, and its rows.

    Unless sharded, a group's prompt is there once, and so is the beginning that all prompts share.
    """
    rollout, limit = config.rollout, config.optimizer.microbatch_tokens
    row = prompt_tokens + rollout.max_completion_tokens
    groups = -(-rank_prompts(config) // config.algorithm.minibatches)
    group = rollout.group_size * row - (0 if config.sharded else (rollout.group_size - 1) * prompt_tokens)
    if group <= limit:  # shorter groups fill it, too
        full = min(groups, limit // group)
        shared = 0 if config.sharded else (full - 1) * shared_tokens
        return min(limit, groups * group) - shared, full * rollout.group_size
    rows = max(1, min(rollout.group_size, limit // row))
    return rows * row, rows


def available_memory(config: TrainConfig, device: torch.device) -> float:
    """Bytes of a device's memory that a rank may have: of a GPU what is free, less an engine's.

    Of a CPU its share of what is free, of the machine or of its control group (container, Slurm), and what it has.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        beside = config.rollout.external and not config.rollout.servers
        return max(0.0, free - (config.rollout.engine_memory * total if beside else 0))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path("/proc/meminfo")).exists():
        machine = 1024 * int(meminfo.read_text().partition("MemAvailable:")[2].split()[0])
    return min(machine, group_memory()) / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + resident_memory()


def group_memory(root: Path = Path("/")) -> float:
    """Bytes that the control groups of this process, version 1 or 2, leave it; infinite without a limit."""
    room, groups = math.inf, root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, name = line.split(":", 2)
        limit, usage, cache = {
            "": ("memory.max", "memory.current", "inactive_file "),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
        }.get(controllers, ("", "", ""))
        top = root / "sys/fs/cgroup" / controllers
        for folder in (top / name[1:], *(top / name[1:]).parents) if limit else ():
            if (folder / limit).is_file() and (most := (folder / limit).read_text().strip()) != "max":
                cached = int((folder / "memory.stat").read_text().rpartition(cache)[2].split()[0])  # can be dropped
                room = min(room, int(most) - int((folder / usage).read_text()) + cached)
    return room


def plan_memory(config: TrainConfig, prompt_tokens: int, device: torch.device, shared_tokens: int = 0) -> float | None:
    """Print the memory that the run needs; if it will not fit, how much every part takes, and what would help.

    Returns its peak in GiB, None if the model cannot be measured; raises ValueError if it certainly will not fit.
    """
    there = available_memory(config, device) / GIB
    has = f"{there:.1f} GiB that are free on {device.type}"
    try:
        planner = Planner(config.model, prompt_tokens, device, shared_tokens)
        certain = planner.certain(config)
        needs = planner.plan(config) if sum(certain.values()) <= there * GIB else {}
    except Exception:  # of an architecture whose layers cannot be cut off: the run itself may be fine
        return None
    if not needs:
        switch = "rollout.prompts" if max(certain, key=certain.get) == "rollouts" else "model.name_or_path"
        parts = ", ".join(f"{part} {size / GIB:,.1f}" for part, size in certain.items())
        raise ValueError(f"--{switch} {attrgetter(switch)(config)} does not fit: GiB of {parts}, of {has}")
    sizes = {key: sum(of.values()) / GIB for key, of in needs.items()}
    most = max(sizes, key=sizes.get)
    if sizes[most] <= USABLE * there:
        training = max(sizes["training"], sizes.get("step", 0))
        if not config.run.quiet:
            phases = f"rollouts {sizes['rollout']:.1f}, training {training:.1f}"
            print(f"memory  planned peak {sizes[most]:.1f} GiB ({phases}) of {has}")
        return sizes[most]
    parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in needs[most].items() if size)
    print(f"memory  {sizes[most]:.1f} GiB in its {most} ({parts}), of {has}: it will probably not fit. "
          f"With {', '.join(advice(config, planner, device, sizes[most]))}")  # fmt: skip
    return sizes[most]


def advice(config: TrainConfig, planner: Planner, device: torch.device, now: float) -> list[str]:
    """Switches that lower the highest need of any phase, which is now so many GiB; the lowest first."""
    changes: dict[str, Any] = {
        "model.gradient_checkpointing": True,
        "optimizer.microbatch_tokens": max(config.optimizer.microbatch_tokens // 4, 1),
        "rollout.max_rows": max(config.rollout.max_rows // 4, 1),
        "model.dtype": "bfloat16",
        "optimizer.name": "adamw8bit",
    }
    if find_spec("peft"):
        changes["model.lora.rank"] = 16
    sizes, prompts = {}, (planner.prompt_tokens, device, planner.shared_tokens)
    for switch, value in changes.items():
        with contextlib.suppress(ValueError):  # a switch that this model does not take
            changed = replace_switches(config, {switch: value})
            other = Planner(changed.model, *prompts) if changed.model != config.model else planner
            size = max(sum(parts.values()) for parts in other.plan(changed).values()) / GIB
            if size < now:
                sizes[f"--{switch} {as_argument(value)} {size:.1f} GiB"] = size
    return sorted(sizes, key=sizes.get)


def check_disk(config: TrainConfig, policy: nn.Module, output: Path) -> None:
    """Raise ValueError if the disk has no room for the run's checkpoints and models; an older one is removed last."""
    run, trained = config.run, [p for p in policy.parameters() if p.requires_grad]
    model = sum(p.nbytes for p in (trained if has_adapters(policy) else policy.parameters()))
    checkpoint = model + STATES[config.optimizer.name] * sum(p.numel() for p in trained)
    checkpoint += model if config.algorithm.reference_every else 0
    saves = 1 + (run.max_steps // run.save_every if run.save_every else 0)
    held = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    models = 3 if run.validate_every else 1  # the final one; the best, a better one
    needed = min(run.keep + 1, saves) * checkpoint + models * model - held
    if needed > (free := shutil.disk_usage(nearest_existing(output)).free):
        what = f"--run.keep {run.keep} needs {needed / GIB:.2g} GiB for checkpoints and models"
        raise ValueError(f"{what}, {output} has {free / GIB:.2g} GiB free: lower it, or set another --run.output_dir")


def resident_memory() -> int:
    """Bytes of this process now, its peak so far where the system does not say."""
    if (statm := Path("/proc/self/statm")).exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return int(peak_memory_gb(torch.device("cpu")) * GIB)
