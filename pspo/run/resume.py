"""Resume a run of the same configuration from its newest undamaged checkpoint, or fork one under another.

Switches that change no number and an engine's arguments may differ in a resumed run, and its limits may grow
(`pspo.config.Fact`). In a fork each part loads what fits it.
"""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pspo import distributed as dist
from pspo.cli import files
from pspo.cli.python import default_output
from pspo.config import TrainConfig, switches_with
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import checkpoints, find_damage, first_undamaged, numbered, prune, remove_leftovers, step_of
from pspo.token_table import TOKENS


class Start(NamedTuple):
    """A run's folder, and what it starts from: its own checkpoint, that of a run to fork, or neither."""

    output: Path
    checkpoint: Path | None
    parent: Path | None


def find_start(config: TrainConfig, settings: files.Settings, resources: contextlib.ExitStack) -> Start:
    """Make and lock a run's folder, and find where the run starts; ValueError if it cannot start there."""
    output = Path(config.run.output_dir or default_output(config))
    files.check_new_folder(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        resources.enter_context(files.lock_folder(output))
    except OSError as error:
        raise ValueError(f"--run.output_dir {output} cannot be written to: {error}") from error
    checkpoint = None
    if files.is_run(output):
        if checkpoints(output) or (output / "metrics.jsonl").exists():  # another run's are kept
            check_same(output, settings)
        checkpoint = find_checkpoint(output)
    else:
        resources.callback(remove_unbegun, output)
    begins_as_fork = checkpoint is None and config.run.fork_from is not None
    return Start(output, checkpoint, find_parent(config.run.fork_from) if begins_as_fork else None)


def remove_unbegun(folder: Path) -> None:
    """Remove the folder of a run that could not begin, unless it holds problems."""
    if not files.is_run(folder):
        with contextlib.suppress(OSError):
            (folder / ".lock").unlink()
            folder.rmdir()


def check_same(run: Path, settings: files.Settings) -> files.Changes:
    """The switches that differ from the run's configuration, and may, as `files.differences`; ValueError for others."""
    is_constant = settings["optimizer"]["schedule"] == "constant"
    steps = settings["algorithm"]["epochs"] * settings["algorithm"]["minibatches"]  # of a rollout

    def may_differ(name: str, old: Any, new: Any) -> bool:
        grows = name in switches_with("may grow") and is_constant and old is not None and (new is None or new > old)
        grows = grows and (name != "run.max_steps" or old % steps == 0)  # otherwise the old end has cut a rollout off
        return grows or name in switches_with("free") or name.startswith("rollout.engine.init_args.")

    fix = f"choose another --run.output_dir, or start there from this one's weights with --run.fork_from {run}"
    return files.require_same(run, settings, may_differ, fix)


def find_checkpoint(run: Path) -> Path | None:
    """The run's newest undamaged checkpoint; if none was saved, None, and its records are removed."""
    for folder in (run, run / "checkpoints"):
        remove_leftovers(folder)
    saved = checkpoints(run)
    checkpoint = first_undamaged(saved)
    if checkpoint is None and (saved or (run / "summary.json").exists()):
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    if checkpoint is None:
        print(f"{run} holds no checkpoint: its run starts anew", file=sys.stderr)
        for name in ("best", "checkpoints", TOKENS):
            shutil.rmtree(run / name, ignore_errors=True)
        for file in (run / "environment.json", *run.glob("*.jsonl")):
            file.unlink(missing_ok=True)
    return checkpoint


def find_parent(fork_from: str) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names."""
    path = Path(fork_from).absolute()
    parent = first_undamaged(checkpoints(path) or [path])
    if parent is None or not (parent / "parts.pt").exists():  # best/ has a manifest, too
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    return parent


def resume(checkpointer: Checkpointer, checkpoint: Path) -> None:
    """Restore parts and folder of a run to its checkpoint. Raises ValueError if the run has other problems now."""
    output = checkpointer.output
    print(f"resuming {output} from {checkpoint.name}")
    states = checkpointer.load(checkpoint)
    for name in ("stream", "validator"):
        if states[name]["fingerprint"] != checkpointer.parts[name].fingerprint:
            raise ValueError(f"--run.output_dir {output} has other problems under the same name: choose another folder")
    validations = states["validator"]["validations"]
    if validations["best"]:
        damage = find_damage(output / "best")
        if damage is not None:
            raise ValueError(f"{damage}: restore it, or start anew from this run with --run.fork_from {output}")
        if files.read_json(output / "best" / "validation.json") != files.plain(validations["best"]):
            validations["best"] = {}  # best/ is of a later step, to which a resumed run on a GPU may not come
    for name, state in states.items():
        checkpointer.parts[name].load_state_dict(state)
    dist.run_on_main(lambda: cut_back(checkpointer))


def cut_back(checkpointer: Checkpointer) -> None:
    """Remove what a run has written after the checkpoint that it resumes from."""
    run = checkpointer.output
    recorder = checkpointer.recorder
    steps = checkpointer.learner.steps
    prune(run, checkpointer.config.run.keep, steps)
    for name in ("summary.json", "test-after.jsonl", "test-final.jsonl"):
        (run / name).unlink(missing_ok=True)
    for rollout in numbered(run / TOKENS, ".parquet"):
        if step_of(rollout) > steps:
            rollout.unlink()
    written = recorder.first_step if recorder.line else steps  # an open line is written after its validation
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = files.read_jsonl(run / name)
        with files.named_damage(run / name):
            lines = [line for line in lines if line["step"] <= written]
        files.write_text(run / name, files.to_jsonl(lines))


def fork(checkpointer: Checkpointer, parent: Path, settings: files.Settings) -> None:
    """Start from another run's checkpoint, and save it as this run's first: it then needs its parent no more.

    Each part says by ``fork_state(state, changes)`` what of the parent's state it loads; a user's loss keeps its state
    if no switch of the losses has changed. ValueError if no step is left.
    """
    changes = files.differences(files.read_config(parent / "config.yaml"), settings)
    states = checkpointer.load(parent)
    problems = (states["stream"]["fingerprint"], checkpointer.parts["stream"].fingerprint)
    if problems[0] != problems[1]:
        changes["data problems"] = problems
    if "run.seed" in changes:
        checkpointer.parts["generators"].seed(checkpointer.config.run.seed, states["learner"]["steps"])
    has_other_loss = any(switch.startswith(("algorithm.surrogate", "algorithm.terms")) for switch in changes)
    for name, part in checkpointer.parts.items():
        state = states.get(name)
        if name.startswith("algorithm."):
            state = None if has_other_loss else state
        elif state is not None:
            state = part.fork_state(state, changes)
        if state is not None:
            part.load_state_dict(state)
    recorder = checkpointer.recorder
    if recorder.limit_reached:
        fix = "raise --run.max_steps or --run.max_tokens, which count from the parent's beginning"
        raise ValueError(f"{parent} has taken {checkpointer.learner.steps} steps: {fix}")
    print(f"forked from {parent}")
    checkpointer.take_snapshot()
    checkpointer.save_snapshot()
