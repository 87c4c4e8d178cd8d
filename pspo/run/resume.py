"""Resume a run or fork one: find its folder and its newest undamaged checkpoint, and restore its parts."""

import math
import os
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.config import RunConfig, TrainConfig
from pspo.records.files import Settings, read_json, read_jsonl, to_jsonl, to_yaml, write_text
from pspo.records.folders import checkpoints, damage, hidden, prune, remove, step_of, tidy
from pspo.records.switches import LONGER, STEERED
from pspo.records.tokens import FOLDER
from pspo.run.changes import allowed_changes, changes_since, check_fork, check_problems, fork_states, record_changes
from pspo.run.checkpointer import Checkpointer

OURS = {".lock", "config.yaml", "data", "environment.json", "starts.jsonl"}  # of a run that has computed nothing


def run_to_resume(resume: str, output_dir: str | None) -> Path | None:
    """The folder of the run to resume; None to start a new one.

    Raises ValueError if --run.output_dir holds something else, or --run.resume names no run or another one.
    """
    output = None if output_dir is None else Path(output_dir)
    if resume in ("auto", "never"):
        names = set(os.listdir(output)) if output is not None and output.is_dir() else set()
        configured = "config.yaml" in names
        if not configured and all(name in OURS or fnmatch(name, ".*.tmp") for name in names):
            return None
        if resume == "never" or not configured:
            raise ValueError(f"--run.output_dir {output} already holds something; choose a new folder")
        return output
    path = Path(resume).absolute()
    run = path.parent.parent if path.parent.name == "checkpoints" else Path(resume)
    if path not in (run.absolute(), *checkpoints(run)) or not (run / "config.yaml").is_file():
        raise ValueError(f"--run.resume {resume} is neither auto, never, a run's folder nor one of its checkpoints")
    if output is not None and output.absolute() != run.absolute():
        raise ValueError(f"--run.resume {resume} is not in --run.output_dir {output}: leave one of them out")
    return output or run


def check_changes(run: Path, settings: Settings) -> None:
    """Raise ValueError for changes that are not allowed, unless the run holds no step yet: then it starts anew."""
    try:
        allowed_changes(run, settings)
    except ValueError:
        if holds_steps(run):
            raise
        print(f"{run} holds no step of the run that was started there: it starts anew", file=sys.stderr)
        for name in ("best", "checkpoints"):
            shutil.rmtree(run / name, ignore_errors=True)
        (run / "environment.json").unlink(missing_ok=True)


def holds_steps(run: Path) -> bool:
    best = run / "best" / "validation.json"
    steps = [step_of(folder) for folder in checkpoints(run)] + [read_json(best)["step"] if best.is_file() else 0]
    return any(steps) or bool(read_jsonl(run / "metrics.jsonl"))


def fork_parent(config: RunConfig, settings: Settings) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names.

    Raises ValueError if there is none, or this configuration cannot continue it.
    """
    path = Path(config.fork_from).absolute()
    every = checkpoints(path) or [folder for folder in checkpoints(path.parent.parent) if folder == path]
    parent = first_intact(every)
    if parent is None:
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    check_fork(parent, settings)
    if step_of(parent) >= config.max_steps:
        raise ValueError(f"--run.max_steps {config.max_steps} counts from step 0: it must be above {parent.name}")
    return parent


def fork(config: RunConfig, settings: Settings, run: Path) -> Path | None:
    """Copy the checkpoint of --run.fork_from into the run, which needs its parent no more; None without a parent.

    Raises OSError if the parent, still training, has removed it meanwhile.
    """
    if config.fork_from is None:
        return None
    parent = fork_parent(config, settings)
    copy, tested = run / "checkpoints" / parent.name, parent.parents[1] / "test-before.jsonl"
    if tested.exists():
        shutil.copy(tested, run)
    return shutil.copytree(parent, hidden(copy, "new")).rename(copy)


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The newest undamaged checkpoint, or the one that --run.resume names; None if none was saved yet.

    Damaged ones are named and skipped. Raises ValueError if only damaged ones are left, or a finished run has none.
    """
    for folder in (run, run / "checkpoints"):
        tidy(folder)
    every = checkpoints(run)
    named = [folder for folder in every if folder.absolute() == Path(resume).absolute()]
    checkpoint = first_intact(named or every)
    if checkpoint is None and (every or (run / "summary.json").exists()):
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    return checkpoint


