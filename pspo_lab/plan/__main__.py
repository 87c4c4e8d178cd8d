"""Plan a training run on GPUs that are not here: ``pspo plan``, with the switches of pspo.train.

Prints memory per GPU, the least seconds of a rollout and of its optimizer steps, bytes sent, and what stops scaling
first, by arithmetic. README.md beside this file has the assumptions, the formulas and what was checked.
"""

from collections.abc import Sequence

import pandas as pd

from pspo.cli.parse import parse, user_errors
from pspo_lab.plan.cost import (
    PHASES,
    PlanConfig,
    Strategy,
    between_groups,
    candidates,
    choose,
    memory,
    messages,
    overhead,
    seconds,
    shapes,
    total,
)
from pspo_lab.plan.shapes import Shape


def row(name: str, shape: Shape, config: PlanConfig, gpus: int) -> dict[str, object]:
    """One line of the table: the model on so many GPUs, by the fastest strategy that fits."""
    s = choose(shape, config, gpus)
    if not (tried := [s] if s else candidates(config, gpus)):  # none fits: the one that needs least
        return {"model": name, "GPUs": gpus, "strategy": "no GPU for a server"}
    held = min(([sum(parts.values()) / 1e9 for parts in memory(shape, config, s).values()] for s in tried), key=max)
    cells = {"model": name, "GPUs": gpus, "strategy": s or "does not fit"}
    cells |= {f"GB {phase}": f"{gb:.{1 if s else 0}f}" for phase, gb in zip(PHASES, held, strict=True)}
    if s is None:
        return cells
    spent, alone = seconds(shape, config, s), total(seconds(shape, config, Strategy("none", 1)))
    tokens = config.rollout.prompts * config.rollout.group_size * (config.plan.prompt_tokens + config.completion_tokens)
    whole = total(spent, config.draws_ahead)
    rate = {"tokens/s": f"{tokens / whole:,.0f}", "efficiency": f"{alone / gpus / whole:.0%}"}
    drawn, trained = (sum(spent[phase].values()) for phase in PHASES)
    if s.servers:
        pushed = spent["rollout"]["push"]
        times = {"push s": pushed, "at once": pushed / s.servers, "draw s": drawn - pushed, "training s": trained}
        times |= {"lag 0 s": total(spent), "lag 1 s": total(spent, ahead=True)}
        return cells | {name: f"{t:.1f}" for name, t in times.items()} | rate
    lost, ring = overhead(shape, config, s), s.shards if s.name == "fsdp2" else gpus
    sent = [size * (1 - 1 / ring) / 1e9 for size, _ in messages(shape, config, s)]
    sent[1] += between_groups(shape, s)[0] * (1 - s.shards / gpus) / 1e9
    cells |= {"rollout s": f"{drawn:.2f}", "training s": f"{trained:.2f}"}
    cells |= {"GB sent/rollout": f"{sent[0]:.1f}", "GB sent/step": f"{sent[1]:.1f}"} | rate
    if gpus > 1:
        cells["most lost to"] = max(lost, key=lost.get)
    return cells


def details(shape: Shape, config: PlanConfig, unit: str) -> pd.DataFrame:
    """Memory (GB) or time (ms) by part, with a column for each number of GPUs that the model fits."""
    columns = {}
    for gpus in config.plan.gpus:
        if s := choose(shape, config, gpus):
            phases, scale = (memory(shape, config, s), 1e9) if unit == "GB" else (seconds(shape, config, s), 1e-3)
            parts = {f"{phase}: {part}": v / scale for phase in PHASES for part, v in phases[phase].items()}
            columns[f"{gpus}: {s}"] = parts
    table = pd.DataFrame(columns).rename_axis(columns=unit)
    return table[(table != 0).any(axis=1)]


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(PlanConfig, "pspo_lab.plan", args)
    with user_errors("pspo_lab.plan"):
        models = shapes(config.model)
    r, a, p = config.rollout, config.algorithm, config.plan
    print(f"{r.prompts} prompts x {r.group_size}, {p.prompt_tokens} + {config.completion_tokens:g} tokens each, "
          f"{a.epochs} epochs x {a.minibatches} minibatches; {p.gpu}: {p.mfu:.0%} of its bf16 peak, {p.mbu:.0%} of its "
          f"bandwidths, {p.usable:.0%} of its memory; least times")  # fmt: skip
    rows = [row(name, shape, config, gpus) for name, shape in models.items() for gpus in p.gpus]
    print(pd.DataFrame(rows).fillna("-").to_string(index=False))
    for shape in models.values() if len(models) == 1 else ():
        for unit in ("GB", "ms"):
            if len(table := details(shape, config, unit)):
                print(f"\n{table.to_string(float_format='{:,.2f}'.format)}")
    print(f"\nGroups stay whole: at most {r.prompts} GPUs or servers have work.")


if __name__ == "__main__":
    main()
