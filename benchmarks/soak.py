"""The embedded default under random faults, against the same runs left in peace: bit-equal, or this script fails.

    python -m benchmarks.soak --minutes 30

Round after round, with a seed each, until the time is up: the run of ``configs/tiny.yaml`` once undisturbed, and once
started again and again until it finishes, while after random times it is killed (SIGKILL), told to stop (SIGTERM,
SIGINT), told twice, or joined by a second run in the same folder, and while between two starts its newest checkpoint is
damaged (a bit flipped, a file cut short, a file gone). At the end weights, best model, metrics (but for seconds) and
samples have to be the same to the last byte. After every start the run has to resume from the newest undamaged
checkpoint, and the metrics may hold no step twice and miss none. Switches after ``--`` go to both runs.
"""

import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.workloads import parser
from pspo.run.endings import EXIT_INTERRUPTED, EXIT_STOPPED
from pspo.run.folders import checkpoints
from pspo.run.folders import find_damage as damage_of

MEAN_SECONDS = 12  # from a start to a fault
FAULTS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice", "second run")


def command(output: Path, seed: int, switches: list[str]) -> list[str]:
    switches = ["--run.save_every=4", "--run.keep=3", *switches, f"--run.seed={seed}", f"--run.output_dir={output}"]
    return [sys.executable, "-u", "-m", "pspo.train", *switches]  # -u: what was printed is there, however it ends


def start(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def contents(run: Path) -> dict[str, object]:
    """What has to be equal: models and samples by their bytes, metrics and summary without times and memory."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    same = ("before", "after", "tokens", "optimizer_steps", "best_step")
    return {
        "metrics.jsonl": [{k: v for k, v in line.items() if not k.startswith("seconds/")} for line in metrics],
        "summary.json": {name: summary[name] for name in same},
        **{f: (run / f).read_bytes() for f in ("samples.jsonl", "final/model.safetensors", "best/model.safetensors")},
    }


def newest_whole(folders: list[Path]) -> Path | None:
    """The newest checkpoint that is as it was saved."""
    return next((folder for folder in folders if damage_of(folder) is None), None)


def damage(run: Path, dice: random.Random) -> str:
    """Damage the newest checkpoint in one of three ways; the one before it stays whole."""
    file = dice.choice(sorted(path for path in checkpoints(run)[0].iterdir() if path.stat().st_size > 0))
    how = dice.choice(("bit flipped", "file cut short", "file gone"))
    content = bytearray(file.read_bytes())
    if how == "file gone":
        file.unlink()
        return how
    place = dice.randrange(len(content))
    if how == "bit flipped":
        content[place] ^= 1 << dice.randrange(8)
    file.write_bytes(content if how == "bit flipped" else content[:place])
    return how


def strike(process: subprocess.Popen, fault: str, words: list[str]) -> None:
    """Do it to the running process and wait for its end."""
    if fault == "second run":
        second = start(words)
        second.communicate()
        assert second.returncode == 2 or process.poll() is not None, f"a second run ended with {second.returncode}"
    else:
        name, _, twice = fault.partition(" ")
        for _ in range(2 if twice else 1):
            process.send_signal(signal.Signals[name])
            time.sleep(0.2)
    process.wait()


def disturbed(output: Path, words: list[str], dice: random.Random, counts: Counter) -> None:
    """Run to the end, whatever happens on the way."""
    while True:
        whole = newest_whole(checkpoints(output))
        known = (output / "config.yaml").exists()
        process = start(words)
        counts["starts"] += 1
        fault = None
        try:
            process.wait(timeout=dice.expovariate(1 / MEAN_SECONDS))
        except subprocess.TimeoutExpired:
            fault = dice.choice(FAULTS)
            strike(process, fault, words)
        said = process.stdout.read()
        code = process.returncode
        resumed = re.search(r"^resuming \S+ from (the start|step-\d+)", said, re.MULTILINE)
        if resumed and known:
            expected = whole.name if whole else "the start"
            assert resumed[1] == expected, f"resumed from {resumed[1]}, not {expected}"
        expected = {"SIGKILL": {-9}, "SIGINT twice": {EXIT_STOPPED, EXIT_INTERRUPTED}}.get(fault, {EXIT_STOPPED})
        if "\nmethod " not in said:  # a run listens to signals after its header, and has saved nothing before
            expected |= {-signal.SIGTERM, -signal.SIGINT, 1, 130}
        assert code == 0 or code in expected, f"exit code {code} after {fault}"
        counts[fault or "none, it finished"] += 1
        if (output / "summary.json").exists():
            return
        lines = (output / "metrics.jsonl").read_text().splitlines(True) if (output / "metrics.jsonl").exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]  # a kill may cut the last one short
        assert steps == sorted(set(steps)), f"steps out of order: {steps}"
        whole = newest_whole(checkpoints(output))
        newest = int(whole.name.removeprefix("step-")) if whole else 0
        counts["steps taken again after a fault"] += max(0, (steps[-1] if steps else 0) - newest)
        if len(checkpoints(output)) > 1 and newest_whole(checkpoints(output)[1:2]) and dice.random() < 0.3:
            counts[damage(output, dice)] += 1


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--seed", type=int, default=0, help="of the faults")
    arguments.add_argument("switches", nargs="*", help="for pspo.train, after --")
    options = arguments.parse_args()
    dice = random.Random(options.seed)
    counts = Counter()
    began = time.monotonic()
    rounds = 0
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() - began < 60 * options.minutes:
            peace, trouble = (Path(scratch) / f"{name}-{rounds}" for name in ("peace", "trouble"))
            subprocess.run(command(peace, rounds, options.switches), check=True, capture_output=True)
            disturbed(trouble, command(trouble, rounds, options.switches), dice, counts)
            expected = contents(peace)
            actual = contents(trouble)
            for name in expected:
                assert actual[name] == expected[name], f"round {rounds}: {name} differs"
            rounds += 1
            print(f"round {rounds}: equal after {counts['starts']} starts in all", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"\n{rounds} runs, {minutes:.0f} minutes, each bit-equal to the same run left in peace")
    for name, count in sorted(counts.items()):
        print(f"{count:6}  {name}")


if __name__ == "__main__":
    main()
