"""Seconds of a rollout with its update by pspo's decoder, by vLLM in turn with it, and by vLLM during it, in turns.

    python -m benchmarks.overlap --turns 3

In an environment with vLLM (docs/guide/models.md). Every turn is a training of the embedded default, 8 rollouts long,
in a process of its own with OMP_NUM_THREADS threads; under --rollout.lag 1 trainer and vLLM have half of them each. The
first two rollouts are not counted. Wall-clock seconds: median over turns of a turn's median [min, max].
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROLLOUTS, WARMUP, PHASES = 8, 2, ("generate", "reward", "train")
SIDES = {
    "pspo": (),
    "vLLM, in turn": ("--rollout.engine=vllm",),
    "vLLM, --rollout.lag 1": ("--rollout.engine=vllm", "--rollout.lag=1"),
}


def measure(switches: tuple[str, ...]) -> list[float]:
    """Median seconds of a rollout's total and phases in one training."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"max_steps": 2 * ROLLOUTS, "validate_every": 0, "test_limit": 0, "save_every": 0}
        run |= {"output_dir": f"{folder}/run"}
        switches = (*switches, *(f"--run.{name}={value}" for name, value in run.items()))
        subprocess.run([sys.executable, "-m", "pspo.train", *switches], check=True, capture_output=True)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    seconds = [[line[f"seconds/{phase}"] for phase in PHASES] for line in lines[WARMUP:]]
    return [statistics.median(map(sum, seconds)), *map(statistics.median, zip(*seconds, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    turns = [{side: measure(switches) for side, switches in SIDES.items()} for _ in range(parser.parse_args().turns)]
    print(f"| | total, s | {' | '.join(PHASES)} | pspo / it |")
    print("|---|---|---|---|---|---|")
    for side in SIDES:
        columns = list(zip(*(turn[side] for turn in turns), strict=True))
        cells = [f"{statistics.median(of):.2f} [{min(of):.2f}, {max(of):.2f}]" for of in columns]
        ratio = statistics.median(turn["pspo"][0] / turn[side][0] for turn in turns)
        print(f"| {side} | {' | '.join(cells)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
