"""Save models: whole or as adapters, with tokenizer and model card, replacing what was there at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.hub.adapters import has_adapters, save_adapters
from pspo.records.files import write_json
from pspo.records.folders import whole_folder


def save_model(
    policy: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    validation: dict[str, Any] | None = None,
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
    policy: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model or adapters, tokenizer and card; ``weights`` replaces a sharded model's own."""
    if has_adapters(policy):
        save_adapters(policy, folder, weights)
    else:
        save_pretrained(policy, folder, weights)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def save_pretrained(
    policy: transformers.PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Save a model with its generation config as it was loaded, which the library itself may refuse to save."""
    loaded, policy.generation_config = policy.generation_config, GenerationConfig()
    try:
        policy.save_pretrained(folder, state_dict=weights)
    finally:
        policy.generation_config = loaded
    loaded.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
