"""Does training with everything on learn what the plain path learns? The embedded model, both ways, several seeds.

    python -m benchmarks.learning_curve --seeds 0 1 2 3 4 --output runs/learning-curve

"fast" is the default. "plain" samples with the library's own loop, keeps rows whose advantage is 0, recomputes the head
and computes every prompt for every row (gradient checkpointing switches the sharing off). Prints validation reward and
greedy accuracy along the run: the fast mean has to lie within the plain seeds' band.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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


def run(way: str, seed: int, output: Path, switches: list[str]) -> None:
    folder = output / f"{way}-{seed}"
    if (folder / "summary.json").exists():
        return
    command = [sys.executable, "-m", "pspo.train", *WAYS[way], f"--run.seed={seed}", f"--run.output_dir={folder}"]
    done = subprocess.run(
        [*command, "--run.test_limit=0", *switches],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{way} seed {seed} failed:\n{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/learning-curve"))
    options, switches = parser.parse_known_args()  # further switches go to every run
    switches = ["--run.max_steps=30", "--run.validate_every=6", *switches]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda job: run(*job, options.output, switches), [(w, s) for s in options.seeds for w in WAYS]))

    curves: dict[str, dict[int, list[tuple[float, float]]]] = {way: {} for way in WAYS}
    cpu = dict.fromkeys(WAYS, 0.0)
    for way, points in curves.items():
        for seed in options.seeds:
            for line in (options.output / f"{way}-{seed}" / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                cpu[way] += record["seconds/generate"] + record["seconds/train"]
                if "validation_reward" in record:
                    values = record["validation_reward"], record["validation_accuracy"]
                    points.setdefault(record["step"], []).append(values)
    print(f"| step | validation reward, plain: mean [min, max] of {len(options.seeds)} seeds | fast: mean [min, max] |"
          " fast mean within | greedy accuracy, plain | fast |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for step in curves["plain"]:
        rewards, accuracies = ({way: list(zip(*curves[way][step], strict=True))[i] for way in WAYS} for i in (0, 1))
        cells = [f"{statistics.mean(rewards[w]):.3f} [{min(rewards[w]):.3f}, {max(rewards[w]):.3f}]" for w in WAYS]
        within = min(rewards["plain"]) <= statistics.mean(rewards["fast"]) <= max(rewards["plain"])
        greedy = [f"{statistics.mean(accuracies[way]):.3f}" for way in WAYS]
        print(f"| {step} | {cells[1]} | {cells[0]} | {'yes' if within else 'NO'} | {greedy[1]} | {greedy[0]} |")
    print(f"\ngeneration and training, seconds in all: plain {cpu['plain']:.0f}, fast {cpu['fast']:.0f}")


if __name__ == "__main__":
    main()
