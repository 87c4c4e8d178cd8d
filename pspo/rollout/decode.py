"""Sample completions: `generate`, and the decoding loop, several times as fast on rollouts as transformers' own.

    prefill -> sample -> forward pass -> sample -> forward pass -> ... -> sample

Each prompt is prefilled once for its group, keys and values go into buffers allocated once, the nucleus is sampled
without sorting the vocabulary, and finished rows leave the batch. Every field that shapes the distribution is explicit
in `Sampling`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria
from transformers.cache_utils import DynamicLayer

from pspo.config import AlgorithmConfig, Decoder, RolloutConfig
from pspo.model import attends_fully, has_plain_cache, is_out_of_memory, pad_token_id, stop_token_ids
from pspo.model.chat import completion_texts
from pspo.model.find import token_ids
from pspo.rollout.graphs import FixedStep
from pspo.rollout.library import generate_by_library
from pspo.rollout.types import Completions, Nucleus, Rollout, Sampling, join

MAX_TRIES = 32  # of sampling by rejection: at top_p 0.5 one row in 4e9 needs more
GPU_CHECK_EVERY = 16  # tokens between checks for finished rows: each makes the CPU wait for the GPU
MIN_FINISHED = 0.25  # share of the rows in the batch that is worth copying the cache without them


# ---------------------------------------------------------------- rollouts


def make_sampling(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    algorithm: AlgorithmConfig | None = None,
    logprobs: bool = False,
) -> Sampling:
    """Sampling as --rollout says, with the model's own padding, and its stop tokens unless they are named.

    Log-probs are recorded on request, or if ``algorithm`` corrects by them; nuclei if it replays them. Raises
    ValueError if the decoder does not support the model.
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
        logprobs=logprobs or (algorithm is not None and algorithm.correction not in (None, "none")),
        nucleus=algorithm is not None and algorithm.nucleus == "replay",
    )


def check_decoder(model: PreTrainedModel, decoder: Decoder) -> None:
    """Raise ValueError if the decoder does not support the model."""
    if decoder != "hf" and not has_plain_cache(model):
        raise ValueError(f"--rollout.decoder {decoder} does not support {type(model).__name__}'s cache; choose hf")
    if decoder == "graphs" and not (attends_fully(model) and model.config._attn_implementation == "sdpa"):
        has = f"{type(model).__name__}'s ({model.config._attn_implementation}); choose pspo"
        raise ValueError(f"--rollout.decoder graphs needs sdpa attention and full attention in every layer, not {has}")


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    group_size: int = 1,
) -> Rollout:
    """Draw ``group_size`` completions of each encoded prompt with torch's global generators.

    At most `Sampling.max_rows` rows are decoded at a time; half as many, and all again, if memory runs out.
    """
    draw = generate_by_library if sampling.decoder == "hf" else decode
    at_a_time = max(1, min(len(prompts), sampling.max_rows // group_size))
    states = torch_states(model.device)
    while True:
        try:
            parts = []
            for i in range(0, len(prompts), at_a_time):
                prompt_ids, prompt_mask = left_pad(prompts[i : i + at_a_time], sampling.pad_id, model.device)
                completions = draw(model, tokenizer, prompt_ids, prompt_mask, sampling, group_size)
                parts.append(make_rollout(tokenizer, prompt_ids, prompt_mask, completions, sampling))
            return parts[0] if len(parts) == 1 else join(parts, sampling.pad_id)
        except RuntimeError as error:
            if at_a_time == 1 or not is_out_of_memory(error):
                raise
        parts.clear()  # outside the except block, whose error holds the tensors of the failed pass
        at_a_time = math.ceil(at_a_time / 2)
        set_torch_states(states, model.device)
        warnings.warn(f"out of memory: drawing as with --rollout.max_rows {at_a_time * group_size}", stacklevel=1)


def left_pad(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Token lists to prompt_ids (B, P) int64 and prompt_mask (B, P) bool."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


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
    ids = completions.ids.to(device)
    rows, width = ids.shape
    group_size = rows // len(prompt_ids)
    prompt_ids = prompt_ids.repeat_interleave(group_size, dim=0)
    prompt_mask = prompt_mask.repeat_interleave(group_size, dim=0)
    is_stop = torch.isin(ids, torch.tensor(sampling.stop_ids, dtype=torch.long, device=device))
    if sampling.stop_strings:
        stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings))
        is_stop |= torch.stack([stop_strings(ids[:, : t + 1], None) for t in range(width)], dim=1)
    terminated = is_stop.any(dim=1)
    lengths = torch.where(terminated, is_stop.long().argmax(dim=1) + 1, width)
    mask = torch.arange(width, device=device) < lengths[:, None]
    tokens = [row.tolist() for row in ids[mask].split(lengths.tolist())]
    texts = completion_texts(tokenizer, prompt_ids.tolist(), tokens, sampling.stop_ids)
    logprobs = completions.logprobs.to(device).where(mask, 0.0) if sampling.logprobs else None
    return Rollout(prompt_ids, prompt_mask, ids, mask, terminated, texts, logprobs, completions.nucleus)


def decode_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The first four tokens of two greedy completions of each prompt, whatever would end them."""
    greedy = replace(sampling.greedy(), stop_ids=(), stop_strings=(), max_completion_tokens=4)
    return generate(model, tokenizer, prompts, greedy, group_size=2).completion_ids.tolist()


def torch_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and this GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_states(states: list[Tensor], device: torch.device) -> None:
    """Set them; a GPU's state is left out where there is none."""
    torch.set_rng_state(states[0].cpu())
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), device)


