"""Save models: whole or as adapters, with tokenizer and model card, replacing what was there at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.files import write_json
from pspo.model.adapters import has_adapters, save_adapters
from pspo.run.folders import whole_folder

Weights = dict[str, Tensor]  # gathered, in place of a sharded model's own


def save_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, validation: Any = None
) -> None:
    """Save a model, with its validation if there is one, replacing ``folder`` at once; RunFailed if it cannot."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, card, weights)
            if validation is not None:
                write_json(temporary / "validation.json", validation)

    dist.run_on_main(save)


def write_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str, weights: Weights | None = None
) -> None:
    """Write model or adapters, tokenizer and card."""
    save = save_adapters if has_adapters(policy) else save_pretrained
    save(policy, folder, weights)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def save_pretrained(policy: PreTrainedModel, folder: Path, weights: Weights | None = None) -> None:
    """Save a model with its generation config as it was loaded, which the library itself may refuse to save."""
    loaded, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        policy.save_pretrained(folder, state_dict=weights)
    finally:
        policy.generation_config = loaded
    loaded.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
