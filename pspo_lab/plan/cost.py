"""Memory, least time and communication of a training run, by strategy: formulas in README.md, inputs in `shapes`."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from pspo.config import ModelConfig, TrainConfig, require
from pspo.model import load_model_config
from pspo.model.logprobs import CHUNK_TOKENS
from pspo_lab.plan.shapes import GPU, GPUS, QWEN, Shape

PHASES = ("rollout", "training")
SAMPLER_BYTES = 36  # per logit where the vocabulary is sorted: scores, probabilities and sums, and int64 indices


@dataclass(frozen=True)
class Assumptions:
    """The machine, and the numbers that a configuration does not hold.

    Args:
        gpu: H100 (SXM, 80 GB) or H200 (SXM, 141 GB), 8 to a node.
        gpus: numbers of GPUs; a line for each.
        strategy: ddp (all replicated), fsdp2 (sharded over all, or over whole nodes and replicated between them), none
            (one GPU); auto, the fastest that fits.
        mfu: share of the bf16 peak that matrix products reach.
        mbu: share of the bandwidths that is reached.
        usable: share of a GPU's memory that tensors may take.
        prompt_tokens: tokens of a prompt, its system prompt included.
        shared_tokens: tokens that all prompts begin with.
        completion_tokens: mean length of a completion; unset, the limit.
        moving: share of the groups whose rewards differ; the others leave the training.
    """

    gpu: Literal["H100", "H200"] = "H100"
    gpus: list[int] = field(default_factory=lambda: [1, 8, 32, 128, 512])
    strategy: Literal["auto", "none", "ddp", "fsdp2"] = "auto"
    mfu: float = 0.4
    mbu: float = 0.8
    usable: float = 0.9
    prompt_tokens: int = 115
    shared_tokens: int = 48
    completion_tokens: float | None = None
    moving: float = 1.0

    def __post_init__(self) -> None:
        ok = len(self.gpus) > 0 and all(n > 0 for n in self.gpus)
        require(ok, "plan.gpus", "must be one or more numbers above 0", self.gpus)
        ok = self.strategy != "none" or set(self.gpus) == {1}
        require(ok, "plan.strategy", "none is for --plan.gpus '[1]'", self.gpus)
        for name in ("mfu", "mbu", "usable", "moving"):
            require(0 < getattr(self, name) <= 1, f"plan.{name}", "must be in (0, 1]", getattr(self, name))
        rule = f"must be at least 0 and below plan.prompt_tokens ({self.prompt_tokens})"
        require(0 <= self.shared_tokens < self.prompt_tokens, "plan.shared_tokens", rule, self.shared_tokens)


@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """A training run to plan, of every size of Qwen2.5 unless it names a model."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(name_or_path="Qwen2.5"))
    plan: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        cast, limit, mean = self.model.autocast, self.rollout.max_completion_tokens, self.plan.completion_tokens
        require(cast != "none", "model.autocast", "must be auto or bf16 for a plan", cast)
        rule = "must be left out of a plan, which knows float32 weights, all of them trained by AdamW or SGD"
        require(self.model.dtype != "bfloat16", "model.dtype", rule, self.model.dtype)
        require(not self.model.has_adapters, "model.lora", rule, self.model.lora)
        require("8bit" not in self.optimizer.name, "optimizer.name", rule, self.optimizer.name)
        rule = f"must be above 0 and at most rollout.max_completion_tokens ({limit})"
        require(mean is None or 0 < mean <= limit, "plan.completion_tokens", rule, mean)

    @property
    def gpu(self) -> GPU:
        """The GPU with the shares of its figures that are reached."""
        gpu, plan = GPUS[self.plan.gpu], self.plan
        reached = {name: getattr(gpu, name) * plan.mbu for name in ("bandwidth", "nvlink", "network")}
        return replace(gpu, memory=gpu.memory * plan.usable, flops=gpu.flops * plan.mfu, **reached)

    @property
    def completion_tokens(self) -> float:
        return self.plan.completion_tokens or self.rollout.max_completion_tokens


