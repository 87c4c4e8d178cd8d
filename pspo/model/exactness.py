"""Refuse a model whose log-probs depend on padding or on the batch: by numbers, at load; nothing else would show it.

There are architectures that ignore padding or positions, let the rows of a batch change each other, scale their logits
after the output embedding, or decode otherwise than they train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from pspo.model import autocast, is_out_of_memory, token_logprobs
from pspo.rollout import Prompts, Sampling, generate, inference, left_pad
from pspo.rollout.engine import EngineError, EngineSampler

TokenIds = Sequence[Sequence[int]]

HEAD = "does more to its logits than its output embedding and softcapping, which `pspo.model.logprobs.head_logits` does"
GROUPS = "gives a row other log-probs in a padded batch than alone"
DECODING = "decodes (--rollout.decoder {}) other tokens than its forward pass finds likeliest"


@torch.no_grad()
def check_exactness(
    policy: PreTrainedModel, tokenizer: Tokenizer, prompts: TokenIds, sampling: Sampling, autocast_mode: str = "none"
) -> None:
    """Compare log-probs in padded groups, and greedy decoding, with the model's own logits of each row alone.

    Rows are made of the tokens of ``prompts``. Raises ValueError for a model that differs by more than rounding, or
    that needs more to run than token ids. Flash attention takes 16 bits alone: only with it is there autocast.
    """
    name, flash = type(policy).__name__, "flash" in (policy.config._attn_implementation or "")
    try:
        with inference(policy), autocast(autocast_mode if flash else "none", policy.device):
            in_16_bits, by_check = differences(policy, tokenizer, prompts, sampling)
    except Exception as error:  # the library raises anything if a model needs more than token ids
        if is_out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ValueError(f"--model.name_or_path: {name} fails on a small batch: {reason}") from error
    for what, nats in by_check:
        size = (nats.mean() if in_16_bits else nats.max()).item()
        if not size <= (0.25 if in_16_bits else 1e-3):  # NaN is refused, too
            raise ValueError(f"--model.name_or_path: {name} {what}: off by {size:.2g} nats")


@torch.no_grad()
def check_engine(sampler: EngineSampler, prompts: Prompts) -> tuple[float, float]:
    """Mean and largest difference, in nats, of an engine's log-probs and the policy's of a few tokens that it draws.

    Raises ValueError if they are not of one model at one temperature.
    """
    sampling, policy, name = sampler.sampling, sampler.learner.policy, type(sampler.engine).__name__
    limits = {"max_completion_tokens": min(sampling.max_completion_tokens, 32), "min_completion_tokens": 0}
    few = replace(sampler, sampling=replace(sampling, logprobs=True, **limits))
    try:
        with torch.random.fork_rng(devices=[]):
            drawn = few.draw(prompts, group_size=2)
    except EngineError as error:
        raise ValueError(f"--rollout.engine {name} fails on a small batch: {error}") from error
    expected = token_logprobs(policy, *drawn.token_ids, sampling.temperature)
    error = (drawn.sampler_logprobs - expected)[drawn.completion_mask].abs()
    mean, largest = error.mean().item(), error.max().item()
    if not mean <= sampler.engine.tolerance:
        raise ValueError(
            f"--rollout.engine {name}: its log-probs differ from the policy's by {mean:.2g} nats on average, "
            f"{largest:.2g} at most: they are not of one model. Use --rollout.engine transformers for this model"
        )
    return mean, largest


def differences(
    policy: PreTrainedModel, tokenizer: Tokenizer, prompts: TokenIds, sampling: Sampling
) -> tuple[bool, list[tuple[str, Tensor]]]:
    """True for logits of 16 bits; and ways in which a model may differ from itself, with the nats at n tokens, (n,)."""
    text = list(islice(cycle(chain.from_iterable(prompts)), 52))
    short, long, alike = text[:3], text[3:27], text[3:23] + text[27:30]
    rows = [(short, text[30:38]), (short, text[38:41]), (long, text[41:46]), (alike, text[46:52])]
    alone, by_check = [logits_alone(policy, *row) for row in rows], []
    for what, part in ((HEAD, slice(2, 3)), (GROUPS, slice(3)), (GROUPS, slice(1, 3)), (GROUPS, slice(2, 4))):
        completions = [torch.tensor(completion) for _, completion in rows[part]]
        ids = pad_sequence(completions, batch_first=True, padding_value=-1)
        batch = *left_pad([prompt for prompt, _ in rows[part]], sampling.pad_id), ids.clamp(min=0), ids >= 0
        prompt_ids, prompt_mask, ids, mask = (tensor.to(policy.device) for tensor in batch)
        expected = torch.cat([pick_logprobs(*of_row) for of_row in zip(alone[part], completions, strict=True)])
        by_check.append((what, (token_logprobs(policy, prompt_ids, prompt_mask, ids, mask)[mask] - expected).abs()))
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)
    drawn = generate(policy, tokenizer, [short, long], greedy, group_size=2).completion_ids
    for prompt, completion in ((short, drawn[0]), (long, drawn[3])):
        logits = logits_alone(policy, prompt, completion.tolist())
        likeliest = pick_logprobs(logits, logits.argmax(dim=1))
        by_check.append((DECODING.format(sampling.decoder), likeliest - pick_logprobs(logits, completion)))
    return alone[0].dtype.itemsize == 2, by_check


def logits_alone(policy: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """(t, V) logits at a completion's t tokens, from the model's own forward pass of one row."""
    ids = torch.tensor([prompt + completion], device=policy.device)
    return policy(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def pick_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(t,) float32 log-probs of tokens (t,) by logits (t, V)."""
    return logits.float().log_softmax(dim=1).gather(1, tokens.to(logits.device)[:, None]).squeeze(1)
