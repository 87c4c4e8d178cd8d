"""The runs of a sweep, and the processes that carry them out: what is finished on disk is the only state."""

import contextlib
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from tqdm import tqdm

from pspo.run.records import flat, lock, read_config, write_text
from pspo.run.signals import EXIT_STOPPED

MODELS = ("best", "final", "checkpoints")  # folders in a run's


@dataclass(frozen=True)
class Run:
    """One run of pspo.train, and its evaluations.

    Attributes:
        config: its complete configuration, as YAML has it.
        evaluate: by folder name, the switches of pspo.evaluate.
        keep_models: false for the runs of a search, of which the metrics are enough.
    """

    folder: Path
    config: dict[str, Any]
    evaluate: dict[str, list[str]]
    keep_models: bool

    def __str__(self) -> str:
        return "/".join(self.folder.parts[-3:])

    @property
    def trained(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def finished(self) -> bool:
        return self.trained and all((self.folder / name / "results.json").exists() for name in self.evaluate)

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def validation_rewards(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [record["validation_reward"] for record in records if "validation_reward" in record]

    @property
    def max_tokens(self) -> int:
        """Tokens that it trains on, at most: every prompt and completion as long as its limit."""
        data, rollout, algorithm, run = (self.config[part] for part in ("data", "rollout", "algorithm", "run"))
        longest = data["max_prompt_tokens"] + rollout["max_completion_tokens"]
        per_rollout = rollout["prompts"] * rollout["group_size"] * longest
        tokens = math.ceil(run["max_steps"] / (algorithm["epochs"] * algorithm["minibatches"])) * per_rollout
        return tokens if run["max_tokens"] is None else min(tokens, run["max_tokens"] + per_rollout)


def changed(run: Run, file: Path) -> dict[str, str]:
    """By switch, what is different from the configuration in a file; where the run lies makes no difference."""
    there = flat(read_config(file))
    return {
        switch: f"{there[switch]!r}, and is now to have {value!r}"
        for switch, value in flat(run.config).items()
        if switch != "run.output_dir" and there.get(switch, value) != value
    }


def clear_unfinished(run: Run) -> None:
    """A run that was cut off goes on from its checkpoints; with other switches by now, it starts over."""
    file = run.folder / "config.yaml"
    if run.folder.exists() and (not file.is_file() or changed(run, file)):
        shutil.rmtree(run.folder)


def commands(run: Run) -> Iterator[tuple[list[str], Path]]:
    """What is left to do of a run, each command with the file that it makes last."""
    if not run.trained:
        clear_unfinished(run)
        config = run.folder.with_suffix(".yaml")
        write_text(config, yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True))
        yield ["pspo.train", "--config", str(config)], run.folder / "summary.json"
    for name, switches in run.evaluate.items():
        if not (run.folder / name / "results.json").exists():
            own = [f"--model.name_or_path={run.summary['best_model']}", f"--run.output_dir={run.folder / name}"]
            yield ["pspo.evaluate", *switches, *own], run.folder / name / "results.json"


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(torch.cuda.device_count())]
    return [name for name in visible.split(",") if name]


def ending(exit_code: int, printed: str) -> tuple[int, str]:
    """The exit code and the last line of a run; where torchrun tells of several, those of the first that failed."""
    failures = list(re.finditer(r"^E\d{4} .*failed \(exitcode: (-?\d+)\)", printed, re.MULTILINE))
    if failures:  # a log may hold those of earlier starts
        exit_code, printed = int(failures[-1][1]), printed[: failures[-1].start()]
    elif re.search(r"SignalException: Process \d+ got signal", printed):  # torchrun itself was told to stop
        exit_code = EXIT_STOPPED
    lines = [line.strip() for line in re.split(r"[\r\n]", printed) if not re.match(r"W\d{4} ", line)]
    return exit_code, next(filter(None, reversed(lines)), "")


