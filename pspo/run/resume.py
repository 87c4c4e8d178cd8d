"""Resume a run or fork one: find its folder and its newest undamaged checkpoint, and restore its parts.

A resumed run continues the same experiment, so only some switches may change on its way; a fork begins another one from
the state of its parent.
"""

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.escape import one_line
from pspo.cli.files import (
    Settings,
    differences,
    read_config,
    read_json,
    read_jsonl,
    read_steps,
    reading,
    to_jsonl,
    to_yaml,
    write_text,
)
from pspo.config import RunConfig, TrainConfig
from pspo.model import is_out_of_memory
from pspo.run.checkpointer import Checkpointer, States, position
from pspo.run.folders import checkpoints, damage, hidden, numbered, prune, step_of, tidy
from pspo.run.switches import FIXED, FREE, LONGER, REDRAWN, ROUNDING, STEERED
from pspo.run.tokens import FOLDER

OURS = {".lock", "config.yaml", "data", "environment.json", "starts.jsonl"}  # of a run that has computed nothing

Changes = dict[str, tuple[Any, Any]]  # by switch, (old, new)


# Which run, and from which checkpoint


def run_to_resume(config: RunConfig) -> Path | None:
    """The folder of the run to resume; None to start a new one.

    Raises ValueError if --run.output_dir holds something else, or --run.resume names no run or another one.
    """
    resume, output = config.resume, None if config.output_dir is None else Path(config.output_dir)
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


def finished_summary(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """The summary of a run that is there already and finished; else {}."""
    run = run_to_resume(config)
    if run is None or not (run / "summary.json").exists():
        return {}
    changes = allowed_changes(run, settings)
    with reading(run / "summary.json"):
        summary = read_json(run / "summary.json")
        left = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (config.max_tokens or math.inf)
    if changes & LONGER and left:
        return {}
    if steered := changes & STEERED:
        advice = "raise --run.max_steps too, or --run.fork_from one of its checkpoints"
        raise ValueError(f"{run} is finished, --{min(steered)} would change nothing: {advice}")
    return summary


def holds_steps(run: Path) -> bool:
    return any(map(step_of, checkpoints(run))) or bool(read_jsonl(run / "metrics.jsonl"))


def find_checkpoint(run: Path, resume: str) -> Path | None:
    """The newest undamaged checkpoint, or the one that --run.resume names; None if none was saved yet.

    Tidies up what interrupted saves left; names damaged checkpoints and skips them. Raises ValueError if only damaged
    ones are left, or a finished run has none.
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
        print(f"{one_line(reason)}; skipped", file=sys.stderr)
    return None


def fork_parent(config: RunConfig, settings: Settings) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names.

    Raises ValueError if there is none, or this configuration cannot continue it.
    """
    path = Path(config.fork_from).absolute()
    parent = first_intact(checkpoints(path) or [path for known in checkpoints(path.parent.parent) if known == path])
    if parent is None:
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    for name, (old, new) in changes_since(parent, settings).items():
        if name in FIXED:
            advice = f"to begin with the weights alone, set --model.name_or_path {parent} and no --run.fork_from"
            raise ValueError(f"--{name} was {old!r}, is {new!r}: a fork cannot change it; {advice}")
    if step_of(parent) >= config.max_steps:
        raise ValueError(f"--run.max_steps {config.max_steps} counts from step 0: it must be above {parent.name}")
    return parent


# What changed


def changes_since(folder: Path, settings: Settings) -> Changes:
    """Differences between the configuration of a run or checkpoint, and this one."""
    changes = differences(read_config(folder / "config.yaml"), settings)
    return {name: pair for name, pair in changes.items() if name not in ("run.output_dir", "run.resume")}


def in_words(changes: Changes) -> dict[str, str]:
    """By switch, such as "--optimizer.lr was 1e-05, is 3e-05"; another class stands for its arguments, too."""
    words = {}
    for name, pair in changes.items():
        paths = tuple(map(without_arguments, pair))
        old, new = paths if paths[0] != paths[1] else pair
        owner, _, argument = name.partition(".init_args.")
        if not argument or f"{owner}.class_path" not in changes:
            words[name] = f"--{name.removesuffix('.class_path')} was {old!r}, is {new!r}"
    return words


def without_arguments(value: Any) -> Any:
    """A list of classes by their paths alone; any other value as it is."""
    if not isinstance(value, list):
        return value
    return [item["class_path"] if isinstance(item, dict) and "class_path" in item else item for item in value]


def allowed_changes(run: Path, settings: Settings) -> set[str]:
    """Switches that changed since the run's config.yaml and may; ValueError names those that may not."""
    with reading(run / "config.yaml"):
        constant = read_config(run / "config.yaml")["optimizer"]["schedule"] == "constant"
    allowed, refused, changes = set(), {}, changes_since(run, settings)
    for name, (old, new) in changes.items():
        grows = name in LONGER and constant and type(old) in (int, float) and (new is None or new > old)
        if name in FREE | STEERED | ROUNDING or grows:
            allowed.add(name)
        else:
            refused[name] = old, new
    if refused:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(in_words(refused).values())}): choose "
            "another folder, or the same switches to resume it"
        )
    return allowed


