"""Checkpointer: saves the state of a run's parts so that a resumed run is the same to the last bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form, or LoRA's adapters in PEFT's;
``parts.pt``, {name: part.state_dict()}; ``rank-0.pt`` and so on, the same of the parts that are each rank's own;
``config.yaml``; and ``manifest.json``. Under fsdp2 ``shards/`` replaces weights and moments: every rank writes its own.
"""

import contextlib
import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from pspo import distributed as dist
from pspo.cli.signals import Stopped
from pspo.cli.user_code import UserCodeFailed, fail_together
from pspo.config import TrainConfig
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.model.save import write_model
from pspo.rollout import Drawing, Experience, Rollout
from pspo.rollout.engine import EngineError
from pspo.rollout.types import Nucleus
from pspo.run.folders import RunFailed, hidden, prune, sync, whole_folder, write_manifest, writing

States = dict[str, dict[str, Any]]  # by part


class Stateful(Protocol):
    """A part of a run: what it needs to be resumed, and how. One with ``per_rank = True`` is each rank's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Checkpointer:
    """Saves the parts when due, and as they were at the last `mark` if the run is stopped or user code raises."""

    def __init__(self, config: TrainConfig, parts: dict[str, Stateful], output: Path) -> None:
        self.config, self.parts, self.output = config, parts, output
        self.learner, self.recorder, self.validator = parts["learner"], parts["recorder"], parts["validator"]
        self.saved: tuple[int, int, bool] | None = None  # position of the last checkpoint
        self.marked: States = {}

    def states(self) -> States:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def mark(self) -> None:
        """Remember the state between two rollouts, or before a validation."""
        self.marked = self.states()

    def save_if_due(self) -> None:
        if self.recorder.is_due(self.config.run.save_every):
            self.save()

    @contextlib.contextmanager
    def save_if_interrupted(self, who: str = "a reward") -> Iterator[None]:
        """If the block is stopped, or the user's code raises, on any rank, save the run as it was marked, and end it.

        Raises Stopped or UserCodeFailed on every rank. Before the first optimizer step a failure has nothing to save.
        """
        try:
            with fail_together():
                yield
        except Stopped:
            if self.marked:  # not in the first test and validation
                self.save(self.marked)
            raise
        except EngineError as error:
            again = f"the same command with --run.output_dir {self.output} resumes from the last checkpoint"
            raise RunFailed(f"the engine failed: {error}; {again}") from error
        except UserCodeFailed as error:
            saved = "not saved before its first step: the same command starts anew"
            if self.learner.steps:
                self.save(self.marked)
                resume = f"the same command with --run.output_dir {self.output} resumes"
                saved = f"saved at step {self.learner.steps}: {resume}"
            raise UserCodeFailed(f"{who} failed\n\n{error}\n\nThe run is {saved}") from error.__cause__

    def save(self, states: States | None = None) -> None:
        """Save a checkpoint, once per position, and remove older ones; RunFailed if it cannot.

        ``states`` are earlier ones to be saved in place of the parts' own.
        """
        states = states or self.states()
        if self.saved == position(states):
            return
        policy, card = self.learner.policy, self.validator.card()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        finite = all(bool(dist.local_shard(parameter).isfinite().all()) for parameter in trained)
        if dist.max_over_ranks(not finite):
            raise RunFailed(f"the weights are not finite at step {self.learner.steps}: lower --optimizer.lr; not saved")
        own = {name: states[name] for name, part in self.parts.items() if getattr(part, "per_rank", False)}
        shared = {name: state for name, state in states.items() if name not in own}
        by_rank = dist.gather_on_main(serialized(own))
        folder = self.output / "checkpoints" / f"step-{self.learner.steps:06d}"
        shards = hidden(folder.with_name(f"{folder.name}-shards"), "new")  # every rank's; rank 0 moves them in
        if dist.is_sharded(policy):
            with writing(f"cannot save {folder}", folder.parent):
                dist.save_shards(shards, policy, self.learner.optimizer)

        def write() -> None:
            with whole_folder(folder) as temporary:
                if shards.exists():
                    shards.rename(temporary / "shards")
                else:
                    write_model(policy, self.recorder.tokenizer, temporary, card)
                torch.save(shared, temporary / "parts.pt")
                for rank, state in enumerate(by_rank):
                    (temporary / f"rank-{rank}.pt").write_bytes(state)
                shutil.copyfile(self.output / "config.yaml", temporary / "config.yaml")
                write_manifest(temporary)
                for file in (*self.output.glob("*.jsonl"), *self.output.glob("tokens.parquet/*")):  # a resume cuts
                    sync(file)
            prune(self.output, self.config.run.keep)

        dist.run_on_main(write)
        self.saved = position(states)

    def load(self, folder: Path) -> tuple[States, int]:
        """Load a checkpoint's weights; return its states, and the number of ranks that saved it.

        Those of the parts that are each rank's own are left out on another number of ranks.
        """
        policy = self.learner.policy
        if dist.is_sharded(policy):
            dist.load_shards(folder / "shards", policy, self.learner.optimizer)
        elif has_adapters(policy):
            fill_adapters(policy, str(folder))
        else:
            saved = load_policy(replace(self.config.model, name_or_path=str(folder), revision=None), policy.device)
            policy.load_state_dict(saved.state_dict())  # into the same memory: other alignment, other sums
        states = torch.load(folder / "parts.pt", map_location="cpu", weights_only=True)
        ranks = len(list(folder.glob("rank-*.pt")))
        if ranks == dist.world_size():
            own = folder / f"rank-{dist.rank()}.pt"
            with torch.serialization.safe_globals([Drawing, Experience, Rollout, Nucleus]):
                states |= torch.load(own, map_location=policy.device, weights_only=True)
        return states, ranks


def position(states: States) -> tuple[int, int, bool]:
    """Optimizer steps taken; prompts drawn, under --rollout.lag some before the first step; whether a line is open."""
    return states["learner"]["steps"], states["stream"]["position"], bool(states["recorder"]["line"])


def serialized(value: Any) -> bytes:
    """What `torch.save` writes, in which views of one tensor share its memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
