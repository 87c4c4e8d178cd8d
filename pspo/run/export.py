"""Merge adapters into their model: ``pspo export --model.name_or_path runs/mine/best --output_dir merged``.

Training saves adapters alone, as PEFT folders; a merged model is one that every library loads. What can be merged are
LoRA's matrices A and B of linear layers, in any PEFT folder, of this trainer's or not. They are added in float32 to the
weights beside which they were trained, of bfloat16, say; --model.dtype names another dtype for both.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from safetensors import safe_open
from transformers import PreTrainedModel

from pspo.cli.parse import parse, user_errors
from pspo.config import LoraConfig, ModelConfig, require
from pspo.model import load_policy, load_tokenizer
from pspo.model.adapters import merged_weights
from pspo.model.load import empty_policy
from pspo.model.save import save_whole
from pspo.run.folders import fsync_tree

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ExportConfig:
    """Merge LoRA adapters into their model.

    Args:
        model: the adapters' PEFT folder, as --model.name_or_path
        output_dir: folder of the merged model
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    output_dir: str = "merged"


def export(config: ExportConfig) -> None:
    """Merge, save and print where; raises ValueError for a model without adapters, or adapters that do not fit it."""
    model = config.model.resolved()
    output = Path(config.output_dir)
    has_adapters = model.lora.name_or_path is not None
    require(has_adapters, "model.name_or_path", "must be a PEFT folder: other models are whole", model.name_or_path)
    require(not output.exists(), "output_dir", "must not exist yet", config.output_dir)
    adapters = adapter_folder(model.lora.name_or_path)
    tokenizer = load_tokenizer(config.model)
    dtype = base_dtype(adapters) if model.dtype == "auto" else model.dtype
    merged = merge(replace(model, dtype=dtype), model)
    saved_dtype = str(merged.dtype).removeprefix("torch.")
    summary = f"adapters merged into {dtype} weights, saved in {saved_dtype}"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as temporary:  # on the same disk
        folder = Path(temporary, "merged")
        save_whole(merged, folder)
        tokenizer.save_pretrained(folder)
        merged_card(adapters, summary).save(folder / "README.md")
        fsync_tree(folder)
        folder.rename(output)
    print(f"{summary}: {output}")


def merge(adapted: ModelConfig, merged: ModelConfig) -> PreTrainedModel:
    """The model of ``merged``, without adapters, with the weights of ``adapted`` and its adapters added in float32."""
    policy = load_policy(adapted, CPU).float()  # rounded as in the run; the sum is not
    model = empty_policy(replace(merged, lora=LoraConfig()), CPU).to_empty(device=CPU)
    model.tie_weights()
    model.load_state_dict(dict(merged_weights(policy)))
    model.generation_config = policy.generation_config
    return model


def adapter_folder(source: str) -> Path:
    """The local PEFT folder, or what is needed of one on the hub."""
    path = Path(source).expanduser()
    return path if path.is_dir() else Path(snapshot_download(source, allow_patterns=["*.safetensors", "README.md"]))


def base_dtype(adapters: Path) -> str:
    """The dtype of the weights beside which adapters were trained; float32 of adapters that do not say."""
    file = adapters / "adapter_model.safetensors"
    if not file.is_file():
        return "float32"
    with safe_open(file, framework="pt") as weights:
        return (weights.metadata() or {}).get("base_dtype", "float32")


def merged_card(adapters: Path, summary: str) -> ModelCard:
    """The adapters' card, if they have one, as the merged model's."""
    file = adapters / "README.md"
    card = ModelCard(file.read_text(encoding="utf-8") if file.is_file() else "---\n{}\n---\n# Merged model\n")
    card.data.library_name = "transformers"
    card.text += f"\n## Merged\n\n{summary[0].upper()}{summary[1:]}.\n"
    return card


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(ExportConfig, "pspo.run.export", args)
    with user_errors("pspo.run.export"):
        export(config)


if __name__ == "__main__":
    main()