# ---------------------------------------------------------------- the decoding loop


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
    state = prefill(model, prompt_ids, prompt_mask, sampling, group_size)
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=prompt_ids.device)
    stop_strings = StopStringCriteria(tokenizer, list(sampling.stop_strings)) if sampling.stop_strings else None
    fixed_step = None
    if sampling.decoder == "graphs":
        fixed_step = FixedStep(state.cache, state.positions, state.attention_mask, state.prompt_length)
    check_every = GPU_CHECK_EVERY if prompt_ids.is_cuda else 1
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
            if fixed_step is None and finished >= MIN_FINISHED * len(state.ended):
                drop_finished_rows(state)
        if fixed_step is None:
            state.positions += 1
            mask = state.attention_mask[..., : state.prompt_length + state.length]
            state.logits = next_logits(model, state.cache, state.tokens[:, None], mask, state.positions)
        else:
            state.logits = fixed_step.next_logits(model, state.tokens)
    logprobs = None if state.logprobs is None else state.logprobs[:, : state.length]
    nucleus = None if state.nuclei is None else state.nuclei.collect(state.length)
    return Completions(state.completions[:, : state.length], logprobs, nucleus)


def prefill(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Sampling, group_size: int
) -> DecodeState:
    """Pass each prompt through the model once, and repeat what comes of it for the rows of its group."""
    limit = sampling.max_completion_tokens
    cache = DynamicCache(config=model.config)
    prompt_mask = prompt_mask.long()
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = next_logits(model, cache, prompt_ids, prompt_mask, positions)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = BufferedLayer(layer, group_size, limit)
        else:
            layer.batch_repeat_interleave(group_size)
    attention_mask = pad(prompt_mask, (0, limit), value=1).repeat_interleave(group_size, dim=0)
    if attends_fully(model) and model.config._attn_implementation == "sdpa":
        attention_mask = attention_mask.bool()[:, None, None]  # the form that attention needs, made once
    completions = prompt_ids.new_full((len(prompt_ids) * group_size, limit), sampling.pad_id)
    live = torch.arange(len(completions), device=prompt_ids.device)
    return DecodeState(
        completions=completions,
        logprobs=torch.zeros_like(completions, dtype=torch.float32) if sampling.logprobs else None,
        nuclei=NucleusRecorder(completions) if sampling.nucleus else None,
        live=live,
        ended=torch.zeros_like(live, dtype=torch.bool),
        logits=logits.repeat_interleave(group_size, dim=0),
        positions=positions[:, -1:].repeat_interleave(group_size, dim=0),
        attention_mask=attention_mask,
        prompt_length=prompt_ids.shape[1],
        cache=cache,
    )


def next_logits(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """(b, V) logits of the token after ids (b, t), whose keys and values are added to the cache."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def sample(state: DecodeState, sampling: Sampling) -> None:
    """Draw the next token of each row, padding where the row has ended; temperature 0 takes the likeliest."""
    scores = state.logits.float() / (sampling.temperature or 1.0)  # (b, V)
    allowed = scores
    if sampling.top_k > 0:
        least = scores.topk(min(sampling.top_k, scores.shape[1])).values[:, -1:]
        allowed = scores.masked_fill(scores < least, -torch.inf)
    if state.nuclei is not None:
        scores = allowed = state.nuclei.cut(allowed, sampling.top_p, state)
    if sampling.temperature > 0:
        tokens = sample_nucleus(allowed.softmax(dim=1), sampling.top_p if state.nuclei is None else 1.0)
    else:
        tokens = allowed.argmax(dim=1)
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


class BufferedLayer(DynamicLayer):
    """A prefilled full-attention cache layer, repeated for each row of a group, that writes into preallocated buffers.

    They are (rows, heads, P + T, dim); `keys` and `values` are views of the filled part.
    """

    def __init__(self, layer: DynamicLayer, group_size: int, max_completion_tokens: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        dtype = layer.keys.dtype
        if torch.is_autocast_enabled(layer.keys.device.type):  # attention would cast the whole cache at every step
            dtype = torch.get_autocast_dtype(layer.keys.device.type)
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


# ---------------------------------------------------------------- drawing a token


def sample_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Draw one token a row from its nucleus: the tokens with less than top_p of the mass strictly above them.

    Takes probabilities (b, V) float32, after temperature; returns tokens (b,) int64. Equally likely tokens at the
    nucleus' edge all belong to it; the library keeps an arbitrary few of them. On a CPU a token outside the nucleus is
    drawn again; rows without a token in it after `MAX_TRIES`, and all on a GPU, are sorted.
    """
    if probs.is_cuda:  # rejection would make the CPU wait for the GPU
        return sample_sorted(probs, top_p)
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
    tokens[rows] = sample_sorted(probs, top_p)
    return tokens


def sample_sorted(probs: Tensor, top_p: float) -> Tensor:
    """`sample_nucleus` by sorting the probabilities (b, V)."""
    probs, tokens = probs.sort(dim=1, descending=True)
    probs = probs * (probs >= nucleus_edge(probs, top_p))
    # as torch.multinomial, without its check, which aborts the process on a GPU if a logit is NaN
    return tokens.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(dim=1, keepdim=True)).squeeze(1)


def nucleus_edge(ordered: Tensor, top_p: float) -> Tensor:
    """The least probability inside the nucleus, (b, 1), of probabilities (b, V) in descending order."""
    limit = top_p if top_p < 1 else math.inf
    is_inside = ordered.cumsum(dim=1) - ordered < limit
    return ordered.where(is_inside, torch.inf).amin(dim=1, keepdim=True)


def in_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The nucleus that `sample_nucleus` draws from, (b, V) bool, of probabilities (b, V); without impossible tokens."""
    edge = nucleus_edge(probs.sort(dim=1, descending=True).values, top_p)
    return (probs >= edge) & (probs > 0)


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
