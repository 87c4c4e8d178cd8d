"""Plan the recipes of configs/one-gpu by `pspo_lab.plan.memory`: ``python -m benchmarks.one_gpu``, a minute on a CPU.

Shapes are Qwen2.5's; prompts of 300 tokens, GSM8K's longest with a system prompt. Two layers of each model run here, in
bf16 autocast as on a GPU; a GPU's attention may keep a little more or less.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from pspo_lab.plan.shapes import QWEN
from pspo_lab.plan.memory import GIB, Planner
from pspo.cli.parse import parse
from pspo.config import TrainConfig

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS = 300
PLANS = [  # recipe, size, GPU in GB, switches beyond the file's
    ("qwen2.5-0.5b", "0.5B", 24, {}),
    ("qwen2.5-0.5b", "0.5B", 40, {"optimizer.microbatch_tokens": 12288}),
    ("qwen2.5-0.5b", "0.5B", 80, {"optimizer.microbatch_tokens": 24576}),
    ("qwen2.5-1.5b-lora", "1.5B", 24, {}),
    ("qwen2.5-1.5b-lora", "1.5B", 40, {"optimizer.microbatch_tokens": 8192}),
    ("qwen2.5-1.5b-lora", "1.5B", 80, {"optimizer.microbatch_tokens": 20480}),
    ("qwen2.5-7b-lora", "7B", 24, {}),
    ("qwen2.5-7b-lora", "7B", 40, {"optimizer.microbatch_tokens": 16384, "rollout.max_rows": 128}),
    ("qwen2.5-7b-lora", "7B", 80, {"optimizer.microbatch_tokens": 7680, "rollout.max_rows": 128,
                                   "model.gradient_checkpointing": "false"}),
]  # fmt: skip


def plan(recipe: str, size: str, switches: dict[str, object]) -> dict[str, float]:
    """GiB of each phase."""
    words = [f"--{name}={value}" for name, value in switches.items()]
    config, _ = parse(TrainConfig, "pspo.train", ["--config", str(ROOT / f"configs/one-gpu/{recipe}.yaml"), *words])
    with tempfile.TemporaryDirectory() as folder:
        QWEN[size].config().save_pretrained(folder)
        model = replace(config.model, name_or_path=folder, autocast="bf16")
        found = Planner(model, PROMPT_TOKENS, torch.device("cpu")).needs(config)
    return {phase: sum(parts.values()) / GIB for phase, parts in found.items()}


def rows() -> list[str]:
    """The lines of the page's table."""
    lines = []
    for recipe, size, gpu, switches in PLANS:
        gib = plan(recipe, size, switches)
        besides = " ".join(f"--{name} {value}" for name, value in switches.items())
        cells = [f"`{recipe}.yaml`", f"{gpu} GB", f"`{besides}`" if besides else "none"]
        lines.append(f"| {' | '.join(cells)} | {gib['rollout']:.1f} | {max(gib['training'], gib['step']):.1f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
