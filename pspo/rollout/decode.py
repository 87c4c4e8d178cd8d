"""The decoding loop, for `model.generate(custom_generate=...)`: several times as fast as the library's on rollouts.

The same distribution in less work: each prompt is prefilled once for its group, keys and values go into buffers
allocated once, the nucleus is sampled without sorting the vocabulary, and finished rows leave the batch. With
``graphs`` every step has the same shapes instead, and a GPU replays it as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from pspo.model import attends_fully
from pspo.rollout.types import Nucleus, Sampling

MAX_TRIES = 32  # of sampling by rejection: at top_p 0.5 one row in 4e9 needs more
GPU_CHECK_EVERY = 16  # tokens between checks for finished rows: each makes the CPU wait for the GPU


class BufferedLayer(DynamicLayer):
    """A full-attention cache layer that, once repeated for each group, writes into preallocated buffers.

    They are (rows, heads, prompt + room, dim); `keys` and `values` are views of the filled part. With `at`, a (1,)
    int64 position to write to, they are whole, so that no shape changes: the attention mask must hide the rest.
    """

    def __init__(self, room: int, at: Tensor | None = None):
        super().__init__()
        self.room, self.at = room, at

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.buffers = []
        for states in (self.keys, self.values):
            rows, heads, length, dim = states.shape
            buffer = states.new_zeros(rows * repeats, heads, length + self.room, dim)  # finite: 0 x NaN is NaN
            buffer[:, :, :length] = states.repeat_interleave(repeats, dim=0)
            self.buffers.append(buffer)
        self._view(length if self.at is None else length + self.room)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        device = key_states.device.type
        if torch.is_autocast_enabled(device):  # attention would cast all of the cache to it at every step
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if self.get_seq_length() == 0:  # the prefill
            return super().update(key_states, value_states, *args, **kwargs)
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            if self.at is None:
                buffer[:, :, start:end] = states
            else:
                buffer.index_copy_(2, self.at, states)
        self._view(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._view(self.get_seq_length())

    def _view(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


def sample_nucleus(logits: Tensor, top_p: float, min_p: float = 0.0) -> Tensor:
    """Draw one token a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Those less likely than min_p times the likeliest are not in it. Takes logits (b, V) float32, after temperature;
    returns tokens (b,) int64. Equally likely tokens at the nucleus' edge all belong to it; the library keeps an
    arbitrary few of them.
    """
    probs = logits.softmax(dim=1)
    limit = top_p if top_p < 1 else float("inf")
    sample = _sample_sorted if probs.is_cuda else _sample_by_rejection  # a GPU would wait
    return sample(probs, limit, min_p)


def _sample_by_rejection(probs: Tensor, limit: float, min_p: float = 0.0) -> Tensor:
    """Draw from the whole distribution, again where that is outside the nucleus; what still is, from sorted ones."""
    cdf = probs.cumsum(dim=1, dtype=torch.float64)  # float32 would round a rare token's share by a per cent
    rows = torch.arange(len(probs))
    tokens = torch.empty_like(rows)
    for _ in range(MAX_TRIES):
        u = torch.rand(len(rows), 1, dtype=torch.float64) * cdf[:, -1:]
        drawn = torch.searchsorted(cdf, u, right=True).clamp(max=probs.shape[1] - 1)  # (len(rows), 1)
        tokens[rows] = drawn.squeeze(1)
        own = probs.gather(1, drawn)
        above = torch.gt(probs, own, out=torch.empty_like(probs)).mul_(probs).sum(dim=1)  # no bool: slow to multiply
        outside = (above >= limit) | (own < min_p * probs.amax(dim=1, keepdim=True)).squeeze(1)
        rows, probs, cdf = rows[outside], probs[outside], cdf[outside]
        if not len(rows):
            return tokens
    tokens[rows] = _sample_sorted(probs, limit, min_p)
    return tokens


def _sample_sorted(probs: Tensor, limit: float, min_p: float = 0.0) -> Tensor:
    probs, tokens = probs.sort(dim=1, descending=True)
    kept = probs * (probs >= _edge(probs, limit, min_p))
    # as torch.multinomial, without its check, which aborts the process on a GPU if a logit is NaN
    return tokens.gather(1, (kept / torch.empty_like(kept).exponential_()).argmax(dim=1, keepdim=True)).squeeze(1)


def in_nucleus(probs: Tensor, top_p: float, min_p: float = 0.0) -> Tensor:
    """The nucleus that `sample_nucleus` draws from, (b, V) bool, of probabilities (b, V); without impossible tokens."""
    edge = _edge(probs.sort(dim=1, descending=True).values, top_p if top_p < 1 else float("inf"), min_p)
    return (probs >= edge) & (probs > 0)


def _edge(ordered: Tensor, limit: float, min_p: float) -> Tensor:
    """The least probability inside the nucleus, (b, 1), of probabilities (b, V) in descending order."""
    inside = ordered.cumsum(dim=1) - ordered < limit
    return ordered.where(inside, torch.inf).amin(dim=1, keepdim=True).maximum(min_p * ordered[:, :1])


def decode(
    model: transformers.PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    prompt_mask: Tensor,
    sampling: Sampling,
    group_size: int,
    **_,
) -> tuple[Tensor, Tensor | None, Nucleus | None]:
    """Complete each prompt ``group_size`` times.

    Args:
        input_ids, prompt_mask: (N, P) int64, left-padded prompts.
        logits_processor: the library's, which apply minimum length, temperature and top_k.
        stopping_criteria: the library's, for stop tokens and strings.

    Returns:
        (N * group_size, T) completions, the rows of one prompt adjacent, padded after their stop token; and on request
        their log-probs, (N * group_size, T) float32: of the model's own logits at the temperature, before processors
        and nucleus; or, if the nucleus is kept, renormalised over it, and the nucleus.
    """
    limit, prompt_length, graphs = sampling.max_completion_tokens, input_ids.shape[1], sampling.decoder == "graphs"
    at = torch.tensor([prompt_length], device=input_ids.device) if graphs else None  # (1,), the column to write
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferedLayer(limit, at) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)

    def forward(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """The next token's logits, (b, V)."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    logits = forward(input_ids, prompt_mask, positions)  # the prefill
    cache.batch_repeat_interleave(group_size)
    logits = logits.repeat_interleave(group_size, dim=0)  # (b, V): b rows are live
    rows = pad(input_ids, (0, limit), value=sampling.pad_id).repeat_interleave(group_size, dim=0)  # (b, P + T)
    logprobs = torch.zeros(len(rows), limit, device=rows.device) if sampling.logprobs else None
    counts = torch.zeros(len(rows), limit, dtype=torch.long, device=rows.device)  # of kept tokens
    mass, kept_tokens = torch.zeros(counts.shape, device=rows.device), []
    attended = pad(prompt_mask, (0, limit), value=1).repeat_interleave(group_size, dim=0)  # (b, P + T)
    if attends_fully(model) and model.config._attn_implementation == "sdpa":
        attended = attended.bool()[:, None, None]  # the form attention needs, made once
    positions = positions[:, -1:].repeat_interleave(group_size, dim=0)  # (b, 1)
    live = torch.arange(len(rows), device=rows.device)  # (b,), indices of the live rows
    ended = torch.zeros_like(live, dtype=torch.bool)
    step = _FixedStep(forward, attended, positions, at) if graphs else None
    check_every = GPU_CHECK_EVERY if rows.is_cuda else 1
    for end in range(prompt_length, prompt_length + limit):
        logits = logits.float()
        scores = logits_processor(rows[live, :end], logits)
        if sampling.nucleus:
            column, probs = end - prompt_length, (logits / (sampling.temperature or 1.0)).softmax(dim=1)
            kept = in_nucleus(scores.softmax(dim=1), sampling.top_p, sampling.min_p)
            scores = scores.masked_fill(~kept, -torch.inf)
            mass[live, column] = (probs * kept).sum(dim=1).where(~ended, 0.0)
            kept &= ~ended[:, None]
            counts[live, column] = kept.sum(dim=1)
            row, ids = kept.nonzero(as_tuple=True)
            kept_tokens.append((live[row], ids))
        cuts = (1.0, 0.0) if sampling.nucleus else (sampling.top_p, sampling.min_p)  # the scores are cut already
        tokens = sample_nucleus(scores, *cuts) if sampling.temperature > 0 else scores.argmax(dim=1)
        tokens = tokens.where(~ended, sampling.pad_id)
        rows[live, end] = tokens
        if logprobs is not None:
            logits = scores if sampling.nucleus else logits / (sampling.temperature or 1.0)
            logprobs[live, end - prompt_length] = -cross_entropy(logits, tokens, reduction="none")
        ended |= stopping_criteria(rows[live, : end + 1], logits)
        check = (end - prompt_length) % check_every == 0
        if end == prompt_length + limit - 1 or (check and ended.all()):
            break
        if check and not graphs and 4 * ended.sum() >= len(ended):  # then fewer rows are worth copying the cache
            stay = (~ended).nonzero().squeeze(1)
            cache.batch_select_indices(stay)
            state = (attended, positions, tokens, live, ended)
            attended, positions, tokens, live, ended = (part[stay] for part in state)
        if step is not None:
            logits = step(tokens)
        else:
            positions = positions + 1
            logits = forward(tokens[:, None], attended[..., : end + 1], positions)
    width, nucleus = end + 1 - prompt_length, None
    if sampling.nucleus:
        owners, ids = (torch.cat(parts) for parts in zip(*kept_tokens, strict=True))
        ids = ids[owners.argsort(stable=True)].split(counts.sum(dim=1).tolist())
        nucleus = Nucleus(list(ids), counts[:, :width])
    return rows[:, prompt_length : end + 1], None if logprobs is None else logprobs[:, :width], nucleus


class _FixedStep:
    """One decoding step whose shapes and addresses never change, captured as a CUDA graph when a GPU first runs it.

    Reads the tokens that were sampled last, (b,), and returns the next logits, (b, V).
    """

    def __init__(self, forward: Callable[..., Tensor], attended: Tensor, positions: Tensor, at: Tensor):
        self.tokens, self.positions, self.at = torch.zeros_like(positions), positions.clone(), at
        self.visible = attended & (torch.arange(attended.shape[3], device=at.device) < at)  # (b, 1, 1, P + T)
        self.forward, self.graph = partial(forward, self.tokens, self.visible, self.positions), None

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens[:, None])
        self.positions += 1
        self.visible.index_fill_(3, self.at, True)
        if not self.tokens.is_cuda:
            self.logits = self.forward()
        else:
            if self.graph is None:
                self._capture()
            self.graph.replay()
        self.at += 1
        return self.logits

    def _capture(self) -> None:
        warm_up = torch.cuda.Stream()  # capture needs every kernel to have run once, on another stream
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                self.forward()
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.forward()
