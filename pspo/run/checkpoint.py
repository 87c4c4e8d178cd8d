"""Save models and whole runs so that a reader never meets half of one, and read a run back to the last bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form (so that it can be loaded as a model,
too), ``training.pt`` (optimizer, schedule, torch's random generators), ``state.json`` (`Progress`, the other random
generators), ``config.yaml``, and ``manifest.json``, which vouches for the others by size and SHA-256. Under fsdp2
``shards/`` has weights and moments in the model's and the optimizer's place, written by every rank while the run waits.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo.distributed import (
    from_main,
    gather,
    highest,
    is_main,
    is_sharded,
    local,
    rank,
    save_shards,
    state_dict,
    world_size,
)


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason of its own; what was saved is still there."""


class DamagedError(ValueError):
    """A checkpoint that is not what was saved."""


@dataclass
class Progress:
    """Where a run stands between two rollouts, beside what `Learner` and the random generators hold.

    Attributes:
        problems: by split, the fingerprint of what a run that goes on must find again.
        prompts: training prompts drawn, the place in their order.
        tokens: of the rollouts.
        skipped: optimizer steps skipped in a row, up to now.
        ranks: that took part in the last rollout; 0 before it.
        microbatch_limit: `Learner.microbatch_limit`, so that a run that goes on computes in the same shapes.
        seconds: spent training and evaluating.
        before: `Evaluation.record` of the base model; {} where it is not measured, None until it could be.
        validated: the last validation and its "step"; {} without validation.
        best: the best of these, that of the model in ``best/``.
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


def save_model(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write the model, its tokenizer and its card in `save_pretrained` form, replacing what ``folder`` held.

    The files are complete and on disk before they take the folder's name. A save that fails (disk full) raises
    RunFailed and leaves what was there.

    Args:
        write_more: puts further files into the folder that it is given.
    """
    weights = state_dict(policy)

    def save() -> None:
        with saving(folder) as temporary:
            write_model(policy, tokenizer, temporary, card, weights)
            write_more(temporary)
            publish(temporary, folder)

    from_main(save)


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[Path]:
    """The folder in which ``folder`` is prepared; an error in it takes it away and raises RunFailed."""
    try:
        yield folder.with_name(f".{folder.name}.new")
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        recover(folder)
        raise RunFailed(f"cannot save {folder}: {error}") from error


def write_model(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Model, tokenizer and card into a new folder; ``weights`` in place of the model's own, where these are shards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def new_folder(folder: Path) -> None:
    """An empty one in which ``folder`` is prepared."""
    with saving(folder) as temporary:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)


