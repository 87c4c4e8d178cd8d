"""Seconds of a rollout with its update, and its tokens per second, under switches against others: trainings in turns.

    python -m benchmarks.turns "" rollout.engine=pspo_vllm.VLLM "rollout.engine=pspo_vllm.VLLM rollout.lag=1"
    python -m benchmarks.turns --ranks 2 --workload tiny --shared optimizer.microbatch_tokens=512 \\
        distributed.strategy=ddp distributed.strategy=fsdp2
    python -m benchmarks.turns "" rollout.decoder=hf rollout.engine=pspo_vllm.VLLM --rollouts 4 \\
        --shared "rollout.prompts=64 rollout.max_rows=256 optimizer.lr=1e-12"

Each argument is a side: switches of pspo.train without their dashes. A turn is a training of the embedded default, or
with the model of a workload of benchmarks/workloads.py, by --ranks processes with OMP_NUM_THREADS threads each.
The first two rollouts are not counted. Wall-clock seconds: median over turns of a turn's median [min, max]; ratios are
the first side's total to each one's, paired by turn.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.workloads import WORKLOADS, model_folder, parser, spread
from pspo.cli.files import read_jsonl

WARMUP, PHASES = 2, ("generate", "reward", "train")


def switches(words: str) -> list[str]:
    return [f"--{word}" for word in words.split()]


def measure(args: Sequence[str], ranks: int, rollouts: int) -> list[float]:
    """Medians of one training: seconds of a rollout's total and phases, and completion tokens drawn per second."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        run = {"quiet": "true", "max_steps": 2 * rollouts, "validate_every": 0, "test_limit": 0, "save_every": 0}
        own = [f"--run.{name}={value}" for name, value in (run | {"output_dir": f"{folder}/run"}).items()]
        command = [sys.executable, *launcher, "-m", "pspo.train", *args, *own]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = read_jsonl(Path(folder, "run", "metrics.jsonl"))[WARMUP:]
        rollout = yaml.safe_load(Path(folder, "run", "config.yaml").read_text())["rollout"]
    seconds = [[line[f"seconds/{phase}"] for phase in PHASES] for line in lines]
    rows = rollout["prompts"] * rollout["group_size"]
    speeds = [rows * line["completion_tokens"] / line["seconds/generate"] for line in lines]
    columns = [map(sum, seconds), *zip(*seconds, strict=True), speeds]
    return [statistics.median(column) for column in columns]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("sides", nargs="+", metavar="SIDE")
    arguments.add_argument("--shared", default="", metavar="SWITCHES", help="of every side")
    arguments.add_argument("--workload", choices=WORKLOADS, default="embedded", help="whose model is trained")
    arguments.add_argument("--model", help="model folder for smollm2 and gsm8k")
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--rollouts", type=int, default=8)
    arguments.add_argument("--turns", type=int, default=3)
    options = arguments.parse_args()
    with model_folder(WORKLOADS[options.workload], options.model) as folder:
        shared = [f"--model.name_or_path={folder}", *switches(options.shared)]
        turns = [
            {side: measure([*shared, *switches(side)], options.ranks, options.rollouts) for side in options.sides}
            for _ in range(options.turns)
        ]
    print(f"| | total, s | {' | '.join(PHASES)} | tok/s | first / it |")
    print("|---|---|---|---|---|---|---|")
    first = options.sides[0]
    for side in options.sides:
        *seconds, speeds = zip(*(turn[side] for turn in turns), strict=True)
        cells = [*map(spread, seconds), spread(speeds, ",.0f")]
        ratio = statistics.median(turn[first][0] / turn[side][0] for turn in turns)
        print(f"| {f'`{side}`' if side else ''} | {' | '.join(cells)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
