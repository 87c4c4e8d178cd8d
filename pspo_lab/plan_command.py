"""Plan a training run: does it fit, and how long does it take? ``pspo plan``, with the switches of pspo.train.

Prints memory per GPU, the least seconds of a rollout and of its optimizer steps, bytes sent, the hours of
run.max_steps, by arithmetic. docs/gpu.md has the assumptions, the formulas and what was checked.
"""

import math
from collections.abc import Sequence

import pandas as pd

from pspo.cli.parse import parse, user_errors
from pspo_lab.plan_cost import PlanConfig, Strategy, choose, memory, messages, seconds, shapes, total
from pspo_lab.plan_shapes import Shape


def row(name: str, shape: Shape, config: PlanConfig, gpus: int) -> dict[str, object]:
    """One line of the table: the model on so many GPUs, by the fastest strategy that fits."""
    s, fits = choose(shape, config, gpus)
    cells = {"model": name, "GPUs": gpus, "strategy": s.name if fits else "does not fit"}
    for phase, parts in memory(shape, config, s).items():
        cells[f"GB {phase}"] = f"{sum(parts.values()) / 1e9:.1f}"
    return cells | time_cells(shape, config, s) if fits else cells


def time_cells(shape: Shape, config: PlanConfig, s: Strategy) -> dict[str, object]:
    """Seconds, bytes and rates of a placement that fits."""
    phases = seconds(shape, config, s)
    draw, train = (sum(parts.values()) for parts in phases.values())
    rollout_gb, step_gb = (size * (1 - 1 / s.gpus) / 1e9 for size, _ in messages(shape, config, s))
    rollout = config.rollout
    tokens = rollout.prompts * rollout.group_size * (config.plan.prompt_tokens + config.completion_tokens)
    alone = total(seconds(shape, config, Strategy("none", 1)))
    rollouts = math.ceil(config.run.max_steps / (config.algorithm.epochs * config.algorithm.minibatches))
    return {
        "rollout s": f"{draw:.2f}",
        "training s": f"{train:.2f}",
        "GB sent/rollout": f"{rollout_gb:.1f}",
        "GB sent/step": f"{step_gb:.1f}",
        "hours": f"{rollouts * total(phases) / 3600:.2f}",
        "tokens/s": f"{tokens / total(phases):,.0f}",
        "efficiency": f"{alone / s.gpus / total(phases):.0%}",
    }


def details(shape: Shape, config: PlanConfig, unit: str) -> pd.DataFrame:
    """Memory (GB) or time (ms) by part, with a column for each number of GPUs that the model fits."""
    columns = {}
    for gpus in config.plan.gpus:
        s, fits = choose(shape, config, gpus)
        if fits:
            phases = memory(shape, config, s) if unit == "GB" else seconds(shape, config, s)
            columns[f"{gpus}: {s.name}"] = {
                f"{phase}: {part}": value for phase in phases for part, value in phases[phase].items()
            }
    table = pd.DataFrame(columns).rename_axis(columns=unit) / (1e9 if unit == "GB" else 1e-3)
    return table[(table != 0).any(axis=1)]


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(PlanConfig, "pspo plan", args)
    with user_errors("pspo plan"):
        models = shapes(config.model)
    rollout = config.rollout
    plan = config.plan
    print(
        f"{rollout.prompts} prompts x {rollout.group_size}, {plan.prompt_tokens} + {config.completion_tokens:g} tokens "
        f"each, {config.algorithm.epochs} epochs x {config.algorithm.minibatches} minibatches; {plan.gpu}: "
        f"{plan.mfu:.0%} of its bf16 peak, {plan.mbu:.0%} of its bandwidths, {plan.usable:.0%} of its memory"
    )
    rows = [row(name, shape, config, gpus) for name, shape in models.items() for gpus in plan.gpus]
    print(pd.DataFrame(rows).fillna("-").to_string(index=False))
    if len(models) == 1:
        for unit in ("GB", "ms"):
            table = details(*models.values(), config, unit)
            if len(table):
                print(f"\n{table.to_string(float_format='{:,.2f}'.format)}")
    print(f"\nGroups stay whole: at most {rollout.prompts} GPUs have work.")
