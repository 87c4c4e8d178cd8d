"""Memory, least time and communication of a training run, by strategy: formulas in docs/gpu.md, inputs in `shapes`."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from jsonargparse.typing import PositiveInt

from pspo.config import ModelConfig, TrainConfig, require
from pspo.model import load_model_config
from pspo.model.device import MAX_ROWS, MICROBATCH_TOKENS
from pspo.model.logprobs import CHUNK_TOKENS, GPU_CHUNK_SHARE
from pspo_lab.plan_shapes import GPU, GPUS, QWEN, Shape

SAMPLER_BYTES = 36  # per logit, at most; scores, probabilities and noise are 22
SAMPLER_TRAFFIC = 54  # per logit read and written for a token: scaled, softmax, noise, largest
NUCLEUS_TRAFFIC = 190  # besides, where top_p cuts: the first arrivals of a race, and 4 passes at top_p 0.85
LAUNCH = 25e-6  # seconds of the CPU for a kernel, Python included: on an H200's host 23 in decoding, 28 in training
GRAPH_KERNEL = 3e-6  # seconds of a small kernel that a CUDA graph launches, on an H200
OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2, "paged_adamw8bit": 0, "sgd": 0}  # per trained element, on the GPU
OPTIMIZER_TRAFFIC = {"adamw": 28, "adamw8bit": 16, "paged_adamw8bit": 16, "sgd": 12}  # read and written in a step


@dataclass(frozen=True)
class Assumptions:
    """The machine, and the numbers that a configuration does not hold.

    Args:
        gpu: A100, H100 (80 GB) or H200 (141 GB), all SXM, 8 to a node; another one is --plan.memory GB of one of them.
        memory: GB of a GPU; unset, all that it has.
        gpus: numbers of GPUs; a line for each.
        mfu: share of the bf16 peak that matrix products reach.
        mbu: share of the bandwidths that is reached.
        usable: share of a GPU's memory that tensors may take.
        prompt_tokens: tokens of a prompt, its system prompt included.
        completion_tokens: mean length of a completion; unset, the limit.
        moving: share of the groups whose rewards differ; the others leave the training.
    """

    gpu: Literal["A100", "H100", "H200"] = "H100"
    memory: float | None = None
    gpus: list[PositiveInt] = field(default_factory=lambda: [1, 8, 32, 128, 512])
    mfu: float = 0.4
    mbu: float = 0.8
    usable: float = 0.9
    prompt_tokens: int = 115
    completion_tokens: float | None = None
    moving: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mfu", "mbu", "usable", "moving"):
            require(0 < getattr(self, name) <= 1, f"plan.{name}", "must be in (0, 1]", getattr(self, name))


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A training run to plan, of every size of Qwen2.5 unless it names a model."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name_or_path="Qwen2.5"))
    plan: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        autocast = self.model.autocast
        require(autocast != "none", "model.autocast", "must be auto or bf16 for a plan", autocast)
        limit = self.rollout.max_completion_tokens
        rule = f"must be above 0 and at most rollout.max_completion_tokens ({limit})"
        require(0 < self.completion_tokens <= limit, "plan.completion_tokens", rule, self.completion_tokens)
        lora = self.model.resolved().lora
        rule = "must be a model without adapters for a plan, with --model.lora.rank"
        require(lora.name_or_path is None, "model.name_or_path", rule, self.model.name_or_path)
        targets = lora.target_modules
        rule = "must be all-linear or a list of names for a plan"
        require(targets == "all-linear" or isinstance(targets, list), "model.lora.target_modules", rule, targets)

    @property
    def gpu(self) -> GPU:
        """The GPU with the shares of its figures that are reached."""
        plan = self.plan
        gpu = GPUS[plan.gpu]
        memory = plan.memory * 1e9 if plan.memory else gpu.memory
        return replace(
            gpu,
            memory=memory * plan.usable,
            flops=gpu.flops * plan.mfu,
            bandwidth=gpu.bandwidth * plan.mbu,
            nvlink=gpu.nvlink * plan.mbu,
            network=gpu.network * plan.mbu,
        )

    @property
    def completion_tokens(self) -> float:
        """Mean length of a completion."""
        mean = self.plan.completion_tokens
        return self.rollout.max_completion_tokens if mean is None else mean

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the model's weights."""
        half = self.model.dtype == "bfloat16" or (self.model.dtype == "auto" and self.model.lora.rank > 0)
        return 2 if half else 4

    def trained(self, shape: Shape) -> int:
        """Elements that the optimizer steps."""
        lora = self.model.lora
        return shape.adapters(lora.rank, lora.target_modules) if lora.rank else shape.parameters


@dataclass(frozen=True)
class Strategy:
    """Placement of a model on its GPUs.

    Attributes:
        name: none (one GPU), ddp (replicated) or fsdp2 (sharded: weights are gathered for every microbatch's forward
            and backward pass and once per rollout, gradients reduced for every microbatch).
    """

    name: str
    gpus: int

    @property
    def shards(self) -> int:
        return self.gpus if self.name == "fsdp2" else 1


