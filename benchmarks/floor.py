"""How far pspo is from this CPU's limit: the least time that each phase of a run or of a workload could take.

    python -m benchmarks.floor runs/mine                                      # a run of yours, made on this machine
    python -m benchmarks.floor tiny vocabulary
    python -m benchmarks.floor smollm2 --model smollm2 --dtype bf16

Measures the machine's matrix product rate and memory bandwidth. Of a run's folder it takes the seconds that the run
recorded, medians over its rollouts but the first; PyTorch should have as many threads as then. Of a workload with
completions of a forced length it runs one rollout with its two optimizer steps, after a warm-up, on one thread, and
takes CPU seconds. Each phase stands beside its floor:

* training: 6 operations per parameter and token of the body, prompts and their common beginning counted once per
  microbatch, 6 per parameter of the output embedding and completion token, and causal attention's; at the matrix
  product rate of the dtype. Rows with advantage 0 are free, and so are softmax, norms and activations; AdamW reads and
  writes its tensors once.
* generation: per step the slower of reading all weights and computing with them, and the keys and values read once.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.vs_trl import run_pspo
from benchmarks.workloads import CPU, WORKLOADS, model_folder, parser, set_up
from pspo.cli.files import read_config, read_jsonl
from pspo.cli.python import config_from_python
from pspo.config import ModelConfig
from pspo.model import load_tokenizer
from pspo.model.device import casts_to_bf16
from pspo.model.linear import use_onednn
from pspo.run.prepare import load_splits
from pspo_lab.plan.cost import shapes
from pspo_lab.plan.shapes import Shape


@dataclass(frozen=True)
class Machine:
    """Operations and bytes per second."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Work:
    """What one rollout and its optimizer steps have to do; the tokens are means."""

    rows: int
    trained: float  # rows that have an advantage
    prompts: int
    prompt_tokens: float
    common: int  # tokens that all prompts begin with
    completion_tokens: float
    decoding_steps: float  # tokens of the longest completion
    epochs: int
    microbatches: float  # of an epoch
    minibatches: int = 1


