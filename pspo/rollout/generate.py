"""Sample completions with Hugging Face `generate`; every field that shapes the distribution is explicit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from pspo.config import Decoder, RolloutConfig
from pspo.model import attends_fully, pad_token_id, shares_prompts, stop_token_ids
from pspo.model.chat import completion_texts
from pspo.model.find import token_ids
from pspo.rollout.decode import decode
from pspo.rollout.types import Nucleus, Rollout, Sampling, join, to_device


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists to prompt_ids (B, P) int64 and prompt_mask (B, P) bool."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


def make_sampling(
    model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig, **more: bool
) -> Sampling:
    """Sampling as the switches and ``more`` fields say, with the model's own padding, and stop tokens unless named."""
    shared = {part.name for part in fields(Sampling)} & {part.name for part in fields(config)}
    values = {name: getattr(config, name) for name in shared}
    named = config.stop_tokens
    stop_ids = stop_token_ids(model, tokenizer) if named is None else token_ids(tokenizer, named)
    return Sampling(stop_ids=stop_ids, pad_id=pad_token_id(model, tokenizer), **values | more)


def check_decoder(model: transformers.PreTrainedModel, decoder: Decoder) -> None:
    """Raise ValueError if the decoder does not support the model."""
    if decoder != "hf" and not shares_prompts(model):
        raise ValueError(f"--rollout.decoder {decoder} does not support {type(model).__name__}'s cache; choose hf")
    if decoder == "graphs" and not (attends_fully(model) and model.config._attn_implementation == "sdpa"):
        has = f"{type(model).__name__}'s ({model.config._attn_implementation}); choose pspo"
        raise ValueError(f"--rollout.decoder graphs needs sdpa attention and full attention in every layer, not {has}")


@torch.no_grad()
def generate(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int = 1,
) -> Rollout:
    """Draw ``group_size`` completions of each encoded prompt with torch's global generator.

    At most `Sampling.max_rows` rows are decoded at a time.
    """
    check_decoder(model, sampling.decoder)
    if sampling.library and (sampling.logprobs or sampling.nucleus):
        raise ValueError("logprobs and nucleus are unavailable with decoder=hf or a repetition_penalty")
    prompts, at_a_time = list(prompts), max(1, sampling.max_rows // group_size)
    parts = []
    with inference(model):
        for start in range(0, len(prompts), at_a_time):
            padded = left_pad(prompts[start : start + at_a_time], sampling.pad_id)
            prompt_ids, prompt_mask = (to_device(part, model.device) for part in padded)  # (N, P)
            drawn = complete(model, tokenizer, prompt_ids, prompt_mask, sampling, group_size)
            parts.append(as_rollout(tokenizer, prompt_ids, prompt_mask, *drawn, sampling))
    return join(parts, sampling.pad_id)


def decode_greedily(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The first four tokens of two greedy completions of each prompt, whatever would end them."""
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)
    return generate(model, tokenizer, prompts, greedy, group_size=2).completion_ids.tolist()


def as_rollout(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    logprobs: Tensor | None,
    nucleus: Nucleus | None,
    sampling: Sampling,
) -> Rollout:
    """Make a rollout of prompts (N, P) and the completions (N * group_size, T) drawn for them.

    Masks come from lengths, never from token values: a pad token may equal a stop token.
    """
    device, (rows, width) = prompt_ids.device, completion_ids.shape
    group_size = rows // len(prompt_ids)
    prompt_ids, prompt_mask = (part.repeat_interleave(group_size, dim=0) for part in (prompt_ids, prompt_mask))
    completion_ids = completion_ids.to(device)
    is_stop = torch.isin(completion_ids, torch.tensor(sampling.stop_ids, dtype=torch.long, device=device))
    if sampling.stop_strings:
        ends = StopStrings(tokenizer, sampling.stop_strings)
        is_stop |= torch.stack([ends(completion_ids[:, : t + 1]) for t in range(width)], dim=1)
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    completion_mask = torch.arange(width, device=device) < lengths[:, None]
    tokens = [row[:length] for row, length in zip(completion_ids.tolist(), lengths.tolist(), strict=True)]
    texts = completion_texts(tokenizer, prompt_ids.tolist(), tokens)
    logprobs = logprobs.to(device).where(completion_mask, 0.0) if sampling.logprobs else None
    return Rollout(prompt_ids, prompt_mask, completion_ids, completion_mask, terminated, texts, logprobs, nucleus)


def complete(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    group_size: int,
) -> tuple[Tensor, Tensor | None, Nucleus | None]:
    """Complete prompts (N, P) by transformers.

    Returns completions (N * group_size, T), padded after their stop token, and on request their log-probs and nucleus.
    """
    mask, strings = prompt_mask.long(), sampling.stop_strings
    stops = StoppingCriteriaList([StopStrings(tokenizer, strings, prompt_ids.shape[1])] if strings else [])
    how = {"generation_config": sampling.generation_config(), "stopping_criteria": stops}
    if not sampling.library:
        loop = partial(decode, prompt_mask=mask, sampling=sampling, group_size=group_size)
        return model.generate(prompt_ids, attention_mask=mask, custom_generate=loop, **how)
    ids, mask = (part.repeat_interleave(group_size, dim=0) for part in (prompt_ids, mask))
    rows = model.generate(ids, attention_mask=mask, synced_gpus=sampling.synced, **how)
    return rows[:, ids.shape[1] :], None, None


class StopStrings(StopStringCriteria):
    """The library's search for stop strings at the end of rows (b, t), after the prompt: (b,) bool."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_length: int = 0):
        super().__init__(tokenizer, list(strings))
        self.prompt_length = prompt_length

    def __call__(self, rows: Tensor, scores: Tensor | None = None, **_) -> Tensor:
        return super().__call__(rows[:, self.prompt_length :], scores)


@contextlib.contextmanager
def inference(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Hide the model's generation config and training mode, and restore them.

    transformers fills unset fields from the model's generation config, and refuses a KV cache in training mode with
    gradient checkpointing.
    """
    config, training = model.generation_config, model.training
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.generation_config = config
        model.train(training)
