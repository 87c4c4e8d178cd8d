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
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.results import NO_GPU, Result, Results, verdict
from pspo.files import environment

if TYPE_CHECKING:
    from benchmarks.gpu.common import Measurement, Options

    Listed = list[tuple[str, Measurement]]  # each with its part

FORK = multiprocessing.get_context("fork")  # nothing is imported again; this process itself never touches CUDA
GRACE = 30  # seconds that a stopped run may take to save
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


def run_apart(name: str, function: Callable, options: "Options", seconds: float) -> tuple[Any, str]:
    """What a function returns in a process of its own; if that fails None, and why in one line."""
    log = options.output / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=child, args=(function, options, log, send))
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
    if process.exitcode == 0:
        return receive.recv(), ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    why = f"stopped after {seconds:.0f} s" if late else f"exit code {process.exitcode}"
    return None, f"error: {why}: {last}"


def child(function: Callable, options: "Options", log: Path, send: Any) -> None:
    """Run it with all output in the log, in a group of processes that can be killed together."""
    import torch

    os.setpgrp()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    send.send(function(options))


def missing(listed: "Listed", results: Results) -> "Listed":
    """What has no values yet; what was tried before comes last."""
    left = [(part, one) for part, one in listed if one.name not in results.saved or not results.saved[one.name].rows]
    return sorted(left, key=lambda pair: pair[1].name in results.saved)


def measure_all(listed: "Listed", options: "Options", results: Results, end: float) -> None:
    """Measure what fits into the time that is left; exits if torch cannot use the GPU."""
    device, why = run_apart("device", describe, options, 120)
    if device is None:
        sys.exit(f"no GPU to measure: {why}")
    there = environment(str(options.device), 1) | device
    for name in PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            there["packages"][name] = metadata.version(name)
    for part, measurement in listed:
        left = end - time.monotonic()
        rows = None
        if lacking := options.lacks(measurement.needs):
            why = f"skipped: needs {' and '.join(lacking)}"
        elif left < measurement.seconds:
            continue
        else:
            rows, why = run_apart(measurement.name, measurement.run, options, left)
        results.add(measurement.name, Result(part, measurement.is_candidate, there, rows or [], why))


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
    if unmeasured := missing(listed, results):
        measure_all(unmeasured, Options(output, given.rehearse, given.smollm2), results, began + 60 * given.minutes)
    unmeasured = [measurement.name for _, measurement in missing(listed, results)]
    print(f"{len(listed) - len(unmeasured)} of {len(listed)} measured: {output / 'results.md'}")
    if given.part == "decide":
        print(verdict(results.saved))
    if unmeasured:
        print(f"without values: {', '.join(unmeasured)}")


if __name__ == "__main__":
    main()
