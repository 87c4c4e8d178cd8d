"""``tokens.parquet``: what optimizer steps computed at tokens, a table with a row for each visit to a token.

The table is a folder with a file per rollout, named by the rollout's last step, with the tokens of its first groups.
``pandas.read_parquet`` reads the folder as one table. The module writes it for runs of pspo and of other trainers.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

TOKENS = "tokens.parquet"
COLUMNS = {
    "step": "int32",  # the optimizer step, from 1
    "row": "int32",  # the completion's place among the rollout's lines of samples.jsonl, from 0
    "problem": "int32",  # index of the training problem
    "sample": "int32",  # number among the group's completions, from 0
    "position": "int32",  # of the token in the completion
    "token_id": "int32",
    "text": "string",  # text that the token adds; empty inside a character of several tokens
    "logprob": "float32",  # the policy's, before the step
    "old_logprob": "float32",
    "sampler_logprob": "float32",  # missing if the rollout has none
    "reference_logprob": "float32",  # missing without a reference model
    "entropy": "float32",  # of the policy's distribution, in nats; over the nucleus under nucleus replay
    "advantage": "float32",
    "weight": "float32",  # d (the surrogate's loss at the token) / d logprob, before aggregation
}
MOST_OPEN = 16  # tokens decoded together; a character has at most four, but a model may print incomplete ones


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds to the tokens before; "" until a character is complete."""
    texts = []
    context = 0  # first token that is decoded with the next ones: some tokenizers set a space between two
    shown = 0  # tokens whose text is complete
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.batch_decode([ids[context:shown], ids[context:end]])
        is_open = now.endswith("\N{REPLACEMENT CHARACTER}") and end - shown < MOST_OPEN
        if is_open and end < len(ids):
            texts.append("")
        else:
            texts.append(now[len(before) :])
            context = shown
            shown = end
    return texts


def write_tokens(run: Path, step: int, parts: list[dict[str, Any]]) -> None:
    """Write the file of the rollout that ends with this step, from the columns (n,) that each process computed."""
    import pandas as pd  # slow to import
    import pyarrow as pa

    table = pd.concat(map(pd.DataFrame, parts)).reindex(columns=list(COLUMNS))
    path = run / TOKENS / f"step-{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # readers of the folder ignore hidden files
    table.to_parquet(temporary, index=False, schema=pa.schema(list(COLUMNS.items())), compression="zstd")
    temporary.rename(path)