@dataclass(frozen=True)
class Strategy:
    """Placement of a model on its GPUs.

    Attributes:
        gpus: the trainer's.
        gather_step: --distributed.gather step: weights are gathered and gradients reduced once per optimizer step;
            otherwise weights for every microbatch's forward and backward pass, gradients for every microbatch.
        gather_rollout: --distributed.rollout gathered: weights once per rollout; otherwise layer by layer per token.
        shard: --distributed.shard: fsdp2 shards over so many GPUs, and replicates between these groups; 0, over all.
        node: the trainer's GPUs on each of its nodes.
        servers: vLLM servers, which draw in the trainer's place.
        tensor_parallel: GPUs of each server.
    """

    name: str
    gpus: int
    gather_step: bool = True
    gather_rollout: bool = True
    shard: int = 0
    node: int = 8
    servers: int = 0
    tensor_parallel: int = 1

    @property
    def shards(self) -> int:
        return (self.shard or self.gpus) if self.name == "fsdp2" else 1

    @property
    def decoders(self) -> int:
        """That share the prompts of a rollout."""
        return self.servers or self.gpus

    def __str__(self) -> str:
        notes = [f"shard {self.shard}"] * (self.shard > 0)
        notes += ["gather step"] * self.gather_step + ["sharded rollout"] * (not self.gather_rollout)
        trainer = ", ".join([self.name, *(notes if self.name == "fsdp2" else [])])
        nodes = f"{self.gpus // self.node} x {self.node}" if self.gpus > self.node else self.gpus
        return f"{nodes}, {trainer}; servers {self.servers} x {self.tensor_parallel}" if self.servers else trainer


@dataclass(frozen=True)
class Load:
    """Work of the busiest GPU. The floats are a training microbatch's, which may be a mean."""

    rows: int  # of a rollout, of a server if there are some
    microbatches: int  # of an optimizer step
    tokens: float  # through the layers,
    keys: float  # in attention, cached ones of each row included,
    pairs: float  # of (query, key),
    predicted: float  # completion tokens

    @classmethod
    def of(cls, config: PlanConfig, s: Strategy, fullest: bool = False) -> "Load":
        """The mean microbatch, or the ``fullest``."""
        plan, group_size, algorithm = config.plan, config.rollout.group_size, config.algorithm
        leave = algorithm.beta == 0 and algorithm.surrogate.silent_at_zero_advantage  # rows of equal groups may
        prompt, length = plan.prompt_tokens, config.completion_tokens
        moving = config.rollout.prompts * (plan.moving if leave else 1.0)
        groups = math.ceil(math.ceil(moving / algorithm.minibatches) / s.gpus)
        shares = s.name != "fsdp2"  # prompts, through a cache
        size, limit = (1 if shares else group_size) * prompt + group_size * length, config.optimizer.microbatch_tokens
        fitting = limit // size * group_size  # rows of a microbatch, whole groups
        if fitting == 0:  # one is too large by itself
            fitting = max(1, math.floor((limit - prompt) / length if shares else limit / (prompt + length)))
        n = math.ceil(groups * group_size / fitting)
        rows = min(groups * group_size, fitting) if fullest else groups * group_size / n
        prompts, width = max(1.0, rows / group_size), prompt + length - 1  # the last token predicts nothing
        tokens, keys, pairs = rows * width, rows * width, rows * width**2
        if shares:
            common = plan.shared_tokens if prompts > 1 else 0
            rest, later = prompts * (prompt - common), rows * (length - 1)
            tokens, keys = common + rest + later, common + prompts * prompt + rows * width
            pairs = common**2 + rest * prompt + later * width
        return cls(math.ceil(config.rollout.prompts / s.decoders) * group_size, n, tokens, keys, pairs, rows * length)


def shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shapes by name: every size of Qwen2.5, one size, or that of a folder or hub model."""
    if model.name_or_path == "Qwen2.5":
        return QWEN
    name = model.name_or_path.rstrip("/").rpartition("/")[2]
    if (size := re.fullmatch(r"Qwen2(?:\.5)?(?:-Math|-Coder)?-([\d.]+B)(?:-Instruct)?", name)) and size[1] in QWEN:
        return {name: QWEN[size[1]]}
    c = load_model_config(model)
    rule = "must be a Qwen2 or a Llama for a plan"
    require(c.model_type in ("qwen2", "llama"), "model.name_or_path", rule, c.model_type)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    sizes = (c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads)
    return {name: Shape(*sizes, c.vocab_size, c.tie_word_embeddings, head_dim, c.model_type == "qwen2")}


def memory(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, dict[str, float]]:
    """Bytes on a GPU at each phase's peak, by phase and part."""
    load, share = Load.of(config, s, fullest=True), shape.parameters / s.shards
    resting = {
        "weights": 4 * share * (2 if config.algorithm.beta > 0 else 1),  # the reference model's, too
        "optimizer": 8 * share if config.optimizer.name == "adamw" else 0.0,
    }
    gathered = 2 * shape.layer + shape.root  # at a time: a layer, the next one, and the embeddings
    unsharded = shape.matrices if s.shards == 1 else shape.parameters
    in_one = s.gather_step or s.shards == 1
    rows = min(load.rows, config.rollout.max_rows)
    decoding = 2 * (unsharded if s.gather_rollout else gathered)
    return {
        "rollout": ({} if s.servers else resting) | {
            "bf16 weights": 2 * shape.parameters / s.tensor_parallel if s.servers else decoding,
            "cache": rows * (config.plan.prompt_tokens + config.rollout.max_completion_tokens) * shape.kv_bytes
            / min(s.tensor_parallel, shape.kv_heads),
            "sampler": SAMPLER_BYTES * rows * shape.vocab,
        },
        "training": resting | {
            "bf16 weights": 2 * (unsharded if in_one else gathered),
            # Sharded ones besides: once per step the shard; else bf16, and float32 to reduce, of what is gathered.
            "gradients": (4 * shape.parameters if in_one else 6 * gathered) + (4 * share if s.shards > 1 else 0),
            "activations": shape.activations(load.tokens, load.keys, load.pairs, config.model.gradient_checkpointing),
            # A chunk's logits and their gradient; and its share of the head's own, in bf16 and cast to be added up.
            "head": 8 * CHUNK_TOKENS * shape.vocab + (6 if s.shards == 1 else 2) * shape.head,
        },
    }  # fmt: skip


