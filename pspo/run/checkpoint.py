"""Save models and whole runs so that a reader never meets half of one, and resume a run bit for bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form, or LoRA's adapters in PEFT's,
``training.pt`` (optimizer, schedule, torch's random generators), ``state.json`` (`Progress`, the other random
generators), under --rollout.lag ``waiting-0.pt`` (rank 0's rollouts), ``config.yaml``, and ``manifest.json`` with the
size and SHA-256 of every other file. Under fsdp2 ``shards/`` replaces model and optimizer: every rank writes its own.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.hub.adapters import save_adapters
from pspo.hub.models import save_pretrained
from pspo.model import has_adapters
from pspo.rollout import Drawing, Experience, Rollout
from pspo.rollout.types import Nucleus
from pspo.run.records import write_json

if TYPE_CHECKING:
    from pspo.run.state import Run


class RunFailed(RuntimeError):
    """A run that cannot continue, for a reason of its own; everything saved is still there."""


@dataclass
class Progress:
    """State of a run between two rollouts, beside `Learner` and the random generators."""

    problems: dict[str, str]  # fingerprints by split, which a resumed run must find again
    prompts: int = 0  # training prompts drawn: the position in their order
    tokens: int = 0  # prompt and completion tokens of the rollouts
    skipped: int = 0  # consecutive optimizer steps skipped up to now
    ranks: int = 0  # of the last rollout; 0 before it
    microbatch_limit: int | None = None  # the learner's, so that a resumed run computes in the same shapes
    seconds: float = 0.0  # training and evaluating
    before: dict[str, Any] | None = (
        None  # `Evaluation.record` of the untrained model; {} if not tested, None until it is
    )
    untrained: dict[str, Any] = field(default_factory=dict)  # step 0's validation and its "step"; {} without
    validated: dict[str, Any] = field(default_factory=dict)  # the last validation
    best: dict[str, Any] = field(default_factory=dict)  # the best of these, of the model in ``best/``
    best_trained: dict[str, Any] = field(default_factory=dict)  # the best but for step 0's
    unvalidated: dict[str, Any] = field(default_factory=dict)  # the last rollout's record while it is validated
    waiting: deque[Experience | Drawing] = field(default_factory=deque)  # this rank's that are not trained on yet

    def validations(self, steps: int) -> dict[str, dict[str, Any]]:
        """Those of a run that has ended after so many steps; {} where there is none."""
        final = self.validated if self.validated.get("step") == steps else {}
        return {"untrained": self.untrained, "best": self.best, "best_trained": self.best_trained, "final": final}


@contextlib.contextmanager
def writing(problem: str, folder: Path) -> Iterator[None]:
    """End the run if something in a folder cannot be written (disk full), and remove what is half there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise their own for a full disk
        tidy(folder)
        raise RunFailed(f"{problem}: {error}") from error


def hidden(folder: Path, suffix: str) -> Path:
    """The name of a folder that is not whole yet (new), to be replaced (old) or to be deleted (gone)."""
    return folder.with_name(f".{folder.name}.{suffix}")


