"""Prompt sharing: compute once what rows have in common. Same numbers to rounding, less work for long prompts."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pspo import distributed as dist
from pspo.model.device import to_device

# The name of models' argument for a cache: transformers renamed it in 5.24, and accepts the first name until 5.40.
CACHE_ARGUMENT = "past_key_values"
if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    CACHE_ARGUMENT = "cache"
MIN_PADDING = 256  # tokens of padding in a pass over completions that justify another pass
MIN_PREFIX = 16  # shorter common beginnings of prompts are not worth a pass of their own


def hidden_states_of_shared_prompts(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, width: int
) -> Tensor | None:
    """(B, T, H): last hidden states from the prompts' last column on; None if nothing can be shared.

    A CPU first computes the beginning of all prompts (the system prompt). Then come the rest of each prompt, once for
    its adjacent rows, and the completions, on a CPU in passes of like lengths. Each pass attends to the keys and values
    of earlier passes, through which gradients flow. Inputs are (B, P + T - 1), on the CPU; ``width`` is P.
    """
    if ids.shape[1] == width:
        return None
    columns = torch.cat([ids[:, :width], mask[:, :width]], dim=1)
    _, row_prompts, counts = columns.unique_consecutive(return_inverse=True, return_counts=True, dim=0)
    prompts = counts.cumsum(dim=0) - counts  # (n,), the first row of each prompt
    cache, mask, L = share_prefix(model, ids[prompts, :width], mask[prompts, :width], mask, positions)
    if L == 0 and len(prompts) == len(ids):
        return None
    last = body_states(model, ids[prompts, L:width], mask[prompts, :width], positions[prompts, L:width], cache)[:, -1:]
    states = last.new_zeros(len(ids), ids.shape[1] - width, last.shape[2])
    lengths = mask[:, width:].sum(dim=1)
    for rows in passes_by_length(lengths, model.device):
        end = width + int(lengths[rows].max())
        of_rows = PassCache(model, cache, row_prompts[rows], last=True)
        completions = body_states(model, ids[rows, width:end], mask[rows, :end], positions[rows, width:end], of_rows)
        states[to_device(rows, model.device), : end - width] = completions
    return torch.cat([last[to_device(row_prompts, model.device)], states], dim=1)


def passes_by_length(lengths: Tensor, device: torch.device) -> list[Tensor]:
    """The rows (b,) of each pass: rows of like lengths (B,); on a GPU, where a pass costs more, all rows in one."""
    order = lengths.argsort(descending=True, stable=True)
    starts = [0]
    if device.type != "cuda":
        sizes = lengths[order].tolist()
        for i, size in enumerate(sizes):
            padding = (sizes[starts[-1]] - size) * (len(sizes) - i)  # of this row and the rows after it
            if padding >= MIN_PADDING:
                starts.append(i)
    return [rows for rows in order.tensor_split(starts[1:]) if lengths[rows[0]] > 0]


def body_states(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """(b, t, H) last hidden states of tokens (b, t), on top of a cache; the mask (b, T) includes cached columns."""
    ids, mask, positions = to_model(model, ids, mask, positions)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
    return model.base_model(**inputs, use_cache=cache is not None).last_hidden_state


def to_model(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (b, t), the mask (b, T) of all columns, and positions (b, t) from the CPU to the model's device.

    On a GPU the mask becomes the columns that each token attends to: transformers would wait for the GPU to make them.
    """
    ids = to_device(ids, model.device)
    mask = to_device(mask, model.device)
    if model.device.type == "cuda" and takes_visible_columns(model):
        columns = torch.arange(mask.shape[1], device=mask.device)
        mask = mask.bool()[:, None, None] & (columns <= columns[-ids.shape[1] :, None])
    return ids, mask, to_device(positions, model.device)


class PassCache(DynamicCache):
    """Cache of a pass that continues an earlier pass, whose cache ``below`` it leaves unchanged for recomputed layers.

    ``rows`` (b,) are the rows of the earlier pass that this pass continues; the ``last`` pass keeps no layers.
    """

    def __init__(
        self, model: PreTrainedModel, below: PassCache | None = None, rows: Tensor | None = None, last: bool = False
    ):
        super().__init__(config=model.config)
        self.layers = self.layers if below is None else below.filled
        self.rows = None if rows is None else to_device(rows, model.device)
        self.last = last
        self.filled = [None] * len(self.layers)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = copy.copy(self.layers[layer_idx])
        if self.rows is not None:
            layer.batch_select_indices(self.rows)
        if self.filled[layer_idx] is None and not self.last:
            self.filled[layer_idx] = layer
        return layer.update(keys, values, *args, **kwargs)


def share_prefix(
    model: PreTrainedModel, prompt_ids: Tensor, prompt_mask: Tensor, mask: Tensor, positions: Tensor
) -> tuple[PassCache, Tensor, int]:
    """On a CPU, compute the common beginning of left-padded prompts (n, P) once, if it has MIN_PREFIX tokens.

    On a GPU another pass costs more than it saves. ``mask`` and ``positions``, (b, P + ...), belong to the rows that
    continue the prompts. Returns, for a pass over columns L and later: its cache; its mask (b, P + ...), which has the
    beginning in columns 0 to L - 1 of every row, and masks the row's own copy; and L, which may be 0.
    """
    cache = PassCache(model)
    if len(prompt_ids) == 1 or model.device.type == "cuda" or not attends_fully(model) or dist.is_sharded(model):
        return cache, mask, 0
    width = prompt_ids.shape[1]
    lengths = prompt_mask.sum(dim=1)
    columns = torch.arange(int(lengths.min()) - 1)  # the prefix is shorter than the shortest prompt
    aligned = prompt_ids.gather(1, (width - lengths)[:, None] + columns)
    L = int((aligned == aligned[0]).all(dim=0).cumprod(dim=0).sum())
    if L < MIN_PREFIX:
        return cache, mask, 0
    columns = columns[None, :L]
    body_states(model, aligned[:1, :L], torch.ones_like(columns), columns, cache)
    mask = mask.clone()
    mask[:, L:width] *= positions[:, L:width] >= L
    mask[:, :L] = 1
    return PassCache(model, cache, torch.zeros(len(prompt_ids), dtype=torch.long)), mask, L


def attends_fully(model: PreTrainedModel) -> bool:
    """True if all layers attend to all earlier tokens, wherever padding lies; windows and ALiBi count columns."""
    config = model.config.get_text_config()
    windows = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's, which its cache does not show
    alibi = getattr(config, "alibi", config.model_type in ("bloom", "mpt"))
    layers = DynamicCache(config=model.config).layers
    return not windows and not alibi and all(type(layer) is DynamicLayer for layer in layers)


def takes_visible_columns(model: PreTrainedModel) -> bool:
    """True if a pass takes the columns that each token attends to, (b, 1, t, T) bool, as its attention mask."""
    return model.config._attn_implementation == "sdpa" and attends_fully(model)


def has_plain_cache(model: PreTrainedModel) -> bool:
    """True if every layer caches keys and values, which rows can share: no linear attention, no state spaces."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def shares_prompts(model: PreTrainedModel) -> bool:
    """True if passes compute once what rows share; not for a sharded model, whose ranks must run equal passes."""
    return has_plain_cache(model) and not dist.is_sharded(model)
