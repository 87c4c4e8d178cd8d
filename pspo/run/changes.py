"""What may change between the starts of a run: the rules of resuming and forking, over the table of switches.

A resumed run continues the same experiment, so only some switches may change on its way; a fork begins another one from
the state of its parent.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from pspo.config import LoraConfig
from pspo.records.files import Settings, differences, read_config, read_jsonl, to_jsonl, write_text
from pspo.records.switches import FREE, LONGER, ROUNDING, STEERED
from pspo.run.checkpointer import States

FIXED = {"distributed.strategy", "model.name_or_path", "model.revision", "model.dtype", "optimizer.name",
         *(f"model.lora.{part.name}" for part in fields(LoraConfig))}  # in forks, too  # fmt: skip
REDRAWN = ("rollout.", "reward.", "algorithm.")  # a fork with others draws and scores its rollouts anew

Changes = dict[str, tuple[Any, Any]]  # by switch, (old, new)


def changes_since(folder: Path, settings: Settings) -> Changes:
    """Differences between the configuration of a run or checkpoint, and this one."""
    changes = differences(read_config(folder / "config.yaml"), settings)
    return {name: pair for name, pair in changes.items() if name not in ("run.output_dir", "run.resume")}


def allowed_changes(run: Path, settings: Settings) -> set[str]:
    """Switches that changed since the run's config.yaml and may; ValueError names those that may not."""
    constant = read_config(run / "config.yaml")["optimizer"]["schedule"] == "constant"
    allowed, refused = set(), []
    for name, (old, new) in changes_since(run, settings).items():
        grows = name in LONGER and constant and old is not None and (new is None or new > old)
        if name in FREE | STEERED | ROUNDING or grows:
            allowed.add(name)
        else:
            refused.append(f"--{name} was {old!r}, is {new!r}")
    if refused:
        raise ValueError(
            f"--run.output_dir {run} holds another experiment ({'; '.join(refused)}): choose another folder, or the "
            "same switches to resume it"
        )
    return allowed


def check_fork(parent: Path, settings: Settings) -> None:
    """Raise ValueError for changes that a fork of this checkpoint cannot make."""
    for name, (old, new) in changes_since(parent, settings).items():
        if name in FIXED:
            advice = f"to begin with the weights alone, set --model.name_or_path {parent} and no --run.fork_from"
            raise ValueError(f"--{name} was {old!r}, is {new!r}: a fork cannot change it; {advice}")


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
    for name, (old, new) in changes.items():
        rounding = " (other rounding)" if name in ROUNDING else ""
        if name != "run.fork_from":
            print(f"changed from step {step} on: --{name} was {old!r}, is {new!r}{rounding}", file=sys.stderr)
        records += [{"step": step, "switch": name, "old": old, "new": new}] if name not in unrecorded else []
    if records or path.exists():
        write_text(path, to_jsonl(records))
