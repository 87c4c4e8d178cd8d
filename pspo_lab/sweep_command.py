"""Train and evaluate many settings from one file: ``pspo sweep --config configs/sweep/tiny.yaml``.

An experiment runs every setting of its methods with each of its seeds, or, if it has a search, the one of each method
that this selects (`pspo_lab.sweep_plan.Search`).

    <output>/<experiment>/<method>-<setting>/seed-<n>/           a full run; evaluations as <name>/results.json
    <output>/<experiment>/<method>-<setting>/seed-<n>.yaml .log  its configuration, and what it printed
    <output>/<experiment>/<method>-<setting>/seed-<n>.failed     why it failed, if it did
    <output>/<experiment>/untrained/<model>/                     evaluations of a model that runs begin with
    <output>/<experiment>/selection.json                         selected settings, and the rewards that decided
    <output>/<experiment>-search/...                             runs of the search, in the same way

The same command resumes a sweep: finished runs are skipped, those that were cut off resume from their last checkpoint.
"""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pspo.cli.files import lock, write_json
from pspo.cli.parse import parse, user_errors
from pspo.cli.progress import Bar
from pspo_lab.sweep_plan import Method, SweepConfig, make_plan
from pspo_lab.sweep_workers import Workers


def main(args: Sequence[str] | None = None) -> None:
    sweep, _ = parse(SweepConfig, "pspo sweep", args)
    with user_errors("pspo sweep"):
        plan = make_plan(sweep)
        if sweep.dry_run:
            return show_plan(plan)
        run_plan(sweep, plan)


def show_plan(plan: list[Method]) -> None:
    """Print all runs, or the settings of a search, then runs and training tokens by experiment and stage."""
    rows = []
    for method in plan:
        if len(method.stages) == 1:
            for job in method.jobs(list(method.stages), list(method.settings)):
                name = f"{job.setting}/seed-{job.seed}"
                if job.stage == "untrained":
                    name = f"untrained/{job.setting}"
                if job.finished:
                    name += " (finished)"
                print(f"{method.experiment}/{name}")
        else:
            print(*(f"{method.experiment}/{setting}" for setting in method.settings), sep="\n")
        for stage, n in method.stages.items():
            jobs = method.jobs([stage], list(method.settings)[:n])
            if stage != "untrained":
                finished, tokens = sum(job.finished for job in jobs), sum(job.tokens for job in jobs)
                rows.append((method.experiment, stage, len(jobs), finished, tokens))
    table = pd.DataFrame(rows, columns=["experiment", "stage", "runs", "finished", "tokens, at most"])
    print(f"\n{table.groupby(['experiment', 'stage'], sort=False).sum()}\n\n{table.sum(numeric_only=True).to_string()}")


def run_plan(sweep: SweepConfig, plan: list[Method]) -> None:
    """Run what is not finished; exits with code 1 if runs failed, 130 if a signal stopped them."""
    output = Path(sweep.output)
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("a") as file:
        if not lock(file):
            raise ValueError(f"--output {output} is in use by another sweep or its runs: wait, or choose another")
        workers = Workers(sweep, file)
        try:
            asyncio.run(run_stages(workers, plan, output))
        except asyncio.CancelledError:
            print("\nstopped; the same command resumes", file=sys.stderr)
            raise SystemExit(130) from None
    for folder, reason in workers.failed.items():
        print(f"failed: {folder}: {reason} (see {folder.with_suffix('.log')})", file=sys.stderr)
    if workers.failed:
        raise SystemExit("--retry_failed runs them again; a search with failed runs selects nothing")
    print(f"all runs are finished: {output}\ncompare them: pspo report {output}")


async def run_stages(workers: Workers, plan: list[Method], output: Path) -> None:
    """Run the stages of all methods one after the other, and write what the search selected."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asyncio.current_task().cancel)
    for stage in ("untrained", "grid", "confirm", "full"):
        due = [method for method in plan if stage in method.stages]
        for name in {method.experiment for method in due if stage == "full" and len(method.stages) > 1}:
            (output / name).mkdir(exist_ok=True)
            write_json(output / name / "selection.json", {m.name: m.selection() for m in due if m.experiment == name})
        jobs = [job for m in due for job in m.jobs([stage], m.chosen(stage))]
        unfinished = [job for job in jobs if not job.finished]
        for job in [job for job in jobs if job.finished]:  # which may have left files
            await workers.carry_out(job)
        tasks = [asyncio.create_task(workers.carry_out(job)) for job in unfinished]
        with Bar(desc=stage, total=len(jobs), initial=len(jobs) - len(tasks), unit="run", quiet=not tasks) as bar:
            for task in asyncio.as_completed(tasks):
                await task
                bar.advance()


if __name__ == "__main__":
    main()
