"""Checkpointer: saves the states of a run's parts, so that a resumed run is the same to the last bit.

A checkpoint is a folder ``step-000042``: the model in `save_pretrained` form, or LoRA's adapters in PEFT's;
``parts.pt``, {name: part.state_dict()}, where "ranks" lists for each rank such states of the parts that differ by rank;
``config.yaml``; and ``manifest.json``. A checkpoint is the same under every strategy: shards of fsdp2 are gathered.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo import files
from pspo.cli.parse import Settings, differences, read_config
from pspo.config import ModelConfig, TrainConfig
from pspo.errors import RunFailed
from pspo.model import fill_adapters, has_adapters
from pspo.model.load import read_policy, write_model
from pspo.rollout import Experience, Rollout
from pspo.rollout.types import Nucleus
from pspo.token_table import TOKENS


class Checkpointer:
    """Saves the parts of a run, by their ``state_dict``, and restores them by their ``load_state_dict``.

    A part with ``per_rank = True`` has a state on each rank; of any other part, rank 0's state is saved. A part's
    ``fork_state(state, changes)`` returns what a fork loads of a parent's state; without it, a fork loads all. The
    snapshot holds the parts' states when they last matched the weights; it is saved if the run is stopped or fails.
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
        self.snapshot = {}  # the last snapshot does not match the weights any more
        self.snapshot = {name: part.state_dict() for name, part in self.parts.items()}

    def save_snapshot(self) -> None:
        """Save a checkpoint of the weights and the snapshot, and remove old checkpoints; RunFailed if that fails."""
        policy = self.learner.policy
        check_finite(policy, self.learner.steps)
        folder = self.output / "checkpoints" / f"step-{self.learner.steps:06d}"
        states = dict(self.snapshot)
        by_rank = [name for name, part in self.parts.items() if getattr(part, "per_rank", False)]
        states["ranks"] = dist.gather_on_main([{name: states.pop(name) for name in by_rank}])
        weights = dist.full_state_dict(policy)
        states["learner"] = dist.gather_shards(states["learner"])

        def write() -> None:
            with files.whole_folder(folder) as temporary:
                write_model(policy, self.recorder.tokenizer, temporary, weights)
                torch.save(states, temporary / "parts.pt")
                load_states(temporary, mmap=True)  # raises if a user's state could not be loaded again
                shutil.copyfile(self.output / "config.yaml", temporary / "config.yaml")
                files.write_manifest(temporary)
                for file in (*self.output.glob("*.jsonl"), *self.output.glob(f"{TOKENS}/*")):
                    files.fsync(file)  # a resumed run needs the records up to this checkpoint
            files.prune(self.output, self.config.run.keep)

        dist.run_on_main(write)

    def save_interrupted(self) -> None:
        """Save the snapshot, if the run has taken a step, but none since the snapshot."""
        if self.learner.steps and self.snapshot and self.snapshot["learner"]["steps"] == self.learner.steps:
            self.save_snapshot()

    def describe_newest(self) -> str:
        """A message that names the newest checkpoint and says what the same command would do with it."""
        command = f"the same command with --run.output_dir {self.output}"
        newest = files.checkpoints(self.output)
        if not newest:
            return f"no checkpoint was saved: {command} starts anew"
        return f"last checkpoint: {newest[0]}; {command} resumes"

    def resume(self, checkpoint: Path) -> None:
        """Restore parts and folder to a checkpoint. Raises ValueError if the run has other problems now."""
        print(f"resuming {self.output} from {checkpoint.name}")
        states = self.load(checkpoint)
        for name in ("stream", "validator"):
            if states[name]["fingerprint"] != self.parts[name].fingerprint:
                fix = "choose another folder"
                raise ValueError(f"--run.output_dir {self.output} has other problems under the same name: {fix}")
        for name, state in states.items():
            self.parts[name].load_state_dict(state)
        dist.run_on_main(self.cut_back)

    def cut_back(self) -> None:
        """Remove what the run wrote after the checkpoint from which it resumes."""
        steps = self.learner.steps
        files.prune(self.output, self.config.run.keep, steps)
        for name in ("summary.json", "test-after.jsonl", "test-final.jsonl"):
            (self.output / name).unlink(missing_ok=True)
        for rollout in files.numbered(self.output / TOKENS, ".parquet"):
            if files.step_of(rollout) > steps:
                rollout.unlink()
        for path in (self.output / "metrics.jsonl", self.output / "samples.jsonl"):
            lines = files.read_jsonl(path)
            with files.named_damage(path):
                lines = [line for line in lines if line["step"] <= self.recorder.first_step]  # no open rollout's
            files.write_text(path, files.to_jsonl(lines))

    def fork(self, parent: Path, settings: Settings) -> None:
        """Start from another run's checkpoint, and save it as this run's first, which makes the parent dispensable.

        A user's loss keeps its state if no switch of the losses has changed. ValueError if no step is left.
        """
        changes = differences(read_config(parent / "config.yaml"), settings)
        states = self.load(parent)
        problems = (states["stream"]["fingerprint"], self.parts["stream"].fingerprint)
        if problems[0] != problems[1]:
            changes["data problems"] = problems
        if "run.seed" in changes:
            self.parts["generators"].seed(self.config.run.seed, states["learner"]["steps"])
        del states["validator"]  # a fork makes its own validations
        if any(switch.startswith(("algorithm.surrogate", "algorithm.terms")) for switch in changes):
            states = {name: state for name, state in states.items() if not name.startswith("algorithm.")}
        for name, part in self.parts.items():
            state = states.get(name)
            if state is not None and hasattr(part, "fork_state"):
                state = part.fork_state(state, changes)
            if state is not None:
                part.load_state_dict(state)
        if self.recorder.limit_reached:
            fix = "raise --run.max_steps or --run.max_tokens, which count from the parent's beginning"
            raise ValueError(f"{parent} has taken {self.learner.steps} steps: {fix}")
        print(f"forked from {parent}")
        self.take_snapshot()
        self.save_snapshot()

    def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint's weights and return its states, without states by rank if the number of ranks differs."""
        load_weights(self.learner.policy, self.config.model, folder)
        states = load_states(folder)
        ranks = states.pop("ranks")
        if len(ranks) == dist.world_size():
            states |= ranks[dist.rank()]
        else:
            lost = "other tokens are drawn from here on, and rollouts that --rollout.lag holds back are lost"
            print(f"the checkpoint is from {len(ranks)} ranks: {lost}", file=sys.stderr)
            self.parts["generators"].seed(self.config.run.seed, states["learner"]["steps"])
        return states


