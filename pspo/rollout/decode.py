"""The decoding loop: prefill -> sample -> forward pass -> sample -> forward pass -> ... -> sample.

Each prompt is prefilled once for its group. Keys and values go into buffers that are allocated once. Nuclei are sampled
without sorting the vocabulary. Finished rows leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import DynamicLayer

from pspo.model import CACHE_ARGUMENT, share_prefix, takes_visible_columns, to_device, to_model
from pspo.rollout.drawing import NucleusRecorder, draw_tokens
from pspo.rollout.types import Completions, Nucleus, Padded, Sampling

GPU_CHECK_EVERY = 16  # tokens between checks for finished rows: each makes the CPU wait for the GPU
MIN_FINISHED = 0.25  # from this share of finished rows on, the cache is copied without them


class Prefill(NamedTuple):
    """Result of a pass over N prompts (N, P)."""

    logits: Tensor  # (N, V), of the next token
    positions: Tensor  # (N, 1), of the last tokens
    mask: Tensor  # (N, P), of the columns with keys and values
    cache: DynamicCache


def prefill(model: PreTrainedModel, prompts: Padded) -> Prefill:
    """Pass prompts (N, P) through the model once; on a CPU, their common beginning once for all of them."""
    positions = (prompts.mask.long().cumsum(dim=1) - 1).clamp(min=0)
    pass_cache, mask, L = share_prefix(model, prompts.ids, prompts.mask, prompts.mask.long(), positions)
    ids, visible, positions = to_model(model, prompts.ids[:, L:], mask, positions[:, L:])
    logits = next_logits(model, pass_cache, ids, visible, positions)
    if torch.is_autocast_enabled(model.device.type):  # attention would cast all keys and values at every step
        dtype = torch.get_autocast_dtype(model.device.type)
        for layer in pass_cache.filled:
            layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
    cache = DynamicCache(config=model.config)
    cache.layers = pass_cache.filled
    return Prefill(logits, positions[:, -1:], mask, cache)


def next_logits(model: Callable[..., Any], cache: DynamicCache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """(b, V) logits of the token after ids (b, t), whose keys and values are added to the cache."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
    # 1 would take a strided view of the states: on a CPU, torch copies the bf16 output embedding for each of its rows.
    last = 1 if ids.shape[1] == 1 else ids.new_full((1,), -1)
    return model(**inputs, use_cache=True, logits_to_keep=last).logits[:, -1]


class BufferedLayer(DynamicLayer):
    """A prefilled full-attention cache layer, repeated for each row of a group, that writes into preallocated buffers.

    The buffers are (rows, heads, P + T, dim); `keys` and `values` are views of the filled part.
    """

    def __init__(self, layer: DynamicLayer, group_size: int, max_completion_tokens: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.buffers = []
        for states in (layer.keys, layer.values):
            self.buffers.append(pad(states.repeat_interleave(group_size, dim=0), (0, 0, 0, max_completion_tokens)))
        self.keys, self.values = (buffer[:, :, : layer.get_seq_length()] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, : self.get_seq_length()] for buffer in self.buffers)


class DecodeState:
    """All B = N * group_size completions so far, and the b rows that are still in the batch."""

    def __init__(self, model: PreTrainedModel, prompts: Padded, sampling: Sampling, group_size: int) -> None:
        """Prefill the prompts, and repeat the results of each prompt for the rows of its group."""
        limit = sampling.max_completion_tokens
        logits, positions, mask, self.cache = prefill(model, prompts)
        for i, layer in enumerate(self.cache.layers):
            if type(layer) is DynamicLayer:
                self.cache.layers[i] = BufferedLayer(layer, group_size, limit)
            else:
                layer.batch_repeat_interleave(group_size)
        mask = to_device(pad(mask, (0, limit), value=1), model.device).repeat_interleave(group_size, dim=0)
        if takes_visible_columns(model):
            mask = mask.bool()[:, None, None]  # the form that attention needs, made once
        self.mask = mask  # (b, P + T), or (b, 1, 1, P + T) bool, of all columns
        self.logits = logits.repeat_interleave(group_size, dim=0)  # (b, V), of the next token
        self.positions = positions.repeat_interleave(group_size, dim=0)  # (b, 1) int64, of the last token
        self.live = torch.arange(len(mask), device=model.device)  # (b,) indices of the rows in the batch
        self.ended = torch.zeros_like(self.live, dtype=torch.bool)  # (b,), true where the row's completion has ended
        self.tokens = self.live  # (b,) int64, drawn last
        self.length = 0  # tokens drawn so far in every live row
        self.completions = self.live.new_full((len(mask), limit), sampling.pad_id)  # (B, T)

    def sample(self, sampling: Sampling) -> Tensor:
        """Draw the next token of each row, padding where the row has ended; returns the scores (b, V)."""
        tokens, scores = draw_tokens(self.logits, sampling)
        self.tokens = tokens.where(~self.ended, sampling.pad_id)
        self.completions[self.live, self.length] = self.tokens
        self.length += 1
        return scores