def check_or_start_anew(run: Path, settings: Settings) -> None:
    """Raise ValueError for changes that are not allowed; empty a run that holds no step yet instead: it starts anew."""
    try:
        allowed_changes(run, settings)
    except ValueError:
        if holds_steps(run):
            raise
        print(f"{run} holds no step of the run that was started there: it starts anew", file=sys.stderr)
        for name in ("best", "checkpoints"):
            shutil.rmtree(run / name, ignore_errors=True)
        (run / "environment.json").unlink(missing_ok=True)


def check_problems(run: Path, states: States, fresh: States) -> None:
    """Raise ValueError if a resumed run has other problems than before; validation may be steered on or off."""
    known, problems = states["validator"]["fingerprints"], fresh["validator"]["fingerprints"]
    same = all(known[split] == problems[split] for split in known.keys() & problems)
    if not same or states["stream"]["fingerprint"] != fresh["stream"]["fingerprint"]:
        raise ValueError(f"--run.output_dir {run} has other problems under the same name: choose another folder")


def record_changes(run: Path, step: int, changes: Changes) -> None:
    """Print the changes since the checkpoint of this step, and make them the last of ``changes.jsonl``."""
    path = run / "changes.jsonl"
    records = [record for record in read_jsonl(path) if record["step"] < step]
    unrecorded = FREE if "run.fork_from" in changes else FREE | LONGER  # which change no number
    for name, text in in_words(changes).items():
        if name not in ("run.fork_from", "run.name"):
            rounding = " (other rounding)" if name in ROUNDING else ""
            print(f"changed from step {step} on: {text}{rounding}", file=sys.stderr)
    for name, (old, new) in changes.items():
        records += [{"step": step, "switch": name, "old": old, "new": new}] if name not in unrecorded else []
    if records or path.exists():
        write_text(path, to_jsonl(records))


# Restoring


def restore(config: TrainConfig, settings: Settings, checkpointer: Checkpointer, parent: Path | None) -> None:
    """Restore the parts and the run's folder to its newest checkpoint, or to ``parent``, that of the run it forks.

    What changed since the checkpoint holds from its step on. Raises ValueError if the run has other problems now.
    """
    run, parts, ranks, changes = checkpointer.output, checkpointer.parts, dist.world_size(), {}
    checkpoint = dist.run_on_main(lambda: find_checkpoint(run, config.run.resume))
    if checkpoint is None and parent is not None:
        checkpoint = dist.run_on_main(lambda: copy_parent(parent, run))
        print(f"forked from {config.run.fork_from} at {checkpoint.name}")
    else:
        print(f"resuming {run} " + (f"from {checkpoint.name}" if checkpoint else "from the start: nothing was saved"))
    if checkpoint is not None:
        with holding_states(checkpoint):
            (states, ranks), fresh = checkpointer.load(checkpoint), checkpointer.states()
            changes = changes_since(checkpoint, settings)
            if "run.fork_from" in changes:  # the checkpoint is the parent's
                states = fork_states(states, fresh, changes)
            check_problems(run, states, fresh)
            for name, part in parts.items():
                if name in states:
                    part.load_state_dict(states[name])
        checkpointer.saved = position(checkpointer.states())
    validator, recorder, steps = parts["validator"], parts["recorder"], parts["learner"].steps
    if validator.best:
        validator.best = best_so_far(run, validator.best["step"], steps)
    tests = ["after", "final"] + ([] if validator.before else ["before"])  # a fork's was on its parent's problems
    written = recorder.first_step if recorder.line else steps  # an open line is written after its validation
    dist.run_on_main(lambda: cut_back(run, steps, written, config.run.keep, tests))
    dist.run_on_main(lambda: record_changes(run, steps, changes))
    if ranks != dist.world_size():
        dropped = ", and rollouts that waited for --rollout.lag are dropped" if config.rollout.lag else ""
        message = f"the checkpoint is from {ranks} ranks: other tokens are drawn from here on{dropped}"
        dist.run_on_main(lambda: print(message, file=sys.stderr))
    if "run.seed" in changes or ranks != dist.world_size():
        parts["generators"].seed(config.run.seed, steps)
    own_run = settings["run"] | {"output_dir": str(run), "resume": "auto"}  # a path would resume from there again
    if own_run["name"] is None and "run.fork_from" not in changes:
        own_run["name"], _ = changes.get("run.name", (None, None))
    dist.run_on_main(lambda: write_text(run / "config.yaml", to_yaml(settings | {"run": own_run})))