@torch.no_grad()
def load_weights(policy: PreTrainedModel, config: ModelConfig, folder: Path) -> None:
    """Load a folder's adapters or whole weights into the policy; ValueError if they are of another model."""
    fix = "fork under its model and --model.lora; or train from it, named as a model"
    misfit = ValueError(f"the weights of {folder} are not of this model: {fix}")
    if (folder / "adapter_config.json").exists() != has_adapters(policy):
        raise misfit
    if has_adapters(policy):
        base = policy.peft_config["default"].base_model_name_or_path
        saved_base = files.read_json(folder / "adapter_config.json")["base_model_name_or_path"]
        if Path(saved_base).resolve() != Path(base).resolve():
            raise misfit
        try:
            fill_adapters(policy, str(folder))
        except ValueError as error:
            raise misfit from error
    else:
        saved = replace(config, name_or_path=str(folder), revision=None)
        weights = read_policy(saved, policy.dtype).state_dict()
        present = policy.state_dict()
        if {name: values.shape for name, values in weights.items()} != {name: p.shape for name, p in present.items()}:
            raise misfit
        for name, parameter in present.items():  # into the same memory: another alignment would change sums
            dist.set_parameter(parameter, weights[name])


def load_states(folder: Path, mmap: bool = False) -> dict[str, Any]:
    """The parts' states in a checkpoint; raises UnpicklingError for anything but plain values and tensors."""
    with torch.serialization.safe_globals([Experience, Rollout, Nucleus]):
        return torch.load(folder / "parts.pt", map_location="cpu", mmap=mmap, weights_only=True)


def check_finite(policy: PreTrainedModel, step: int) -> None:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if not dist.full_tensor(torch.nn.utils.get_total_norm(trained)).isfinite():
        raise RunFailed(f"the weights are not finite at step {step}: lower --optimizer.lr; not saved")


def save_model(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, record: Any = None) -> None:
    """Save a model and, if given, its validation's record; ``folder`` is replaced at once. RunFailed if that fails."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with files.whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, weights)
            if record is not None:
                files.write_json(temporary / "validation.json", record)
                files.write_manifest(temporary)

    dist.run_on_main(save)
