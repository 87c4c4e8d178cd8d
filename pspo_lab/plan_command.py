"""Will a training run fit? ``pspo plan``, with the switches of pspo.train, prints the memory of a GPU by phase.

On several GPUs by ``ddp`` where that fits, otherwise by ``fsdp2``. It is arithmetic: docs/gpu.md has the formulas and
what was checked.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
from jsonargparse.typing import PositiveFloat, PositiveInt

from pspo.cli.parse import parse, user_errors
from pspo.config import ModelConfig, TrainConfig, require
from pspo.model import load_model_config
from pspo.model.device import MAX_ROWS, MICROBATCH_TOKENS
from pspo.model.find import resolve_adapters
from pspo.model.logprobs import CHUNK_TOKENS, GPU_CHUNK_SHARE
from pspo_lab.shapes import QWEN, Shape

SAMPLER_BYTES = 36  # per logit, at most; scores, probabilities and noise are 22
OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "paged_adamw8bit": 0, "sgd": 0}  # per trained element, on the GPU


@dataclass(frozen=True)
class Assumptions:
    """The machine, and the numbers that a configuration does not hold.

    Args:
        memory: GB of a GPU.
        usable: share of it that tensors may take.
        gpus: numbers of GPUs; a line for each.
        prompt_tokens: tokens of a prompt, its system prompt included; completions are as long as their limit.
    """

    memory: PositiveFloat = 80.0
    usable: float = 0.9
    gpus: list[PositiveInt] = field(default_factory=lambda: [1, 8, 32, 128, 512])
    prompt_tokens: PositiveInt = 115

    def __post_init__(self) -> None:
        require(0 < self.usable <= 1, "plan.usable", "must be in (0, 1]", self.usable)


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A training run to plan, of every size of Qwen2.5 unless it names a model."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name_or_path="Qwen2.5"))
    plan: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        autocast = self.model.autocast
        require(autocast != "none", "model.autocast", "must be auto or bf16 for a plan", autocast)
        targets = self.model.lora.target_modules
        rule = "must be all-linear or a list of names for a plan"
        require(targets == "all-linear" or isinstance(targets, list), "model.lora.target_modules", rule, targets)

    @property
    def memory(self) -> float:
        """Bytes of a GPU that tensors may take."""
        return self.plan.memory * 1e9 * self.plan.usable


def shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes by name: every size of Qwen2.5, one size, or that of a folder or hub model."""
    rule = "must be a model without adapters for a plan, with --model.lora.rank"
    require(resolve_adapters(model).lora.name_or_path is None, "model.name_or_path", rule, model.name_or_path)
    if model.name_or_path == "Qwen2.5":
        return QWEN
    name = model.name_or_path.rstrip("/").rpartition("/")[2]
    if (size := re.fullmatch(r"Qwen2(?:\.5)?(?:-Math|-Coder)?-([\d.]+B)(?:-Instruct)?", name)) and size[1] in QWEN:
        return {name: QWEN[size[1]]}
    config = load_model_config(model)
    rule = "must be a Qwen2 or a Llama for a plan"
    require(config.model_type in ("qwen2", "llama"), "model.name_or_path", rule, config.model_type)
    shape = Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        qkv_bias=config.model_type == "qwen2",
    )
    return {name: shape}


@dataclass(frozen=True)
class Microbatch:
    """The fullest microbatch of a GPU.

    Attributes:
        rows: completions.
        tokens: through the layers.
        keys: in attention, cached ones of each row included.
        pairs: of (query, key).
    """

    rows: int
    tokens: float
    keys: float
    pairs: float