@dataclass(frozen=True)
class Load:
    """Work of the busiest GPU. The floats are a training microbatch's, which may be a mean.

    Attributes:
        rows: of a rollout.
        microbatches: of an optimizer step.
        tokens: through the layers.
        keys: in attention, cached ones of each row included.
        pairs: of (query, key).
        predicted: completion tokens.
    """

    rows: int
    microbatches: int
    tokens: float
    keys: float
    pairs: float
    predicted: float


def training_load(config: PlanConfig, s: Strategy, fullest: bool = False) -> Load:
    """Load of the mean microbatch, or of the ``fullest``."""
    plan = config.plan
    group_size = config.rollout.group_size
    prompt = plan.prompt_tokens
    length = config.completion_tokens
    moving = plan.moving if config.algorithm.beta == 0 else 1.0  # groups without an advantage leave the training
    groups = math.ceil(math.ceil(config.rollout.prompts * moving / config.algorithm.minibatches) / s.gpus)
    shares_prompts = s.name != "fsdp2"  # through a cache
    prompts = 1 if shares_prompts else group_size
    size = prompts * prompt + group_size * length
    limit = config.optimizer.microbatch_tokens or MICROBATCH_TOKENS
    fitting = limit // size * group_size  # rows of a microbatch, whole groups
    if fitting == 0:  # one group is too large by itself
        rest = (limit - prompt) / length if shares_prompts else limit / (prompt + length)
        fitting = max(1, math.floor(rest))
    microbatches = math.ceil(groups * group_size / fitting)
    rows = min(groups * group_size, fitting) if fullest else groups * group_size / microbatches
    width = prompt + length - 1  # the last token predicts nothing
    tokens = rows * width
    keys = rows * width
    pairs = rows * width**2
    if shares_prompts:
        prompts = max(1.0, rows / group_size)
        later = rows * (length - 1)
        tokens = prompts * prompt + later
        keys = prompts * prompt + rows * width
        pairs = prompts * prompt**2 + later * width
    rollout_rows = math.ceil(config.rollout.prompts / s.gpus) * group_size
    return Load(rollout_rows, microbatches, tokens, keys, pairs, rows * length)


def shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes by name: every size of Qwen2.5, one size, or that of a folder or hub model."""
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


def memory(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, dict[str, float]]:
    """Bytes on a GPU at each phase's peak, by phase and part."""
    load = training_load(config, s, fullest=True)
    rollout = config.rollout
    trained = config.trained(shape)
    weight_bytes = config.weight_bytes
    frozen = trained < shape.parameters
    weights = weight_bytes * shape.parameters / s.shards
    if frozen:
        weights += 4 * trained / s.shards
    resting = {"weights": weights, "optimizer": OPTIMIZER_BYTES[config.optimizer.name] * trained / s.shards}
    if config.algorithm.beta > 0:
        resting["reference"] = 4 * trained / s.shards if frozen else weights
    copies = 2 if weight_bytes == 4 else 0  # bytes of an element's copy in bf16, by autocast
    gathered = 2 * shape.layer + shape.root  # elements at a time: a layer, the next one, and the embeddings
    rows = min(load.rows, rollout.max_rows or MAX_ROWS)
    cache = rows * (config.plan.prompt_tokens + rollout.max_completion_tokens) * shape.kv_bytes
    drawing = resting | {
        "bf16 weights": copies * shape.matrices if s.shards == 1 else 2 * shape.parameters,
        "cache": cache,
        "sampler": SAMPLER_BYTES * rows * shape.vocab,
    }

    gradients = 4 * trained
    if s.shards > 1:  # the shard, and of what is gathered bf16, and float32 to reduce
        gradients = 4 * trained / s.shards + (0 if frozen else 6 * gathered)
    chunk = max(CHUNK_TOKENS, config.gpu.memory / GPU_CHUNK_SHARE / (4 * shape.vocab))  # tokens
    head = 0 if frozen else shape.head  # its gradient's share of a chunk, in bf16 and cast to be added up
    training = resting | {
        "bf16 weights": copies * shape.matrices if s.shards == 1 else 2 * gathered,
        "gradients": gradients,
        "activations": shape.activations(load.tokens, load.keys, load.pairs, config.model.gradient_checkpointing),
        "head": 8 * chunk * shape.vocab + (6 if s.shards == 1 else 2) * head,
    }
    return {"rollout": drawing, "training": training}


