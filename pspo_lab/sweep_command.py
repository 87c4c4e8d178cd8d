"""Train and evaluate many settings from one file: ``pspo sweep --config configs/sweep/tiny.yaml``.

An experiment runs every setting of its methods with each of its seeds. If it has a search, it runs one setting of each
method: the one that the search selects (`pspo_lab.sweep_plan.Search`).

    <output>/<experiment>/<method>-<setting>/seed-<n>/           a full run; evaluations as <name>/results.json
    <output>/<experiment>/<method>-<setting>/seed-<n>.yaml .log  its configuration, and what it printed
    <output>/<experiment>/untrained/<model>/                     evaluations of a model that runs begin with
    <output>/<experiment>/selection.json                         selected settings, and the rewards that decided
    <output>/<experiment>-search/...                             runs of the search, in the same way

The same command resumes a sweep: finished runs are skipped, all others resume from their last checkpoint.
"""

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from subprocess import DEVNULL
from typing import IO, Any

import pandas as pd
from tqdm import tqdm

from pspo import distributed as dist
from pspo.cli.parse import parse
from pspo.cli.values import to_yaml
from pspo.config import require
from pspo.endings import EXIT_INTERRUPTED, user_errors
from pspo.files import lock_folder, read_json, write_json, write_text
from pspo.terminal import Bar
from pspo_lab.identities import algorithms
from pspo_lab.power import Estimate
from pspo_lab.runs import Runs, read_runs, run_folders
from pspo_lab.sweep_plan import MODEL, WEIGHTS, Job, Method, SweepConfig, make_plan
from pspo_lab.tables import Column, main_values, noise_floor


