"""Merge adapters into their model: ``pspo export --model.name_or_path runs/mine/best --output_dir merged``.

Training saves adapters alone, as PEFT folders; a merged model is one that every library loads. The adapters are added
in float32 to the weights beside which they were trained, of bfloat16, say; --model.dtype names another dtype for both.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from safetensors import safe_open

from pspo.cli.parse import parse, user_errors
from pspo.config import LoraConfig, ModelConfig, require
from pspo.model import load_policy, load_tokenizer
from pspo.model.adapters import merged_weights
from pspo.model.load import empty_policy
from pspo.model.save import save_pretrained
from pspo.run.folders import fsync_tree


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
    model, output = config.model.resolved(), Path(config.output_dir)
    found = model.lora.name_or_path is not None
    require(found, "model.name_or_path", "must be a PEFT folder: other models are whole", model.name_or_path)
    require(not output.exists(), "output_dir", "must not exist yet", config.output_dir)
    tokenizer, adapters = load_tokenizer(model), adapter_folder(model.lora.name_or_path)
    trained, cpu = base_dtype(adapters) if model.dtype == "auto" else model.dtype, torch.device("cpu")
    policy = load_policy(replace(model, dtype=trained), cpu).float()  # rounded as in the run; the sum is not
    merged = empty_policy(replace(model, lora=LoraConfig()), cpu).to_empty(device=cpu)
    merged.tie_weights()
    merged.load_state_dict(dict(merged_weights(policy)))
    merged.generation_config = policy.generation_config
    how = f"adapters merged into {trained} weights, saved in {str(merged.dtype).removeprefix('torch.')}"
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as temporary:  # on the same disk
        save_pretrained(merged, Path(temporary, "merged"))
        tokenizer.save_pretrained(f"{temporary}/merged")
        merged_card(adapters, how).save(f"{temporary}/merged/README.md")
        fsync_tree(Path(temporary, "merged"))
        Path(temporary, "merged").rename(output)
    print(f"{how}: {output}")


def adapter_folder(source: str) -> Path:
    """The local PEFT folder, or what is needed of one on the hub."""
    path = Path(source).expanduser()
    return path if path.is_dir() else Path(snapshot_download(source, allow_patterns=["*.safetensors", "README.md"]))


def base_dtype(adapters: Path) -> str:
    """The dtype of the weights beside which adapters were trained; float32 of adapters that do not say."""
    if not (file := adapters / "adapter_model.safetensors").is_file():
        return "float32"
    with safe_open(file, framework="pt") as weights:
        return (weights.metadata() or {}).get("base_dtype", "float32")


def merged_card(adapters: Path, how: str) -> ModelCard:
    """The adapters' card, if they have one, as the merged model's."""
    file = adapters / "README.md"
    card = ModelCard(file.read_text(encoding="utf-8") if file.is_file() else "---\n{}\n---\n# Merged model\n")
    card.data.library_name = "transformers"
    card.text += f"\n## Merged\n\n{how[0].upper()}{how[1:]}.\n"
    return card


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(ExportConfig, "pspo.run.export", args)
    with user_errors("pspo.run.export"):
        export(config)


if __name__ == "__main__":
    main()
