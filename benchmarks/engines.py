"""Completion tokens per second of pspo's decoder, of vLLM and of transformers' generate, drawn in turns.

    python -m benchmarks.engines --models tiny-base smollm2 --rows 16 64 256 --turns 3

In an environment with vLLM (docs/guide/models.md); `--engines pspo hf` needs none. Groups of 4 from prompts of the
embedded task, --tokens at most: "even", every completion has as many, and "uneven", they end where the model ends them.
float32, OMP_NUM_THREADS threads each. Medians over wall-clock times [min, max], after one group drawn by each that is
not counted.
"""

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.workloads import parser, spread
from pspo.config import DataConfig, ModelConfig, RolloutConfig, TrainConfig
from pspo.engines import VLLM
from pspo.model import load_policy, load_tokenizer
from pspo.rollout import generate, load_prompts, make_sampling

GROUP = 4


def measure(model: str, rows: int, options: argparse.Namespace, engine: VLLM | None, policy, tokenizer) -> None:
    prompts = load_prompts(DataConfig(), tokenizer, "train", limit=rows // GROUP).ids
    rollout = RolloutConfig(max_completion_tokens=options.tokens, max_rows=rows)
    for lengths in options.lengths:
        at_least = options.tokens if lengths == "even" else 0
        sampling = replace(make_sampling(policy, tokenizer, rollout), min_completion_tokens=at_least)
        samplings = {
            "pspo": sampling,
            "vllm": replace(sampling, served_by=engine),
            "hf": replace(sampling, decoder="hf"),
        }
        speeds: dict[str, list[float]] = {name: [] for name in options.engines}
        for turn in range(options.turns + 1):
            for name in options.engines:
                torch.manual_seed(turn)
                began = time.perf_counter()
                drawn = generate(policy, tokenizer, prompts if turn > 0 else prompts[:1], samplings[name], GROUP)
                if turn > 0:
                    speeds[name].append(int(drawn.completion_mask.sum()) / (time.perf_counter() - began))
        cells = " | ".join(spread(of_engine, ",.0f") for of_engine in speeds.values())
        print(f"| {model} | {rows} | {lengths} | {cells} |", flush=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engines", nargs="+", choices=("pspo", "vllm", "hf"), default=("pspo", "vllm", "hf"))
    arguments.add_argument("--models", nargs="+", default=["tiny-base"])
    arguments.add_argument("--rows", nargs="+", type=int, default=[16, 64, 128, 256, 512])
    arguments.add_argument("--lengths", nargs="+", choices=("even", "uneven"), default=("even", "uneven"))
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--turns", type=int, default=3)
    options = arguments.parse_args()
    print(f"| model | rows | lengths | {' | '.join(f'{name} tok/s' for name in options.engines)} |")
    print("|---" * (3 + len(options.engines)) + "|")
    for model in options.models:
        rollout = RolloutConfig(engine="vllm", max_rows=max(options.rows))
        config = TrainConfig(model=ModelConfig(model), rollout=rollout)
        policy, tokenizer = load_policy(config.model), load_tokenizer(config.model)
        engine = VLLM(config, 512, policy.device) if "vllm" in options.engines else None
        if engine is not None:
            engine.push(policy, 0)
        for rows in options.rows:
            measure(model, rows, options, engine, policy, tokenizer)
        if engine is not None:
            engine.close()


if __name__ == "__main__":
    main()