def fullest_microbatch(config: PlanConfig, gpus: int, is_sharded: bool) -> Microbatch:
    """Whole groups up to the limit of tokens; shards compute a prompt for every row, others once for its group."""
    group_size = config.rollout.group_size
    prompt = config.plan.prompt_tokens
    length = config.rollout.max_completion_tokens
    groups = math.ceil(math.ceil(config.rollout.prompts / config.algorithm.minibatches) / gpus)
    limit = config.optimizer.microbatch_tokens or MICROBATCH_TOKENS
    prompts = group_size if is_sharded else 1
    fitting = limit // (prompts * prompt + group_size * length) * group_size  # rows
    if fitting == 0:  # one group is too large by itself
        fitting = max(1, limit // (prompt + length) if is_sharded else (limit - prompt) // length)
    rows = min(groups * group_size, fitting)
    width = prompt + length - 1  # the last token predicts nothing
    if is_sharded:
        return Microbatch(rows, rows * width, rows * width, rows * width**2)
    prompts = max(1.0, rows / group_size)
    later = rows * (length - 1)
    tokens = prompts * prompt + later
    return Microbatch(rows, tokens, prompts * prompt + rows * width, prompts * prompt**2 + later * width)


def memory(shape: Shape, config: PlanConfig, gpus: int, strategy: str) -> dict[str, dict[str, float]]:
    """Bytes on a GPU at each phase's peak, by phase and part; ``strategy`` as --distributed.strategy."""
    rollout = config.rollout
    lora = config.model.lora
    shards = gpus if strategy == "fsdp2" else 1
    trained = shape.adapters(lora.rank, lora.target_modules) if lora.rank else shape.parameters
    frozen = trained < shape.parameters
    half = config.model.dtype == "bfloat16" or (config.model.dtype == "auto" and lora.rank > 0)
    weights = (2 if half else 4) * shape.parameters / shards
    if frozen:
        weights += 4 * trained / shards
    resting = {"weights": weights, "optimizer": OPTIMIZER_BYTES[config.optimizer.name] * trained / shards}
    if config.algorithm.beta > 0:
        resting["reference"] = 4 * trained / shards if frozen else weights
    copies = 0 if half else 2  # bytes of an element's copy in bf16, by autocast
    gathered = 2 * shape.layer + shape.root  # elements at a time: a layer, the next one, and the embeddings
    rows = min(math.ceil(rollout.prompts / gpus) * rollout.group_size, rollout.max_rows or MAX_ROWS)
    drawing = resting | {
        "bf16 weights": copies * shape.matrices if shards == 1 else 2 * shape.parameters,
        "cache": rows * (config.plan.prompt_tokens + rollout.max_completion_tokens) * shape.kv_bytes,
        "sampler": SAMPLER_BYTES * rows * shape.vocab,
    }

    gradients = 4 * trained
    if shards > 1:  # the shard, and of what is gathered bf16, and float32 to reduce
        gradients = 4 * trained / shards + (0 if frozen else 6 * gathered)
    chunk = max(CHUNK_TOKENS, config.memory / GPU_CHUNK_SHARE / (4 * shape.vocab))  # tokens
    head = 0 if frozen else shape.head  # its gradient's share of a chunk, in bf16 and cast to be added up
    batch = fullest_microbatch(config, gpus, shards > 1)
    training = resting | {
        "bf16 weights": copies * shape.matrices if shards == 1 else 2 * gathered,
        "gradients": gradients,
        "activations": shape.activations(batch.tokens, batch.keys, batch.pairs, config.model.gradient_checkpointing),
        "head": 8 * chunk * shape.vocab + (6 if shards == 1 else 2) * head,
    }
    return {"rollout": drawing, "training": training}


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(PlanConfig, "pspo plan", args)
    with user_errors("pspo plan"):
        models = shapes(config.model)
    rollout = config.rollout
    plan = config.plan
    print(
        f"{rollout.prompts} prompts x {rollout.group_size}, {plan.prompt_tokens} + {rollout.max_completion_tokens} "
        f"tokens each; {plan.usable:.0%} of {plan.memory:g} GB a GPU"
    )
    rows = []
    parts = {}
    for name, shape in models.items():
        for gpus in plan.gpus:
            for strategy in ("ddp", "fsdp2") if gpus > 1 else ("none",):
                phases = memory(shape, config, gpus, strategy)
                sizes = {phase: sum(phases[phase].values()) for phase in phases}
                fits = max(sizes.values()) <= config.memory
                if fits:
                    break
            row = {"model": name, "GPUs": gpus, "strategy": strategy if fits else "does not fit"}
            rows.append(row | {f"GB {phase}": f"{size / 1e9:.1f}" for phase, size in sizes.items()})
            parts[f"{gpus}: {strategy}"] = {
                f"{phase}: {part}": size / 1e9 for phase in phases for part, size in phases[phase].items()
            }
    print(pd.DataFrame(rows).to_string(index=False))
    if len(models) == 1:
        table = pd.DataFrame(parts).rename_axis(columns="GB")
        print(f"\n{table[(table != 0).any(axis=1)].to_string(float_format='{:,.2f}'.format)}")
    print(f"\nGroups stay whole: at most {rollout.prompts} GPUs have work.")
