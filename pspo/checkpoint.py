"""Save models so that a reader never meets half of one."""

import os
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str) -> None:
    """Write the model, its tokenizer and its card in `save_pretrained` form, replacing what ``folder`` held.

    The files are complete and on disk before they take the folder's name. A save that fails (disk full) raises
    OSError and leaves what was there.
    """
    temporary, replaced = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
    if replaced.exists() and not folder.exists():  # a save was cut off between the two renames below
        replaced.rename(folder)
    for leftover in (temporary, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    policy.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(card, encoding="utf-8")
    for path in (*temporary.rglob("*"), temporary):
        _sync(path)
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
