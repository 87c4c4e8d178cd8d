"""Compare what two commits compute, bit for bit: ``python scripts/compare_commits.py HEAD~1 HEAD``.

Each commit is checked out into a worktree and runs, one after the other in this environment: the embedded default with
seeds 0 and 1, runs of two ranks, a run that is stopped and resumed, and a sampled evaluation. Prints the SHA-256 of
every result of both and exits with 1 if any differs. Takes about five minutes a commit on two cores.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # with several, sums may depend on the machine's load
TRAIN = ["-m", "pspo.train"]
SHORT = ["--run.test_limit=0", "--run.validation_limit=32"]
RUNS = {  # by output folder: the commands that make it
    "seed-0": [TRAIN],
    "seed-1": [[*TRAIN, "--run.seed=1"]],
    "ddp": [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TRAIN,
             "--distributed.strategy=ddp", "--run.max_steps=20", *SHORT]],
    "fsdp2": [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *TRAIN,
               "--distributed.strategy=fsdp2", "--run.max_steps=6", *SHORT]],
    "resumed": [[*TRAIN, f"--run.max_steps={steps}", "--run.save_every=10", *SHORT] for steps in (16, 30)],
    "evaluation": [["-m", "pspo.evaluate", "--model.name_or_path=tiny-math", "--data.limit=200",
                    "--eval.temperatures=[0.0, 0.6]", "--eval.samples=4"]],
}  # fmt: skip


def results(checkout: Path, output: Path) -> dict[str, str]:
    """SHA-256 of every weight file, of the metrics without timings, and of the completions."""
    hashes = {}
    for name, commands in RUNS.items():
        for command in commands:
            words = [sys.executable, *command, f"--run.output_dir={output / name}"]
            subprocess.run(words, cwd=checkout, check=True, capture_output=True, env=ONE_THREAD)
        for file in sorted([*(output / name).glob("*/model.safetensors"), *(output / name).glob("*.jsonl")]):
            content = file.read_bytes()
            if file.name == "metrics.jsonl":
                lines = [json.loads(line) for line in content.splitlines()]
                kept = [{key: line[key] for key in sorted(line) if not key.startswith("seconds/")} for line in lines]
                content = json.dumps(kept).encode()
            hashes[str(file.relative_to(output))] = hashlib.sha256(content).hexdigest()
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs=2)
    commits = parser.parse_args().commits
    repository = Path(__file__).parents[1]
    found = []
    for commit in commits:
        with tempfile.TemporaryDirectory() as folder:
            checkout = Path(folder, "checkout")
            worktree = ["git", "-C", str(repository), "worktree"]
            subprocess.run([*worktree, "add", "--detach", str(checkout), commit], check=True, capture_output=True)
            try:
                found.append(results(checkout, Path(folder, "runs")))
            finally:
                subprocess.run([*worktree, "remove", "--force", str(checkout)], check=True)
    before, after = found
    for name in sorted(before.keys() | after.keys()):
        same = "same  " if before.get(name) == after.get(name) else "DIFFER"
        print(f"{same}  {name:40} {before.get(name, '-'):.16} {after.get(name, '-'):.16}")
    raise SystemExit(before != after)


if __name__ == "__main__":
    main()