def fits(shape: Shape, config: PlanConfig, s: Strategy) -> bool:
    splits = shape.heads % s.tensor_parallel == 0
    return splits and all(sum(parts.values()) <= config.gpu.memory for parts in memory(shape, config, s).values())


def messages(shape: Shape, config: PlanConfig, s: Strategy) -> tuple[tuple[float, int], tuple[float, int]]:
    """(bytes, calls) that each of the trainer's GPUs gathers or reduces: for a rollout, and in an optimizer step.

    With --distributed.shard that is within a group; `between_groups` has the rest.
    """
    load, calls, n = Load.of(config, s), shape.layers + 1, shape.parameters
    if s.gpus == 1 or s.name != "fsdp2":
        return (0, 0), (8 * n, 2)  # an all-reduce in float32 is both
    batches = math.ceil(load.rows / config.rollout.max_rows)
    times = 1 if s.gather_rollout else batches * config.rollout.max_completion_tokens
    gathers, reductions = (1, 1) if s.gather_step else (2 * load.microbatches, load.microbatches)
    embeddings = load.microbatches if config.optimizer.one_pass else gathers  # its backward pass is inside the forward
    root = shape.root + shape.hidden
    size = 2 * (n - root) * gathers + 2 * root * embeddings + 4 * n * reductions
    step = size, shape.layers * gathers + embeddings + calls * reductions
    return (0, 0) if s.servers else (2 * n * times, calls * times), step


def between_groups(shape: Shape, s: Strategy) -> tuple[float, int]:
    """(bytes, calls) that each GPU reduces and gathers between groups of --distributed.shard, in an optimizer step."""
    return (8 * shape.parameters / s.shards, 2 * (shape.layers + 1)) if s.shards not in (1, s.gpus) else (0, 0)


def push(shape: Shape, config: PlanConfig, s: Strategy) -> float:
    """Seconds in which rank 0 gives the servers the weights, one after the other.

    Each time they are gathered from the shards twice, for their shapes and for their values; the second time overlaps
    with NCCL's broadcast, which passes through a server's GPUs in turn. One broadcast to all servers would take as long
    as one server.
    """
    gpu, size = replace(config.gpu, node=s.node), shape.pushed_bytes
    gather = gpu.collective(size, shape.tensors, s.shards)
    in_one_node = s.gpus + s.servers * s.tensor_parallel <= config.gpu.node
    send = size / (gpu.nvlink if in_one_node else gpu.network)
    return s.servers * (gather + max(gather, send))


