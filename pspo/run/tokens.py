"""``tokens.parquet``: what every optimizer step computed at the tokens of a rollout's first groups.

A folder with a file per rollout, named by its last step; ``pandas.read_parquet`` reads it as one table.
"""

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

FOLDER = "tokens.parquet"
COLUMNS = {
    "step": "int32",  # the optimizer step, from 1
    "problem": "int32",  # index of the training problem
    "sample": "int32",  # of the group's completions
    "position": "int32",  # in the completion
    "token_id": "int32",
    "text": "string",  # that the token adds; empty inside a character of several tokens
    "logprob": "float32",  # of the policy, before the step
    "old_logprob": "float32",
    "sampler_logprob": "float32",  # missing if the rollout has none, as the next
    "reference_logprob": "float32",
    "entropy": "float32",  # of the policy's distribution, in nats; under nucleus replay over the nucleus
    "advantage": "float32",
    "weight": "float32",  # d surrogate's loss of the token / d logprob, before aggregation
}


class TokenRecord:
    """Collects what optimizer steps compute at the tokens of this rank's first ``rows`` rows of a rollout."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.visits: list[dict[str, np.ndarray]] = []

    def add(self, step: int, values: dict[str, Tensor]) -> None:
        """Add a step's values (n,) at tokens, by column of `COLUMNS`, and ``row`` and ``position`` of these."""
        is_recorded = values["row"] < self.rows
        visit = {name: value[is_recorded].cpu().numpy() for name, value in values.items()}
        self.visits.append(visit | {"step": np.full(len(visit["row"]), step)})

    def take(self, tokenizer: PreTrainedTokenizerBase, experience: Any, group_size: int) -> dict[str, Any]:
        """Columns of the visits to the tokens of a `pspo.rollout.Experience`; they are then forgotten."""
        columns = {name: np.concatenate([visit[name] for visit in self.visits]) for name in self.visits[0]}
        self.visits = []
        rows = columns["row"].astype(int)
        positions = columns["position"].astype(int)
        ids = experience.rollout.completion_ids[: self.rows].cpu().numpy()
        texts = {}
        for row in set(rows):
            length = positions[rows == row].max() + 1
            texts[row] = token_texts(tokenizer, ids[row, :length].tolist())
        columns["problem"] = np.array(experience.prompts)[rows // group_size]
        columns["sample"] = rows % group_size
        columns["token_id"] = ids[rows, positions]
        columns["text"] = [texts[row][position] for row, position in zip(rows, positions, strict=True)]
        return columns


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds to those before it; "" until a character is complete."""
    texts = []
    context = 0  # first token that is decoded with the next ones: some tokenizers set a space between two
    shown = 0  # tokens whose text is complete
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.batch_decode([ids[context:shown], ids[context:end]])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
        else:
            texts.append(now[len(before) :])
            context = shown
            shown = end
    return texts


def write_tokens(run: Path, step: int, parts: list[dict[str, Any]]) -> None:
    """Write the columns of all ranks for the rollout that ends with this step."""
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as parquet

    schema = pa.schema(list(COLUMNS.items()))
    tables = []
    for columns in parts:
        missing = pa.nulls(len(columns["row"]))
        tables.append(pa.table({name: columns.get(name, missing) for name in COLUMNS}).cast(schema))
    path = run / FOLDER / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # which readers of the folder pass over
    parquet.write_table(pa.concat_tables(tables), temporary, compression="zstd")
    temporary.rename(path)
