"""Put LoRA adapters into a model, and read and write them as PEFT folders.

PEFT puts its layers into the model, which stays the one that transformers made. Adapters are never merged while they
train: rollouts, log-probs and gradients run the same layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.cli.files import DAMAGE
from pspo.config import ModelConfig


def has_adapters(policy: PreTrainedModel) -> bool:
    return getattr(policy, "_hf_peft_config_loaded", False)


class StartingAdapters:
    """Reference model of a policy with adapters, in a `with` block: the same model with the adapters it has now."""

    def __init__(self, policy: PreTrainedModel):
        self.policy = policy
        self.adapters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.start = [parameter.detach().clone() for parameter in self.adapters]

    def __enter__(self) -> PreTrainedModel:
        self.swap()
        return self.policy

    def __exit__(self, *_: object) -> None:
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the policy's adapters and those it started with."""
        for adapter, other in zip(self.adapters, self.start, strict=True):
            own = adapter.clone()
            adapter.copy_(other)
            other.copy_(own)
        torch.clear_autocast_cache()  # which holds bf16 copies of the adapters


def add_adapters(policy: PreTrainedModel, config: ModelConfig) -> None:
    """Freeze a model and put float32 adapters into it, without dropout; `fill_adapters` gives them values."""
    from peft import LoraConfig

    lora, start = config.lora, config.lora.name_or_path
    try:
        new = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.target_modules}
        made = LoraConfig.from_pretrained(start) if start else LoraConfig(**new)
        made.task_type, made.revision, made.lora_dropout, made.inference_mode = "CAUSAL_LM", config.revision, 0.0, False
        with torch.random.fork_rng(devices=[]):
            policy.add_adapter(made)
    except (ValueError, *DAMAGE) as error:  # no such folder, no such layers, no such file as PEFT writes
        switch = f"name_or_path {start}" if start else f"target_modules {lora.target_modules}"
        raise ValueError(f"--model.lora.{switch}: {error}") from error
    made.base_model_name_or_path = config.name_or_path
    if not isinstance(made.target_modules, str):
        made.target_modules = sorted(made.target_modules)  # a set, which is saved in any order
    trained = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    if unknown := [name for name in trained if not ("lora_A." in name or "lora_B." in name)]:
        raise ValueError(f"--model.lora: {unknown[0]} is neither A nor B of a linear layer: leave such adapters out")
    for parameter in trained.values():
        parameter.data = parameter.data.float()


@torch.no_grad()
def fill_adapters(policy: PreTrainedModel, source: str | None) -> None:
    """Copy adapters from a PEFT folder or hub id into a model's own; without one, A is random and B is 0."""
    from peft.utils import load_peft_weights

    saved = None if source is None else load_peft_weights(source, device="cpu")
    generator = torch.Generator().manual_seed(torch.initial_seed())
    adapters = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    if unknown := (saved or {}).keys() - map(name_in_file, adapters):
        what = f"does not fit the model: its adapter_config.json says nothing of {min(unknown)}"
        raise ValueError(f"--model.lora.name_or_path {source} {what}")
    for name, parameter in adapters.items():
        whole = torch.zeros(parameter.shape)
        if saved is not None:
            whole = saved.get(name_in_file(name), whole[:0]).float()
            if whole.shape != parameter.shape:
                raise ValueError(f"--model.lora.name_or_path {source} does not fit the model: {name} is missing there")
        elif "lora_A" in name:
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)  # as PEFT's
        dist.assign(parameter, whole)


def save_adapters(policy: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the adapters and their base's dtype as a PEFT folder; ``weights`` replaces a sharded model's own."""
    weights = weights or policy.state_dict()
    saved = {name_in_file(name): weights[name] for name, weight in policy.named_parameters() if weight.requires_grad}
    base_dtype = next(str(weight.dtype) for weight in policy.parameters() if not weight.requires_grad)
    metadata = {"base_dtype": base_dtype.removeprefix("torch.")}  # one: several would come in any order
    save_file(saved, folder / "adapter_model.safetensors", metadata=metadata)
    policy.peft_config["default"].save_pretrained(folder)


@torch.no_grad()
def merged_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names, weights and buffers of a model, tied ones under each name; with adapters, those of the merged model."""
    for name, weight in policy.state_dict().items():
        if ".lora_" in name:
            continue
        owner, is_wrapped, kind = name.rpartition(".base_layer.")
        if is_wrapped and kind not in ("weight", "bias"):
            raise ValueError(f"--model.lora: {name} has adapters that cannot be merged")
        if is_wrapped and kind == "weight":
            weight = weight + policy.get_submodule(owner).get_delta_weight("default").to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def weights_of_files(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """`merged_weights`, gathered, under the names and in the shapes of files: the library fuses experts, say."""
    from transformers.core_model_loading import revert_weight_conversion  # takes a second to import

    for _, layer in groupby(merged_weights(policy), lambda named: re.match(r"(.*?\.\d+\.)?", named[0])[0]):
        weights = {name: dist.full_tensor(weight) for name, weight in layer}
        yield from revert_weight_conversion(policy, weights).items()


def name_in_file(name: str) -> str:
    """A parameter's name in a PEFT folder."""
    return "base_model.model." + name.replace(".default.", ".")
