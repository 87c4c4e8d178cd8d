"""What each optimisation is worth: the same rollout and update with one of them off at a time, in turns.

    python -m benchmarks.ablation embedded tiny
    python -m benchmarks.ablation gsm8k --model smollm2 --data gsm8k --turns 1
    python -m benchmarks.ablation smollm2 --model smollm2 --dtype bf16 --lora 16

Workloads are those of benchmarks/workloads.py. Prints the median CPU seconds of one thread, and how many times as long
as with everything on. Every variant takes the same optimizer steps from the same weights on the same rollout.
"""

import contextlib
import copy
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

import pspo.rollout.drawing
import pspo.update.batching
import pspo.update.learner
from benchmarks.workloads import WORKLOADS, Setup, model_folder, parser, set_up
from pspo.losses import Clip
from pspo.model import shared_prompts
from pspo.model.load import checkpoint_activations
from pspo.rollout import Rollout, generate
from pspo.update import Learner, update


def in_order(rows, key):
    return list(rows)


AS_IT_IS = contextlib.nullcontext
NO_PREFIX = partial(mock.patch.object, shared_prompts, "MIN_PREFIX", 10**9)
ONE_PASS = partial(mock.patch.object, shared_prompts, "MIN_PADDING", 10**9)
UNSHARED = partial(mock.patch.object, pspo.update.learner, "shares_prompts", return_value=False)
RECOMPUTED = "activations recomputed"
UNFUSED = "AdamW not fused"
BONUS = "with an entropy bonus, which needs every row"
TRAINING = {  # what is off, by what patch
    "everything on": AS_IT_IS,
    "rows with advantage 0 kept": partial(mock.patch.object, Clip, "silent_at_zero_advantage", False),
    "common beginning of prompts per prompt": NO_PREFIX,
    "prompts computed per row": UNSHARED,
    "completions of all lengths in one pass": ONE_PASS,
    "keys and values copied for query heads": partial(mock.patch.dict, os.environ, TRANSFORMERS_SDPA_FORCE_GQA="0"),
    RECOMPUTED: AS_IT_IS,
    f"{RECOMPUTED}, prompts computed per row": UNSHARED,
    "microbatches not sorted by length": partial(
        mock.patch.object, pspo.update.batching, "sorted", in_order, create=True
    ),
    UNFUSED: AS_IT_IS,
    BONUS: AS_IT_IS,
}
BY_A_RACE = {"sample_nucleus": pspo.rollout.drawing.sample_race}
GENERATION = {  # what is off: decoder, and what is patched
    "everything on": ("pspo", AS_IT_IS),
    "common beginning of prompts per prompt": ("pspo", NO_PREFIX),
    "the nucleus by a race": ("pspo", partial(mock.patch.multiple, pspo.rollout.drawing, **BY_A_RACE)),
    "fixed shapes, no row dropped": ("graphs", AS_IT_IS),
    "the library's loop": ("hf", AS_IT_IS),
}


def train_seconds(name: str, s: Setup, rollout: Rollout, advantages: torch.Tensor) -> float:
    policy = copy.deepcopy(s.policy)
    if name.startswith(RECOMPUTED):
        checkpoint_activations(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=name != UNFUSED)
    config = s.config
    if name == BONUS:
        config = replace(config, algorithm=replace(config.algorithm, entropy_coef=0.01))
    with TRAINING[name]():
        start = time.process_time()
        update(Learner(policy, optimizer), rollout, advantages, config)
        return time.process_time() - start


def generate_seconds(name: str, s: Setup, group_size: int) -> float:
    decoder, patched = GENERATION[name]
    with patched():
        start = time.process_time()
        generate(s.policy, s.tokenizer, s.prompts, replace(s.sampling, decoder=decoder), group_size)
        return time.process_time() - start


def report(title: str, seconds: dict[str, list[float]]) -> None:
    print(f"\n{title}")
    base = statistics.median(seconds["everything on"])
    for name, values in seconds.items():
        print(f"  {name:40} {statistics.median(values):7.2f} s  x {statistics.median(values) / base:.2f}")


def main() -> None:
    arguments = parser(__doc__, [*WORKLOADS])
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    arguments.add_argument("--lora", type=int, default=0, metavar="RANK")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for name in options.workloads:
        workload = WORKLOADS[name]
        with model_folder(workload, options.model) as folder:
            s = set_up(workload, folder, 0, options.dtype, options.lora, options.data)
        torch.manual_seed(0)
        rollout = generate(s.policy, s.tokenizer, s.prompts, s.sampling, workload.group_size)
        advantages = workload.advantages(rollout, s.problems)

        train_seconds("everything on", s, rollout, advantages)  # a warm-up
        training: dict[str, list[float]] = {variant: [] for variant in TRAINING}
        generation: dict[str, list[float]] = {variant: [] for variant in GENERATION}
        for _ in range(options.turns):
            for variant, values in training.items():
                values.append(train_seconds(variant, s, rollout, advantages))
            for variant, values in generation.items():
                values.append(generate_seconds(variant, s, workload.group_size))
        zero = (advantages == 0).float().mean().item()
        report(f"{name}: two optimizer steps on {len(rollout)} rows ({100 * zero:.0f}% with advantage 0)", training)
        report(f"{name}: generation of {len(rollout)} rows", generation)


if __name__ == "__main__":
    main()
