"""Check at load that a model's log-probs do not depend on padding or on the batch; no later error would show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle, islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from pspo.model.device import autocast, is_out_of_memory
from pspo.model.logprobs import token_logprobs

TokenIds = Sequence[Sequence[int]]
Row = tuple[list[int], list[int]]  # token ids of a prompt and of its completion

HEAD = "does more to its logits than its output embedding and softcapping (`pspo.model.logprobs.head_logprobs`)"
GROUPS = "gives a row other log-probs in a padded batch than alone"
DECODING = "decodes (--rollout.decoder) other tokens than its forward pass finds likeliest"


@torch.no_grad()
def check_exactness(
    policy: PreTrainedModel, prompts: TokenIds, decode: Callable[[TokenIds], TokenIds], autocast_mode: str = "none"
) -> None:
    """Raise ValueError if a model's padded groups or greedy decoding differ from its own logits of each row alone.

    ``decode`` returns, for prompts, the first tokens of two adjacent greedy completions of each prompt.
    """
    name = type(policy).__name__
    needs_16_bits = "flash" in (policy.config._attn_implementation or "")
    try:
        with autocast(autocast_mode if needs_16_bits else "none", policy.device):
            differences = list(measure_differences(policy, prompts, decode))
    except Exception as error:  # the library raises anything if a model needs more than token ids
        if is_out_of_memory(error):
            raise
        raise ValueError(f"--model.name_or_path: {name} fails on a small batch: {error}") from error
    for fault, nats, dtype in differences:
        is_rough = dtype.itemsize == 2  # some tokens of bf16 logits are always far off
        size = (nats.mean() if is_rough else nats.max()).item()
        if not size <= (0.25 if is_rough else 1e-3):  # NaN is refused, too
            raise ValueError(f"--model.name_or_path: {name} {fault}: off by {size:.2g} nats")


def measure_differences(
    policy: PreTrainedModel, prompts: TokenIds, decode: Callable[[TokenIds], TokenIds]
) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """For each way in which a model may differ from itself: the fault, nats (n,) at n tokens, and the logits' dtype."""
    tokens = list(islice(cycle(chain.from_iterable(prompts)), 52))
    short = tokens[:3]
    long = tokens[3:27]
    related = long[:20] + tokens[27:30]  # shares its beginning with the long prompt
    rows = [(short, tokens[30:38]), (short, tokens[38:41]), (long, tokens[41:46]), (related, tokens[46:52])]
    cases = [(HEAD, rows[2:3]), (GROUPS, rows[:3]), (GROUPS, rows[1:3]), (GROUPS, rows[2:4])]
    for fault, batch in cases:
        logits = [single_row_logits(policy, row) for row in batch]
        expected = [pick_logprobs(logits[i], batch[i][1]) for i in range(len(batch))]
        error = padded_logprobs(policy, batch) - torch.cat(expected)
        yield fault, error.abs(), logits[0].dtype
    decoded = decode([short, long])
    for prompt, completion in ((short, list(decoded[0])), (long, list(decoded[3]))):
        logits = single_row_logits(policy, (prompt, completion))
        regret = pick_logprobs(logits, logits.argmax(dim=1).tolist()) - pick_logprobs(logits, completion)
        yield DECODING, regret, logits.dtype


def padded_logprobs(policy: PreTrainedModel, rows: list[Row]) -> Tensor:
    """Log-probs (n,) of the completions' tokens, row after row, by `token_logprobs` of one padded batch.

    A word's token pads: a pad token's embedding may be 0, which would hide that the model reads padding.
    """
    filler = rows[0][0][0]
    padded = []
    for part, side in ((0, "left"), (1, "right")):
        tokens = [torch.tensor(row[part]) for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_value=-1, padding_side=side)
        padded += [ids.where(ids >= 0, filler), ids >= 0]
    return token_logprobs(policy, *padded).cpu()[padded[-1]]


def single_row_logits(policy: PreTrainedModel, row: Row) -> Tensor:
    """(t, V) logits at a completion's t tokens, from the model's own forward pass of one row."""
    prompt, completion = row
    ids = torch.tensor([prompt + completion], device=policy.device)
    return policy(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def pick_logprobs(logits: Tensor, tokens: list[int]) -> Tensor:
    """(t,) float32 log-probs of t tokens, from logits (t, V)."""
    return logits.cpu().float().log_softmax(dim=1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
