"""The decoding loop: several times as fast as `model.generate` on rollouts, and the same distribution.

    prefill -> sample -> advance -> sample -> advance -> ... -> sample

Each prompt is prefilled once for its group, keys and values go into buffers allocated once, the nucleus is sampled
without sorting the vocabulary, and finished rows leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, StopStringCriteria
from transformers.cache_utils import DynamicLayer

from pspo.model import attends_fully
from pspo.rollout.types import Nucleus, Sampling

MAX_TRIES = 32  # of sampling by rejection: at top_p 0.5 one row in 4e9 needs more
GPU_CHECK_EVERY = 16  # tokens between checks for finished rows: each makes the CPU wait for the GPU
MIN_FINISHED = 0.25  # share of the rows in the batch that is worth copying the cache without them


# ---------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Completions:
    """What was drawn for N prompts, the rows of one prompt adjacent.

    Attributes:
        ids: (N * group_size, T) int64, padded after their stop token.
        logprobs: (N * group_size, T) float32, on request: of the logits at the temperature, before top_k and
            nucleus; or, if the nuclei are recorded, renormalised over them.
        nucleus: on request.
    """

    ids: Tensor
    logprobs: Tensor | None = None
    nucleus: Nucleus | None = None


@dataclass
class DecodeState:
    """All B = N * group_size completions so far, and the b rows that are still in the batch.

    Attributes:
        completions: (B, T) int64, padding where nothing is drawn.
        logprobs: (B, T) float32, of the drawn tokens; None unless requested.
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
    length: int
    live: Tensor
    ended: Tensor
    tokens: Tensor
    logits: Tensor
    positions: Tensor
    attention_mask: Tensor
    prompt_length: int
    cache: DynamicCache


def decode(
    model: transformers.PreTrainedModel,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    group_size: int,
    stop_strings: StopStringCriteria | None = None,
) -> Completions:
    """Complete each prompt ``group_size`` times.

    Args:
        prompt_ids, prompt_mask: (N, P) int64 and bool, left-padded prompts.
        stop_strings: finds the rows of token ids (b, t) that end with one of `Sampling.stop_strings`.
    """
    state = prefill(model, prompt_ids, prompt_mask, sampling, group_size)
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=prompt_ids.device)
    nuclei = NucleusRecorder(state.completions) if sampling.nucleus else None
    fixed_step = FixedStep(state) if sampling.decoder == "graphs" else None
    check_every = GPU_CHECK_EVERY if prompt_ids.is_cuda else 1
    while True:
        sample(state, sampling, nuclei)
        state.ended |= torch.isin(state.tokens, stop_ids)
        if stop_strings is not None:
            state.ended |= stop_strings(state.completions[state.live, : state.length], None)
        if state.length == sampling.max_completion_tokens:
            break
        if (state.length - 1) % check_every == 0:
            finished = int(state.ended.sum())
            if finished == len(state.ended):
                break
            if fixed_step is None and finished >= MIN_FINISHED * len(state.ended):
                drop_finished_rows(state)
        if fixed_step is None:
            advance(model, state)
        else:
            fixed_step.advance(model, state)
    logprobs = None if state.logprobs is None else state.logprobs[:, : state.length]
    nucleus = None if nuclei is None else nuclei.collect(state.length)
    return Completions(state.completions[:, : state.length], logprobs, nucleus)


def prefill(
    model: transformers.PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Sampling, group_size: int
) -> DecodeState:
    """Pass each prompt through the model once, and repeat what comes of it for the rows of its group."""
    limit = sampling.max_completion_tokens
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferedLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    prompt_mask = prompt_mask.long()
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = next_logits(model, cache, prompt_ids, prompt_mask, positions)
    cache.batch_repeat_interleave(group_size)
    attention_mask = pad(prompt_mask, (0, limit), value=1).repeat_interleave(group_size, dim=0)
    if attends_fully(model) and model.config._attn_implementation == "sdpa":
        attention_mask = attention_mask.bool()[:, None, None]  # the form that attention needs, made once
    rows = len(prompt_ids) * group_size
    live = torch.arange(rows, device=prompt_ids.device)
    return DecodeState(
        completions=prompt_ids.new_full((rows, limit), sampling.pad_id),
        logprobs=torch.zeros(rows, limit, device=prompt_ids.device) if sampling.logprobs else None,
        length=0,
        live=live,
        ended=torch.zeros_like(live, dtype=torch.bool),
        tokens=live,
        logits=logits.repeat_interleave(group_size, dim=0),
        positions=positions[:, -1:].repeat_interleave(group_size, dim=0),
        attention_mask=attention_mask,
        prompt_length=prompt_ids.shape[1],
        cache=cache,
    )


