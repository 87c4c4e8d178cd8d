"""Speed: decoding against the bandwidth floor, training against the matrix product peak, optimisations on and off."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.ablation import UNSHARED
from benchmarks.gpu.common import GROUP, Options, Rows, random_policy, row, timed, tiny_prompts
from pspo.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import PSPO
from pspo.model import autocast, casts_to_bf16
from pspo.rollout import Rollout, Sampling, generate, left_pad
from pspo.run.optimizers import make_optimizer
from pspo.update import Learner, update
from pspo_lab.plan.shapes import GPUS

MICROBATCH = 16384  # tokens
OFF = {  # optimisations without a switch
    "prompts-per-row": UNSHARED,
}


@dataclass(frozen=True)
class Load:
    """So many completions of exactly so many tokens, by a random model of a size."""

    size: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.size}-{self.rows}x{self.tokens}"

    def of(self, options: Options) -> "Load":
        """Few and short ones in a rehearsal."""
        return replace(self, rows=2 * GROUP, tokens=6) if options.rehearse else self

    def sampling(self, pad_id: int, decoder: str) -> Sampling:
        return Sampling([], pad_id, max_completion_tokens=self.tokens, max_rows=self.rows, decoder=decoder)

    def config(self, microbatch: int = MICROBATCH, optimizer: str = "adamw", **model: Any) -> TrainConfig:
        return TrainConfig(
            model=ModelConfig(**model),
            algorithm=AlgorithmConfig(surrogate=PSPO(), epochs=1),
            rollout=RolloutConfig(prompts=self.rows // GROUP, group_size=GROUP, max_completion_tokens=self.tokens),
            optimizer=OptimizerConfig(name=optimizer, lr=1e-6, microbatch_tokens=microbatch),
            run=RunConfig(max_steps=10**9),
        )


def bandwidth(options: Options) -> float:
    """Bytes read and written per second by a copy."""
    source = torch.ones(2**18 if options.rehearse else 2**29, device=options.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), options.device, 10)[0]


def matrix_rate(options: Options) -> float:
    """Operations per second of a large bf16 matrix product."""
    n = 128 if options.rehearse else 8192
    a, b = (torch.randn(n, n, device=options.device, dtype=torch.bfloat16) for _ in "ab")
    return 2 * n**3 / timed(lambda: a @ b, options.device, 10)[0]


def machine(options: Options) -> Rows:
    return [
        row("copy, read and written", bandwidth(options) / 1e9, "GB/s"),
        row("bf16 matrix product", matrix_rate(options) / 1e12, "TFLOP/s"),
    ]


def decode(options: Options, load: Load, decoder: str) -> Rows:
    """A decoding step, prefill excluded, and the least time: weights, keys and values read once."""
    load, shape, device = load.of(options), options.shape(load.size), options.device
    policy = random_policy(shape, ModelConfig(), device)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    sampling = load.sampling(tokenizer.pad_token_id, decoder)

    def run(tokens: int) -> None:
        with autocast("auto", device):
            generate(policy, tokenizer, prompts, replace(sampling, max_completion_tokens=tokens), GROUP)

    prefill, _ = timed(partial(run, 1), device)
    seconds, peak = timed(partial(run, load.tokens), device, 1 if decoder == "hf" else 3)
    step = (seconds - prefill) / (load.tokens - 1)
    width = 2 if casts_to_bf16("auto", device) else 4  # bytes of a number
    cached = load.rows * (sum(map(len, prompts)) / len(prompts) + load.tokens / 2)  # tokens, on average
    floor = width * (shape.matrices + cached * shape.kv_bytes / 2) / bandwidth(options)
    return [
        row("step", 1e3 * step, "ms"),
        row("floor", 1e3 * floor, "ms"),
        row("step / floor", step / floor, most=2 if decoder == "graphs" else None),
        row("completion tokens, prefill included", load.rows * load.tokens / seconds, "1/s"),
        row("peak memory", peak, "GB"),
    ]


def train(options: Options, load: Load, off: str = "", **switches: Any) -> Rows:
    """One optimizer step on a random rollout; MFU counts the operations needed, each prompt once, causal attention."""
    load, shape, device, config = load.of(options), options.shape(load.size), options.device, load.config(**switches)
    policy = random_policy(shape, config.model, device)
    learner = Learner(policy, make_optimizer(policy, config.optimizer))
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    ids, mask = (part.to(device).repeat_interleave(GROUP, dim=0) for part in left_pad(prompts, tokenizer.pad_token_id))
    completions = torch.randint(shape.vocab, (load.rows, load.tokens), device=device)
    every = torch.ones_like(completions, dtype=torch.bool)
    rollout = Rollout(ids, mask, completions, every, every[:, 0], [""] * load.rows)
    advantages = torch.randn(load.rows, device=device)
    with OFF[off]() if off else contextlib.nullcontext():
        seconds, memory = timed(partial(update, learner, rollout, advantages, config), device)

    lengths, predicted = [len(prompt) for prompt in prompts], load.rows * load.tokens
    pairs = sum(n * n / 2 + GROUP * load.tokens * (n + load.tokens / 2) for n in lengths)
    rate = 3 * shape.flops(sum(lengths) + predicted, pairs, predicted) / seconds
    peaks = {"measured": matrix_rate(options)}
    if device.type == "cuda":
        peaks |= {f"{name}'s": gpu.flops for name, gpu in GPUS.items() if name in torch.cuda.get_device_name()}
    least = None if load.size == "135M" or off else 0.4
    return [
        row("optimizer step", seconds, "s"),
        row("tokens", rollout.tokens / seconds, "1/s"),
        *(row(f"MFU, of the {kind} peak", rate / peak, least=least) for kind, peak in peaks.items()),
        row("peak memory", memory, "GB"),
        row("microbatches", learner.microbatch_limit or config.optimizer.microbatch_tokens, "tokens"),  # halved on OOM
    ]
