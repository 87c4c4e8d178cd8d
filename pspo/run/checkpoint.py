"""Save models and whole runs so that a reader never meets half of one, and resume a run bit for bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form, ``training.pt`` (optimizer, schedule,
torch's random generators), ``state.json`` (`Progress`, the other random generators), ``config.yaml``, and
``manifest.json`` with the size and SHA-256 of every other file. Under fsdp2 ``shards/`` replaces model and optimizer:
every rank writes its own.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.run.records import write_json


class RunFailed(RuntimeError):
    """A run that cannot continue, for a reason of its own; everything saved is still there."""


@dataclass
class Progress:
    """Where a run stands between two rollouts, beside what `Learner` and the random generators hold.

    Attributes:
        problems: by split, the fingerprint that a resumed run must find again.
        prompts: training prompts drawn, which is the position in their order.
        tokens: prompt and completion tokens of the rollouts.
        skipped: consecutive optimizer steps skipped up to now.
        ranks: ranks of the last rollout; 0 before it.
        microbatch_limit: `Learner.microbatch_limit`, so that a resumed run computes in the same shapes.
        seconds: spent training and evaluating.
        before: `Evaluation.record` of the untrained model; {} if it is not tested, None until it is.
        validated: the last validation and its "step"; {} without validation.
        best: the best of these, of the model in ``best/``.
    """

    problems: dict[str, str]
    prompts: int = 0
    tokens: int = 0
    skipped: int = 0
    ranks: int = 0
    microbatch_limit: int | None = None
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    validated: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` once everything in it is on the disk; rank 0 only.

    An error (disk full) leaves the old folder, and becomes RunFailed.
    """
    temporary, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    try:
        recover(folder)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own for a full disk
        recover(folder)
        raise RunFailed(f"cannot save {folder}: {error}") from error


def recover(folder: Path) -> None:
    """Clean up after an interrupted save; ``folder`` is then whole, the old one or the new one."""
    temporary, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    if replaced.exists() and not folder.exists():  # between the two renames
        replaced.rename(folder)
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a folder under another name, so that a kill leaves no half of it under its own."""
    hidden = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def tidy(run: Path) -> None:
    """Finish or undo what a kill interrupted, in the whole run."""
    for hidden in (*(run / "checkpoints").glob(".step-*.gone"), *(run / "checkpoints").glob(".step-*.shards")):
        shutil.rmtree(hidden, ignore_errors=True)
    interrupted = {hidden.name.split(".")[1] for hidden in (run / "checkpoints").glob(".step-*")}
    for folder in (run / "best", run / "final", *(run / "checkpoints" / name for name in interrupted)):
        recover(folder)


def write_model(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model, tokenizer and card in `save_pretrained` form; ``weights`` replaces a sharded model's own."""
    policy.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def save_model(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    validation: dict[str, Any] | None = None,
) -> None:
    """Save a model, with its validation if there is one, replacing ``folder`` at once; RunFailed if it cannot."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, card, weights)
            if validation is not None:
                write_json(temporary / "validation.json", validation)

    dist.run_on_main(save)


def save_checkpoint(
    run: Path,
    keep: int,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stateful: dict[str, Any],
    steps: int,
    progress: Progress,
    card: str,
) -> None:
    """Save everything that the run's future depends on, and remove older checkpoints; RunFailed if it cannot.

    Args:
        run: the run's folder; its config.yaml is copied, its .jsonl files are flushed first.
        keep: number of newest checkpoints to keep.
        stateful: optimizer and schedule, by name.
    """
    finite = all(bool(dist.local_shard(parameter).isfinite().all()) for parameter in policy.parameters())
    if dist.max_over_ranks(not finite):
        raise RunFailed(f"the weights are not finite at step {steps} and were not saved: lower --optimizer.lr")
    every_rank = dist.gather_objects(random_state(policy.device))
    torch_state = {name: part.state_dict() for name, part in stateful.items()}
    torch_state |= {"random": [state.pop("torch") for state in every_rank]}
    state = asdict(progress) | {"steps": steps, "random": every_rank}
    folder = run / "checkpoints" / f"step-{steps:06d}"
    shards = folder.with_name(f".{folder.name}.shards")  # of all ranks, moved into the checkpoint by rank 0
    if dist.is_sharded(policy):
        try:
            dist.save_shards(shards, policy, stateful["optimizer"].optimizer)
        except RuntimeError as error:
            shutil.rmtree(shards, ignore_errors=True)
            raise RunFailed(f"cannot save {folder}: {error}") from error

    def save() -> None:
        with whole_folder(folder) as temporary:
            if shards.exists():
                shards.rename(temporary / "shards")
            else:
                write_model(policy, tokenizer, temporary, card)
            torch.save(torch_state, temporary / "training.pt")
            (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
            shutil.copyfile(run / "config.yaml", temporary / "config.yaml")
            paths = sorted(path for path in temporary.rglob("*") if path.is_file())
            write_json(temporary / "manifest.json", {str(p.relative_to(temporary)): describe(p) for p in paths})
            for file in run.glob("*.jsonl"):
                sync(file)
        for old in checkpoints(run)[keep:]:
            remove(old)

    dist.run_on_main(save)


def load_checkpoint(folder: Path, stateful: dict[str, Any], device: torch.device) -> tuple[int, Progress]:
    """Restore everything but the model; returns the optimizer steps taken, and the run's progress.

    Random generators are restored only on as many ranks as saved them.
    """
    torch_state = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    for name, part in stateful.items():
        part.load_state_dict(torch_state[name])
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    steps, generators = state.pop("steps"), state.pop("random")
    if len(generators) == dist.world_size():
        restore_random_state(generators[dist.rank()] | {"torch": torch_state["random"][dist.rank()]}, device)
    return steps, Progress(**state)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators: python's, numpy's, and under "torch" a list of torch's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (a reward may use it)
    generators = [torch.get_rng_state()]
    if device.type == "cuda":
        generators.append(torch.cuda.get_rng_state(device))
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": generators}


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Undo `random_state`, which JSON has turned tuples of into lists."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"][0])
    if device.type == "cuda" and len(state["torch"]) > 1:
        torch.cuda.set_rng_state(state["torch"][1], device)


def checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, newest first; folders not named like ``step-42`` are ignored."""
    return sorted((f for f in (run / "checkpoints").glob("step-*") if f.name[5:].isdecimal()), key=step_of)[::-1]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(folder: Path) -> str | None:
    """Name the first file of a checkpoint that is not what was saved; None if all are."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{folder} is damaged: manifest.json is missing"
    except ValueError:
        return f"{folder} is damaged: manifest.json cannot be read"
    for name, saved in files.items():
        if not (folder / name).is_file():
            return f"{folder} is damaged: {name} is missing"
        if describe(folder / name) != saved:
            return f"{folder} is damaged: {name} differs from what was saved (size or SHA-256)"
    return None