def publish(temporary: Path, folder: Path) -> None:
    """Give a folder its name once all of it is on the disk."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    replaced = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Tidy up after a save that was cut off; ``folder`` is then whole, the old one or the new one."""
    temporary, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    if replaced.exists() and not folder.exists():  # between the two renames
        replaced.rename(folder)
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Saver:
    """Saves checkpoints: the model at once, the rest from a copy and in the background, while the run goes on.

    The thread touches nothing but its copy and the files. One save at a time; an error of it comes up in the next call.

    Args:
        run: the run's folder; its config.yaml is copied, its .jsonl files are brought to the disk first.
        keep: so many checkpoints stay, the newest.
        stateful: optimizer and schedule, by name: what has a state_dict.
    """

    def __init__(
        self,
        run: Path,
        keep: int,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stateful: dict[str, Any],
    ) -> None:
        self.run, self.keep, self.policy, self.tokenizer, self.stateful = run, keep, policy, tokenizer, stateful
        self.pending: Future[None] | None = None
        self.saved: int | None = None  # the step of the last save

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with contextlib.suppress(*([RunFailed] if kind else [])):  # not in place of the first error
            self._wait()

    def wait(self) -> None:
        """Until the save at hand, rank 0's, is on the disk, on every rank; raises RunFailed where it could not be."""
        from_main(self._wait)

    def _wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def save(self, steps: int, card: str, progress: Progress) -> None:
        """Save all that the run's future depends on, as it is now."""
        self.wait()
        if highest(not all(bool(local(parameter).isfinite().all()) for parameter in self.policy.parameters())):
            raise RunFailed(
                f"the weights are no longer finite at step {steps}, and were not saved: lower --optimizer.lr"
            )
        if steps == self.saved:
            return
        self.saved = steps
        torch_state = {name: on_cpu(part.state_dict()) for name, part in self.stateful.items()}
        every_rank = gather(random_state(self.policy.device))
        torch_state |= {"random": [state.pop("torch") for state in every_rank]}
        state = json.dumps(asdict(progress) | {"steps": steps, "random": every_rank})
        folder = self.run / "checkpoints" / f"step-{steps:06d}"
        if is_sharded(self.policy):
            from_main(lambda: new_folder(folder))
            with saving(folder) as temporary:
                save_shards(temporary / "shards", self.policy, self.stateful["optimizer"].optimizer)
        else:
            from_main(lambda: self._write_model(folder, card))
        if is_main():
            pool = ThreadPoolExecutor(1)
            self.pending = pool.submit(self._finish, folder, torch_state, state)
            pool.shutdown(wait=False)

    def _write_model(self, folder: Path, card: str) -> None:
        with saving(folder) as temporary:
            write_model(self.policy, self.tokenizer, temporary, card)

    def _finish(self, folder: Path, torch_state: dict[str, Any], state: str) -> None:
        with saving(folder) as temporary:
            torch.save(torch_state, temporary / "training.pt")
            (temporary / "state.json").write_text(state, encoding="utf-8")
            shutil.copyfile(self.run / "config.yaml", temporary / "config.yaml")
            paths = sorted(path for path in temporary.rglob("*") if path.is_file())
            files = {str(path.relative_to(temporary)): describe(path) for path in paths}
            (temporary / "manifest.json").write_text(json.dumps(files, indent=2), encoding="utf-8")
            for file in self.run.glob("*.jsonl"):
                sync(file)
            publish(temporary, folder)
            for old in checkpoints(self.run)[self.keep :]:
                remove(old)


def random_state(device: torch.device) -> dict[str, Any]:
    """Where this process's generators stand: python's, numpy's, and under "torch" a list of torch's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (a reward may use it)
    generators = [torch.get_rng_state()]
    if device.type == "cuda":
        generators.append(torch.cuda.get_rng_state(device))
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": generators}


def set_torch_generators(of_ranks: list[list[torch.Tensor]], device: torch.device) -> None:
    """Put torch's generators back to where this rank's were; other numbers of ranks draw other numbers."""
    if len(of_ranks) != world_size():
        return
    torch.set_rng_state(of_ranks[rank()][0])
    if device.type == "cuda" and len(of_ranks[rank()]) > 1:
        torch.cuda.set_rng_state(of_ranks[rank()][1], device)


def on_cpu(value: Any) -> Any:
    """A copy of the tensors in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    if isinstance(value, list):
        return [on_cpu(part) for part in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints that there are, newest first; a folder of another name than ``step-42`` is none."""
    return sorted((f for f in (run / "checkpoints").glob("step-*") if f.name[5:].isdecimal()), key=step_of)[::-1]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def remove(folder: Path) -> None:
    """So that a kill leaves no half of it under its name."""
    hidden = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def tidy(run: Path) -> None:
    """Finish or undo what a kill cut off, in the whole run."""
    for hidden in (run / "checkpoints").glob(".step-*.gone"):
        shutil.rmtree(hidden, ignore_errors=True)
    cut_off = {hidden.name.split(".")[1] for hidden in (run / "checkpoints").glob(".step-*")}
    for folder in (run / "best", run / "final", *(run / "checkpoints" / name for name in cut_off)):
        recover(folder)


def describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def verify(folder: Path) -> None:
    """Raise DamagedError, naming the fault, where a checkpoint is not what was saved."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        raise DamagedError(f"{folder} is damaged: manifest.json is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DamagedError(f"{folder} is damaged: manifest.json cannot be read") from None
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != size:
            raise DamagedError(f"{folder} is damaged: {name} has {path.stat().st_size:,} bytes of {size:,}")
        if describe(path)["sha256"] != digest:
            raise DamagedError(f"{folder} is damaged: {name} is not what was saved (SHA-256)")


def newest_checkpoint(
    folders: Sequence[Path], load: Callable[[Path], None] = lambda folder: None
) -> tuple[Path | None, list[str]]:
    """The first of the checkpoints that verifies and loads, and what is wrong with those before it."""
    damage = []
    for folder in folders:
        reason = from_main(lambda folder=folder: reason_of(verify, folder))
        if reason is None:  # all ranks load, and agree on what came of it
            reason = next(filter(None, gather(reason_of(load, folder))), None)
        if reason is None:
            return folder, damage
        damage.append(reason)
    return None, damage


def reason_of(check: Callable[[Path], None], folder: Path) -> str | None:
    """What a check of the folder says is damaged; None where nothing is."""
    try:
        check(folder)
    except DamagedError as error:
        return str(error)
    return None


@contextlib.contextmanager
def unreadable_is_damaged(folder: Path, what: str) -> Iterator[None]:
    """Raise DamagedError, with the reason, for what files raise that are whole but not what a run saves."""
    kinds = (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # of what is refused in the next line
            yield
    except torch.OutOfMemoryError:  # a RuntimeError, too, and no fault of the checkpoint
        raise
    except (*kinds, UnpicklingError, FileNotFoundError) as error:
        cause = error.__cause__  # a library's own OSError has no number
        machine = isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT)
        if machine or isinstance(cause, MemoryError):
            raise cause from None
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.100}"
        raise DamagedError(f"{folder} is damaged: {what} is not what a run saves ({reason})") from error


