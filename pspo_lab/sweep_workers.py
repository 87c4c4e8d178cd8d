"""Carry out jobs, several at a time: each command is a process with GPUs of its own, or a launcher's."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from itertools import cycle, islice
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any

from tqdm import tqdm

from pspo import distributed as dist
from pspo.cli.files import read_json, to_yaml, write_text
from pspo.cli.signals import EXIT_STOPPED
from pspo_lab.sweep_plan import Job, SweepConfig, switch_words


class Workers:
    """Processes that carry out jobs, and hold the sweep's ``lock``."""

    def __init__(self, sweep: SweepConfig, lock: IO[Any]) -> None:
        gpus = [] if sweep.launcher else dist.visible_gpus()
        n = sweep.processes
        groups = [",".join(gpus[i : i + n]) for i in range(0, len(gpus) - n + 1, n)] or [None]
        workers = sweep.workers or len(groups)
        self.threads = max(1, (os.cpu_count() or 1) // (workers * n))
        self.idle = asyncio.Queue()  # GPUs of the workers that have nothing to do
        for group in islice(cycle(groups), workers):
            self.idle.put_nowait(group)
        self.sweep = sweep
        self.lock = lock
        self.failed: dict[Path, str] = {}  # reasons by folder

    async def carry_out(self, job: Job) -> None:
        """Train and evaluate, or do what is left of it; if cancelled, no process is left running."""
        failure = job.folder.with_suffix(".failed")
        if failure.exists() and not self.sweep.retry_failed:
            self.failed[job.folder] = failure.read_text(encoding="utf-8")
        elif not job.finished:
            gpus = await self.idle.get()
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            failure.unlink(missing_ok=True)
            while not job.finished and job.folder not in self.failed:
                await self.run_next_command(job, gpus)
            self.idle.put_nowait(gpus)
            tqdm.write(f"{job.folder}: {self.failed.get(job.folder, 'finished')}")
        if job.finished and job.stage != "full":  # a search needs no weights
            for name in ("best", "final", "checkpoints"):
                shutil.rmtree(job.folder / name, ignore_errors=True)

    async def run_next_command(self, job: Job, gpus: str | None) -> None:
        """Train, or evaluate once; a command that leaves no result fails the job."""
        command, product = next_command(job)
        log_file = job.folder.with_suffix(".log")
        with log_file.open("ab") as log:
            start = log.tell()
            exit_code = await self.launch(command, gpus, log)
        if product.exists():
            return
        printed = log_file.read_bytes()[start:].decode(errors="replace")
        last_line = re.split(r"\n[EW]\d{4} ", printed)[0].rstrip().rpartition("\n")[2]  # before torchrun's
        self.failed[job.folder] = f"exit code {exit_code}, no {product.name}: {last_line}"
        if exit_code != EXIT_STOPPED:  # that one resumes the next time
            write_text(job.folder.with_suffix(".failed"), self.failed[job.folder])

    async def launch(self, command: list[str], gpus: str | None, log: IO[bytes]) -> int:
        """Run a command to its end and return its exit code."""
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={self.sweep.processes}", "-m"]
        words = [sys.executable, "-m", *(torchrun if self.sweep.processes > 1 else []), *command]
        environment = dict(os.environ)
        if self.sweep.launcher:
            words = [word.replace("{command}", shlex.join(words)) for word in shlex.split(self.sweep.launcher)]
        else:
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
            environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # ranks end their rollout and save
            if gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = gpus
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            pass_fds=[self.lock.fileno()],  # a sweep that is killed alone cannot start again before its processes end
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:  # cancelled: the process saves and ends
                os.killpg(process.pid, signal.SIGTERM)
                await process.wait()


def next_command(job: Job) -> tuple[list[str], Path]:
    """What a job runs next, and the file that it writes last."""
    if not job.trained:
        config = job.folder.with_suffix(".yaml")
        write_text(config, to_yaml(job.config))
        return ["pspo.train", "--config", str(config)], job.folder / "summary.json"
    folder = next(job.folder / name for name in job.evaluate if not (job.folder / name / "results.json").exists())
    switches = dict(job.evaluate[folder.name])
    if job.stage == "untrained":
        for name in ("name_or_path", "revision", "trust_remote_code"):
            switches[f"model.{name}"] = job.config["model"][name]
    else:
        switches["model.name_or_path"] = read_json(job.folder / "summary.json")["best_model"]
    switches["run.output_dir"] = str(folder)
    return ["pspo.evaluate", *switch_words(switches)], folder / "results.json"
