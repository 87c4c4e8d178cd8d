"""Save a run's models: whole folders, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.files import write_json
from pspo.model.save import write_model
from pspo.run.folders import whole_folder


def save_model(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, validation: Any = None
) -> None:
    """Save a model, with its validation if there is one, replacing ``folder`` at once; RunFailed if it cannot."""
    weights = dist.full_state_dict(policy)

    def save() -> None:
        with whole_folder(folder) as temporary:
            write_model(policy, tokenizer, temporary, weights)
            if validation is not None:
                write_json(temporary / "validation.json", validation)

    dist.run_on_main(save)