def tidy(parent: Path) -> None:
    """Finish or undo what interrupted saves left in a folder."""
    for leftover in parent.glob(".*.tmp"):  # of `write_text`
        leftover.unlink()
    for old in parent.glob(".*.old"):
        if not (folder := parent / old.name[1:-4]).exists():  # killed between the two renames
            old.rename(folder)
    for suffix in ("new", "old", "gone"):
        for leftover in parent.glob(f".*.{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``folder`` once everything in it is on the disk; rank 0 only."""
    with writing(f"cannot save {folder}", folder.parent):
        temporary, replaced = hidden(folder, "new"), hidden(folder, "old")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a folder under another name, so that a kill leaves no half of it under its own."""
    gone = folder.rename(hidden(folder, "gone"))
    shutil.rmtree(gone, ignore_errors=True)


def write_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, weights: dict | None = None
) -> None:
    """Write model or adapters, tokenizer and card; ``weights`` replaces a sharded model's own."""
    if has_adapters(policy):
        save_adapters(policy, folder, weights)
    else:
        save_pretrained(policy, folder, weights)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def save_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, validation: dict | None = None
) -> None:
    """Save a model, with its validation if there is one, replacing ``folder`` at once; RunFailed if it cannot."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, card, weights)
            if validation is not None:
                write_json(temporary / "validation.json", validation)

    dist.run_on_main(save)


def save_checkpoint(run: "Run", random: dict[str, Any] | None = None) -> None:
    """Save everything that the run's future depends on, and remove older checkpoints; RunFailed if it cannot.

    ``random`` is an earlier `random_state` to be saved in place of this process's own.
    """
    policy, steps, card = run.learner.policy, run.learner.steps, run.card()
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    finite = all(bool(dist.local_shard(parameter).isfinite().all()) for parameter in trained)
    if dist.max_over_ranks(not finite):
        raise RunFailed(f"the weights are not finite at step {steps} and were not saved: lower --optimizer.lr")
    generators = dist.gather_objects(random or random_state(policy.device))
    torch_state = {name: part.state_dict() for name, part in run.stateful.items()}
    torch_state |= {"random": [of_rank.pop("torch") for of_rank in generators]}
    state = vars(run.progress) | {"steps": steps, "random": generators}
    waiting = dist.gather_objects(serialized(list(state.pop("waiting"))))
    folder = run.output / "checkpoints" / f"step-{steps:06d}"
    shards = hidden(folder.with_name(f"{folder.name}-shards"), "new")  # every rank's; rank 0 moves them in
    if dist.is_sharded(policy):
        with writing(f"cannot save {folder}", folder.parent):
            dist.save_shards(shards, policy, run.learner.optimizer)

    def save() -> None:
        with whole_folder(folder) as temporary:
            if shards.exists():
                shards.rename(temporary / "shards")
            else:
                write_model(policy, run.tokenizer, temporary, card)
            torch.save(torch_state, temporary / "training.pt")
            for rank, of_rank in enumerate(waiting if run.config.rollout.lag else []):
                (temporary / f"waiting-{rank}.pt").write_bytes(of_rank)
            (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
            shutil.copyfile(run.output / "config.yaml", temporary / "config.yaml")
            paths = sorted(path for path in temporary.rglob("*") if path.is_file())
            write_json(temporary / "manifest.json", {str(p.relative_to(temporary)): describe(p) for p in paths})
            for records in run.output.glob("*.jsonl"):  # which a resumed run cuts back to this step
                sync(records)
        prune(run.output, run.config.run.keep)

    dist.run_on_main(save)


def serialized(value: Any) -> bytes:
    """What `torch.save` writes, in which views of one tensor share its memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_checkpoint(folder: Path, stateful: dict[str, Any], device: torch.device) -> tuple[int, Progress]:
    """Restore everything but the model; returns the optimizer steps taken, and the run's progress.

    Random generators, and rollouts that wait, are restored only on as many ranks as saved them.
    """
    torch_state = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    for name, part in stateful.items():
        part.load_state_dict(torch_state[name])
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    steps, generators = state.pop("steps"), state.pop("random")
    if len(generators) == dist.world_size():
        restore_random_state(generators[dist.rank()] | {"torch": torch_state["random"][dist.rank()]}, device)
        if (waiting := folder / f"waiting-{dist.rank()}.pt").exists():
            with torch.serialization.safe_globals([Drawing, Experience, Rollout, Nucleus]):
                state["waiting"] = deque(torch.load(waiting, map_location=device, weights_only=True))
    return steps, Progress(**state)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of this process's generators: python's, numpy's, and under "torch" a list of torch's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (a reward may use it)
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    own = [torch.get_rng_state(), *on_gpu]
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": own}


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


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for old in checkpoints(run)[keep:]:
        remove(old)


def describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def damage(folder: Path) -> str | None:
    """Name the first file of a checkpoint that is not what was saved; None if all are."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        return f"{folder} is damaged: manifest.json ({error})"
    for name, saved in files.items():
        if not (folder / name).is_file() or describe(folder / name) != saved:
            return f"{folder} is damaged: {name} is missing, or not what was saved (size, SHA-256)"
    return None