class Workers:
    """Carries out runs, several at a time, each a process (or a launcher's) that can be stopped."""

    def __init__(
        self, runs: int, workers: int | None, processes: int, launcher: str | None, retry_failed: bool
    ) -> None:
        """For as many runs; the other arguments are those of `pspo.sweep.SweepConfig`."""
        n, devices = processes, gpus()
        shares = [",".join(devices[i : i + n]) for i in range(0, len(devices) - n + 1, n)]
        self.workers = workers or len(shares) or 1
        self.devices: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for i in range(self.workers):
            self.devices.put(shares[i % len(shares)] if len(devices) > 1 and not launcher else None)
        self.launcher, self.retry_failed = launcher, retry_failed
        self.threads = max(1, (os.cpu_count() or 1) // (self.workers * n))
        self.python = [sys.executable, "-m"]
        if n > 1:
            self.python += ["torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m"]
        self.failed: dict[Path, str] = {}
        self.processes: set[subprocess.Popen] = set()
        self.starting, self.stopping = threading.Lock(), threading.Event()
        self.bar = tqdm(total=runs, desc="sweep", unit="run")

    def execute(self, runs: Iterable[Run]) -> None:
        """Do what is not done yet; failures are kept in `failed`, and do not stop the others."""
        todo = []
        for run in runs:
            failure = run.folder.with_suffix(".failed")
            if run.finished:
                self.bar.update()
            elif failure.exists() and not self.retry_failed:
                self.failed[run.folder] = failure.read_text(encoding="utf-8")
            else:
                todo.append(run)
        with ThreadPoolExecutor(self.workers) as pool:
            futures = {pool.submit(self.carry_out, run): run for run in todo}
            try:
                for future in as_completed(futures):
                    future.result()
                    self.report(futures[future])
            finally:
                if not all(future.done() for future in futures):  # an interrupt or an error: nothing is left running
                    self.stop()
                    pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        with self.starting:
            self.stopping.set()
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGTERM)

    def report(self, run: Run) -> None:
        if run.finished:
            rewards = "".join(f", validation reward {reward:.3f}" for reward in run.validation_rewards[-1:])
            tqdm.write(f"{run}: {run.summary['tokens']:,} tokens, {run.summary['seconds']:.0f} s{rewards}")
            self.bar.update()
        else:
            tqdm.write(f"{run}: FAILED, {self.failed[run.folder]}")

    def carry_out(self, run: Run) -> None:
        """Train and evaluate, or do what is left of it."""
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        failure = run.folder.with_suffix(".failed")
        with run.folder.with_suffix(".log").open("ab") as log:
            # A run's processes inherit its log, and the lock on it: where a sweep alone was killed, its last runs go
            # on, and are waited for here instead of being done twice.
            while not lock(log):
                if self.stopping.wait(0.5):
                    return
            failure.unlink(missing_ok=True)
            if not run.trained:
                log.truncate(0)
            for command, product in commands(run):
                exit_code = self.launch(command, log)
                if self.stopping.is_set():
                    return
                if not product.exists():
                    printed = Path(log.name).read_text(encoding="utf-8", errors="replace")
                    exit_code, last = ending(exit_code, printed)
                    ended = f"exit code {exit_code}" if exit_code else f"exit code 0, but no {product.name}"
                    self.failed[run.folder] = f"{ended}: {last}"
                    if exit_code != EXIT_STOPPED:  # that one is saved, and goes on the next time
                        write_text(failure, self.failed[run.folder])
                    return
            if not run.keep_models:
                for name in MODELS:
                    shutil.rmtree(run.folder / name, ignore_errors=True)

    def launch(self, command: list[str], log: IO[bytes]) -> int | None:
        """Run one command and wait for it; None where the sweep is being stopped."""
        words = [*self.python, *command]
        environment = dict(os.environ)
        if self.launcher:
            words = [word.replace("{command}", shlex.join(words)) for word in shlex.split(self.launcher)]
        else:
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
            environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # for a rollout and a save
        device = self.devices.get()
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        try:
            with self.starting:
                if self.stopping.is_set():
                    return None
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
                self.processes.add(process)
            exit_code = process.wait()
            with self.starting:
                self.processes.discard(process)
            return exit_code
        finally:
            self.devices.put(device)