def messages(shape: Shape, config: PlanConfig, s: Strategy) -> tuple[tuple[float, int], tuple[float, int]]:
    """(bytes, calls) that each of the trainer's GPUs gathers or reduces: for a rollout, and in an optimizer step."""
    if s.gpus == 1:
        return (0, 0), (0, 0)
    trained = config.trained(shape)
    if s.name != "fsdp2":
        return (0, 0), (8 * trained, 2)  # an all-reduce in float32 is both
    microbatches = training_load(config, s).microbatches
    gathers = 2 * microbatches  # of the layers; the embeddings once, their backward pass is inside the forward
    root = shape.root + shape.hidden
    size = 2 * (shape.parameters - root) * gathers + 2 * root * microbatches + 4 * trained * microbatches
    calls = shape.layers + 1
    step = size, shape.layers * gathers + microbatches + calls * microbatches
    return (2 * shape.parameters, calls), step


def seconds(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, dict[str, float]]:
    """Least time of a rollout and of its optimizer steps, by phase and part; communication as far as it shows."""
    gathered, reduced = messages(shape, config, s)
    gpu = config.gpu
    drawing = {"gather": gpu.collective(*gathered, s.shards)} | decoding_seconds(shape, config, s)
    load = training_load(config, s)
    algorithm = config.algorithm
    trained = config.trained(shape)
    frozen = trained < shape.parameters
    forward = shape.flops(load.tokens, load.pairs, load.predicted)
    again = shape.flops(load.tokens, load.pairs, 0) if config.model.gradient_checkpointing else 0
    backward = forward if frozen else 2 * forward  # no gradients of frozen weights
    # Weights are written in bf16 once and read twice, gradients written in bf16, read, and added to those in float32.
    traffic = (4 if frozen else 22) * shape.matrices / gpu.bandwidth
    steps = algorithm.epochs * algorithm.minibatches
    unseen = algorithm.minibatches - 1  # passes without gradient: old log-probs, reference log-probs
    if algorithm.beta > 0:
        unseen += algorithm.minibatches
    passes = steps * max((forward + backward + again) / gpu.flops, traffic) + unseen * forward / gpu.flops
    passes *= load.microbatches
    kernels = 427 * shape.layers + 128 if frozen else 335 * shape.layers + 184  # of a microbatch, counted as in drawing
    hidden = passes if s.shards > 1 else 0.0  # a layer is gathered and reduced while others compute
    moved = OPTIMIZER_TRAFFIC[config.optimizer.name] * trained / s.shards
    training = {
        "passes": passes,
        "launches": max(0.0, LAUNCH * load.microbatches * kernels * (steps + unseen / 3) - passes),
        "optimizer": steps * moved / gpu.bandwidth,
        "communication": max(0.0, steps * gpu.collective(*reduced, s.gpus) - hidden),
    }
    return {"rollout": drawing, "training": training}


def decoding_seconds(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, float]:
    """Least time of drawing a rollout, by part."""
    gpu = config.gpu
    rollout = config.rollout
    load = training_load(config, s)
    prompt = config.plan.prompt_tokens
    limit = rollout.max_completion_tokens
    length = config.completion_tokens
    groups = load.rows / rollout.group_size
    batches = math.ceil(load.rows / (rollout.max_rows or MAX_ROWS))
    read = batches * 2 * shape.matrices / gpu.bandwidth  # all weights, for each batch
    live = load.rows * length / limit  # rows that end leave the batch
    nucleus = rollout.top_p < 1
    parts = {
        "prefill": max(shape.flops(groups * prompt, groups * prompt**2, groups) / gpu.flops, read),
        "decoding": limit * max(shape.flops(live, 0, live) / gpu.flops, read),
        "cache": load.rows * length * (prompt + length / 2) * shape.kv_bytes / gpu.bandwidth,
        "sampler": limit * live * shape.vocab * (SAMPLER_TRAFFIC + NUCLEUS_TRAFFIC * nucleus) / gpu.bandwidth,
    }
    # Kernels of a token, counted on a simulated GPU under bf16 autocast.
    kernels = limit * batches * (46 * shape.layers + 38 + 51 * nucleus)
    if rollout.decoder in ("auto", "graphs") and s.name != "fsdp2":
        return parts | {"launches": GRAPH_KERNEL * kernels}
    return parts | {"launches": max(0.0, LAUNCH * kernels - sum(parts.values()))}


def total(phases: dict[str, dict[str, float]]) -> float:
    """Seconds of a rollout with its steps."""
    return sum(sum(parts.values()) for parts in phases.values())


def choose(shape: Shape, config: PlanConfig, gpus: int) -> tuple[Strategy, bool]:
    """The fastest strategy that fits, and True; if none does, the one that needs least memory, and False."""
    needs = {}
    for name in ("none",) if gpus == 1 else ("ddp", "fsdp2"):
        s = Strategy(name, gpus)
        needs[s] = max(sum(parts.values()) for parts in memory(shape, config, s).values())
    fitting = [s for s in needs if needs[s] <= config.gpu.memory]
    if not fitting:
        return min(needs, key=needs.get), False
    return min(fitting, key=lambda s: total(seconds(shape, config, s))), True
