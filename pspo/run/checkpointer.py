"""Checkpointer: saves the state of a run's parts so that a resumed run is the same to the last bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form, or LoRA's adapters in PEFT's;
``parts.pt``, {name: part.state_dict()}; ``rank-0.pt`` and so on, the same of parts whose state differs by rank;
``config.yaml``; and ``manifest.json``. Under fsdp2 ``shards/`` replaces weights and moments: every rank writes its own.
"""

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.errors import RunFailed
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.model.find import read_adapter_config
from pspo.model.load import write_model
from pspo.rollout import Experience, Rollout
from pspo.rollout.types import Nucleus
from pspo.run.folders import checkpoints, fsync, prune, temporary_path, whole_folder, write_errors, write_manifest
from pspo.token_table import TOKENS


class Checkpointer:
    """Saves the parts of a run, by their ``state_dict``, and reads what it has saved.

    Attributes:
        parts: those that have a ``state_dict``, by name; one with ``per_rank = True`` has another state on each rank.
        snapshot: the parts' states when they last matched the weights: what is saved if the next rollout or validation
            is stopped or fails.
    """

    def __init__(self, config: TrainConfig, parts: dict[str, Any], output: Path) -> None:
        self.config = config
        self.parts = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
        self.output = output
        self.learner = parts["learner"]
        self.recorder = parts["recorder"]
        self.snapshot: dict[str, Any] = {}

    def take_snapshot(self) -> None:
        """Keep the parts' states."""
        self.snapshot = {}  # the last one is not of the weights as they are
        self.snapshot = {name: part.state_dict() for name, part in self.parts.items()}

    def save_snapshot(self) -> None:
        """Save a checkpoint of the weights and the snapshot, and remove older ones; RunFailed if it cannot."""
        policy = self.learner.policy
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        if not dist.full_tensor(torch.nn.utils.get_total_norm(trained)).isfinite():
            raise RunFailed(f"the weights are not finite at step {self.learner.steps}: lower --optimizer.lr; not saved")
        folder = self.output / "checkpoints" / f"step-{self.learner.steps:06d}"
        shared_states = dict(self.snapshot)
        rank_names = [name for name, part in self.parts.items() if getattr(part, "per_rank", False)]
        rank_file = io.BytesIO()
        torch.save({name: shared_states.pop(name) for name in rank_names}, rank_file)
        rank_files = dist.gather_on_main(rank_file.getvalue())
        shards = temporary_path(folder.with_name(f"{folder.name}-shards"), "new")  # of every rank; rank 0 moves them in
        if dist.is_sharded(policy):
            with write_errors(folder):
                dist.save_shards(shards, policy, self.learner.optimizer)

        def write() -> None:
            with whole_folder(folder) as temporary:
                if dist.is_sharded(policy):
                    shards.rename(temporary / "shards")
                else:
                    write_model(policy, self.recorder.tokenizer, temporary)
                torch.save(shared_states, temporary / "parts.pt")
                torch.load(temporary / "parts.pt", mmap=True, weights_only=True)  # raises for a user's unfit state
                for rank, content in enumerate(rank_files):
                    (temporary / f"rank-{rank}.pt").write_bytes(content)
                shutil.copyfile(self.output / "config.yaml", temporary / "config.yaml")
                write_manifest(temporary)
                for file in (*self.output.glob("*.jsonl"), *self.output.glob(f"{TOKENS}/*")):
                    fsync(file)  # a resumed run needs their lines up to this checkpoint
            prune(self.output, self.config.run.keep)

        dist.run_on_main(write)

    def save_interrupted(self) -> None:
        """Save the snapshot, if the run has taken a step and a snapshot matches the weights."""
        if self.learner.steps and self.snapshot:
            self.save_snapshot()

    def describe_newest(self) -> str:
        """The newest checkpoint, and what the same command does with it, for messages."""
        command = f"the same command with --run.output_dir {self.output}"
        newest = checkpoints(self.output)
        if not newest:
            return f"no checkpoint was saved: {command} starts anew"
        return f"last checkpoint: {newest[0]}; {command} resumes"

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's weights, and return its states; of another number of ranks without those of each rank."""
        self.load_weights(folder)
        states = torch.load(folder / "parts.pt", map_location="cpu", weights_only=True)
        ranks = len(list(folder.glob("rank-*.pt")))
        if ranks == dist.world_size():
            with torch.serialization.safe_globals([Experience, Rollout, Nucleus]):
                states |= torch.load(folder / f"rank-{dist.rank()}.pt", map_location="cpu", weights_only=True)
        else:
            print(f"the checkpoint is from {ranks} ranks: other tokens are drawn from here on", file=sys.stderr)
            self.parts["generators"].seed(self.config.run.seed, states["learner"]["steps"])
        return states

    def load_weights(self, folder: Path) -> None:
        """Load a checkpoint's shards, adapters or whole weights; ValueError if they are not of this model."""
        policy = self.learner.policy
        fix = "fork under its model, --model.lora and --distributed.strategy; or train from it, named as a model"
        misfit = ValueError(f"the weights of {folder} are not of this model: {fix}")
        is_sharded = dist.is_sharded(policy)
        is_adapted = has_adapters(policy) and not is_sharded
        if ((folder / "shards").exists(), (folder / "adapter_config.json").exists()) != (is_sharded, is_adapted):
            raise misfit
        if is_sharded:
            dist.load_shards(folder / "shards", policy, self.learner.optimizer)
        elif is_adapted:
            base = policy.peft_config["default"].base_model_name_or_path
            if Path(read_adapter_config(folder)["base_model_name_or_path"]).resolve() != Path(base).resolve():
                raise misfit
            try:
                fill_adapters(policy, str(folder))
            except ValueError as error:
                raise misfit from error
        else:
            model = replace(self.config.model, name_or_path=str(folder), revision=None)
            weights = load_policy(model, policy.device).state_dict()
            shapes = [{name: w.shape for name, w in part.items()} for part in (weights, policy.state_dict())]
            if shapes[0] != shapes[1]:
                raise misfit
            policy.load_state_dict(weights)  # into the same memory: other alignment, other sums
