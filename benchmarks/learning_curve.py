"""Does training with everything on learn what the plain path learns? The embedded model, both ways, several seeds.

    python -m benchmarks.learning_curve --seeds 0 1 2 3 4 --output runs/learning-curve

"fast" is the default. "plain" samples with the library's own loop, keeps rows whose advantage is 0, recomputes the head
and computes every prompt for every row (gradient checkpointing switches the sharing off). Prints the training reward
and the greedy accuracy on validation problems along the run: the fast mean has to lie within the plain seeds' band.
(The sampled validation reward would not tell: every validation draws with the same random numbers, so the seeds of one
way share their luck.)
"""

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.methods import run
from pspo.losses import PSPO


@dataclass(frozen=True)
class PlainPSPO(PSPO):
    """PSPO without its promises: a class that makes none is never short-cut."""


WAYS = {
    "fast": [],
    "plain": [
        "--algorithm.surrogate=benchmarks.learning_curve.PlainPSPO",
        "--rollout.decoder=hf",
        "--model.gradient_checkpointing=true",
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/learning-curve"))
    options, switches = parser.parse_known_args()  # further switches go to every run
    switches = ["--run.test_limit=0", "--run.max_steps=30", "--run.validate_every=6", *switches]
    with ThreadPoolExecutor(options.workers) as pool:
        for seed in options.seeds:
            for way, own in WAYS.items():
                pool.submit(run, way, seed, options.output, [*own, *switches])

    # way -> quantity -> step -> one value a seed
    curves: dict[str, dict[str, dict[int, list[float]]]] = {way: {"training": {}, "greedy": {}} for way in WAYS}
    cpu = dict.fromkeys(WAYS, 0.0)
    for way, quantities in curves.items():
        for seed in options.seeds:
            recent: list[float] = []
            for line in (options.output / f"{way}-{seed}" / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                cpu[way] += record["seconds/generate"] + record["seconds/train"]
                recent.append(record["reward"])
                if "validation_accuracy" in record:
                    quantities["training"].setdefault(record["step"], []).append(statistics.mean(recent))
                    quantities["greedy"].setdefault(record["step"], []).append(record["validation_accuracy"])
                    recent = []
    print(f"mean [min, max] of {len(options.seeds)} seeds\n")
    print("| to step | training reward since then, plain | fast | within | greedy accuracy, plain | fast | within |")
    print("|---|---|---|---|---|---|---|")
    for step in curves["plain"]["training"]:
        cells = [str(step)]
        for quantity in ("training", "greedy"):
            plain, fast = (curves[way][quantity][step] for way in ("plain", "fast"))
            cells += [
                f"{statistics.mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]" for values in (plain, fast)
            ]
            cells.append("yes" if min(plain) <= statistics.mean(fast) <= max(plain) else "NO")
        print(f"| {' | '.join(cells)} |")
    print(f"\ngeneration and training, seconds in all: plain {cpu['plain']:.0f}, fast {cpu['fast']:.0f}")


if __name__ == "__main__":
    main()