def first_intact(folders: list[Path]) -> Path | None:
    """The first undamaged checkpoint; damaged ones before it are named."""
    for folder in folders:
        reason = damage(folder)
        if reason is None:
            return folder
        print(f"{reason}; skipped", file=sys.stderr)
    return None


def restore(config: TrainConfig, settings: Settings, checkpointer: Checkpointer) -> None:
    """Restore the parts and the run's folder to its newest checkpoint, or to that of the run which it forks.

    What changed since the checkpoint holds from its step on. Raises ValueError if the run has other problems now.
    """
    run, parts = checkpointer.output, checkpointer.parts
    own = dist.run_on_main(lambda: find_checkpoint(run, config.run.resume))
    checkpoint = own or dist.run_on_main(lambda: fork(config.run, settings, run))
    if checkpoint != own:
        print(f"forked from {config.run.fork_from} at {checkpoint.name}")
    else:
        print(f"resuming {run} " + (f"from {checkpoint.name}" if checkpoint else "from the start: nothing was saved"))
    changes, ranks = {}, dist.world_size()
    if checkpoint is not None:
        (states, ranks), fresh = checkpointer.load(checkpoint), checkpointer.states()
        changes = changes_since(checkpoint, settings)
        if "run.fork_from" in changes:  # the checkpoint is the parent's
            states = fork_states(states, fresh, changes)
        check_problems(run, states, fresh)
        for name, part in parts.items():
            if name in states:
                part.load_state_dict(states[name])
        checkpointer.saved = checkpointer.position
    validator, steps = parts["validator"], parts["learner"].steps
    if validator.best:
        validator.best = best_so_far(run, validator.best["step"], steps)
    tests = ["after", "final"] + ([] if validator.before else ["before"])  # a fork's was on its parent's problems
    dist.run_on_main(lambda: cut_back(run, steps, config.run.keep, tests))
    dist.run_on_main(lambda: record_changes(run, steps, changes))
    if ranks != dist.world_size():
        dropped = ", and rollouts that waited for --rollout.lag are dropped" if config.rollout.lag else ""
        message = f"the checkpoint is from {ranks} ranks: other tokens are drawn from here on{dropped}"
        dist.run_on_main(lambda: print(message, file=sys.stderr))
    if "run.seed" in changes or ranks != dist.world_size():
        parts["generators"].seed(config.run.seed, steps)
    own_run = settings["run"] | {"output_dir": str(run), "resume": "auto"}  # a path would resume from there again
    dist.run_on_main(lambda: write_text(run / "config.yaml", to_yaml(settings | {"run": own_run})))


def best_so_far(run: Path, step: int, steps: int) -> dict[str, Any]:
    """The validation of the model in ``best/``, step ``step``'s; {} if one after ``steps`` replaced it.

    With a change the run may never come to that one again.
    """
    file = run / "best" / "validation.json"
    if not file.is_file() or (best := read_json(file))["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best if best["step"] <= steps else {}


def finished_summary(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """The summary of a run that is there already and finished; else {}."""
    run = run_to_resume(config.resume, config.output_dir)
    if run is None or not (run / "summary.json").exists():
        return {}
    changes = allowed_changes(run, settings)
    summary = read_json(run / "summary.json")
    left = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (config.max_tokens or math.inf)
    if changes & LONGER and left:
        return {}
    if steered := changes & STEERED:
        advice = "raise --run.max_steps too, or --run.fork_from one of its checkpoints"
        raise ValueError(f"{run} is finished, --{min(steered)} would change nothing: {advice}")
    return summary


def cut_back(run: Path, steps: int, keep: int, tests: list[str]) -> None:
    """Remove what came after this step: newer checkpoints, lines of the records, and tests. An old summary is renamed.

    Older checkpoints than it keeps are there if a kill came between saving one and removing another.
    """
    if (summary := run / "summary.json").exists():
        ended = read_json(summary)["optimizer_steps"]
        summary.rename(run / f"summary-step-{ended:06d}.json")
    for folder in checkpoints(run):
        if step_of(folder) > steps:
            remove(folder)
    prune(run, keep)
    for when in tests:
        (run / f"test-{when}.jsonl").unlink(missing_ok=True)
    for rollout in (run / FOLDER).glob("step-*.parquet"):
        if int(rollout.stem.removeprefix("step-")) > steps:
            rollout.unlink()
    for path in (run / "metrics.jsonl", run / "samples.jsonl"):
        if path.exists():
            write_text(path, to_jsonl(record for record in read_jsonl(path) if record["step"] <= steps))
