"""The six methods on the embedded model: every method with every seed, and the table of how they did.

    python -m benchmarks.methods --seeds 0 1 2 3 4 --workers 2 --output runs/methods

Each run is `python -m pspo.train --algorithm.surrogate METHOD --run.seed SEED` with one thread; runs that are finished
are not run again. Prints greedy accuracy on the held-out problems before and after with its 95% interval, and
validation reward along the way.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pspo.evaluate.results import percent

METHODS = ("PSPO", "NoClip", "Clip", "P3O", "SAPO", "TOPR")


def run(name: str, seed: int, output: Path, switches: list[str]) -> None:
    """Train into <output>/<name>-<seed> with one thread, unless that is done."""
    folder = output / f"{name}-{seed}"
    if (folder / "summary.json").exists():
        return
    command = [sys.executable, "-m", "pspo.train", *switches, f"--run.seed={seed}", f"--run.output_dir={folder}"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} seed {seed} failed:\n{done.stderr[-2000:]}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/methods"))
    options, switches = parser.parse_known_args()  # further switches go to every run
    with ThreadPoolExecutor(options.workers) as pool:
        for seed in options.seeds:
            for method in options.methods:
                pool.submit(run, method, seed, options.output, [f"--algorithm.surrogate={method}", *switches])

    before = {}
    print("| method | accuracy after, by seed | mean | lowest 95% bound | validation reward at a fifth of the run |")
    print("|---|---|---|---|---|")
    for method in options.methods:
        folders = [options.output / f"{method}-{seed}" for seed in options.seeds]
        folders = [folder for folder in folders if (folder / "summary.json").exists()]
        if not folders:
            continue
        summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
        before = summaries[0]["before"]
        after = [summary["after"] for summary in summaries]
        accuracies = [f"{100 * a['accuracy']:.1f}" for a in after]
        early = []
        for folder in folders:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            early.append(next(line["validation_reward"] for line in lines if "validation_reward" in line))
        print(
            f"| {method} | {' '.join(accuracies)} "
            f"| {percent(statistics.mean(a['accuracy'] for a in after))} "
            f"| {percent(min(a['ci95'][0] for a in after))} | {statistics.mean(early):.3f} |"
        )
    if before:
        print(f"\nbefore: {percent(before['accuracy'], before['ci95'])} of {before['n']} problems")


if __name__ == "__main__":
    main()
