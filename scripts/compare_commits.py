"""Compare what two commits compute, bit for bit: ``python scripts/compare_commits.py HEAD~1 HEAD``.

Each commit is checked out into a worktree and runs, one after the other in this environment: the embedded default with
seeds 0 and 1, runs of two ranks, runs that end and are continued (plain, with lag and resampling, with LoRA), an
environment, and a sampled evaluation. Prints the SHA-256 of every result of both commits; exits with 1 if any differs.
Takes about seven minutes a commit on two cores. Or one commit at a time:

    python scripts/compare_commits.py HEAD~1 --save before.json
    python scripts/compare_commits.py HEAD --against before.json
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",  # with several threads, sums may depend on the machine's load
}
TRAIN = ["-m", "pspo.train"]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TRAIN]
SHORT = ["--run.test_limit=0", "--run.validation_limit=32"]


def continued(*switches: str) -> list[list[str]]:
    """Commands of a run that ends after 16 steps, and is then continued from its last checkpoint."""
    return [[*TRAIN, *switches, f"--run.max_steps={steps}", "--run.save_every=10", *SHORT] for steps in (16, 30)]


RUNS = {  # by output folder: the commands that make it
    "seed-0": [TRAIN],
    "seed-1": [[*TRAIN, "--run.seed=1"]],
    "ddp": [[*TWO_RANKS, "--distributed.strategy=ddp", "--run.max_steps=20", *SHORT]],
    "fsdp2": [[*TWO_RANKS, "--distributed.strategy=fsdp2", "--run.max_steps=6", *SHORT]],
    "resumed": continued(),
    "lag-resumed": continued("--rollout.lag=2", "--rollout.resample=1"),
    "lora-resumed": continued("--model.lora.rank=8"),
    "environment": [[*TRAIN, "--config=configs/calculator.yaml", "--run.max_steps=20", *SHORT]],
    "evaluation": [["-m", "pspo.evaluate", "--model.name_or_path=tiny-math", "--data.limit=200",
                    "--eval.temperatures=[0.0, 0.6]", "--eval.samples=4"]],
}  # fmt: skip


def hash_results(checkout: Path, output: Path) -> dict[str, str]:
    """SHA-256 of the best and final weights, of the metrics without timings, and of the completions."""
    hashes = {}
    for name, commands in RUNS.items():
        for command in commands:
            words = [sys.executable, *command, f"--run.output_dir={output / name}"]
            subprocess.run(words, cwd=checkout, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        kinds = ("*/*model.safetensors", "*.jsonl", "tokens.parquet/*")
        for file in sorted(file for kind in kinds for file in (output / name).glob(kind)):
            content = file.read_bytes()
            if file.name == "metrics.jsonl":
                lines = [json.loads(line) for line in content.splitlines()]
                kept = [{key: line[key] for key in sorted(line) if not key.startswith("seconds/")} for line in lines]
                content = json.dumps(kept).encode()
            hashes[str(file.relative_to(output))] = hashlib.sha256(content).hexdigest()
    return hashes


def hash_commit(commit: str) -> dict[str, str]:
    """Return by file the hashes of what this commit computes in a worktree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        worktree = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*worktree, "add", "--detach", str(checkout), commit], check=True, capture_output=True)
        try:
            return hash_results(checkout, Path(folder, "runs"))
        finally:
            subprocess.run([*worktree, "remove", "--force", str(checkout)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", help="two commits, or one with --save or --against")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the last commit's hashes")
    parser.add_argument("--against", type=Path, metavar="FILE", help="read hashes, in place of a first commit")
    options = parser.parse_args()
    if len(options.commits) != (1 if options.save or options.against else 2):
        parser.error("give two commits, or one with --save or --against")
    saved = [json.loads(options.against.read_text())] if options.against else []
    sides = saved + [hash_commit(commit) for commit in options.commits]
    if options.save:
        options.save.write_text(json.dumps(sides[-1], indent=1) + "\n")
    before = sides[0]
    after = sides[-1]
    for name in sorted(before.keys() | after.keys()):
        same = "same  " if before.get(name) == after.get(name) else "DIFFER"
        print(f"{same}  {name:48} {before.get(name, '-'):.16} {after.get(name, '-'):.16}")
    raise SystemExit(before != after)


if __name__ == "__main__":
    main()