def next_logits(
    model: transformers.PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor, positions: Tensor
) -> Tensor:
    """(b, V) logits of the token after ids (b, t), whose keys and values are added to the cache."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def sample(state: DecodeState, sampling: Sampling, nuclei: NucleusRecorder | None = None) -> None:
    """Draw the next token of each row, padding where the row has ended; temperature 0 takes the likeliest."""
    scores = state.logits.float() / (sampling.temperature or 1.0)  # (b, V)
    allowed = scores
    if sampling.top_k > 0:
        least = scores.topk(min(sampling.top_k, scores.shape[1])).values[:, -1:]
        allowed = scores.masked_fill(scores < least, -torch.inf)
    top_p = sampling.top_p
    if nuclei is not None:
        scores = allowed = nuclei.cut(allowed, top_p, state)
        top_p = 1.0
    tokens = sample_nucleus(allowed, top_p) if sampling.temperature > 0 else allowed.argmax(dim=1)
    state.tokens = tokens.where(~state.ended, sampling.pad_id)
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


def advance(model: transformers.PreTrainedModel, state: DecodeState) -> None:
    """Pass the tokens that were drawn last through the model: the next logits."""
    state.positions = state.positions + 1
    mask = state.attention_mask[..., : state.prompt_length + state.length]
    state.logits = next_logits(model, state.cache, state.tokens[:, None], mask, state.positions)


class BufferedLayer(DynamicLayer):
    """A full-attention cache layer that, once repeated for each group, writes into preallocated buffers.

    They are (rows, heads, P + T, dim); `keys` and `values` are views of the filled part.
    """

    def __init__(self, max_completion_tokens: int):
        super().__init__()
        self.max_completion_tokens = max_completion_tokens

    def batch_repeat_interleave(self, repeats: int) -> None:
        dtype = self.keys.dtype
        if torch.is_autocast_enabled(self.keys.device.type):  # attention would cast the whole cache at every step
            dtype = torch.get_autocast_dtype(self.keys.device.type)
        self.buffers = []
        for states in (self.keys, self.values):
            rows, heads, length, dim = states.shape
            shape = (rows * repeats, heads, length + self.max_completion_tokens, dim)
            buffer = states.new_zeros(shape, dtype=dtype)
            buffer[:, :, :length] = states.repeat_interleave(repeats, dim=0)
            self.buffers.append(buffer)
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if start == 0:  # the prefill
            return super().update(key_states, value_states, *args, **kwargs)
        end = start + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        length = self.get_seq_length()
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


# ---------------------------------------------------------------- drawing a token


def sample_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Draw one token a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Takes scores (b, V) float32, after temperature; returns tokens (b,) int64. Equally likely tokens at the nucleus'
    edge all belong to it; the library keeps an arbitrary few of them.
    """
    probs = scores.softmax(dim=1)
    limit = top_p if top_p < 1 else float("inf")
    if probs.is_cuda:  # rejection would make the CPU wait for the GPU
        return _sample_sorted(probs, limit)
    return _sample_by_rejection(probs, limit)


