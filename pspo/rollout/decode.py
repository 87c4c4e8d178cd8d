"""The decoding loop, several times as fast on rollouts as transformers' own.

    prefill -> sample -> forward pass -> sample -> forward pass -> ... -> sample

Each prompt is prefilled once for its group, keys and values go into buffers allocated once, the nucleus is sampled
without sorting the vocabulary, and finished rows leave the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria
from transformers.cache_utils import DynamicLayer

from pspo.model import CACHE_ARGUMENT, takes_visible_columns, to_device, to_model
from pspo.rollout.types import Completions, Nucleus, Sampling

MAX_TRIES = 32  # of sampling by rejection: at top_p 0.5 one row in 4e9 needs more
RACE_MISS = 1e-12  # probability of a draw that `sample_race` may get wrong
GPU_CHECK_EVERY = 16  # tokens between checks for finished rows: each makes the CPU wait for the GPU
MIN_FINISHED = 0.25  # share of the rows in the batch that is worth copying the cache without them


@dataclass
class DecodeState:
    """All B = N * group_size completions so far, and the b rows that are still in the batch.

    Attributes:
        completions: (B, T) int64, padding where nothing is drawn.
        logprobs: (B, T) float32, of the drawn tokens; None unless requested.
        nuclei: records what they are drawn from; None unless requested.
        length: tokens drawn so far in every live row.
        live: (b,) int64, indices of the rows in the batch.
        ended: (b,) bool, their completions that have ended.
        tokens: (b,) int64, those drawn last.
        logits: (b, V) of the next token.
        positions: (b, 1) int64, of the token that the logits were computed from.
        attention_mask: (b, P + T), or (b, 1, 1, P + T) bool, of all columns.
        prompt_length: P.
        cache: keys and values of the rows.
    """

    completions: Tensor
    logprobs: Tensor | None
    nuclei: NucleusRecorder | None
    live: Tensor
    ended: Tensor
    logits: Tensor
    positions: Tensor
    attention_mask: Tensor
    prompt_length: int
    cache: DynamicCache
    tokens: Tensor | None = None
    length: int = 0


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    group_size: int,
) -> Completions:
    """Complete each of the left-padded prompts (N, P) ``group_size`` times."""
    device = model.device
    state = begin(model, prompt_ids, prompt_mask, sampling, group_size)
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)
    stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings)) if sampling.stop_strings else None
    check_every = GPU_CHECK_EVERY if device.type == "cuda" else 1
    while True:
        sample(state, sampling)
        state.ended |= torch.isin(state.tokens, stop_ids)
        if stop_strings is not None:
            state.ended |= stop_strings(state.completions[state.live, : state.length], None)
        if state.length == sampling.max_completion_tokens:
            break
        if (state.length - 1) % check_every == 0:
            finished = int(state.ended.sum())
            if finished == len(state.ended):
                break
            if finished >= MIN_FINISHED * len(state.ended):
                drop_finished_rows(state)
        state.positions += 1
        mask = state.attention_mask[..., : state.prompt_length + state.length]
        state.logits = next_logits(model, state.cache, state.tokens[:, None], mask, state.positions)
    logprobs = None if state.logprobs is None else state.logprobs[:, : state.length]
    nucleus = None if state.nuclei is None else state.nuclei.collect(state.length)
    return Completions(state.completions[:, : state.length], logprobs, nucleus)


class Prefill(NamedTuple):
    """Result of a pass over N prompts: logits (N, V) of the next token, last positions (N, 1), keys and values."""

    logits: Tensor
    positions: Tensor
    cache: DynamicCache


def prefill(model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor) -> Prefill:
    """Pass prompts (N, P) through the model once."""
    positions = (prompt_mask.long().cumsum(dim=1) - 1).clamp(min=0)
    ids, mask, positions = to_model(model, prompt_ids, prompt_mask.long(), positions)
    cache = DynamicCache(config=model.config)
    return Prefill(next_logits(model, cache, ids, mask, positions), positions[:, -1:], cache)


def begin(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Sampling, group_size: int
) -> DecodeState:
    """Prefill, and repeat what comes of each prompt for the rows of its group."""
    limit = sampling.max_completion_tokens
    logits, positions, cache = prefill(model, prompt_ids, prompt_mask)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = BufferedLayer(layer, group_size, limit)
        else:
            layer.batch_repeat_interleave(group_size)
    attention_mask = to_device(pad(prompt_mask.long(), (0, limit), value=1), model.device)
    attention_mask = attention_mask.repeat_interleave(group_size, dim=0)
    if takes_visible_columns(model):
        attention_mask = attention_mask.bool()[:, None, None]  # the form that attention needs, made once
    live = torch.arange(len(prompt_ids) * group_size, device=model.device)
    completions = live.new_full((len(live), limit), sampling.pad_id)
    return DecodeState(
        completions=completions,
        logprobs=torch.zeros_like(completions, dtype=torch.float32) if sampling.logprobs else None,
        nuclei=NucleusRecorder(completions) if sampling.nucleus else None,
        live=live,
        ended=torch.zeros_like(live, dtype=torch.bool),
        logits=logits.repeat_interleave(group_size, dim=0),
        positions=positions.repeat_interleave(group_size, dim=0),
        attention_mask=attention_mask,
        prompt_length=prompt_ids.shape[1],
        cache=cache,
    )


def next_logits(model: Callable[..., Any], cache: DynamicCache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """(b, V) logits of the token after ids (b, t), whose keys and values are added to the cache."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
    return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]


