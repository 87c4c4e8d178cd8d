"""Resume a run, or fork one.

The same configuration resumes the run in --run.output_dir from its newest undamaged checkpoint; only switches that
change no number may differ, and a run may become longer. --run.fork_from starts a new run under any configuration from
another one's checkpoint: each part loads what fits it.
"""

import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.escape import one_line
from pspo.cli.files import Settings, differences, read_config, read_json, read_jsonl, to_jsonl, write_text
from pspo.config import RunConfig, TrainConfig
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import checkpoints, find_damage, numbered, prune, remove_leftovers, step_of
from pspo.run.tokens import FOLDER

FREE = {  # switches that change no number of a run
    "data.path", "reward.on_error", "reward.timeout", "reward.workers", "run.keep", "run.output_dir", "run.quiet",
    "run.save_every", "run.tracker",
}  # fmt: skip
LIMITS = {"run.max_steps", "run.max_tokens"}  # may grow, unless the learning rate depends on them


# Which folder, and which checkpoint


def holds_run(output: Path) -> bool:
    """True if a run was started in the folder; ValueError if it holds anything else."""
    if (output / "config.yaml").exists():
        return True
    names = os.listdir(output) if output.is_dir() else []
    if any(name != "data" and not name.startswith(".") for name in names):  # which a run writes before its config.yaml
        raise ValueError(f"--run.output_dir {output} already holds something; choose a new folder")
    return False


def finished_summary(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """The summary of a finished run that is in --run.output_dir and is not to be longer; else {}.

    Raises ValueError if the run has another configuration.
    """
    output = Path(config.output_dir or "")
    if config.output_dir is None or not holds_run(output) or not (output / "summary.json").exists():
        return {}
    changes = check_same(output, settings)
    summary = read_json(output / "summary.json")
    is_below_limits = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < (
        config.max_tokens or math.inf
    )
    return {} if changes & LIMITS and is_below_limits else summary


def check_same(run: Path, settings: Settings) -> set[str]:
    """The switches that differ from the run's configuration, and may; ValueError names those that may not."""
    saved = read_config(run / "config.yaml")
    is_constant = saved["optimizer"]["schedule"] == "constant"
    changes = differences(saved, settings)
    refused = []
    for name, (old, new) in changes.items():
        grows = name in LIMITS and is_constant and old is not None and (new is None or new > old)
        if name not in FREE and not grows:
            refused.append(f"--{name.removesuffix('.class_path')} was {old!r}, is {new!r}")
    if refused:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(refused)}): choose another --run.output_dir, "
            f"or start there from this one's weights with --run.fork_from {run}"
        )
    return set(changes)


def find_checkpoint(run: Path) -> Path | None:
    """The run's newest undamaged checkpoint after step 0, None if none was saved; names damaged ones and skips them.

    Finishes or undoes what interrupted saves left. Raises ValueError if only damaged ones are left, or a finished run
    has none.
    """
    for folder in (run, run / "checkpoints"):
        remove_leftovers(folder)
    saved = [folder for folder in checkpoints(run) if step_of(folder) > 0]
    checkpoint = first_undamaged(saved)
    if checkpoint is None and (saved or (run / "summary.json").exists()):
        raise ValueError(f"--run.output_dir {run}: no checkpoint to resume from is left; choose another folder")
    return checkpoint


def first_undamaged(folders: list[Path]) -> Path | None:
    """The first undamaged checkpoint; damaged ones before it are named."""
    for folder in folders:
        damage = find_damage(folder)
        if damage is None:
            return folder
        print(f"{one_line(damage)}; skipped", file=sys.stderr)
    return None


def find_parent(config: RunConfig) -> Path:
    """The checkpoint that --run.fork_from names, or the newest undamaged one of the run that it names."""
    path = Path(config.fork_from).absolute()
    parent = first_undamaged(checkpoints(path) or [path])
    if parent is None:
        raise ValueError(f"--run.fork_from {path} is neither an undamaged checkpoint nor a run's folder with one")
    if step_of(parent) >= config.max_steps:
        raise ValueError(f"--run.max_steps {config.max_steps} counts from step 0: it must be above {parent.name}")
    return parent


def remove_records(run: Path) -> None:
    """Remove what a run without a checkpoint has written, for the one that starts anew in its folder."""
    for name in ("best", "checkpoints", FOLDER):
        shutil.rmtree(run / name, ignore_errors=True)
    for file in (run / "environment.json", *run.glob("*.jsonl")):
        file.unlink(missing_ok=True)


# Restoring


def resume(checkpointer: Checkpointer, checkpoint: Path, seed: int) -> None:
    """Restore parts and folder of a run to its checkpoint. Raises ValueError if the run has other problems now."""
    output = checkpointer.output
    print(f"resuming {output} from {checkpoint.name}")
    states, ranks = checkpointer.load(checkpoint)
    fresh = checkpointer.states()
    for name in ("stream", "validator"):
        if states[name]["fingerprint"] != fresh[name]["fingerprint"]:
            raise ValueError(f"--run.output_dir {output} has other problems under the same name: choose another folder")
    best_step = states["validator"]["best"].get("step")
    if best_step is not None and read_json(output / "best" / "validation.json")["step"] != best_step:
        states["validator"]["best"] = {}  # a later model is there: on a GPU the run may never come to that one again
    checkpointer.load_states(states)
    if ranks != dist.world_size():
        print(f"the checkpoint is from {ranks} ranks: other tokens are drawn from here on", file=sys.stderr)
        checkpointer.parts["generators"].seed(seed, checkpointer.learner.steps)
    dist.run_on_main(lambda: cut_back(checkpointer))


def cut_back(checkpointer: Checkpointer) -> None:
    """Remove what a run has written after the checkpoint that it resumes from."""
    run = checkpointer.output
    steps = checkpointer.learner.steps
    recorder = checkpointer.recorder
    prune(run, checkpointer.config.run.keep, steps)
    for name in ("summary.json", "test-after.jsonl", "test-final.jsonl"):
        (run / name).unlink(missing_ok=True)
    for rollout in numbered(run / FOLDER, ".parquet"):
        if step_of(rollout) > steps:
            rollout.unlink()
    written = recorder.first_step if recorder.line else steps  # an open line is written after its validation
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [line for line in read_jsonl(run / name) if line["step"] <= written]
        write_text(run / name, to_jsonl(lines))


def fork(config: TrainConfig, settings: Settings, checkpointer: Checkpointer, parent: Path) -> None:
    """Start from another run's checkpoint, and save it as this run's first: it then needs its parent no more.

    Validations and rollouts that wait are the parent's own; every other part loads its state, if that fits it.
    """
    states, ranks = checkpointer.load(parent)
    changes = set(differences(read_config(parent / "config.yaml"), settings))
    fitting = {"learner", "recorder"}
    if changes & {"optimizer.name", "model.dtype"}:  # other moments
        states["learner"]["optimizer"] = None
    if states["stream"]["fingerprint"] == checkpointer.parts["stream"].fingerprint:
        fitting.add("stream")
    if "run.seed" in changes or ranks != dist.world_size():
        checkpointer.parts["generators"].seed(config.run.seed, states["learner"]["steps"])
    else:
        fitting.add("generators")
    for name in states:  # of the loss
        switch = ".".join(name.split(".")[:2])
        if switch.startswith("algorithm.") and not any(change.startswith(switch) for change in changes):
            fitting.add(name)
    checkpointer.load_states({name: states[name] for name in fitting})
    print(f"forked from {config.run.fork_from} at {parent.name}")
    checkpointer.save()