def _sample_by_rejection(probs: Tensor, limit: float) -> Tensor:
    """Draw from the whole distribution, again where that is outside the nucleus; what still is, from sorted ones."""
    cdf = probs.cumsum(dim=1, dtype=torch.float64)  # float32 would round a rare token's share by a per cent
    rows = torch.arange(len(probs))
    tokens = torch.empty_like(rows)
    for _ in range(MAX_TRIES):
        u = torch.rand(len(rows), 1, dtype=torch.float64) * cdf[:, -1:]
        candidates = torch.searchsorted(cdf, u, right=True).clamp(max=probs.shape[1] - 1)  # (len(rows), 1)
        tokens[rows] = candidates.squeeze(1)
        likelier = torch.gt(
            probs, probs.gather(1, candidates), out=torch.empty_like(probs)
        )  # no bool: slow to multiply
        is_outside = likelier.mul_(probs).sum(dim=1) >= limit
        rows = rows[is_outside]
        probs = probs[is_outside]
        cdf = cdf[is_outside]
        if not len(rows):
            return tokens
    tokens[rows] = _sample_sorted(probs, limit)
    return tokens


def _sample_sorted(probs: Tensor, limit: float) -> Tensor:
    """Draw from the sorted probabilities (b, V) without those outside the nucleus."""
    probs, tokens = probs.sort(dim=1, descending=True)
    probs = probs * (probs >= _edge(probs, limit))
    # as torch.multinomial, without its check, which aborts the process on a GPU if a logit is NaN
    return tokens.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(dim=1, keepdim=True)).squeeze(1)


def in_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The nucleus that `sample_nucleus` draws from, (b, V) bool, of probabilities (b, V); without impossible tokens."""
    edge = _edge(probs.sort(dim=1, descending=True).values, top_p if top_p < 1 else float("inf"))
    return (probs >= edge) & (probs > 0)


def _edge(ordered: Tensor, limit: float) -> Tensor:
    """The least probability inside the nucleus, (b, 1), of probabilities (b, V) in descending order."""
    is_inside = ordered.cumsum(dim=1) - ordered < limit
    return ordered.where(is_inside, torch.inf).amin(dim=1, keepdim=True)


# ---------------------------------------------------------------- only on request


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
        ids = torch.cat(self.ids)[torch.cat(self.rows).argsort(stable=True)]
        return Nucleus(list(ids.split(self.counts.sum(dim=1).tolist())), self.counts[:, :length])


class FixedStep:
    """`advance` with shapes and addresses that never change, captured as a CUDA graph when a GPU first runs it.

    All rows stay in the batch, and the attention mask hides the columns that are not written yet.
    """

    def __init__(self, state: DecodeState):
        self.column = torch.tensor([state.prompt_length], device=state.tokens.device)  # (1,), to write next
        state.cache.layers = [FixedLayer(layer, self.column) for layer in state.cache.layers]
        self.tokens = torch.zeros_like(state.positions)  # (b, 1)
        self.positions = state.positions.clone()  # (b, 1)
        columns = torch.arange(state.attention_mask.shape[-1], device=self.column.device)
        self.visible = state.attention_mask & (columns < self.column)  # (b, 1, 1, P + T)
        self.graph: torch.cuda.CUDAGraph | None = None

    def advance(self, model: transformers.PreTrainedModel, state: DecodeState) -> None:
        """Pass the tokens that were drawn last through the model: the next logits."""
        self.tokens.copy_(state.tokens[:, None])
        self.positions += 1
        self.visible.index_fill_(3, self.column, True)
        if not self.tokens.is_cuda:
            state.logits = self.forward(model, state)
        else:
            if self.graph is None:
                self.capture(model, state)
            self.graph.replay()
            state.logits = self.logits
        self.column += 1

    def forward(self, model: transformers.PreTrainedModel, state: DecodeState) -> Tensor:
        return next_logits(model, state.cache, self.tokens, self.visible, self.positions)

    def capture(self, model: transformers.PreTrainedModel, state: DecodeState) -> None:
        warm_up = torch.cuda.Stream()  # capture needs every kernel to have run once, on another stream
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                self.forward(model, state)
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.forward(model, state)


class FixedLayer(DynamicLayer):
    """A cache layer of whole buffers (rows, heads, P + T, dim), written at a column (1,) int64 that others move."""

    def __init__(self, layer: BufferedLayer, column: Tensor):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.buffers
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values
