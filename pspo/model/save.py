"""Write models into a folder: whole or as adapters, with their tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pspo.model.adapters import has_adapters, save_adapters
from pspo.model.find import stop_token_ids


def write_model(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model or adapters, and tokenizer, into a folder; ``weights`` are a sharded model's, gathered."""
    if has_adapters(policy):
        save_adapters(policy, folder, weights)
    else:
        generation_config = policy.generation_config
        policy.generation_config = GenerationConfig()  # the library may refuse to save the model's own
        try:
            policy.save_pretrained(folder, state_dict=weights)
        finally:
            policy.generation_config = generation_config
        saved = copy.deepcopy(generation_config)
        stops = stop_token_ids(policy, tokenizer)
        if stops != [saved.eos_token_id]:
            saved.eos_token_id = stops  # a base model's does not have the end of a turn, where completions end
        saved.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    tokenizer.save_pretrained(folder)