class RecordingState(DecodeState):
    """Records the tokens' log-probs and nuclei, as ``sampling`` asks."""

    def __init__(self, model: PreTrainedModel, prompts: Padded, sampling: Sampling, group_size: int) -> None:
        super().__init__(model, prompts, sampling, group_size)
        self.logprobs = torch.zeros_like(self.completions, dtype=torch.float32) if sampling.logprobs else None
        self.nuclei = NucleusRecorder(self.completions) if sampling.nucleus else None

    def sample(self, sampling: Sampling) -> Tensor:
        if self.nuclei is not None:
            self.logits = self.nuclei.cut(self.logits, sampling, self.live, self.ended, self.length)
            sampling = replace(sampling, top_k=0, top_p=1.0)
        scores = super().sample(sampling)
        if self.logprobs is not None:
            self.logprobs[self.live, self.length - 1] = -cross_entropy(scores, self.tokens, reduction="none")
        return scores

    def recorded(self) -> tuple[Tensor | None, Nucleus | None]:
        logprobs = None if self.logprobs is None else self.logprobs[:, : self.length]
        return logprobs, None if self.nuclei is None else self.nuclei.collect(self.length)


def decode(
    model: PreTrainedModel, prompts: Padded, sampling: Sampling, stops: StopStringCriteria | None, group_size: int
) -> Completions:
    """Complete each of the prompts (N, P) ``group_size`` times."""
    device = model.device
    records = sampling.logprobs or sampling.nucleus
    state = (RecordingState if records else DecodeState)(model, prompts, sampling, group_size)
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
    check_every = GPU_CHECK_EVERY if device.type == "cuda" else 1
    while True:
        state.sample(sampling)
        state.ended |= torch.isin(state.tokens, stop_ids)
        if stops is not None:
            state.ended |= stops(state.completions[state.live, : state.length], None)
        if state.length == sampling.max_completion_tokens:
            break
        if (state.length - 1) % check_every == 0:
            finished = int(state.ended.sum())
            if finished == len(state.ended):
                break
            if finished >= MIN_FINISHED * len(state.ended):  # they leave the batch and the cache
                stay = (~state.ended).nonzero().squeeze(1)
                state.cache.batch_select_indices(stay)
                for name in ("live", "ended", "tokens", "positions", "mask"):
                    setattr(state, name, getattr(state, name)[stay])
        state.positions += 1
        mask = state.mask[..., : prompts.ids.shape[1] + state.length]
        state.logits = next_logits(model, state.cache, state.tokens[:, None], mask, state.positions)
    return Completions(state.completions[:, : state.length], *(state.recorded() if records else ()))


def generate_by_library(
    model: PreTrainedModel, prompts: Padded, sampling: Sampling, stops: StopStringCriteria | None, group_size: int
) -> Completions:
    """Decode by transformers' own `generate`, without the model's generation config; the reference for `decode`."""
    prompt_ids = prompts.ids.to(model.device).repeat_interleave(group_size, dim=0)
    prompt_mask = prompts.mask.long().to(model.device).repeat_interleave(group_size, dim=0)
    width = prompt_ids.shape[1]
    criteria = StoppingCriteriaList()
    if stops is not None:
        criteria.append(lambda ids, scores: stops(ids[:, width:], scores))
    greedy = sampling.temperature == 0
    config = GenerationConfig(
        do_sample=not greedy,
        temperature=1.0 if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=50 if greedy else sampling.top_k,  # 50 is the library's default: any other value warns when greedy
        max_new_tokens=sampling.max_completion_tokens,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.pad_id,
    )
    hidden_config = model.generation_config
    model.generation_config = GenerationConfig()  # unset fields would be filled from the model's
    try:
        rows = model.generate(
            prompt_ids, attention_mask=prompt_mask, generation_config=config, stopping_criteria=criteria
        )
    finally:
        model.generation_config = hidden_config
    return Completions(rows[:, width:])
