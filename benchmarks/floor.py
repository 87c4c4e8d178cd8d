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

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vs_trl import TOKENS, WORKLOADS, model_folder, run_pspo


@dataclass(frozen=True)
class Machine:
    """What one thread does: operations and bytes per second."""

    flops: float
    bandwidth: float


def measure(dtype: str) -> Machine:
    import torch

    from pspo.model.linear import use_onednn

    @torch.no_grad()
    def best(function, n=8):
        seconds = []
        for _ in range(n):
            start = time.process_time()
            function()
            seconds.append(time.process_time() - start)
        return min(seconds)

    product = torch.nn.Sequential(torch.nn.Linear(1536, 1536, bias=False))
    use_onednn(product)  # as the model's own
    a = torch.randn(1536, 1536)
    if dtype == "bf16":
        a, product = a.bfloat16(), product.bfloat16()
    big = torch.ones(2**27)  # 512 MiB
    return Machine(2 * 1536**3 / best(lambda: product(a)), 4 * len(big) / best(lambda: big.sum()))


def floors(folder: str, name: str, dtype: str, machine: Machine, prompts: list[list[int]]) -> dict[str, float]:
    """Seconds of one rollout and its two optimizer steps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    workload, config = WORKLOADS[name], AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    body = sum(p.numel() for n, p in model.base_model.named_parameters() if p.dim() == 2 and "embed" not in n)
    head = config.vocab_size * config.hidden_size
    everything = sum(p.numel() for p in model.parameters())
    layers, width = config.num_hidden_layers, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    keys = 2 * layers * config.num_key_value_heads * head_dim * (2 if dtype == "bf16" else 4)  # bytes a token
    rows, group = workload.prompts * workload.group_size, workload.group_size
    prompts = prompts[: workload.prompts]
    mean_prompt = sum(map(len, prompts)) / len(prompts)
    common = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)

    microbatches = rows // workload.microbatch
    tokens = rows * (TOKENS - 1) + sum(len(prompt) - common for prompt in prompts) + microbatches * common
    attention = 12 * layers * width * rows * TOKENS * (mean_prompt + TOKENS / 2)
    train = 2 * (6 * body * tokens + 6 * head * rows * TOKENS + attention) / machine.flops
    train += 2 * 7 * 4 * everything / machine.bandwidth
    per_step = max(
        2 * rows * (body + head) / machine.flops, (body + head) * (2 if dtype == "bf16" else 4) / machine.bandwidth
    )
    cached = rows * sum(mean_prompt + step for step in range(TOKENS)) * keys / machine.bandwidth
    prefill = 2 * body * rows / group * mean_prompt / machine.flops
    return {"generate": prefill + TOKENS * per_step + cached, "train": train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    forced = [name for name, workload in WORKLOADS.items() if workload.forced]
    parser.add_argument("workloads", nargs="+", choices=forced)
    parser.add_argument("--model", help="model folder for smollm2")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    options.rollouts, options.data = 1, None

    import torch

    from pspo.config import SYSTEM_PROMPT, ModelConfig
    from pspo.model import load_tokenizer
    from pspo.rollout import encode_prompts
    from pspo.tasks import load_problems

    torch.set_num_threads(1)
    machine = measure(options.dtype)
    print(f"one thread: {machine.flops / 1e9:.0f} GFLOP/s {options.dtype}, {machine.bandwidth / 1e9:.1f} GB/s")
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(WORKLOADS[name], options.model, Path(scratch))
            tokenizer = load_tokenizer(ModelConfig(folder))
            problems = load_problems("arithmetic", "train", limit=2 * WORKLOADS[name].prompts)
            prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], SYSTEM_PROMPT)
            limit = floors(folder, name, options.dtype, machine, prompts[WORKLOADS[name].prompts :])
            record = run_pspo(WORKLOADS[name], folder, options)[-1]
        for phase, least in limit.items():
            spent = record[phase]
            print(f"{name:12} {phase:9} {spent:7.2f} s, floor {least:6.2f} s: {100 * least / spent:3.0f}% of the limit")


if __name__ == "__main__":
    main()
