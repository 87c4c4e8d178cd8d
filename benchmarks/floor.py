"""How far pspo is from the machine's limit: the least time that each phase of a forced-length workload could take.

    python -m benchmarks.floor tiny vocabulary
    python -m benchmarks.floor smollm2 --model smollm2 --dtype bf16

Measures the machine's matrix product rate and memory bandwidth, then runs one rollout with its two optimizer steps
(after a warm-up) and sets each phase's CPU seconds beside its floor:

* training: 6 operations per parameter and token of the body, prompts and their common beginning counted once per
  microbatch, 6 per parameter of the output embedding and completion token, and causal attention's; at the matrix
  product rate of the dtype. Softmax, norms and activations are free; AdamW reads and writes its tensors once.
* generation: per step the slower of reading all weights and computing with them, and the keys and values read once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.plan.cost import shapes
from benchmarks.plan.shapes import Shape
from benchmarks.vs_trl import run_pspo
from benchmarks.workloads import WORKLOADS, Workload, model_folder, parser, set_up
from pspo.config import ModelConfig
from pspo.model.linear import use_onednn


@dataclass(frozen=True)
class Machine:
    """What one thread does: operations and bytes per second."""

    flops: float
    bandwidth: float


def best_seconds(function: Callable[[], Any], repeats: int = 8) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


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


def floors(
    workload: Workload, shape: Shape, dtype: str, machine: Machine, prompts: list[list[int]]
) -> dict[str, float]:
    """Least seconds of one rollout and of its two optimizer steps."""
    rows, length, number = workload.rows, workload.tokens, 2 if dtype == "bf16" else 4  # bytes of a number
    mean_prompt = sum(map(len, prompts)) / len(prompts)
    common = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    microbatches = rows // workload.microbatch
    tokens = rows * (length - 1) + sum(len(prompt) - common for prompt in prompts) + microbatches * common
    train = 2 * 3 * shape.flops(tokens, rows * length * (mean_prompt + length / 2), rows * length) / machine.flops
    train += 2 * 7 * 4 * shape.parameters / machine.bandwidth
    per_step = max(shape.flops(rows, 0, rows) / machine.flops, shape.matrices * number / machine.bandwidth)
    cached = rows * sum(mean_prompt + step for step in range(length)) * shape.kv_bytes * number / 2
    prefill = shape.flops(workload.prompts * mean_prompt, 0, 0) / machine.flops
    return {"generate": prefill + length * per_step + cached / machine.bandwidth, "train": train}


def main() -> None:
    arguments = parser(__doc__, [name for name, workload in WORKLOADS.items() if workload.forced])
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    machine = measure(options.dtype)
    print(f"one thread: {machine.flops / 1e9:.0f} GFLOP/s {options.dtype}, {machine.bandwidth / 1e9:.1f} GB/s")
    for name in options.workloads:
        workload = WORKLOADS[name]
        with model_folder(workload, options.model) as folder:
            prompts = set_up(workload, folder, 1).prompts[workload.prompts :]  # the first are the warm-up's
            (shape,) = shapes(ModelConfig(folder)).values()
            limit = floors(workload, shape, options.dtype, machine, prompts)
            record = run_pspo(workload, folder, 1, dtype=options.dtype)[-1]
        for phase, least in limit.items():
            spent = record[phase]
            print(f"{name:12} {phase:9} {spent:7.2f} s, floor {least:6.2f} s: {100 * least / spent:3.0f}% of the limit")


if __name__ == "__main__":
    main()
