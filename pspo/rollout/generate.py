"""Sample completions; every field that shapes the distribution is explicit in `Sampling`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from pspo.config import Decoder, RolloutConfig
from pspo.model import attends_fully, has_plain_cache, pad_token_id, stop_token_ids
from pspo.model.chat import completion_texts
from pspo.model.find import token_ids
from pspo.rollout.decode import Completions, decode
from pspo.rollout.types import Rollout, Sampling, join


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists to prompt_ids (B, P) int64 and prompt_mask (B, P) bool."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return ids, torch.arange(width) >= width - lengths[:, None]


def make_sampling(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    logprobs: bool = False,
) -> Sampling:
    """Sampling as --rollout says, with the model's own padding, and its stop tokens unless they are named.

    Raises ValueError if the decoder does not support the model.
    """
    check_decoder(model, config.decoder)
    if config.stop_tokens is None:
        stop_ids = stop_token_ids(model, tokenizer)
    else:
        stop_ids = token_ids(tokenizer, config.stop_tokens)
    return Sampling(
        stop_ids=stop_ids,
        pad_id=pad_token_id(model, tokenizer),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_completion_tokens=config.max_completion_tokens,
        stop_strings=config.stop_strings,
        max_rows=config.max_rows,
        decoder=config.decoder,
        logprobs=logprobs,
    )


def check_decoder(model: transformers.PreTrainedModel, decoder: Decoder) -> None:
    """Raise ValueError if the decoder does not support the model."""
    if decoder != "hf" and not has_plain_cache(model):
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
    prompts = list(prompts)
    prompts_at_a_time = max(1, sampling.max_rows // group_size)
    parts = []
    with inference(model):
        for start in range(0, len(prompts), prompts_at_a_time):
            prompt_ids, prompt_mask = left_pad(prompts[start : start + prompts_at_a_time], sampling.pad_id)
            prompt_ids = prompt_ids.to(model.device)  # (N, P)
            prompt_mask = prompt_mask.to(model.device)
            if sampling.decoder == "hf":
                completions = generate_by_library(model, tokenizer, prompt_ids, prompt_mask, sampling, group_size)
            else:
                stop_strings = None
                if sampling.stop_strings:
                    stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings))
                completions = decode(model, prompt_ids, prompt_mask, sampling, group_size, stop_strings)
            parts.append(make_rollout(tokenizer, prompt_ids, prompt_mask, completions, sampling))
    return parts[0] if len(parts) == 1 else join(parts, sampling.pad_id)


def make_rollout(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Completions,
    sampling: Sampling,
) -> Rollout:
    """Make a rollout of prompts (N, P) and the completions (N * group_size, T) drawn for them.

    Masks come from lengths, never from token values: a pad token may equal a stop token.
    """
    device = prompt_ids.device
    rows, width = completions.ids.shape
    group_size = rows // len(prompt_ids)
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.repeat_interleave(group_size, dim=0)
    completion_ids = completions.ids.to(device)
    is_stop = torch.isin(completion_ids, torch.tensor(sampling.stop_ids, dtype=torch.long, device=device))
    if sampling.stop_strings:
        ends = StopStringCriteria(tokenizer, list(sampling.stop_strings))
        is_stop |= torch.stack([ends(completion_ids[:, : t + 1], None) for t in range(width)], dim=1)
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    completion_mask = torch.arange(width, device=device) < lengths[:, None]
    tokens = [row[:length] for row, length in zip(completion_ids.tolist(), lengths.tolist(), strict=True)]
    texts = completion_texts(tokenizer, prompt_ids.tolist(), tokens)
    return Rollout(
        prompt_ids,
        prompt_mask,
        completion_ids,
        completion_mask,
        terminated,
        texts,
        sampler_logprobs=completions.logprobs.to(device).where(completion_mask, 0.0) if sampling.logprobs else None,
        nucleus=completions.nucleus,
    )


def decode_greedily(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The first four tokens of two greedy completions of each prompt, whatever would end them."""
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)
    return generate(model, tokenizer, prompts, greedy, group_size=2).completion_ids.tolist()


@contextlib.contextmanager
def inference(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode: transformers refuses a KV cache in training with gradient checkpointing."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# ---------------------------------------------------------------- the reference


def generate_by_library(
    model: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    group_size: int,
) -> Completions:
    """Complete prompts (N, P) by transformers' own `generate`.

    The model's generation config is hidden meanwhile: transformers would fill unset fields from it.
    """
    if sampling.logprobs or sampling.nucleus:
        raise ValueError("logprobs and nucleus are unavailable with decoder=hf")
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.long().repeat_interleave(group_size, dim=0)
    criteria = StoppingCriteriaList()
    if sampling.stop_strings:
        criteria.append(CompletionStopStrings(tokenizer, sampling.stop_strings, prompt_ids.shape[1]))
    hidden_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        rows = model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=generation_config(sampling),
            stopping_criteria=criteria,
        )
    finally:
        model.generation_config = hidden_config
    return Completions(rows[:, prompt_ids.shape[1] :])


def generation_config(sampling: Sampling) -> GenerationConfig:
    """`Sampling` in transformers' terms."""
    greedy = sampling.temperature == 0
    return GenerationConfig(
        do_sample=not greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=50 if greedy else sampling.top_k,  # 50 is the library's default: any other draws a warning when greedy
        repetition_penalty=1.0,
        num_beams=1,
        max_new_tokens=sampling.max_completion_tokens,
        min_new_tokens=0,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.pad_id,
        use_cache=True,
    )


class CompletionStopStrings(StopStringCriteria):
    """Finds rows (b, P + t) whose completion ends with a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], prompt_length: int):
        super().__init__(tokenizer, list(strings))
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs) -> Tensor:
        return super().__call__(input_ids[:, self.prompt_length :], scores, **kwargs)
