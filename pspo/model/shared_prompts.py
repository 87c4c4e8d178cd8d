"""Prompt sharing: compute what rows have in common once. Same numbers to rounding, less work for long prompts."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

MIN_PREFIX = 16  # shorter common beginnings of prompts are not worth a pass of their own


def hidden_states_of_shared_prompts(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, width: int
) -> Tensor | None:
    """(B, T, H): last hidden states from the prompts' last column on; None if nothing can be shared.

    First the beginning of all prompts (the system prompt), then the rest of each prompt for its adjacent rows, then the
    completions, each on top of the keys and values of what precedes it, through which gradients flow.

    Args:
        ids, mask, positions: (B, P + T - 1), prompts left-padded and completions right-padded.
        width: P, the prompts' columns.
    """
    prompt_ids, prompt_mask = ids[:, :width], mask[:, :width]
    is_first = torch.ones_like(ids[:, 0], dtype=torch.bool)  # of the rows with its prompt
    is_first[1:] = (prompt_ids[1:] != prompt_ids[:-1]).any(dim=1) | (prompt_mask[1:] != prompt_mask[:-1]).any(dim=1)
    prompts = is_first.nonzero().squeeze(1)  # (n,), the first row of each prompt
    prefix = prompt_ids[0, :0]  # (L,)
    if len(prompts) > 1 and attends_fully(model):
        prefix = _common_prefix(prompt_ids[prompts], prompt_mask[prompts])
    nothing_shared = len(prefix) == 0 and len(prompts) == len(ids)
    cached = shares_prompts(model) and not model.training  # training mode means gradient checkpointing: no cache
    if nothing_shared or not cached or ids.shape[1] == width:
        return None

    cache = DynamicCache(config=model.config)

    def body(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return model.base_model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state

    L = len(prefix)
    if L > 0:
        body(prefix[None], torch.ones_like(prefix)[None], torch.arange(L, device=ids.device)[None])
        cache.batch_select_indices(torch.zeros_like(prompts))
        mask = mask.clone()
        mask[:, L:width] *= positions[:, L:width] >= L  # the prefix takes the first L columns of every row,
        mask[:, :L] = 1  # whatever padding was there
    last = body(ids[prompts, L:width], mask[prompts, :width], positions[prompts, L:width])[:, -1:]
    prompt_of_row = is_first.cumsum(dim=0) - 1  # (B,)
    cache.batch_select_indices(prompt_of_row)
    return torch.cat([last[prompt_of_row], body(ids[:, width:], mask, positions[:, width:])], dim=1)


def _common_prefix(prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
    """The tokens (L,) with which all prompts begin, shorter than the shortest prompt; none if fewer than MIN_PREFIX."""
    lengths = prompt_mask.sum(dim=1)
    columns = torch.arange(int(lengths.min()) - 1, device=prompt_ids.device)
    aligned = prompt_ids.gather(1, (prompt_ids.shape[1] - lengths)[:, None] + columns)  # (B, shortest - 1)
    L = int((aligned == aligned[0]).all(dim=0).cumprod(dim=0).sum())
    return aligned[0, : L if L >= MIN_PREFIX else 0]


def attends_fully(model: PreTrainedModel) -> bool:
    """True if every layer attends to everything before, wherever padding lies: windows and ALiBi count columns."""
    config = model.config.get_text_config()
    windows = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's, which its cache does not show
    alibi = getattr(config, "alibi", config.model_type in ("bloom", "mpt"))
    layers = DynamicCache(config=model.config).layers
    return not windows and not alibi and all(type(layer) is DynamicLayer for layer in layers)


def shares_prompts(model: PreTrainedModel) -> bool:
    """True if every layer caches keys and values, which rows can share: no linear attention, no state spaces."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
