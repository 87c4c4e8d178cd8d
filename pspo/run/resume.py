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
from pspo.run.checkpointer import Checkpointer, States, position
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
    if config.output_dir is None:
        return {}
    output = Path(config.output_dir)
    if not holds_run(output) or not (output / "summary.json").exists():
        return {}
    changes = check_same(output, settings)
    summary = read_json(output / "summary.json")
    max_tokens = config.max_tokens or math.inf
    is_below_limits = summary["optimizer_steps"] < config.max_steps and summary["tokens"] < max_tokens
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
    named = [folder for folder in checkpoints(path.parent.parent) if folder == path]
    parent = first_undamaged(checkpoints(path) or named)
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
    output, parts = checkpointer.output, checkpointer.parts
    print(f"resuming {output} from {checkpoint.name}")
    states, ranks = checkpointer.load(checkpoint)
    fresh = checkpointer.states()
    for name in ("stream", "validator"):
        if states[name]["fingerprint"] != fresh[name]["fingerprint"]:
            raise ValueError(f"--run.output_dir {output} has other problems under the same name: choose another folder")
    checkpointer.load_states(states)
    learner, validator, recorder = parts["learner"], parts["validator"], parts["recorder"]
    if validator.best:
        validator.best = best_in_folder(output, validator.best["step"], learner.steps)
    written = recorder.first_step if recorder.line else learner.steps  # an open line is written after its validation
    dist.run_on_main(lambda: cut_back(output, learner.steps, written, checkpointer.config.run.keep))
    if ranks != dist.world_size():
        dropped = ", and rollouts that waited for --rollout.lag are dropped" if checkpointer.config.rollout.lag else ""
        if dist.is_main():
            message = f"the checkpoint is from {ranks} ranks: other tokens are drawn from here on{dropped}"
            print(message, file=sys.stderr)
        parts["generators"].seed(seed, learner.steps)
    checkpointer.saved_position = position(checkpointer.states())


def fork(config: TrainConfig, settings: Settings, checkpointer: Checkpointer, parent: Path) -> None:
    """Start from another run's checkpoint, and save it as this run's first: it then needs its parent no more."""
    states, ranks = checkpointer.load(parent)
    changes = set(differences(read_config(parent / "config.yaml"), settings))
    checkpointer.load_states(fork_states(states, checkpointer.states(), changes))
    if "run.seed" in changes or ranks != dist.world_size():
        checkpointer.parts["generators"].seed(config.run.seed, checkpointer.learner.steps)
    print(f"forked from {config.run.fork_from} at {parent.name}")
    checkpointer.save()


def fork_states(parent: States, fresh: States, changes: set[str]) -> States:
    """The parent's state of every part that it fits; of the others, such as validations and rollouts that wait, fresh.

    ``changes`` are the switches that differ from the parent's.
    """
    states = fresh | {"learner": parent["learner"], "recorder": parent["recorder"]}
    if changes & {"optimizer.name", "model.dtype"}:  # other moments
        states["learner"] = parent["learner"] | {"optimizer": fresh["learner"]["optimizer"]}
    if parent["stream"]["fingerprint"] == fresh["stream"]["fingerprint"]:
        states["stream"] = parent["stream"]
    if "generators" in parent:
        states["generators"] = parent["generators"]
    for name in fresh.keys() & parent:
        switch = ".".join(name.split(".")[:2])
        if switch.startswith("algorithm.") and not any(change.startswith(switch) for change in changes):
            states[name] = parent[name]  # of the same surrogate or term
    return states


def best_in_folder(run: Path, step: int, steps: int) -> dict[str, Any]:
    """The validation of the model in ``best/``, step ``step``'s; {} if one after step ``steps`` has replaced it.

    On a GPU the run may never come to that one again.
    """
    file = run / "best" / "validation.json"
    best = read_json(file) if file.is_file() else {"step": -1}
    if best["step"] < step:
        raise ValueError(f"{file.parent} is missing, or not the best model (step {step}'s): choose another folder")
    return best if best["step"] <= steps else {}


def cut_back(run: Path, steps: int, written: int, keep: int) -> None:
    """Remove what came after step ``steps``, and lines of the records after step ``written``.

    Older checkpoints than it keeps are there if a kill came between saving one and removing another.
    """
    records = {name: read_jsonl(run / name) for name in ("metrics.jsonl", "samples.jsonl") if (run / name).exists()}
    prune(run, keep, steps)
    for name in ("summary.json", "test-after.jsonl", "test-final.jsonl"):
        (run / name).unlink(missing_ok=True)
    for rollout in numbered(run / FOLDER, ".parquet"):
        if step_of(rollout) > steps:
            rollout.unlink()
    for name, lines in records.items():
        write_text(run / name, to_jsonl(line for line in lines if line["step"] <= written))