def best_seconds(function: Callable[[], Any], repeats: int = 8) -> float:
    """CPU seconds of each thread, which other processes do not lengthen as they do wall-clock seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds) / torch.get_num_threads()


@torch.no_grad()
def measure(dtype: str) -> Machine:
    product = torch.nn.Sequential(torch.nn.Linear(1536, 1536, bias=False))
    use_onednn(product)  # as the model's own
    a = torch.randn(1536, 1536)
    if dtype == "bf16":
        a, product = a.bfloat16(), product.bfloat16()
    big = torch.ones(2**27)  # 512 MiB
    flops = 2 * 1536**3 / best_seconds(lambda: product(a))
    return Machine(flops, 4 * len(big) / best_seconds(lambda: big.sum()))


def floors(work: Work, shape: Shape, dtype: str, machine: Machine) -> dict[str, float]:
    """Least seconds of one rollout and of its optimizer steps."""
    number, length, share = 2 if dtype == "bf16" else 4, work.completion_tokens, work.trained / work.rows  # bytes
    own = work.prompts * share * (work.prompt_tokens - work.common)
    tokens = work.trained * (length - 1) + own + work.microbatches * work.common
    pairs = work.trained * length * (work.prompt_tokens + length / 2)
    train = work.epochs * 3 * shape.flops(tokens, pairs, work.trained * length) / machine.flops
    train += work.epochs * work.minibatches * 7 * 4 * shape.parameters / machine.bandwidth
    computed = shape.flops(work.rows * length, 0, work.rows * length) / machine.flops
    read = work.decoding_steps * shape.matrices * number / machine.bandwidth
    cached = work.rows * length * (work.prompt_tokens + length / 2) * shape.kv_bytes * number / 2
    prefill = shape.flops(work.prompts * work.prompt_tokens, 0, 0) / machine.flops
    return {"generate": prefill + max(computed, read) + cached / machine.bandwidth, "train": train}


def measure_workload(name: str, options: argparse.Namespace) -> tuple[Shape, Work, dict[str, float]]:
    """A workload's shape and work, and the CPU seconds of its phases."""
    workload = WORKLOADS[name]
    with model_folder(workload, options.model) as folder:
        ids = set_up(workload, folder, 1).prompts[workload.prompts :]  # the first are the warm-up's
        (shape,) = shapes(ModelConfig(folder)).values()
        seconds = run_pspo(workload, folder, 1, dtype=options.dtype)[-1]
    common = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
    rows, length, mean = workload.rows, workload.tokens, sum(map(len, ids)) / len(ids)
    sizes = (rows, rows, workload.prompts, mean, common, length, length)
    return shape, Work(*sizes, epochs=2, microbatches=rows // workload.microbatch), seconds


def measure_run(folder: Path) -> tuple[Shape, Work, dict[str, float], str]:
    """A run's shape and work, the seconds of its phases, and its dtype; ValueError for what has no floor here."""
    config, _ = config_from_python(**read_config(folder / "config.yaml"))
    lines = pd.DataFrame(read_jsonl(folder / "metrics.jsonl"))
    drawn, lines = lines["tokens"].diff().iloc[1:].mean(), lines.iloc[1:]
    if lines.empty or config.rollout.environment or config.rollout.engine or config.model.has_adapters:
        raise ValueError(f"{folder}: at least two rollouts, without environment, engine and adapters")
    prompts = load_splits(config, load_tokenizer(config.model, config.data), None)["train"]
    first = [prompts.ids[i] for i in range(min(64, len(prompts)))]
    common = next(i for i, column in enumerate(zip(*first, strict=False)) if len(set(column)) > 1)
    rows, n = config.rollout.prompts * config.rollout.group_size, config.rollout.prompts
    mean = lines[["completion_tokens", "completion_tokens_max", "zero_advantage_share"]].mean()
    length, trained = mean["completion_tokens"], rows * (1 - mean["zero_advantage_share"])
    prompt_tokens, algorithm = drawn / rows - length, config.algorithm
    microbatches = max(algorithm.minibatches, trained * (prompt_tokens + length) / config.optimizer.microbatch_tokens)
    shape = shapes(config.model).popitem()[1]
    dtype = "bf16" if casts_to_bf16(config.model.autocast, CPU) or config.model.dtype == "bfloat16" else "fp32"
    work = Work(rows, trained, n, prompt_tokens, common, length, mean["completion_tokens_max"], algorithm.epochs,
                microbatches, algorithm.minibatches)  # fmt: skip
    return shape, work, {name: lines[f"seconds/{name}"].median() for name in ("generate", "train")}, dtype


def main() -> None:
    arguments = parser(__doc__)
    names = [name for name, workload in WORKLOADS.items() if workload.forced]
    arguments.add_argument("of", nargs="+", help=f"{', '.join(names)}, or a run's folder")
    arguments.add_argument("--model", help="model folder for smollm2")
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the workloads")
    options = arguments.parse_args()
    threads, machines = torch.get_num_threads(), {}
    for name in options.of:
        dtype = options.dtype
        torch.set_num_threads(1 if name in names else threads)
        if name in names:
            shape, work, seconds = measure_workload(name, options)
        else:
            shape, work, seconds, dtype = measure_run(Path(name))
        if (key := (dtype, torch.get_num_threads())) not in machines:
            machine = machines[key] = measure(dtype)
            rates = f"{machine.flops / 1e9:.0f} GFLOP/s {dtype}, {machine.bandwidth / 1e9:.1f} GB/s"
            print(f"{key[1]} threads: {rates}")
        for phase, least in floors(work, shape, dtype, machines[key]).items():
            spent = seconds[phase]
            print(f"{name:12} {phase:9} {spent:7.3g} s, floor {least:7.3g} s: {100 * least / spent:3.0f}% of the limit")


if __name__ == "__main__":
    main()
