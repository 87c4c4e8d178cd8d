"""Everything that only a GPU can tell: correctness, speed, ranks, and a comparison with TRL and vLLM.

    python -m benchmarks.gpu --minutes 8 --part decide          # which candidates pay; three times
    python -m benchmarks.gpu --minutes 9 --part correctness     # from the repository root
    python -m benchmarks.gpu --minutes 9 --part speed           # again, until it says that nothing is left
    python -m benchmarks.gpu --rehearse --part all              # all of it in small, on a CPU

Nothing is downloaded. On the machine there must be:

* the repository (tiny-base is in it; models of other sizes get random weights);
* Python 3.11 or newer with the packages of constraints.txt, torch built for CUDA among them: an environment, or wheels
  of `pip download -c constraints.txt -d wheels .`, installed by `pip install --no-index --find-links wheels ...`.
  pspo itself need not be installed;
* for one check of decoders: --smollm2, SmolLM2-135M-Instruct's folder (results/smollm2/README.md says where from);
* for the comparisons: trl 1.16.0, and a vLLM that it supports; without, they are skipped.

Writes results.json and results.md into --output after each measurement, and its log into logs/. What has values is
not measured again; what failed or was stopped is tried again, after the rest. Each runs in a process of its own, which
is sent SIGTERM when the minutes are over, and killed 30 seconds later.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pspo.files import environment, read_json, write_json, write_text

if TYPE_CHECKING:
    from benchmarks.gpu.common import Measurement, Options

    Listed = list[tuple[str, Measurement]]  # each with its part

ROOT = Path(__file__).parents[2]
FORK = multiprocessing.get_context("fork")  # nothing is imported again; this process itself never touches CUDA
GRACE = 30  # seconds that a stopped run may take to save
NO_GPU = "none"
PEERS = ("trl", "vllm", "bitsandbytes", "triton")


def describe(options: "Options") -> dict[str, Any]:
    """The GPU and its driver; raises RuntimeError if torch cannot use it."""
    import torch

    if options.rehearse:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
        return {"gpu": f"{NO_GPU} (rehearsal on {name})", "driver": ""}
    device = torch.cuda.get_device_properties(0)
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    driver = subprocess.run(query, shell=True, capture_output=True, text=True).stdout.partition("\n")[0]
    torch.ones(1, device="cuda").item()
    return {"gpu": device.name, "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda, "driver": driver}


def measure(measurement: "Measurement", options: "Options", seconds: float) -> dict[str, Any]:
    """Run a measurement in a process of its own: what it returns as "rows", or in one line an "error"."""
    log = options.output / "logs" / f"{measurement.name}.log"
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=child, args=(measurement, options, log, send))
    process.start()
    send.close()
    try:
        process.join(seconds)
        if late := process.is_alive():
            process.terminate()
            process.join(GRACE)
    finally:  # and everything that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    spent = {"seconds": round(time.monotonic() - began, 1)}
    if process.exitcode == 0:
        return {"rows": receive.recv()} | spent
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    why = f"stopped after {seconds:.0f} s" if late else f"exit code {process.exitcode}"
    return {"error": f"{why}: {last}"} | spent


def child(measurement: "Measurement", options: "Options", log: Path, send: Any) -> None:
    """Measure, with all output in the log, in a group of processes that can be killed together."""
    import torch

    os.setpgrp()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    send.send(measurement.run(options))


def report(results: dict[str, Any]) -> str:
    """results.md: the machines, and a table for each part."""
    found = [result["environment"] for result in results.values()]
    machines = {
        f"* {e['gpu']}, driver {e['driver']}, torch {e['packages']['torch']}, transformers "
        f"{e['packages']['transformers']}, commit {e['commit']}" for e in found
    }  # fmt: skip
    lines = ["# Measured by `python -m benchmarks.gpu`", "", *sorted(machines)]
    for part in dict.fromkeys(result["part"] for result in results.values()):
        lines += ["", f"## {part}", "", "| measurement | what | value | goal | met |", "|---|---|---|---|---|"]
        of_part = {name: result for name, result in results.items() if result["part"] == part}
        lines += [f"| {name} | {' | '.join(c)} |" for name, result in of_part.items() for c in cells(result)]
    return "\n".join([*lines, "", *verdict(results)]).rstrip() + "\n"


def verdict(results: dict[str, Any]) -> list[str]:
    """A table of the candidates, and a line on those that gained enough on a GPU and compute the same."""
    rows = []
    gained = []
    for name, result in results.items():
        values = {r["what"]: r for r in result.get("rows", [])}
        if "gain" not in values:
            continue
        goal = values["gain"]["goal"]
        is_exact = all(r["ok"] is not False for r in values.values() if r is not values["gain"])
        gpu = result["environment"]["gpu"]
        if values["gain"]["ok"] and is_exact and not gpu.startswith(NO_GPU):
            gained.append(name)
        shown = [f"{text(values[what]['value'])} {values[what]['unit']}" for what in ("now", "with it", "gain")]
        rows.append(f"| {name} | {' | '.join(shown)} | {text(is_exact)} | {gpu} |")
    if not rows:
        return []
    header = ["| candidate | now | with it | gain | same numbers | GPU |", "|---|---|---|---|---|---|"]
    line = f"Gain of {goal}, with the same numbers: {', '.join(gained) or 'none'}."
    return ["## Verdict", "", *header, *rows, "", line]


def cells(result: dict[str, Any]) -> list[list[str]]:
    """What, value, goal and whether it is met, of each row; without any, why."""
    why = [f"{key}: {result[key]}".replace("|", "/") for key in ("error", "skipped") if key in result]
    return [[*why, "", "", ""]] * len(why) + [
        [r["what"], f"{text(r['value'])} {r['unit']}".strip(), r["goal"], "" if r["ok"] is None else text(r["ok"])]
        for r in result.get("rows", [])
    ]


def text(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1e4 else f"{value:.4g}"


class Results:
    """What was measured, by measurement: results.json, and results.md for people; both are written after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / "results.json"
        self.saved: dict[str, Any] = read_json(file) if file.exists() else {}

    def missing(self, listed: "Listed") -> "Listed":
        """What has no values yet; what was tried before comes last."""
        missing = [(part, one) for part, one in listed if "rows" not in self.saved.get(one.name, {})]
        return sorted(missing, key=lambda pair: pair[1].name in self.saved)

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.saved[name] = result | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        write_json(self.folder / "results.json", self.saved)
        write_text(self.folder / "results.md", report(self.saved))
        for row in cells(result):
            print(name, *filter(None, row), sep="  ", flush=True)


