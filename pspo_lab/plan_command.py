"""Will a training run fit? ``pspo plan``, with the switches of pspo.train, prints the memory of a GPU by phase.

On several GPUs by ``ddp`` where that fits, otherwise by ``fsdp2``. It is arithmetic: docs/gpu.md has the formulas and
what was checked. Of the model it needs the configuration alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from transformers import AutoModelForCausalLM, PretrainedConfig

from pspo.cli.parse import parse
from pspo.config import ModelConfig, TrainConfig, require
from pspo.model import load_model_config
from pspo.model.adapters import add_adapters
from pspo.model.device import GPU_BYTES_PER_ROW, fitting_tokens
from pspo.model.find import resolve_adapters
from pspo.model.logprobs import CHUNK_TOKENS, GPU_CHUNK_SHARE
from pspo.run.endings import user_errors

USABLE = 0.9  # share of the memory that tensors may take
SAMPLER_BYTES = 36  # per logit, at most; scores, probabilities and noise are 22
OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "paged_adamw8bit": 0, "sgd": 0}  # per trained element, on the GPU


@dataclass(frozen=True)
class Assumptions:
    """The machine, and the numbers that a configuration does not hold.

    Args:
        memory: GB of a GPU.
        gpus: numbers of GPUs; a line for each.
        prompt_tokens: tokens of a prompt, its system prompt included; completions are as long as their limit.
    """

    memory: PositiveFloat = 80.0
    gpus: list[PositiveInt] = field(default_factory=lambda: [1, 8, 32, 128, 512])
    prompt_tokens: PositiveInt = 115


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A training run to plan."""

    plan: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        autocast = self.model.autocast
        require(autocast != "none", "model.autocast", "must be auto or bf16 for a plan", autocast)

    @property
    def memory(self) -> float:
        """Bytes of a GPU that tensors may take."""
        return self.plan.memory * 1e9 * USABLE


class Elements(NamedTuple):
    """Numbers of a model's elements.

    Attributes:
        parameters: all, adapters aside.
        trained: of these or of adapters.
        matrices: that a token is multiplied by; those of an untied input embedding are looked up.
        layer: of a layer's matrices.
        embeddings: of input and output embedding, together if they are tied.
        head: of the output embedding.
    """

    parameters: int
    trained: int
    matrices: int
    layer: int
    embeddings: int
    head: int


def count_elements(model: ModelConfig, model_config: PretrainedConfig) -> Elements:
    """Count the elements of a model that is made without memory."""
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(model_config, trust_remote_code=model.trust_remote_code)
    parameters = policy.num_parameters()
    linears = {name: m.weight.numel() for name, m in policy.named_modules() if isinstance(m, torch.nn.Linear)}
    head = policy.get_output_embeddings().weight.numel()
    if model.has_adapters:
        add_adapters(policy, model)
    return Elements(
        parameters=parameters,
        trained=policy.num_parameters(only_trainable=True),
        matrices=sum(linears.values()),
        layer=sum(n for name, n in linears.items() if ".layers.0." in name),
        embeddings=head if model_config.tie_word_embeddings else 2 * head,
        head=head,
    )


class Microbatch(NamedTuple):
    """The fullest microbatch of a GPU: tokens through the layers, keys in attention, and pairs of (query, key).

    Keys are each row's, those of a shared prompt once more with its own row.
    """

    tokens: float
    keys: float
    pairs: float


def fullest_microbatch(config: PlanConfig, gpus: int, limit: int, is_sharded: bool) -> Microbatch:
    """Groups up to the limit of tokens; shards compute a prompt for every row, others once for its group."""
    group_size = config.rollout.group_size
    prompt = config.plan.prompt_tokens
    length = config.rollout.max_completion_tokens
    copies = group_size if is_sharded else 1  # of a group's prompt
    groups = math.ceil(math.ceil(config.rollout.prompts / config.algorithm.minibatches) / gpus)
    groups = min(groups, max(limit / (copies * prompt + group_size * length), 1 / group_size))
    rows = groups * group_size
    width = prompt + length - 1  # the last token predicts nothing
    if is_sharded:
        return Microbatch(rows * width, rows * width, rows * width**2)
    later = rows * (length - 1)
    return Microbatch(groups * prompt + later, groups * prompt + rows * width, groups * prompt**2 + later * width)


def activations(model_config: PretrainedConfig, batch: Microbatch, checkpointing: bool) -> float:
    """Bytes that autograd keeps of a pass through the layers of a Qwen2 or Llama, with attention by sdpa and a mask.

    Per token and layer: residual and its normalised form twice in float32, bf16 copies of the latter for q, k, v, gate
    and up, query and attention's output, four times the intermediate. Per key: key and value, repeated to all heads.
    With checkpointing: each layer's input, and one layer's all.
    """
    hidden = model_config.hidden_size
    heads = model_config.num_attention_heads
    layers = model_config.num_hidden_layers
    width = heads * head_dim(model_config)
    per_token = 26 * hidden + 4 * width + 8 * model_config.intermediate_size + 4 * heads + 8
    layer = batch.tokens * per_token + batch.keys * 4 * width + 2 * batch.pairs
    kept = layer + layers * batch.tokens * 4 * hidden if checkpointing else layers * layer
    return kept + batch.tokens * (8 * hidden + 4)  # the last norm


