"""``tokens.parquet``: what optimizer steps computed at tokens, a table with a row for each visit to a token.

It is a folder with a file per rollout, named by its last step, of the tokens of the rollout's first groups;
``pandas.read_parquet`` reads it as one table. Runs of pspo and of other trainers are written by this module.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

TOKENS = "tokens.parquet"
COLUMNS = {
    "step": "int32",  # the optimizer step, from 1
    "row": "int32",  # the completion's place among the rollout's lines of samples.jsonl, from 0
    "problem": "int32",  # index of the training problem
    "sample": "int32",  # of the group's completions
    "position": "int32",  # in the completion
    "token_id": "int32",
    "text": "string",  # that the token adds; empty inside a character of several tokens
    "logprob": "float32",  # of the policy, before the step
    "old_logprob": "float32",
    "sampler_logprob": "float32",  # missing if the rollout has none
    "reference_logprob": "float32",  # missing without --algorithm.beta
    "entropy": "float32",  # of the policy's distribution, in nats; under nucleus replay over the nucleus
    "advantage": "float32",
    "weight": "float32",  # d surrogate's loss of the token / d logprob, before aggregation
}
MOST_OPEN = 16  # tokens that are decoded together; a character has at most four, but a model may print half ones


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds to those before it; "" until a character is complete."""
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
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as parquet

    schema = pa.schema(list(COLUMNS.items()))
    tables = []
    for columns in parts:
        missing = pa.nulls(len(columns["row"]))
        tables.append(pa.table({name: columns.get(name, missing) for name in COLUMNS}).cast(schema))
    path = run / TOKENS / f"step-{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # which readers of the folder pass over
    parquet.write_table(pa.concat_tables(tables), temporary, compression="zstd")
    temporary.rename(path)
