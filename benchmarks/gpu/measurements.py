"""Speed, whole steps and whole runs on a GPU.

Decoding is set against the bandwidth floor, training against the matrix product peak, whole steps stand beside TRL's,
and all GPUs of the machine are ranks. Measurements that need a GPU differ from another one, which a rehearsal runs, by
their arguments.
"""

import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.gpu.common import GROUP, Options, in_turns, random_policy, seconds_of, timed, tiny_prompts
from benchmarks.gpu.correctness import torchrun
from benchmarks.gpu.results import Rows, row
from benchmarks.vs_trl import Shape, Workload, model_folder, run_pspo, run_trl
from pspo.config import AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.files import read_json, read_jsonl
from pspo.losses import PSPO
from pspo.model import autocast, default_microbatch_tokens
from pspo.model.device import casts_to_bf16, peak_memory_gb
from pspo.rollout import Rollout, Sampling, generate, left_pad
from pspo.train import main
from pspo.update import Learner, update
from pspo.update.optimizers import make_optimizer

PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # bf16 operations a second, dense: NVIDIA's data sheets


@dataclass(frozen=True)
class Load:
    """So many completions of exactly so many tokens, by a random model of a size."""

    size: str
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.size}-{self.rows}x{self.tokens}"

    def workload(self, options: Options, microbatch: int | None = None) -> Workload:
        shape = options.shape(self.size)
        return Workload(self.rows // GROUP, GROUP, microbatch or self.rows, True, shape, tokens=self.tokens)


def measure(function: Callable[..., Rows], load: Load, **how: Any) -> Callable[[Options], Rows]:
    """The measurement of a load: in a rehearsal of few and short completions."""
    few = replace(load, rows=2 * GROUP, tokens=6)
    return lambda options: function(options, few if options.rehearse else load, **how)


Decoding = tuple[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]], Sampling]
Training = tuple[Learner, Rollout, Tensor, TrainConfig]


def decoding_inputs(options: Options, load: Load, decoder: str = "graphs") -> Decoding:
    """What `generate` takes."""
    policy = random_policy(options.shape(load.size), ModelConfig(), options.device)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    limits = {"max_completion_tokens": load.tokens, "max_rows": load.rows}
    return policy, tokenizer, prompts, Sampling([], tokenizer.pad_token_id, **limits, decoder=decoder)


