"""Merge adapters into their model: ``pspo export --model.name_or_path runs/mine/best --output_dir merged``.

The product of LoRA's matrices A and B, for linear layers of any PEFT folder, is added to weights in float32. The base
model is loaded, and the merged model saved, in --model.dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pspo.cli.parse import parse
from pspo.config import LoraConfig, ModelConfig, switch
from pspo.endings import exit_codes, user_errors
from pspo.files import whole_folder
from pspo.model import load_policy, load_tokenizer
from pspo.model.adapters import merged_weights
from pspo.model.find import resolve_adapters
from pspo.model.load import write_model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExportConfig:
    """Merge LoRA adapters into their model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    output_dir: str = switch("merged", "folder of the merged model")


def export(config: ExportConfig) -> None:
    """Merge and save; raises ValueError for a model without adapters, or adapters that do not fit it."""
    model = resolve_adapters(config.model)
    output = Path(config.output_dir).expanduser()
    tokenizer = load_tokenizer(config.model)  # raises for a folder that is not there
    if model.lora.name_or_path is None:
        raise ValueError("--model.name_or_path must be a PEFT folder: other models have no adapters to merge")
    if output.exists():
        raise ValueError(f"--output_dir {output} must not exist yet")
    merged = load_policy(replace(model, lora=LoraConfig()), CPU)
    merged.load_state_dict(dict(merged_weights(load_policy(model, CPU).float())))
    with whole_folder(output) as folder:
        write_model(merged, tokenizer, folder)
    print(f"adapters merged in float32, saved in {merged.dtype}: {output}")


@exit_codes("pspo export")
def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(ExportConfig, "pspo export", args)
    with user_errors("pspo export"):
        export(config)