def measure_all(missing: "Listed", options: "Options", results: Results, end: float) -> None:
    """Measure what fits into the time that is left; exits if torch cannot use the GPU."""
    from benchmarks.gpu.common import Measurement

    device = measure(Measurement("device", describe), options, 120)
    if "error" in device:
        sys.exit(f"no GPU to measure: {device['error']}")
    there = environment(str(options.device), 1) | device["rows"]
    for name in PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            there["packages"][name] = metadata.version(name)
    for part, measurement in missing:
        left = end - time.monotonic()
        if lacking := options.lacks(measurement.needs):
            result = {"skipped": f"needs {' and '.join(lacking)}"}
        elif left < measurement.seconds:
            continue
        else:
            result = measure(measurement, options, left)
        results.add(measurement.name, result | {"part": part, "environment": there})


def main(args: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("decide", "correctness", "speed", "fsdp", "vllm", "all"), default="all")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these measurements of the part alone")
    parser.add_argument("--output", type=Path, help="default: gpu-results, or gpu-rehearsal")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU; its times mean nothing")
    given = parser.parse_args(args)
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # is_available() without touching CUDA
    from benchmarks.gpu.common import Options
    from benchmarks.gpu.parts import PARTS

    listed = [(part, one) for part in PARTS if given.part in (part, "all") for one in PARTS[part]]
    names = [measurement.name for _, measurement in listed]
    if unknown := {*(given.only or [])}.difference(names):
        parser.error(f"--only {' '.join(unknown)}: choose from {', '.join(names)}")
    listed = [(part, one) for part, one in listed if one.name in (given.only or names)]
    output = (given.output or Path("gpu-rehearsal" if given.rehearse else "gpu-results")).absolute()
    results = Results(output)
    if missing := results.missing(listed):
        measure_all(missing, Options(output, given.rehearse, given.smollm2), results, began + 60 * given.minutes)
    missing = [measurement.name for _, measurement in results.missing(listed)]
    print(f"{len(listed) - len(missing)} of {len(listed)} measured: {output / 'results.md'}")
    if given.part == "decide":
        print("\n".join(verdict({name: result for name, result in results.saved.items() if name in names})))
    if missing:
        print(f"without values: {', '.join(missing)}")


if __name__ == "__main__":
    main()