def load_checkpoint(folder: Path, stateful: dict[str, Any], device: torch.device) -> tuple[int, Progress]:
    """Put back everything but the model's weights; returns the optimizer steps taken, and the run's progress.

    Raises DamagedError where the files hold something else; what was put back until then stays.
    """
    with unreadable_is_damaged(folder, "training.pt"):
        torch_state = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
        for name, part in stateful.items():
            if torch_state[name].keys() != part.state_dict().keys():  # a scheduler would take any
                raise ValueError(f"the {name} has {', '.join(torch_state[name])}")
            part.load_state_dict(torch_state[name])
        for parameter, moments in stateful["optimizer"].state.items():
            if any(value.ndim > 0 and value.shape != parameter.shape for value in moments.values()):
                raise ValueError("the optimizer is of another model")
        set_torch_generators(torch_state["random"], device)
    with unreadable_is_damaged(folder, "state.json"):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        steps, generators = state.pop("steps"), state.pop("random")
        if len(generators) == world_size():
            version, internal, gauss = generators[rank()]["python"]
            random.setstate((version, tuple(internal), gauss))
            kind, keys, *rest = generators[rank()]["numpy"]
            np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
        progress = Progress(**state)
        check_progress(steps, progress)
    return steps, progress


def check_progress(steps: int, progress: Progress) -> None:
    """Raise ValueError for what no run's progress can be."""
    counts = {"steps": steps} | {name: getattr(progress, name) for name in ("prompts", "tokens", "skipped", "ranks")}
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value!r:.40}")
    limit = progress.microbatch_limit
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f"microbatch_limit is {limit!r:.40}")
    if not (isinstance(progress.seconds, int | float) and 0 <= progress.seconds < math.inf):
        raise ValueError(f"seconds is {progress.seconds!r:.40}")
    for name in ("problems", "before", "validated", "best"):
        value = getattr(progress, name)
        if not isinstance(value, dict) and (name != "before" or value is not None):
            raise ValueError(f"{name} is {value!r:.40}")
    for validation in (progress.validated, progress.best):
        if validation and not all(isinstance(validation[name], int | float) for name in ("step", "validation_reward")):
            raise ValueError(f"a validation is {validation!r:.80}")