def sample(state: DecodeState, sampling: Sampling) -> None:
    """Draw the next token of each row, padding where the row has ended."""
    scores, allowed = score_tokens(state.logits, sampling)
    top_p = sampling.top_p
    if state.nuclei is not None:
        scores = allowed = state.nuclei.cut(allowed, top_p, state)
        top_p = 1.0
    state.tokens = draw_tokens(allowed, sampling.temperature, top_p).where(~state.ended, sampling.pad_id)
    state.completions[state.live, state.length] = state.tokens
    if state.logprobs is not None:
        state.logprobs[state.live, state.length] = -cross_entropy(scores, state.tokens, reduction="none")
    state.length += 1


def drop_finished_rows(state: DecodeState) -> None:
    """Take the rows that have ended out of the batch and the cache."""
    stay = (~state.ended).nonzero().squeeze(1)
    state.cache.batch_select_indices(stay)
    state.live = state.live[stay]
    state.ended = state.ended[stay]
    state.tokens = state.tokens[stay]
    state.positions = state.positions[stay]
    state.attention_mask = state.attention_mask[stay]


class BufferedLayer(DynamicLayer):
    """A prefilled full-attention cache layer, repeated for each row of a group, that writes into preallocated buffers.

    They are (rows, heads, P + T, dim); `keys` and `values` are views of the filled part.
    """

    def __init__(self, layer: DynamicLayer, group_size: int, max_completion_tokens: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        dtype = cache_dtype(layer.keys)
        self.buffers = []
        for states in (layer.keys, layer.values):
            repeated = states.to(dtype).repeat_interleave(group_size, dim=0)
            self.buffers.append(pad(repeated, (0, 0, 0, max_completion_tokens)))
        self.set_length(layer.get_seq_length())

    def set_length(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.set_length(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.set_length(self.get_seq_length())


def cache_dtype(states: Tensor) -> torch.dtype:
    """The dtype of buffers for keys and values: autocast's, or attention would cast all of them at every step."""
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype


def torch_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and this GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_states(states: list[Tensor], device: torch.device) -> None:
    """Set them; a GPU's state is left out where there is none."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


# ---------------------------------------------------------------- drawing a token


def score_tokens(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Logits (b, V) at the temperature, float32; and the same with -inf below the top_k largest of each row."""
    scores = logits.float() / (sampling.temperature or 1.0)
    if sampling.top_k == 0:
        return scores, scores
    least = scores.topk(min(sampling.top_k, scores.shape[1])).values[:, -1:]
    return scores, scores.masked_fill(scores < least, -torch.inf)


def draw_tokens(scores: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token (b,) of each row of scores (b, V), from its nucleus; temperature 0 takes the likeliest."""
    return sample_nucleus(scores.softmax(dim=1), top_p) if temperature > 0 else scores.argmax(dim=1)


def sample_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Draw one token a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Takes probabilities (b, V) float32, after temperature; returns tokens (b,) int64. Equally likely tokens at the
    nucleus' edge all belong to it; the library keeps an arbitrary few of them. On a CPU a token outside the nucleus is
    drawn again; where that fails `MAX_TRIES` times, and on a GPU, `sample_race` draws.
    """
    if probs.is_cuda:  # rejection would make the CPU wait for the GPU
        return sample_race(probs, top_p)
    limit = top_p if top_p < 1 else math.inf
    cdf = probs.cumsum(dim=1, dtype=torch.float64)  # float32 would round a rare token's share by a per cent
    rows = torch.arange(len(probs))
    tokens = torch.empty_like(rows)
    for _ in range(MAX_TRIES):
        u = torch.rand(len(rows), 1, dtype=torch.float64) * cdf[:, -1:]
        candidates = torch.searchsorted(cdf, u, right=True).clamp(max=probs.shape[1] - 1)  # (len(rows), 1)
        tokens[rows] = candidates.squeeze(1)
        likelier = torch.empty_like(probs)  # 0 or 1, as floats: bools are slow to multiply
        torch.gt(probs, probs.gather(1, candidates), out=likelier)
        is_outside = likelier.mul_(probs).sum(dim=1) >= limit
        rows = rows[is_outside]
        if not len(rows):
            return tokens
        probs = probs[is_outside]
        cdf = cdf[is_outside]
    tokens[rows] = sample_race(probs, top_p)
    return tokens


def sample_race(probs: Tensor, top_p: float) -> Tensor:
    """`sample_nucleus` in a fixed number of operations, without a wait for a GPU: a CUDA graph can hold them.

    Tokens arrive at exponential times, at the rates ``probs``. Of any set of tokens the first to arrive is a draw from
    that set, so the first inside the nucleus is the token. It is looked for among the first k to arrive, which are all
    outside with a probability below `RACE_MISS`, and the likeliest token, which is inside. A bisection of these
    candidates by their probability finds the least likely one inside.
    """
    race = probs / torch.empty_like(probs).exponential_()
    if top_p >= 1:
        return race.argmax(dim=1)
    k = min(math.ceil(math.log(RACE_MISS) / math.log1p(-top_p)), probs.shape[1])
    arrivals = race.topk(k, dim=1).indices
    candidates = torch.cat([arrivals, probs.argmax(dim=1, keepdim=True)], dim=1)  # (b, k + 1)
    p = probs.gather(1, candidates)
    ordered = p.sort(dim=1, descending=True).values
    inside = torch.zeros_like(candidates[:, :1])  # place of the least likely one that is known to be inside
    for bit in reversed(range(k.bit_length())):
        place = (inside + (1 << bit)).clamp(max=k)
        above = (probs * (probs > ordered.gather(1, place))).sum(dim=1, keepdim=True)
        inside = place.where(above < top_p, inside)
    first = (p >= ordered.gather(1, inside)).long().argmax(dim=1, keepdim=True)
    return candidates.gather(1, first).squeeze(1)


def nucleus_edge(probs: Tensor, top_p: float) -> Tensor:
    """The least probability inside the nucleus, (b, 1), of probabilities (b, V) float32, which are not sorted.

    Float32 numbers in [0, 1] are in the order of their bits, of which 30 can be set. From the highest on, a bit is set
    if at least top_p of the mass is strictly above: then the next number is the least with less above it.
    """
    if top_p >= 1:
        return torch.zeros_like(probs[:, :1])
    bits = torch.zeros_like(probs[:, :1], dtype=torch.int32)
    for bit in reversed(range(30)):
        higher = bits + (1 << bit)
        above = (probs * (probs > higher.view(torch.float32))).sum(dim=1, keepdim=True)
        bits = higher.where(above >= top_p, bits)
    return (bits + 1).view(torch.float32)


def in_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The nucleus that `sample_nucleus` draws from, (b, V) bool, of probabilities (b, V); without impossible tokens."""
    return (probs >= nucleus_edge(probs, top_p)) & (probs > 0)


class NucleusRecorder:
    """Keeps the nuclei that tokens are drawn from, for --algorithm.nucleus replay."""

    def __init__(self, completions: Tensor):
        self.counts = torch.zeros_like(completions)  # (B, T), tokens of each nucleus
        self.rows: list[Tensor] = []  # by step, the row of each recorded token
        self.ids: list[Tensor] = []

    def cut(self, scores: Tensor, top_p: float, state: DecodeState) -> Tensor:
        """Record the nuclei of the rows that have not ended; scores (b, V) come back with -inf outside the nuclei."""
        is_inside = in_nucleus(scores.softmax(dim=1), top_p)
        recorded = is_inside & ~state.ended[:, None]
        rows, ids = recorded.nonzero(as_tuple=True)
        self.counts[state.live, state.length] = recorded.sum(dim=1)
        self.rows.append(state.live[rows])
        self.ids.append(ids)
        return scores.masked_fill(~is_inside, -torch.inf)

    def collect(self, length: int) -> Nucleus:
        """The nuclei of the first ``length`` columns."""
        ids = torch.cat(self.ids)[torch.cat(self.rows).argsort(stable=True)].cpu()
        counts = self.counts[:, :length].cpu()
        return Nucleus(list(ids.split(counts.sum(dim=1).tolist())), counts)
