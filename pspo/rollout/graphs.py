"""Decoder "graphs": a forward pass with shapes and addresses that never change, on a GPU as a CUDA graph.

All rows stay in the batch, and the attention mask hides the columns that are not written yet.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class FixedStep:
    """The passes after the prefill; the first on a GPU is captured, the others replay it.

    Args:
        cache: of prefilled layers with ``buffers`` (b, heads, P + T, dim); they are replaced.
        positions: (b, 1) int64, of the prompts' last tokens.
        attention_mask: (b, 1, 1, P + T) bool.
        prompt_length: P.
    """

    def __init__(self, cache: DynamicCache, positions: Tensor, attention_mask: Tensor, prompt_length: int):
        self.column = torch.tensor([prompt_length], device=positions.device)  # (1,), to write next
        self.cache = cache
        cache.layers = [FixedLayer(layer.buffers, self.column) for layer in cache.layers]
        self.tokens = torch.zeros_like(positions)  # (b, 1)
        self.positions = positions.clone()
        columns = torch.arange(attention_mask.shape[-1], device=positions.device)
        self.visible = attention_mask & (columns < self.column)
        self.graph: torch.cuda.CUDAGraph | None = None

    def next_logits(self, model: transformers.PreTrainedModel, tokens: Tensor) -> Tensor:
        """(b, V) logits of the token after the tokens (b,)."""
        self.tokens.copy_(tokens[:, None])
        self.positions += 1
        self.visible.index_fill_(3, self.column, True)
        if not tokens.is_cuda:
            self.logits = self.forward(model)
        else:
            if self.graph is None:
                self.capture(model)
            self.graph.replay()
        self.column += 1
        return self.logits

    def forward(self, model: transformers.PreTrainedModel) -> Tensor:
        output = model(
            input_ids=self.tokens,
            attention_mask=self.visible,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def capture(self, model: transformers.PreTrainedModel) -> None:
        warm_up = torch.cuda.Stream()  # capture needs every kernel to have run once, on another stream
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                self.forward(model)
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.forward(model)


class FixedLayer(DynamicLayer):
    """A cache layer of whole buffers (b, heads, P + T, dim), written at a column (1,) int64 that others move."""

    def __init__(self, buffers: list[Tensor], column: Tensor):
        super().__init__()
        self.lazy_initialization(*buffers)
        self.keys, self.values = buffers
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values
