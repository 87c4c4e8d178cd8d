"""The arithmetic of `pspo.plan` against what a CPU can measure.

    python -m benchmarks.plan_check                  # all four, some five minutes on one thread
    python -m benchmarks.plan_check flops lag

* flops: what torch counts in a rollout and in its optimizer steps, completions forced to one length and natural ones,
  against the plan's sums over means (attention in plain matrix products, for a CPU's fused one is not counted).
* memory: peak of a process over what it held before the model, bf16 autocast, against the plan: a model so small that
  what the libraries take shows, and a larger one in microbatches of 4 and of 16 rows.
* seconds: a rollout and its two optimizer steps, with this CPU's measured matrix products and bandwidth in place of a
  GPU's, against the clock and against `benchmarks.floor`, which has its own sums.
* lag: how far the policy is from the one that made a rollout, by optimizer steps in between: what asynchronous rollouts
  train on. The embedded model, 32 x 4, two epochs, Clip.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.floor import floors, measure
from benchmarks.vs_trl import WORKLOADS, Workload, advantages_of, model_folder, run_pspo, set_up_pspo

WIDE = {"hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 4096}
WORKLOADS |= {"wide": Workload(16, 4, 16, True, WIDE), "wide, 4 rows": Workload(16, 4, 4, True, WIDE)}
WORKLOADS["small"] = Workload(16, 4, 16, True, {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 4096})
DTYPE = {"dtype": "bf16", "data": None}


def planned(config, folder: str, prompts, rollout=None, advantages=None, **machine):
    """The shape, and the plan's configuration of a run: lengths and shares are a rollout's where one is given."""
    from benchmarks.plan.__main__ import Assumptions, PlanConfig, shapes
    from pspo.config import ModelConfig

    common = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    plan = {"prompt_tokens": round(sum(map(len, prompts)) / len(prompts)), "shared_tokens": common}
    if rollout is not None:
        moving = (advantages != 0).float().mean().item()  # rows, where the plan has groups
        plan |= {"completion_tokens": rollout.completion_mask.sum().item() / len(rollout), "moving": moving}
    parts = {"rollout": config.rollout, "algorithm": config.algorithm, "optimizer": config.optimizer}
    (shape,) = shapes(ModelConfig(folder)).values()
    return shape, PlanConfig(model=ModelConfig(folder), plan=Assumptions(**plan | machine), **parts)


def check_flops() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.plan.__main__ import Load, Strategy
    from pspo.rollout import generate
    from pspo.train import Learner, update

    for name in ("tiny", "embedded"):
        workload = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(workload, None, Path(scratch))
            options = argparse.Namespace(dtype="fp32", rollouts=0, data=None)
            config, tokenizer, policy, sampling, problems, prompts = set_up_pspo(workload, folder, options)
            policy.set_attn_implementation("eager")
            optimizer = torch.optim.AdamW(policy.parameters(), lr=workload.lr)
            learner = Learner(policy, None, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
            prompts = prompts[: workload.prompts]
            torch.manual_seed(0)
            with FlopCounterMode(display=False) as generating:
                rollout = generate(policy, tokenizer, prompts, sampling, workload.group_size)
            advantages = advantages_of(workload, rollout, problems[: workload.prompts])
            with FlopCounterMode(display=False) as training:
                update(learner, rollout, advantages, config)
            shape, plan = planned(config, folder, prompts, rollout, advantages)

        load, prompt, length = Load.of(plan, Strategy("none", 1)), plan.plan.prompt_tokens, plan.plan.completion_tokens
        steps, decoded = config.algorithm.epochs * load.microbatches, len(rollout) * (length - 1)
        n = len(prompts)
        generation = shape.flops(n * prompt, n * prompt**2, n)
        generation += shape.flops(decoded, decoded * (prompt + length / 2), decoded)
        passes = steps * 3 * shape.flops(load.tokens, load.pairs, load.predicted)
        for phase, expected, counter in (("generate", generation, generating), ("update", passes, training)):
            counted = counter.get_total_flops()
            print(f"flops   {name:8} {phase:8} counted {counted / 1e9:6.1f} G, planned {expected / 1e9:6.1f} G: "
                  f"{expected / counted:.2f}; mean length {length:.0f}, moving {plan.plan.moving:.0%}")  # fmt: skip


def check_memory() -> None:
    for name in ("small", "wide, 4 rows", "wide"):  # in a process each, whose peak is the workload's
        with tempfile.TemporaryDirectory() as scratch:
            for step in ("--make", "--peak"):
                command = [sys.executable, "-m", "benchmarks.plan_check", step, name, scratch]
                subprocess.run(command, check=True)


def print_peak(name: str, folder: str) -> None:
    import resource

    import torch

    from benchmarks.plan.__main__ import Strategy, memory
    from pspo.config import ModelConfig
    from pspo.model import load_tokenizer

    torch.set_num_threads(1)
    options = argparse.Namespace(rollouts=0, **DTYPE)
    load_tokenizer(ModelConfig(folder))  # what the libraries need for that counts as there before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_pspo(WORKLOADS[name], folder, options)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    config, *_, prompts = set_up_pspo(WORKLOADS[name], folder, options)
    shape, plan = planned(config, folder, prompts)
    parts = memory(shape, plan, Strategy("none", 1))["training"]
    listed = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in parts.items())
    print(f"memory  {name:12} measured {peak:5,.0f} MiB, planned {sum(parts.values()) / 2**20:5,.0f} MiB: {listed}")


def check_seconds() -> None:
    import torch

    from benchmarks.plan.__main__ import Strategy, seconds
    from benchmarks.plan.shapes import GPU, GPUS

    torch.set_num_threads(1)
    machine = measure("bf16")
    GPUS["cpu"] = GPU(float("inf"), machine.flops, machine.bandwidth)
    print(f"seconds one thread: {machine.flops / 1e9:.0f} GFLOP/s bf16, {machine.bandwidth / 1e9:.1f} GB/s")
    for name in ("tiny", "wide"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(WORKLOADS[name], None, Path(scratch))
            options = argparse.Namespace(rollouts=1, **DTYPE)
            config, *_, prompts = set_up_pspo(WORKLOADS[name], folder, options)
            prompts = prompts[WORKLOADS[name].prompts :]
            shape, plan = planned(config, folder, prompts, gpu="cpu", mfu=1.0, mbu=1.0)
            parts = seconds(shape, plan, Strategy("none", 1))
            other = floors(folder, name, "bf16", machine, prompts)
            spent = run_pspo(WORKLOADS[name], folder, options)[-1]
        for phase, label in (("rollout", "generate"), ("training", "train")):
            least = sum(parts[phase].values())
            print(f"seconds {name:5} {label:9} measured {spent[label]:6.2f}, planned {least:6.3f} "
                  f"({100 * least / spent[label]:3.0f}%), benchmarks.floor {other[label]:6.3f}")  # fmt: skip


def check_lag(rollouts: int = 24, farthest: int = 8) -> None:
    import torch

    from pspo.model import locate, token_logprobs
    from pspo.rollout import generate
    from pspo.train import Learner, update

    torch.set_num_threads(1)
    workload = WORKLOADS["embedded"]
    options = argparse.Namespace(dtype="fp32", rollouts=rollouts - 1, data=None)
    config, tokenizer, policy, sampling, problems, prompts = set_up_pspo(workload, locate("tiny-base"), options)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=workload.lr, weight_decay=0.0)
    learner = Learner(policy, None, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    torch.manual_seed(0)
    kept, seen = [], {}

    def logprobs_of(rollout):
        with torch.no_grad():
            return token_logprobs(policy, *rollout.token_ids, config.rollout.temperature)[rollout.completion_mask]

    for first in range(0, len(prompts), workload.prompts):
        rows = slice(first, first + workload.prompts)
        rollout = generate(policy, tokenizer, prompts[rows], sampling, workload.group_size)
        kept = [(rollout, logprobs_of(rollout)), *kept][:farthest]
        update(learner, rollout, advantages_of(workload, rollout, problems[rows]), config)
        for age, (old_rollout, old_logprobs) in enumerate(kept, start=1):
            seen.setdefault(age * config.algorithm.epochs, []).append((logprobs_of(old_rollout) - old_logprobs).exp())
    print(f"lag     tiny-base, lr {workload.lr:g}, {rollouts} rollouts of {workload.prompts} x {workload.group_size}")
    print("lag     steps  |r-1|/2   ESS   p1 of r  p99 of r  |r-1| > 0.2")
    for lag, ratios in seen.items():
        r = torch.cat(ratios)
        ordered = r.sort().values
        p1, p99 = (ordered[round(q * (len(r) - 1))].item() for q in (0.01, 0.99))
        ess, far = r.mean() ** 2 / r.square().mean(), ((r - 1).abs() > 0.2).float().mean()
        print(f"lag     {lag:5}  {(r - 1).abs().mean() / 2:7.4f} {ess:6.3f} {p1:8.3f} {p99:9.3f} {far:10.2%}")


def main() -> None:
    checks = {"flops": check_flops, "memory": check_memory, "seconds": check_seconds, "lag": check_lag}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(checks)}; unset, all")
    for step in ("--make", "--peak"):  # of the memory check, in processes of their own
        parser.add_argument(step, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.checks) - set(checks):
        parser.error(f"no check is called {', '.join(unknown)}")
    if options.make:
        model_folder(WORKLOADS[options.make[0]], None, Path(options.make[1]))
        return
    if options.peak:
        print_peak(*options.peak)
        return
    names = options.checks or list(checks)
    if len(names) > 1:
        for name in names:
            subprocess.run([sys.executable, "-m", "benchmarks.plan_check", name], check=True, env=os.environ)
    else:
        checks[names[0]]()


if __name__ == "__main__":
    main()
