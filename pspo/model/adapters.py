"""Put LoRA adapters into a model, and read and write them as PEFT folders.

Adapters are never merged while they train: rollouts, log-probs and gradients run the same layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from pspo import distributed as dist
from pspo.config import ModelConfig
from pspo.files import named_damage, read_json

if TYPE_CHECKING:
    import peft

# Fields that adapter_config.json may set. The file is refused if another field differs from PEFT's default: only
# y = W x + b + s B A x is trained and merged exactly.
PLAIN_FIELDS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip
# Classes of PEFT's and models' layers that compute W x + b alone; other subclasses of nn.Linear may do more. Experts
# are left out: PEFT adds the adapters of experts to the weights before each pass, where bf16 rounds the adapters away.
LINEAR_CLASSES = {"Linear", "Conv1D", "FalconLinear"}


def has_adapters(policy: PreTrainedModel) -> bool:
    """True if the model has adapters."""
    return hasattr(policy, "peft_config")


class StartingAdapters:
    """Reference model for a `with` block: the policy with stored adapters, at first a copy of its own."""

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
        """Exchange the policy's adapters and the stored ones."""
        for adapter, stored in zip(self.adapters, self.start, strict=True):
            current = adapter.clone()
            adapter.copy_(stored)
            stored.copy_(current)
        torch.clear_autocast_cache()  # the cache holds bf16 copies of the adapters


def adapter_config(config: ModelConfig) -> peft.LoraConfig:
    """PEFT's configuration of a folder's adapters, or of new ones; ValueError if the folder's are not plain LoRA."""
    import peft

    lora = config.lora
    if lora.name_or_path is None:
        adapters = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.target_modules)
    else:
        default = peft.LoraConfig().to_dict()
        for name, value in read_json(Path(lora.name_or_path, "adapter_config.json")).items():
            is_start = (name, value) == ("init_lora_weights", "gaussian")  # of adapters that are trained by now
            if name not in PLAIN_FIELDS and value and value != default.get(name) and not is_start:
                raise ValueError(
                    f"--model.name_or_path {lora.name_or_path}: its adapter_config.json sets {name} to {value!r}; "
                    "adapters other than plain LoRA's are neither trained nor merged exactly: use adapters without it"
                )
        adapters = peft.LoraConfig.from_pretrained(lora.name_or_path)
    adapters.base_model_name_or_path = config.name_or_path
    adapters.revision = config.revision
    adapters.task_type = "CAUSAL_LM"
    adapters.lora_dropout = 0.0
    adapters.inference_mode = False
    return adapters


def add_adapters(policy: PreTrainedModel, adapters: peft.LoraConfig) -> None:
    """Freeze a model and put float32 adapters into it, without dropout; `fill_adapters` sets their values."""
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(adapters, policy, "default")
        check_layers(policy)
    except ValueError as error:
        raise ValueError(f"--model.lora.target_modules: {error}") from error
    adapters.target_parameters = None  # PEFT fills it in for mixtures; it has matched none
    if not isinstance(adapters.target_modules, str):
        adapters.target_modules = sorted(adapters.target_modules)  # a set, which is saved in any order
    for parameter in trained_parameters(policy).values():
        parameter.data = parameter.data.float()


def check_layers(policy: PreTrainedModel) -> None:
    """Raise ValueError if adapters cannot be merged: their layer is not plain linear, or shares its weight."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(weight) for _, weight in policy.named_parameters(remove_duplicate=False))
    for name, layer in policy.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        is_linear = {type(layer).__name__, type(layer.base_layer).__name__} <= LINEAR_CLASSES
        is_linear = is_linear and not name.endswith(".dt_proj")  # Jamba reads this layer's weight, and runs no adapters
        if not is_linear or uses[id(layer.base_layer.weight)] > 1:
            reason = "has the weight of another layer" if is_linear else "is no plain linear layer"
            fix = """name other layers, such as '["q_proj", "k_proj", "v_proj", "o_proj"]'"""
            raise ValueError(f"{name} {reason}: its adapters could not be merged; {fix}")


def trained_parameters(policy: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def fill_adapters(policy: PreTrainedModel, source: str | None) -> None:
    """Set a model's adapters to the values in a PEFT folder; without a folder, A is random, as in PEFT, and B is 0."""
    parameters = {name_in_file(name): parameter for name, parameter in trained_parameters(policy).items()}
    values = {name: torch.zeros(parameter.shape) for name, parameter in parameters.items()}
    if source is None:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        for name in values:
            if "lora_A" in name:
                nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
    else:
        file = Path(source, "adapter_model.safetensors")
        with named_damage(file):
            saved = {name: weight.float() for name, weight in load_file(file).items()}
        if {name: v.shape for name, v in saved.items()} != {name: v.shape for name, v in values.items()}:
            raise ValueError(f"--model.name_or_path {source}: its adapters are not those of its adapter_config.json")
        values = saved
    for name, parameter in parameters.items():
        dist.set_parameter(parameter, values[name])


def save_adapters(policy: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the adapters as a PEFT folder; ``weights`` are the gathered weights of a sharded model."""
    weights = weights or policy.state_dict()
    adapters = {name_in_file(name): weights[name] for name in trained_parameters(policy)}
    save_file(adapters, folder / "adapter_model.safetensors")
    policy.peft_config["default"].save_pretrained(folder)


@torch.no_grad()
def merged_weights(policy: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights and buffers, by name, of a model with its adapters merged: W + s B A."""
    for name, weight in policy.state_dict().items():
        if ".lora_" in name:
            continue
        layer, is_adapted, kind = name.rpartition(".base_layer.")
        if is_adapted and kind == "weight":
            change = policy.get_submodule(layer).get_delta_weight("default")
            weight = (weight.float() + change).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def name_in_file(name: str) -> str:
    """A parameter's name in a PEFT folder."""
    return "base_model.model." + name.replace(".default.", ".")
