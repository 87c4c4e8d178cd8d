"""What each optimisation is worth: the same rollout and update with one of them off at a time, in turns.

    python -m benchmarks.ablation embedded tiny
    python -m benchmarks.ablation gsm8k --model smollm2 --data gsm8k --turns 1

Workloads are those of benchmarks/vs_trl.py. Prints the median CPU seconds of one thread, and how many times as long as
with everything on. Every variant takes the same optimizer steps from the same weights on the same rollout.
"""

import argparse
import contextlib
import copy
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

import pspo.model.linear
import pspo.rollout.decode
import pspo.update
from benchmarks.vs_trl import WORKLOADS, advantages_of, model_folder, set_up_pspo
from pspo.config import TrainConfig
from pspo.losses import Clip
from pspo.model import shared_prompts
from pspo.model.load import checkpoint_activations
from pspo.rollout import generate
from pspo.update import Learner, update


@dataclass(frozen=True)
class Recomputing(Clip):
    """Clip that does not say that it is token-local: the head is recomputed in the backward pass."""

    silent_at_zero_advantage = True


@dataclass(frozen=True)
class Keeping(Clip):
    """Clip that does not say that it is silent where A = 0: those rows stay in the passes."""

    token_local = True


def in_order(rows, key):
    return list(rows)


PLAIN_PRODUCTS = mock.patch.object(pspo.model.linear.OneDNNLinear, "forward", torch.nn.Linear.forward)
UNSHARED = mock.patch.object(shared_prompts, "shares_prompts", return_value=False)
RECOMPUTED = "activations recomputed"
TRAINING = {  # what is off: surrogate, and what is patched
    "everything on": (Clip(), contextlib.nullcontext),
    "head recomputed, not in one pass": (Recomputing(), contextlib.nullcontext),
    "rows with advantage 0 kept": (Keeping(), contextlib.nullcontext),
    "common beginning of prompts per prompt": (
        Clip(),
        lambda: mock.patch.object(shared_prompts, "MIN_PREFIX", 10**9),
    ),
    "prompts computed per row": (Clip(), lambda: UNSHARED),
    RECOMPUTED: (Clip(), contextlib.nullcontext),
    f"{RECOMPUTED}, prompts computed per row": (Clip(), lambda: UNSHARED),
    "microbatches not sorted by length": (
        Clip(),
        lambda: mock.patch.object(pspo.update, "sorted", in_order, create=True),
    ),
    "AdamW not fused": (Clip(), contextlib.nullcontext),
    "PyTorch's own float32 products": (Clip(), lambda: PLAIN_PRODUCTS),
}
SORTED = mock.patch.object(pspo.rollout.decode, "_sample_by_rejection", pspo.rollout.decode._sample_sorted)
GENERATION = {
    "everything on": ("pspo", contextlib.nullcontext()),
    "vocabulary sorted for the nucleus": ("pspo", SORTED),
    "fixed shapes, no row dropped": ("graphs", contextlib.nullcontext()),
    "PyTorch's own float32 products": ("pspo", PLAIN_PRODUCTS),
    "the library's loop": ("hf", contextlib.nullcontext()),
}


def train_seconds(name: str, policy, rollout, advantages, config: TrainConfig) -> float:
    surrogate, patched = TRAINING[name]
    policy = copy.deepcopy(policy)
    if name.startswith(RECOMPUTED):
        checkpoint_activations(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=name != "AdamW not fused")
    learner = Learner(policy, optimizer)
    config = replace(config, algorithm=replace(config.algorithm, surrogate=surrogate))
    with patched():
        start = time.process_time()
        update(learner, rollout, advantages, config)
        return time.process_time() - start


def report(title: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{title}")
    base = statistics.median(seconds["everything on"])
    for name, values in seconds.items():
        print(f"  {name:40} {statistics.median(values):7.2f} s  x {statistics.median(values) / base:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--model", help="model folder for smollm2 and gsm8k")
    parser.add_argument("--data", help="GSM8K's folder for gsm8k")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    options.rollouts, options.dtype = 0, "fp32"
    torch.set_num_threads(1)
    for name in options.workloads:
        workload = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(workload, options.model, Path(scratch))
            config, tokenizer, policy, sampling, problems, prompts = set_up_pspo(workload, folder, options)
        torch.manual_seed(0)
        rollout = generate(policy, tokenizer, prompts, sampling, workload.group_size)
        advantages = advantages_of(workload, rollout, problems)

        train_seconds("everything on", policy, rollout, advantages, config)  # a warm-up
        training: dict[str, list[float]] = {variant: [] for variant in TRAINING}
        generation: dict[str, list[float]] = {variant: [] for variant in GENERATION}
        for _ in range(options.turns):
            for variant, values in training.items():
                values.append(train_seconds(variant, policy, rollout, advantages, config))
            for variant, values in generation.items():
                decoder, patched = GENERATION[variant]
                with patched:
                    start = time.process_time()
                    generate(policy, tokenizer, prompts, replace(sampling, decoder=decoder), workload.group_size)
                    values.append(time.process_time() - start)
        zero = (advantages == 0).float().mean().item()
        report(f"{name}: two optimizer steps on {len(rollout)} rows ({100 * zero:.0f}% with advantage 0)", training)
        report(f"{name}: generation of {len(rollout)} rows", generation)


if __name__ == "__main__":
    main()