def training_inputs(
    options: Options, load: Load, microbatch: int | None = None, optimizer: str = "adamw", **model: Any
) -> Training:
    """What `update` takes: a rollout of random completions of word problems; microbatches of the size of a run's."""
    config = TrainConfig(
        model=ModelConfig(**model),
        algorithm=AlgorithmConfig(surrogate=PSPO(), epochs=1),
        rollout=RolloutConfig(prompts=load.rows // GROUP, group_size=GROUP, max_completion_tokens=load.tokens),
        optimizer=OptimizerConfig(name=optimizer, lr=1e-6),
        run=RunConfig(max_steps=10**9),
    )
    shape = options.shape(load.size)
    policy = random_policy(shape, config.model, options.device)
    tokens = microbatch or default_microbatch_tokens(policy, config.model.gradient_checkpointing)
    learner = Learner(policy, make_optimizer(policy, config.optimizer), microbatch_tokens=tokens)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    ids, mask = (part.repeat_interleave(GROUP, dim=0) for part in left_pad(prompts, tokenizer.pad_token_id))
    completions = torch.randint(shape.vocab, (load.rows, load.tokens))
    every = torch.ones_like(completions, dtype=torch.bool)
    rollout = Rollout(ids, mask, completions, every, every[:, 0], [""] * load.rows)
    return learner, rollout, torch.randn(load.rows), config


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
    shape = options.shape(load.size)
    device = options.device
    policy, tokenizer, prompts, sampling = decoding_inputs(options, load, decoder)

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


def operations(shape: Shape, tokens: float, pairs: float, predicted: float) -> float:
    """Operations of a forward pass.

    Args:
        tokens: that go through the layers.
        pairs: of (query, key) in attention.
        predicted: tokens that go through the output embedding.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2 * shape.layers * shape.layer * tokens + attention + 2 * shape.head * predicted


def train(options: Options, load: Load, **switches: Any) -> Rows:
    """One optimizer step on a random rollout; MFU counts the operations needed, each prompt once, causal attention."""
    shape = options.shape(load.size)
    device = options.device
    learner, rollout, *rest = training_inputs(options, load, **switches)
    seconds, memory = timed(partial(update, learner, rollout, *rest), device)

    lengths = rollout.prompt_mask.sum(dim=1)[::GROUP].tolist()
    predicted = load.rows * load.tokens
    pairs = sum(n * n / 2 + GROUP * load.tokens * (n + load.tokens / 2) for n in lengths)
    rate = 3 * operations(shape, sum(lengths) + predicted, pairs, predicted) / seconds
    peaks = {"measured": matrix_rate(options)}
    if device.type == "cuda":
        peaks |= {f"{name}'s": peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()}
    least = None if load.size == "135M" else 0.4
    return [
        row("optimizer step", seconds, "s"),
        row("tokens", rollout.tokens / seconds, "1/s"),
        *(row(f"MFU, of the {kind} peak", rate / peak, least=least) for kind, peak in peaks.items()),
        row("peak memory", memory, "GB"),
        row("microbatches", learner.microbatch_tokens, "tokens"),  # halved where memory ran out
    ]


# Whole steps

PROMPT = 115  # tokens, about
MICROBATCH = 16384  # tokens, of both sides
COUNTED = 2  # rollouts after the warm-up


def steps(options: Options, load: Load, vllm: bool = False) -> Rows:
    """A rollout with its two optimizer steps, from the same random weights: seconds and memory of both sides."""
    device = options.device
    microbatch = GROUP
    found = {}
    while 2 * microbatch <= min(load.rows, MICROBATCH // (PROMPT + load.tokens)):
        microbatch *= 2
    workload = load.workload(options, microbatch)
    how = {"dtype": "bf16" if device.type == "cuda" else "fp32", "device": device, "vllm": vllm}
    with model_folder(workload, device=device) as folder:
        for side, run in (("pspo", partial(run_pspo, decoder="graphs")), ("TRL", run_trl)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _, *records = run(workload, folder, COUNTED, **how)
            found[side] = statistics.median(record["total"] for record in records), peak_memory_gb(device)
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without a GPU
    goal = (None if load.size == "1.5B" else 1) if vllm else 2
    return [
        *(row(side, seconds, "s") for side, (seconds, _) in found.items()),
        row("TRL / pspo", found["TRL"][0] / found["pspo"][0], least=goal),
        row("pspo, peak memory", found["pspo"][1], "GB"),
        row("TRL, peak memory of torch's tensors", found["TRL"][1], "GB"),
    ]


def vllm_alone(options: Options, load: Load) -> Rows:
    """Completion tokens per second, prompts included: of vLLM by itself, and of pspo's graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    device = options.device
    policy, tokenizer, prompts, sampling = decoding_inputs(options, load)
    with model_folder(load.workload(options), device=device) as folder:
        engine = LLM(folder, dtype="bfloat16", gpu_memory_utilization=0.4, max_model_len=1024, max_num_seqs=load.rows)
        draws = {"n": GROUP, "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": load.tokens}
        params = SamplingParams(**draws, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

        def by_vllm() -> None:
            engine.generate(inputs, params, use_tqdm=False)

        def by_pspo() -> None:
            with autocast("auto", device):
                generate(policy, tokenizer, prompts, sampling, GROUP)

        times = in_turns({"vLLM": partial(seconds_of, by_vllm, device), "pspo": partial(seconds_of, by_pspo, device)})
    return [
        *(row(side, load.rows * load.tokens / seconds, "1/s") for side, seconds in times.items()),
        row("pspo / vLLM", times["vLLM"] / times["pspo"], "x", least=1),
    ]


def vllm_pushed(options: Options, load: Load) -> Rows:
    """A rollout by vLLM in a process of its own, with the weights pushed, and its two steps."""
    device = options.device
    workload = load.workload(options)
    with model_folder(workload, device=device) as folder:
        _, *records = run_pspo(workload, folder, COUNTED, vllm=True, by_vllm=True, dtype="bf16", device=device)
    middle = {key: statistics.median(record[key] for record in records) for key in ("generate", "total", "nats apart")}
    return [
        row("weights pushed and completions drawn", middle["generate"], "s"),
        row("rollout and two steps", middle["total"], "s"),
        row("log-probs, from the policy's in float32 on average", middle["nats apart"], "nats", most=0.1),
    ]


def ranks(options: Options, strategy: str) -> Rows:
    """Rollouts of 32 x 4 x 128 tokens for every GPU, by `pspo.train` under torchrun; with "none", without, on one."""
    processes = 1 if strategy == "none" else max(1, torch.cuda.device_count())
    prompts, tokens, rollouts = (2, 6, 2) if options.rehearse else (32, 128, 4)
    workload = Workload(prompts, GROUP, GROUP, forced=True, shape=options.shape("0.5B"))
    with model_folder(workload) as folder, tempfile.TemporaryDirectory() as output:
        args = [
            f"--model.name_or_path={folder}", "--reward.functions=[benchmarks.vs_trl.checksum]",
            f"--rollout.prompts={prompts * processes}", f"--rollout.group_size={GROUP}",
            f"--rollout.max_completion_tokens={tokens}",
            f"--run.max_steps={2 * rollouts}", "--run.save_every=0",
            "--run.validate_every=0", "--run.test_limit=0", "--run.quiet=true", f"--run.output_dir={output}",
            f"--distributed.strategy={strategy}",
        ]  # fmt: skip
        main(args) if strategy == "none" else torchrun(processes, *args)
        lines = read_jsonl(Path(output) / "metrics.jsonl")[1:]  # the first is the warm-up
        peak = read_json(Path(output) / "summary.json")["peak_memory_gb"]
    generate, update = (
        statistics.median(line[f"seconds/{phase}"] for line in lines) for phase in ("generate", "train")
    )
    return [
        row("ranks", processes),
        row("rollout", generate, "s"),
        row("its 2 optimizer steps", update, "s"),
        row("completion tokens", prompts * GROUP * processes * tokens / (generate + update), "1/s"),
        row("peak memory of a rank", peak, "GB"),
    ]