def seconds(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, dict[str, float]]:
    """Least time of a rollout and of its optimizer steps, by phase and part; communication as far as it shows.

    A server's GPUs decode together, each with its part of every matrix, and add up twice per layer.
    """
    load, gpu = Load.of(config, s), replace(config.gpu, node=s.node)
    rollout, algorithm = config.rollout, config.algorithm
    prompt, limit, groups = config.plan.prompt_tokens, rollout.max_completion_tokens, load.rows / rollout.group_size
    length = config.completion_tokens
    gathered, reduced = messages(shape, config, s)
    width, batches = s.tensor_parallel, math.ceil(load.rows / rollout.max_rows)
    flops, bandwidth = gpu.flops * width, gpu.bandwidth * width  # of what decodes
    read = 2 * shape.matrices / bandwidth
    live = load.rows * length / limit  # rows that end leave the batch
    added = 2 * shape.layers * (batches * gpu.latency + 4 * live * shape.hidden * (1 - 1 / width) / gpu.nvlink)

    forward = shape.flops(load.tokens, load.pairs, load.predicted)
    again = shape.flops(load.tokens, load.pairs, 0) if config.model.gradient_checkpointing else 0
    # Weights are written in bf16 once and read twice, gradients written in bf16, read, and added to those in float32.
    traffic = 22 * shape.matrices / gpu.bandwidth
    steps, moved = algorithm.epochs * algorithm.minibatches, 28 if config.optimizer.name == "adamw" else 12
    unseen = algorithm.minibatches - 1 + algorithm.minibatches * (algorithm.beta > 0)  # old and reference log-probs
    passes = steps * max((3 * forward + again) / gpu.flops, traffic) + unseen * forward / gpu.flops
    passes *= load.microbatches
    alone = replace(gpu, node=1)  # each GPU sends its shard to those of the other groups by its own link
    sent = alone.collective(*between_groups(shape, s), s.gpus // s.shards)
    sent = steps * (sent + gpu.collective(*reduced, s.shards if s.name == "fsdp2" else s.gpus))
    hidden = passes if s.shards > 1 else 0.0  # a layer is gathered and reduced while others compute
    return {
        "rollout": {
            "push": push(shape, config, s),
            "gather": gpu.collective(*gathered, s.shards),
            "prefill": max(shape.flops(groups * prompt, groups * prompt**2, groups) / flops, batches * read),
            "decoding": limit * max(shape.flops(live, 0, live) / flops, batches * read),
            "tensor parallel": limit * added if width > 1 else 0.0,
            "cache": load.rows * length * (prompt + length / 2) * shape.kv_bytes / bandwidth,
        },
        "training": {
            "passes": passes,
            # AdamW reads four tensors and writes three, plain SGD two and one.
            "optimizer": steps * moved * shape.parameters / s.shards / gpu.bandwidth,
            "communication": max(0.0, sent - hidden),
        },
    }


def total(phases: dict[str, dict[str, float]], ahead: bool = False) -> float:
    """A rollout with its steps; ``ahead``, if servers draw the next one while this one is trained on (--rollout.lag).

    The weights are pushed between the two: before the next rollout, with nothing being drawn or trained on.
    """
    drawn, trained = (sum(phases[phase].values()) for phase in PHASES)
    pushed = phases["rollout"]["push"]
    return pushed + max(drawn - pushed, trained) if ahead else drawn + trained


def candidates(config: PlanConfig, gpus: int) -> list[Strategy]:
    """Placements on all GPUs; with an engine, of the trainer on some whole nodes, on a part of one or on the same part
    of each, if its prompts divide by that, and servers on the other GPUs."""
    if not config.rollout.external:
        return placements(config, gpus, config.gpu.node)
    node, parts, found = min(gpus, config.gpu.node), config.algorithm.minibatches, []
    nodes = gpus // node
    for used, own in [*((n, node) for n in range(1, nodes)), *((n, own) for n in {1, nodes} for own in range(1, node))]:
        for width in (1, 2, 4, 8) if config.rollout.prompts % (parts * used * own) == 0 else ():
            servers = used * ((node - own) // width) + (nodes - used) * (node // width)
            trainers = [s for s in placements(config, used * own, own) if s.gather_rollout]
            found += [replace(s, servers=servers, tensor_parallel=width) for s in trainers if servers > 0]
    return found


def placements(config: PlanConfig, gpus: int, node: int) -> list[Strategy]:
    """The trainer's, with so many GPUs on each node."""
    if gpus == 1:
        return [Strategy("none", 1)]
    shards = [0, *(n for n in range(node, gpus, node) if n > 1 and gpus % n == 0)]
    options = [(step, rollout, n, node) for n in shards for rollout in (True, False) for step in (True, False)]
    found = [Strategy("ddp", gpus, node=node), *(Strategy("fsdp2", gpus, *option) for option in options)]
    return [s for s in found if config.plan.strategy in ("auto", s.name)]


def choose(shape: Shape, config: PlanConfig, gpus: int) -> Strategy | None:
    """The fastest strategy that fits."""
    fitting = [s for s in candidates(config, gpus) if fits(shape, config, s)]
    return min(fitting, key=lambda s: total(seconds(shape, config, s), config.draws_ahead), default=None)


def overhead(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, float]:
    """GPU-seconds of each part beyond those of one GPU with room for everything: where the efficiency goes."""
    one, many = seconds(shape, config, Strategy("none", 1)), seconds(shape, config, s)
    return {part: s.gpus * t - one[phase][part] for phase in PHASES for part, t in many[phase].items()}
