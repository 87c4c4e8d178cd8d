"""Merge adapters into their model: ``python -m pspo.export --model.name_or_path runs/mine/best --output_dir merged``.

Training saves adapters alone, as PEFT folders; a merged model is one that every library loads. It is merged in
--model.dtype, by default float32.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pspo.cli.parse import parse, user_errors
from pspo.config import LoraConfig, ModelConfig, require
from pspo.hub.save import save_pretrained
from pspo.model import load_policy, load_tokenizer


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
    from peft import PeftModel

    tokenizer = load_tokenizer(model)
    base = load_policy(replace(model, lora=LoraConfig()), torch.device("cpu"))
    merged = PeftModel.from_pretrained(base, model.lora.name_or_path).merge_and_unload()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".export-") as temporary:  # on the same disk
        save_pretrained(merged, Path(temporary, "merged"))
        tokenizer.save_pretrained(f"{temporary}/merged")
        Path(temporary, "merged").rename(output)
    print(f"merged: {output}")


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(ExportConfig, "pspo.export", args)
    with user_errors("pspo.export"):
        export(config)


if __name__ == "__main__":
    main()