@contextlib.contextmanager
def holding_states(checkpoint: Path) -> Iterator[None]:
    """Raise ValueError if a checkpoint is whole by its manifest, and holds something else than the parts' states."""
    try:
        yield
    except Exception as error:  # what is not ours raises anything
        if isinstance(error, OSError | ValueError) or is_out_of_memory(error):
            raise
        kind = type(error).__name__
        raise ValueError(f"{checkpoint} does not hold what a run saves ({kind}): choose another folder") from error


def copy_parent(parent: Path, run: Path) -> Path:
    """Copy a fork's parent into the run, which then needs it no more; OSError if its own run has just removed it."""
    copy, tested = run / "checkpoints" / parent.name, parent.parents[1] / "test-before.jsonl"
    if tested.exists():
        shutil.copy(tested, run)
    return shutil.copytree(parent, hidden(copy, "new")).rename(copy)


def fork_states(parent: States, fresh: States, changes: Changes) -> States:
    """A fork's states: its parent's, but the best models are of its own validations.

    Another surrogate begins its own state, other training problems come in an order of their own; the untrained model's
    test was on other test problems.
    """
    validator, problems = parent["validator"], fresh["validator"]["fingerprints"]
    same = {split: validator["fingerprints"].get(split) == problems.get(split) for split in ("validation", "test")}
    own = {"fingerprints": problems, "validated": {}, "best": {}, "best_trained": {}}
    own |= {} if same["test"] else {"before": {}}
    own |= {} if same["validation"] else {"untrained": {}}
    states = {name: parent.get(name, state) for name, state in fresh.items()} | {"validator": validator | own}
    if "surrogate" in fresh and any(name.startswith("algorithm.surrogate.") for name in changes):
        states["surrogate"] = fresh["surrogate"]
    other_problems = parent["stream"]["fingerprint"] != fresh["stream"]["fingerprint"]
    if other_problems:
        states["stream"] = fresh["stream"]
    if other_problems or any(name.startswith(REDRAWN) for name in changes.keys() - {"rollout.lag"}):
        states["delay"] = fresh["delay"]
    return states


def best_so_far(run: Path, step: int, steps: int) -> dict[str, Any]:
    """The validation of the model in ``best/``, step ``step``'s; {} if one after ``steps`` replaced it.

    With a change the run may never come to that one again.
    """
    file = run / "best" / "validation.json"
    if not file.is_file() or (best := read_json(file))["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best if best["step"] <= steps else {}


def cut_back(run: Path, steps: int, written: int, keep: int, tests: list[str]) -> None:
    """Remove what came after this step: newer checkpoints and tests, and lines of the records after step ``written``.

    An old summary is renamed.
    Older checkpoints than it keeps are there if a kill came between saving one and removing another.
    """
    records = {name: read_steps(run / name) for name in ("metrics.jsonl", "samples.jsonl", "changes.jsonl")}
    if (summary := run / "summary.json").exists():
        with reading(summary):
            ended = f"summary-step-{read_json(summary)['optimizer_steps']:06d}.json"
        summary.rename(run / ended)  # the first change, after all that can be refused
    prune(run, keep, steps)
    for when in tests:
        (run / f"test-{when}.jsonl").unlink(missing_ok=True)
    for rollout in numbered(run / FOLDER, ".parquet"):
        if step_of(rollout) > steps:
            rollout.unlink()
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (run / name).exists():
            write_text(run / name, to_jsonl(record for record in records[name] if record["step"] <= written))
