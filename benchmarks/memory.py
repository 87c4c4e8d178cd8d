"""Compare the memory that runs plan with the peak that they reach: ``python -m benchmarks.memory SMOLLM2``, 20 minutes.

SMOLLM2 is a folder or hub id of SmolLM2-135M-Instruct. Each run is a process of its own, in which every completion
counts. The lines are those of docs/guide/one-gpu.md.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from pspo.model import ASSETS
from pspo.cli.files import read_json

SHORT = "--run.test_limit=0 --run.validate_every=0 --reward.functions=benchmarks.memory.position"
FEW = "--run.max_steps=2 --rollout.prompts=4 --rollout.max_completion_tokens=64"
KINDS = [  # model, switches
    ("tiny-base", "--run.max_steps=20"),
    ("tiny-base", "--run.max_steps=20 --model.gradient_checkpointing=true"),
    ("tiny-base", "--run.max_steps=20 --model.lora.rank=16"),
    ("tiny-base with 50,000 tokens", "--run.max_steps=20"),
    ("tiny-base", "--run.max_steps=6 --rollout.prompts=128 --optimizer.microbatch_tokens=16384"),
    ("SmolLM2-135M", FEW),
    ("SmolLM2-135M", f"{FEW} --model.dtype=bfloat16"),
    ("SmolLM2-135M", f"{FEW} --model.gradient_checkpointing=true"),
    ("SmolLM2-135M", f"{FEW} --model.lora.rank=16"),
    ("SmolLM2-135M", FEW.replace("prompts=4", "prompts=8")),
]


def position(completions: list[str]) -> list[float]:
    """A reward by which no group is without advantages."""
    return [i / len(completions) for i in range(len(completions))]


def main(smollm2: str) -> None:
    """Print a line of the page's table for each kind of run."""
    with tempfile.TemporaryDirectory() as folder:
        wide = str(Path(folder, "wide"))
        tiny = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-base")
        tiny.resize_token_embeddings(50_000, mean_resizing=False)
        for part in (tiny, AutoTokenizer.from_pretrained(ASSETS / "tiny-base")):
            part.save_pretrained(wide)
        paths = {"tiny-base": "tiny-base", "tiny-base with 50,000 tokens": wide, "SmolLM2-135M": smollm2}
        for number, (model, switches) in enumerate(KINDS):
            output = Path(folder, str(number))
            words = [f"--model.name_or_path={paths[model]}", *SHORT.split(), *switches.split()]
            command = [sys.executable, "-m", "pspo.train", *words, f"--run.output_dir={output}", "--run.quiet"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            planned, peak = (read_json(output / "summary.json")[f"{name}_memory_gb"] for name in ("planned", "peak"))
            besides = f"`{switches.replace('=', ' ')}`" if switches else "none"
            print(f"| {model} | {besides} | {planned:.2f} | {peak:.2f} | {planned / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
