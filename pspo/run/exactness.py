"""Refuse a model whose log-probs are not its own: by numbers, at load, because nothing else would show it.

There are architectures that ignore padding or positions, let the rows of a batch change each other, scale their logits
after the output embedding, or decode otherwise than they train.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pspo.model import is_out_of_memory, token_logprobs
from pspo.rollout import Sampling, generate, inference, left_pad

HEAD = "does more to its logits than its output embedding and softcapping, which `pspo.model.logprobs.head_logits` does"
GROUPS = "gives a row other log-probs in a padded batch than alone"
DECODING = "decodes (--rollout.decoder {}) other tokens than its forward pass finds likeliest"


@torch.no_grad()
def check_exactness(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> None:
    """Compare log-probs in padded groups, and greedy decoding, with the model's own logits of each row alone.

    Rows are made of the tokens of ``prompts``. Raises ValueError for a model that differs by more than rounding, or
    that needs more to run than token ids.
    """
    name = type(policy).__name__
    try:
        with inference(policy):
            found = list(differences(policy, tokenizer, prompts, sampling))
    except Exception as error:  # the library raises anything if a model needs more than token ids
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ValueError(f"--model.name_or_path: {name} fails on a small batch: {reason}") from error
    for what, by_token in found:
        in_16_bits = by_token.dtype.itemsize == 2
        size = (by_token.mean() if in_16_bits else by_token.max()).item()
        if not size <= (0.25 if in_16_bits else 1e-3):  # NaN is refused, too
            raise ValueError(f"--model.name_or_path: {name} {what}: off by {size:.2g} nats")


@torch.no_grad()
def check_engine(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[float, float]:
    """Mean and largest difference, in nats, of an engine's log-probs and the policy's of tokens that the engine draws.

    Raises ValueError if they are not of one model.
    """
    sampling.served_by.push(policy, 0)
    with torch.random.fork_rng(devices=[]):
        drawn = generate(policy, tokenizer, prompts, replace(sampling, logprobs=True, play=None), group_size=2)
    expected = token_logprobs(policy, *drawn.token_ids, sampling.temperature)
    error = (drawn.sampler_logprobs - expected)[drawn.completion_mask].abs()
    mean, largest = error.mean().item(), error.max().item()
    if not mean <= 0.1:
        what = f"{mean:.2g} nats on average, {largest:.2g} at most"
        raise ValueError(
            f"--rollout.engine: its log-probs differ from the policy's by {what}: they are not of one model. "
            "Use --rollout.engine transformers for this model"
        )
    return mean, largest


def differences(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> Iterator[tuple[str, Tensor]]:
    """Ways in which a model may differ from itself, and by how much at some tokens: (n,) nats, of its logits' dtype."""
    text = list(islice(cycle(chain.from_iterable(prompts)), 52))
    short, long, alike = text[:3], text[3:27], text[3:23] + text[27:30]
    rows = [(short, text[30:38]), (short, text[38:41]), (long, text[41:46]), (alike, text[46:52])]
    alone = [logprobs_alone(policy, *row) for row in rows]  # of (t, V)
    for what, part in ((HEAD, slice(2, 3)), (GROUPS, slice(3)), (GROUPS, slice(1, 3)), (GROUPS, slice(2, 4))):
        prompt_ids, prompt_mask = left_pad([prompt for prompt, _ in rows[part]], sampling.pad_id)
        completions = [torch.tensor(completion) for _, completion in rows[part]]
        ids, lengths = pad_sequence(completions, batch_first=True), torch.tensor([len(row) for row in completions])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        inputs = [tensor.to(policy.device) for tensor in (prompt_ids, prompt_mask, ids, mask)]
        expected = torch.cat([
            of_row.gather(1, row.to(of_row.device)[:, None]).squeeze(1)
            for of_row, row in zip(alone[part], completions, strict=True)
        ])  # fmt: skip
        yield what, (token_logprobs(policy, *inputs)[inputs[3]] - expected).abs().to(expected.dtype)
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), play=None, max_completion_tokens=4)
    drawn = generate(policy, tokenizer, [short, long], greedy, group_size=2).completion_ids
    for prompt, completion in ((short, drawn[0]), (long, drawn[3])):
        of_row = logprobs_alone(policy, prompt, completion.tolist())
        yield DECODING.format(sampling.decoder), of_row.amax(dim=1) - of_row.gather(1, completion[:, None]).squeeze(1)


def logprobs_alone(policy: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """(t, V) log-probs of all tokens at a completion's t, from the model's own forward pass of one row."""
    ids = torch.tensor([prompt + completion], device=policy.device)
    logits = policy(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(dim=1).to(logits.dtype)
