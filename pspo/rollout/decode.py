"""A decoding loop for `model.generate(custom_generate=...)`, several times as fast as the library's own on rollouts.

The distribution is exactly that of Hugging Face sampling; what differs is the work: each prompt is prefilled once for
its whole group, keys and values go into buffers allocated once, the nucleus is found without sorting the vocabulary,
and rows that have ended leave the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer

NUCLEUS_CANDIDATES = 64


class BufferedLayer(DynamicLayer):
    """A full-attention cache layer that, once spread over its groups, writes new keys and values into room set aside.

    Buffers are (rows, heads, prompt + room, dim); `keys` and `values` are views of their filled part.
    """

    def __init__(self, room: int):
        super().__init__()
        self.room = room

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.buffers = []
        for states in (self.keys, self.values):
            rows, heads, length, dim = states.shape
            buffer = states.new_empty(rows * repeats, heads, length + self.room, dim)
            buffer[:, :, :length] = states.repeat_interleave(repeats, dim=0)
            self.buffers.append(buffer)
        self._view(length)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start, end = self.get_seq_length(), self.get_seq_length() + key_states.shape[2]
        if start == 0:  # the prefill
            return super().update(key_states, value_states, *args, **kwargs)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._view(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._view(self.get_seq_length())

    def _view(self, length: int) -> None:
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)


def sample_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Draw one token a row from the smallest set of most likely tokens whose mass is at least top_p.

    Exact without sorting the vocabulary: where the nucleus fits into the most likely 64 tokens it is cut there;
    elsewhere tokens are drawn from the whole distribution until one has less than top_p of the mass strictly above it.

    Args:
        logits: (b, V) float32, after temperature.
        top_p: in (0, 1].

    Returns:
        (b,) int64. Of tokens tied at the nucleus's edge those count that topk puts first; all, where it is wider
        than 64.
    """
    probs = logits.softmax(dim=1)
    if top_p >= 1:
        return probs.multinomial(1).squeeze(1)
    top_probs, top_tokens = probs.topk(min(NUCLEUS_CANDIDATES, probs.shape[1]), dim=1)  # (b, 64)
    mass_above = top_probs.cumsum(dim=1) - top_probs
    kept = top_probs.where(mass_above < top_p, 0.0)
    tokens = top_tokens.gather(1, kept.multinomial(1)).squeeze(1)
    wide = (mass_above[:, -1] + top_probs[:, -1] < top_p).nonzero().squeeze(1)  # rows whose nucleus goes on
    while len(wide) and probs.shape[1] > NUCLEUS_CANDIDATES:
        drawn = probs[wide].multinomial(1)  # (w, 1)
        tokens[wide] = drawn.squeeze(1)
        above = probs[wide].where(probs[wide] > probs[wide].gather(1, drawn), 0.0).sum(dim=1)
        wide = wide[above >= top_p]
    return tokens


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    generation_config: GenerationConfig,
    group_size: int,
    top_p: float,
    stop_ids: Sequence[int],
    **model_kwargs,
) -> Tensor:
    """Complete each prompt ``group_size`` times.

    `generate` prepares the arguments; its processors do minimum length, temperature and top_k.

    Args:
        input_ids: (N, P), left-padded prompts; their mask, (N, P) int64, is in ``model_kwargs["attention_mask"]``.

    Returns:
        (N * group_size, T) completions, the rows of one prompt adjacent, padded after their stop token.
    """
    limit, prompt_length = generation_config.max_new_tokens, input_ids.shape[1]
    attention_mask = model_kwargs["attention_mask"]  # which the library leaves out where nothing is padded
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferedLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]

    cache.batch_repeat_interleave(group_size)
    logits = logits.repeat_interleave(group_size, dim=0)  # (b, V), b rows are live, at first all
    rows = torch.nn.functional.pad(input_ids, (0, limit), value=generation_config.pad_token_id)
    rows = rows.repeat_interleave(group_size, dim=0)  # (N * group_size, P + T), to be filled in
    attended = torch.nn.functional.pad(attention_mask, (0, limit), value=1).repeat_interleave(group_size, dim=0)
    positions = positions[:, -1:].repeat_interleave(group_size, dim=0)  # (b, 1)
    stops = torch.tensor(stop_ids, device=rows.device)
    live = torch.arange(len(rows), device=rows.device)  # (b,), which row each live one is
    ended = torch.zeros_like(live, dtype=torch.bool)
    for end in range(prompt_length, prompt_length + limit):
        scores = logits_processor(rows[live, :end], logits.float())
        tokens = sample_nucleus(scores, top_p) if generation_config.do_sample else scores.argmax(dim=1)
        tokens = tokens.where(~ended, generation_config.pad_token_id)
        rows[live, end] = tokens
        ended |= torch.isin(tokens, stops)
        if ended.all() or end == prompt_length + limit - 1:
            break
        if 4 * ended.sum() >= len(ended):  # fewer rows are worth a copy of the cache
            stay = (~ended).nonzero().squeeze(1)
            cache.batch_select_indices(stay)
            attended, positions, tokens, live, ended = (
                part[stay] for part in (attended, positions, tokens, live, ended)
            )
        positions = positions + 1
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=attended[:, : end + 1],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    return rows[:, prompt_length : end + 1]