def head_dim(model_config: PretrainedConfig) -> int:
    return getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads


def memory(config: PlanConfig, model_config: PretrainedConfig, n: Elements, gpus: int, strategy: str) -> dict:
    """Bytes on a GPU at each phase's peak, by phase and part; ``strategy`` as --distributed.strategy."""
    rollout = config.rollout
    model = config.model
    shards = gpus if strategy == "fsdp2" else 1
    frozen = n.trained < n.parameters
    half = model.dtype == "bfloat16" or (model.dtype == "auto" and model.has_adapters)
    weights = (2 if half else 4) * n.parameters / shards
    if frozen:
        weights += 4 * n.trained / shards
    resting = {"weights": weights, "optimizer": OPTIMIZER_BYTES[config.optimizer.name] * n.trained / shards}
    if config.algorithm.beta > 0:
        resting["reference"] = 4 * n.trained / shards if frozen else weights
    copies = 0 if half else 2  # bytes of an element's copy in bf16, by autocast
    gathered = 2 * n.layer + n.embeddings  # elements at a time: a layer, the next one, and the embeddings
    max_rows = rollout.max_rows or int(config.plan.memory * 1e9) // GPU_BYTES_PER_ROW
    rows = min(math.ceil(rollout.prompts / gpus) * rollout.group_size, max_rows)
    kv_bytes = 4 * model_config.num_hidden_layers * model_config.num_key_value_heads * head_dim(model_config)
    drawing = resting | {
        "bf16 weights": copies * n.matrices if shards == 1 else 2 * n.parameters,
        "cache": rows * (config.plan.prompt_tokens + rollout.max_completion_tokens) * kv_bytes,
        "sampler": SAMPLER_BYTES * rows * model_config.vocab_size,
    }

    gradients = 4 * n.trained
    if shards > 1:  # the shard, and of what is gathered bf16, and float32 to reduce
        gradients = 4 * n.trained / shards + (0 if frozen else 6 * gathered)
    chunk = max(CHUNK_TOKENS, config.memory / GPU_CHUNK_SHARE / (4 * model_config.vocab_size))  # tokens
    head = 0 if frozen else n.head  # its gradient's share of a chunk, in bf16 and cast to be added up
    checkpointing = model.gradient_checkpointing
    states = weights + 12 * n.trained / shards
    fitting = fitting_tokens(config.plan.memory * 1e9, states, model_config, checkpointing, shards > 1)
    batch = fullest_microbatch(config, gpus, config.optimizer.microbatch_tokens or fitting, shards > 1)
    training = resting | {
        "bf16 weights": copies * n.matrices if shards == 1 else 2 * gathered,
        "gradients": gradients,
        "activations": activations(model_config, batch, checkpointing),
        "head": 8 * chunk * model_config.vocab_size + (6 if shards == 1 else 2) * head,
    }
    return {"rollout": drawing, "training": training}


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(PlanConfig, "pspo plan", args)
    with user_errors("pspo plan"):
        model = resolve_adapters(config.model)
        model_config = load_model_config(model)
        rule = "must be a Qwen2 or a Llama for a plan"
        require(model_config.model_type in ("qwen2", "llama"), "model.name_or_path", rule, model_config.model_type)
        elements = count_elements(model, model_config)
    rollout = config.rollout
    plan = config.plan
    print(
        f"{rollout.prompts} prompts x {rollout.group_size}, {plan.prompt_tokens} + {rollout.max_completion_tokens} "
        f"tokens each; {USABLE:.0%} of {plan.memory:g} GB a GPU"
    )
    rows = []
    parts = {}
    for gpus in plan.gpus:
        for strategy in ("ddp", "fsdp2") if gpus > 1 else ("none",):
            phases = memory(config, model_config, elements, gpus, strategy)
            sizes = {phase: sum(phases[phase].values()) for phase in phases}
            fits = max(sizes.values()) <= config.memory
            if fits:
                break
        row = {"GPUs": gpus, "strategy": strategy if fits else "does not fit"}
        rows.append(row | {f"GB {phase}": f"{size / 1e9:.1f}" for phase, size in sizes.items()})
        parts[f"{gpus}: {strategy}"] = {
            f"{phase}: {part}": size / 1e9 for phase in phases for part, size in phases[phase].items()
        }
    print(pd.DataFrame(rows).to_string(index=False))
    table = pd.DataFrame(parts).rename_axis(columns="GB")
    print(f"\n{table[(table != 0).any(axis=1)].to_string(float_format='{:,.2f}'.format)}")
    print(f"\nGroups stay whole: at most {rollout.prompts} GPUs have work.")