class JobRunner:
    """Runs jobs in processes of their own, which hold the sweep's ``lock``."""

    def __init__(self, sweep: SweepConfig, lock: IO[Any]) -> None:
        gpus = [] if sweep.launcher else dist.visible_gpus()
        n = sweep.processes
        groups = [",".join(gpus[i : i + n]) for i in range(0, len(gpus) - n + 1, n)] or [None]
        workers = sweep.workers or len(groups)
        self.threads = max(1, (os.cpu_count() or 1) // (workers * n))
        self.idle = asyncio.Queue()  # the GPUs of idle workers
        for group in islice(cycle(groups), workers):
            self.idle.put_nowait(group)
        self.sweep = sweep
        self.lock = lock
        self.failed: dict[Path, str] = {}  # why jobs failed, by folder

    async def carry_out(self, job: Job) -> None:
        """Run the commands that a job still takes; if cancelled, leave no process running."""
        gpus = await self.idle.get()
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            for command, product in commands(job):
                await self.run_command(job, command, product, gpus)
        except (OSError, ValueError) as error:
            self.failed[job.folder] = str(error)
        self.idle.put_nowait(gpus)
        tqdm.write(f"{job.folder}: {self.failed.get(job.folder, 'finished')}")
        if job.finished and job.stage != "full":  # a search needs no weights
            for name in WEIGHTS:
                shutil.rmtree(job.folder / name, ignore_errors=True)

    async def run_command(self, job: Job, command: list[str], product: Path, gpus: str | None) -> None:
        """Run a command of a job; ChildProcessError if it does not write its product."""
        log_file = Path(f"{job.folder}.log")
        with log_file.open("ab") as log:
            start = log.tell()
            exit_code = await self.launch(command, gpus, log)
        if product.exists():
            return
        printed = log_file.read_bytes()[start:].decode(errors="replace")
        last_line = re.split(r"\n[EW]\d{4} ", printed)[0].rstrip().rpartition("\n")[2]  # before torchrun's messages
        raise ChildProcessError(f"exit code {exit_code}, no {product.name}: {last_line}")

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


def commands(job: Job) -> Iterator[tuple[list[str], Path]]:
    """Yield the commands that a job still takes, in order, each with the file that the command writes last."""
    if not job.trained:
        config = Path(f"{job.folder}.yaml")
        write_text(config, to_yaml(job.config))
        yield ["pspo.train", "--config", str(config)], job.folder / "summary.json"
    for folder, values in job.evaluate.items():
        product = job.folder / folder / "results.json"
        if product.exists():
            continue
        model = {name: job.config["model"][name] for name in MODEL}
        if job.stage != "untrained":
            best = Path(read_json(job.folder / "summary.json")["best_model"]).name
            model |= {"name_or_path": str(job.folder / best), "revision": None}  # the sweep may have been moved
        run = values["run"] | {"output_dir": str(product.parent)}
        config = job.folder / f"{folder}.yaml"
        job.folder.mkdir(parents=True, exist_ok=True)
        write_text(config, to_yaml(values | {"model": values["model"] | model, "run": run}))
        yield ["pspo.evaluate", "--config", str(config)], product


def main(args: Sequence[str] | None = None) -> None:
    sweep, _ = parse(SweepConfig, "pspo sweep", args)
    with user_errors("pspo sweep"):
        sweep = replace(sweep, output=str(Path(sweep.output).expanduser()))
        plan = make_plan(sweep)
        if sweep.dry_run:
            show_plan(plan)
            return print("", *describe_pilot(sweep, plan), sep="\n")
        run_plan(sweep, plan)


def show_plan(plan: list[Method]) -> None:
    """Print all settings, then the number of runs by experiment and stage."""
    rows = []
    for method in plan:
        print(*(f"{method.experiment}/{setting}" for setting in method.settings), sep="\n")
        jobs = [job for job in method.planned() if job.stage != "untrained"]
        rows += [(method.experiment, job.stage, 1, job.finished) for job in jobs]
    table = pd.DataFrame(rows, columns=["experiment", "stage", "runs", "finished"])
    print(f"\n{table.groupby(['experiment', 'stage'], sort=False).sum()}\n\n{table.sum(numeric_only=True).to_string()}")


def describe_pilot(sweep: SweepConfig, plan: list[Method]) -> Iterator[str]:
    """Lines: the time that all runs take, the noise floor, and what the seeds of each experiment detect."""
    sd = sweep.sd and sweep.sd / 100
    column = Column("", "accuracy")
    if sweep.pilot is not None:
        pilot = read_runs(run_folders([sweep.pilot])).finished
        require(len(pilot.labels) > 0, "pilot", "must have finished runs", sweep.pilot)
        yield describe_time(pilot, [job for method in plan for job in method.planned() if not job.trained])
        if sd is None:
            values = main_values(pilot)
            sd, df = noise_floor(values, algorithms(pilot))
            if not df:
                raise ValueError(f"--pilot {sweep.pilot} takes two finished runs of one algorithm; or give --sd")
            column = values[0].column
    if sd is None:
        yield "What can these seeds detect? Give --pilot RUNS or --sd POINTS; a pilot also tells the hours."
        return
    yield f"Noise floor: two runs of one algorithm differ by {column.difference_text(sd)} (standard deviation)."
    for name in dict.fromkeys(method.experiment for method in plan):
        found = Estimate(0.0, sd**2, 0.0, len(sweep.experiments[name].seeds), 1)
        if found.n_seeds > 1:
            detected = f"{found.n_seeds} seeds detect {column.difference_text(found.detects())} on the same problems"
            yield f"{name}: {detected} at 80% power; 1, 2, 5 points take {found.seeds_text()} seeds."


def describe_time(pilot: Runs, jobs: Sequence[Job]) -> str:
    """A sentence: the time that the jobs take at the pilot's seconds a step."""
    summaries = [run.summary for run in pilot.labels]
    seconds = sum(summary["seconds"] for summary in summaries) / sum(one["optimizer_steps"] for one in summaries)
    steps = sum(job.config["run"]["max_steps"] for job in jobs)
    device = read_json(next(iter(pilot.labels)).folder / "environment.json").get("device", "machine")
    hours = f"{seconds * steps / 3600:.1f} hours of the pilot's {device}"
    return f"{steps:,} optimizer steps take about {hours}, evaluations aside: {seconds:.2f} s each there."


def run_plan(sweep: SweepConfig, plan: list[Method]) -> None:
    """Run what is not finished; exits with code 1 if runs failed, 130 if a signal stopped them."""
    output = Path(sweep.output)
    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output, switch="--output") as file:
        runner = JobRunner(sweep, file)
        try:
            asyncio.run(run_stages(runner, plan, output))
        except asyncio.CancelledError:
            print("\nstopped; the same command resumes", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None
    for folder, reason in runner.failed.items():
        print(f"failed: {folder}: {reason} (see {folder}.log)", file=sys.stderr)
    if runner.failed:
        raise SystemExit("the same command runs them again; a search with failed runs selects nothing")
    print(f"all runs are finished: {output}\ncompare them: pspo report {output}")


async def run_stages(runner: JobRunner, plan: list[Method], output: Path) -> None:
    """Run the stages of all methods one after the other, and write what the search selected."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asyncio.current_task().cancel)
    for stage in ("untrained", "grid", "confirm", "full"):
        due = [method for method in plan if stage in method.stages]
        for name in {method.experiment for method in due if stage == "full" and len(method.stages) > 1}:
            (output / name).mkdir(exist_ok=True)
            write_json(output / name / "selection.json", {m.name: m.selection() for m in due if m.experiment == name})
        jobs = [job for method in due for job in method.jobs([stage], method.chosen(stage))]
        tasks = [asyncio.create_task(runner.carry_out(job)) for job in jobs if not job.finished]
        with Bar(desc=stage, total=len(jobs), initial=len(jobs) - len(tasks), unit="run", quiet=not tasks) as bar:
            for task in asyncio.as_completed(tasks):
                await task
                bar.advance()
