"""Put LoRA adapters into a model, and read and write them as PEFT folders.

PEFT puts its layers into the model, which stays the one that transformers made. Adapters are never merged while they
train: rollouts, log-probs and gradients run the same layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.config import LoraConfig, ModelConfig

if TYPE_CHECKING:
    import peft


def has_adapters(policy: PreTrainedModel) -> bool:
    """True if `add_adapters` has put adapters into the model."""
    return hasattr(policy, "peft_config")


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
        for adapter, stored in zip(self.adapters, self.start, strict=True):
            current = adapter.clone()
            adapter.copy_(stored)
            stored.copy_(current)
        torch.clear_autocast_cache()  # which holds bf16 copies of the adapters


def add_adapters(policy: PreTrainedModel, config: ModelConfig) -> None:
    """Freeze a model and put float32 adapters into it, without dropout; `fill_adapters` gives them values."""
    lora = config.lora
    try:
        adapters = peft_config(lora)
        with torch.random.fork_rng(devices=[]):
            policy.add_adapter(adapters)
    except (ValueError, AttributeError, LookupError, TypeError) as error:  # the others of a damaged file
        switch = "lora.target_modules" if lora.name_or_path is None else f"name_or_path {lora.name_or_path}"
        raise ValueError(f"--model.{switch}: {error}") from error
    adapters.base_model_name_or_path = config.name_or_path  # `add_adapter` writes the local path
    adapters.revision = config.revision
    if not isinstance(adapters.target_modules, str):
        adapters.target_modules = sorted(adapters.target_modules)  # a set, which is saved in any order
    for name, parameter in trained_parameters(policy).items():
        if "lora_A." not in name and "lora_B." not in name:
            raise ValueError(f"--model.lora: {name} is neither A nor B of a linear layer: leave such adapters out")
        parameter.data = parameter.data.float()


def peft_config(lora: LoraConfig) -> peft.LoraConfig:
    """PEFT's configuration of a folder's adapters, or of new ones."""
    import peft

    if lora.name_or_path is None:
        adapters = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules)
    else:
        adapters = peft.LoraConfig.from_pretrained(lora.name_or_path)
    adapters.task_type = "CAUSAL_LM"
    adapters.lora_dropout = 0.0
    adapters.inference_mode = False
    return adapters


def trained_parameters(policy: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def fill_adapters(policy: PreTrainedModel, source: str | None) -> None:
    """Set a model's adapters to those of a PEFT folder or hub id; without one, A is random and B is 0."""
    parameters = {name_in_file(name): parameter for name, parameter in trained_parameters(policy).items()}
    if source is None:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        for name, parameter in parameters.items():
            values = torch.zeros(parameter.shape)
            if "lora_A" in name:
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)  # as PEFT's
            dist.set_parameter(parameter, values)
        return
    from peft.utils import load_peft_weights

    saved = load_peft_weights(source, device="cpu")
    saved_shapes = {name: values.shape for name, values in saved.items()}
    if saved_shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise ValueError(f"--model.name_or_path {source}: its adapters are not those of its adapter_config.json")
    for name, parameter in parameters.items():
        dist.set_parameter(parameter, saved[name].float())


def save_adapters(policy: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the adapters and their base's dtype as a PEFT folder; ``weights`` are a sharded model's, gathered."""
    weights = weights or policy.state_dict()
    adapters = {name_in_file(name): weights[name] for name in trained_parameters(policy)}
    base_dtype = next(str(weight.dtype) for weight in policy.parameters() if not weight.requires_grad)
    metadata = {"base_dtype": base_dtype.removeprefix("torch.")}  # one entry: several would come in any order
    save_file(adapters, folder / "adapter_model.safetensors", metadata=metadata)
    policy.peft_config["default"].save_pretrained(folder)


@torch.no_grad()
def merged_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names, weights and buffers of a model with its adapters merged; ValueError for those of no layer's weight."""
    for name, weight in policy.state_dict().items():
        if ".lora_" in name:
            continue
        layer, is_wrapped, kind = name.rpartition(".base_layer.")
        if is_wrapped and kind not in ("weight", "bias"):
            raise ValueError(f"--model.lora: {name} has adapters that cannot be merged")
        if is_wrapped and kind == "weight":
            weight = weight + policy.get_submodule(layer).get_delta_weight("default").to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def name_in_file(name: str) -> str:
    """A parameter's name in a PEFT folder."""
    return "base_model.model." + name.replace(".default.", ".")
