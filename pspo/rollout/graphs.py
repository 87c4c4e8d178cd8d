"""Decoder "graphs": the decoding loop for a GPU. One CUDA graph computes a whole step.

Shapes and addresses never change: keys and values are written at a column that is a tensor, and the attention mask
hides the columns that are not written yet. Every 16 tokens the CPU asks how many rows are unfinished. Once half of the
rows can hold these, they move to the front, and a graph of half as many decodes on. Buffers and graphs are kept for
the next rollout. A smaller rollout begins at each buffer's start: its tokens do not depend on earlier rollouts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel, StopStringCriteria
from transformers.cache_utils import DynamicLayer

from pspo.model import to_device
from pspo.rollout.decode import GPU_CHECK_EVERY, Prefill, next_logits, prefill
from pspo.rollout.drawing import draw_tokens
from pspo.rollout.types import Completions, Padded, Sampling

MIN_ROWS = 8  # fewest rows to shrink to: fewer are hardly faster
COLUMN_STEP = 64  # the number of columns is a multiple of this: a slightly longer prompt needs no new graphs
GRAPH_DECODERS: WeakKeyDictionary[PreTrainedModel, GraphDecoder] = WeakKeyDictionary()


def decode_by_graphs(
    model: PreTrainedModel, prompts: Padded, sampling: Sampling, stops: StopStringCriteria | None, group_size: int
) -> Completions:
    """Complete each of the prompts (N, P) ``group_size`` times."""
    rows = len(prompts.ids) * group_size
    n = round_rows(rows)
    limit = sampling.max_completion_tokens
    columns = COLUMN_STEP * math.ceil((prompts.ids.shape[1] + limit) / COLUMN_STEP)
    prefilled = prefill(model, prompts)
    decoder = GRAPH_DECODERS.pop(model, None)  # put back at the end, unless memory runs out
    if decoder is None or not decoder.fits(prefilled, n, columns, limit):
        decoder = None  # frees its buffers before new ones are allocated
        decoder = GraphDecoder(prefilled, n, columns, limit)
    decoder.load(prefilled, n, columns, sampling, group_size)
    decoder.cast_weights(model)
    decoder.draw(prefilled.logits.repeat_interleave(group_size, dim=0), sampling)
    length = 1
    while length < limit:
        if length % GPU_CHECK_EVERY == 0:
            if stops is not None:
                decoder.end_rows(n, length, stops)
            live = int((~decoder.ended[:n]).sum())
            if live == 0:
                break
            n = decoder.shrink(n, live)
        decoder.advance(model, n, sampling)
        length += 1
    GRAPH_DECODERS[model] = decoder
    logprobs = decoder.logprobs[:rows, :length] if sampling.logprobs else None
    return Completions(decoder.completions[:rows, :length], logprobs)


def round_rows(rows: int) -> int:
    """Round a number of rows up to one of four sizes between powers of two; each size needs a graph of its own."""
    step = 2 ** max(0, (rows - 1).bit_length() - 3)
    return step * math.ceil(rows / step)


class GraphDecoder:
    """Buffers for R rows and C columns, and graphs that decode the first of these rows."""

    def __init__(self, prefilled: Prefill, rows: int, columns: int, limit: int) -> None:
        device = prefilled.logits.device
        self.size = (rows, columns, limit)
        self.buffers = []  # flat: for each layer one of keys and one of values
        for layer in prefilled.cache.layers:
            for states in (layer.keys, layer.values):
                numbers = rows * columns * states.shape[1] * states.shape[3]
                self.buffers.append(states.new_zeros(numbers))
        self.visible_buffer = torch.zeros(rows * columns, dtype=torch.bool, device=device)
        self.weights: dict[str, Tensor] = {}  # linear layers' in autocast's dtype: a graph would cast them each time
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)  # drawn last
        self.positions = torch.zeros_like(self.tokens)  # of the tokens drawn last
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        self.rows = torch.arange(rows, device=device)  # the completion that each row of the buffers decodes
        self.column = torch.zeros(1, dtype=torch.long, device=device)  # to write next
        self.length = torch.zeros(1, dtype=torch.long, device=device)  # tokens drawn
        self.completions = torch.zeros(rows, limit, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, limit, device=device)
        self.graphs: dict[tuple[int, bool, int, str], torch.cuda.CUDAGraph | None] = {}  # None until it is captured

    def fits(self, prefilled: Prefill, *size: int) -> bool:
        """True if the buffers are large enough, and of the dtype of the keys."""
        is_large = all(needed <= there for needed, there in zip(size, self.size, strict=True))
        return is_large and prefilled.cache.layers[0].keys.dtype == self.buffers[0].dtype

    def load(self, prefilled: Prefill, n: int, columns: int, sampling: Sampling, group_size: int) -> None:
        """Load prefilled prompts (N, P), each into ``group_size`` of n rows; the rest of the rows are idle."""
        rows = len(prefilled.mask) * group_size
        width = prefilled.mask.shape[1]
        device = self.tokens.device
        views = []
        prompts = [states for layer in prefilled.cache.layers for states in (layer.keys, layer.values)]
        for buffer, states in zip(self.buffers, prompts, strict=True):
            _, heads, _, dim = states.shape
            view = buffer[: n * heads * columns * dim].view(n, heads, columns, dim)
            view[:rows, :, :width] = states.repeat_interleave(group_size, dim=0)
            views.append(view)
        self.keys = views[::2]  # of each layer, (n, heads, c, dim); n rows and c columns are decoded now
        self.values = views[1::2]
        self.tokens.zero_()
        self.positions.zero_()  # idle rows count on, too, and would in time leave the model's range
        self.positions[:rows] = prefilled.positions.repeat_interleave(group_size, dim=0)
        self.visible = self.visible_buffer[: n * columns].view(n, 1, 1, columns)  # columns that are attended to
        self.visible.fill_(False)
        self.visible[:rows, 0, 0, :width] = to_device(prefilled.mask, device).repeat_interleave(group_size, dim=0)
        self.ended.fill_(True)
        self.ended[:rows] = False
        self.rows.copy_(torch.arange(len(self.rows), device=device))
        self.column.fill_(width)
        self.length.zero_()
        self.completions.fill_(sampling.pad_id)
        is_cast = torch.is_autocast_enabled(device.type)
        # What a graph depends on besides its rows.
        self.kind = (is_cast, columns, str(replace(sampling, max_completion_tokens=1)))

    def cast_weights(self, model: PreTrainedModel) -> None:
        """Under autocast, copy the weights and biases of linear layers in its dtype."""
        device_type = model.device.type
        if not torch.is_autocast_enabled(device_type):
            return
        dtype = torch.get_autocast_dtype(device_type)
        linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for key, weight in [pair for name, linear in linears for pair in linear.named_parameters(name, recurse=False)]:
            if weight.dtype == dtype:
                continue
            if key not in self.weights:
                self.weights[key] = torch.empty_like(weight, dtype=dtype, requires_grad=False)
            self.weights[key].copy_(weight)

    def shrink(self, n: int, live: int) -> int:
        """The new number of rows: n, halved while the live rows fit half. The live rows move to the front."""
        size = n
        while size // 2 >= max(live, MIN_ROWS):
            size //= 2
        if size < n:
            order = self.ended[:n].long().argsort(stable=True)[:size]
            for buffer in (self.tokens, self.positions, self.visible, self.ended, self.rows, *self.keys, *self.values):
                buffer[:size] = buffer[order]
        return size

    def end_rows(self, n: int, length: int, stop_strings: StopStringCriteria) -> None:
        """End the rows whose completions hold a stop string within the tokens since the last check."""
        ids = self.completions[:, :length].cpu()
        has_stop = torch.zeros(len(ids), dtype=torch.bool)
        for end in range(length - GPU_CHECK_EVERY + 1, length + 1):
            has_stop |= stop_strings(ids[:, :end], None)
        self.ended[:n] |= to_device(has_stop, self.ended.device)[self.rows[:n]]

    def advance(self, model: PreTrainedModel, n: int, sampling: Sampling) -> None:
        """Draw one more token for the first n rows: on a GPU by a graph, but for the first token of each kind."""
        key = (n, *self.kind)
        if self.tokens.device.type != "cuda" or key not in self.graphs:
            self.step(model, n, sampling)
            self.graphs[key] = None
            return
        if self.graphs[key] is None:  # a capture needs a step before it, and computes and draws nothing itself
            graph = torch.cuda.CUDAGraph()
            captured = (other for other in self.graphs.values() if other is not None)
            pool = next((other.pool() for other in captured), None)  # graphs never run at the same time
            with torch.cuda.graph(graph, pool=pool):
                self.step(model, n, sampling)
            self.graphs[key] = graph
        self.graphs[key].replay()

    def step(self, model: PreTrainedModel, n: int, sampling: Sampling) -> None:
        """Pass the tokens drawn last through the model, and draw the next token of each of the first n rows."""
        self.positions[:n] += 1
        self.visible[:n].index_fill_(3, self.column, True)
        cache = DynamicCache(config=model.config)
        pairs = zip(self.keys, self.values, strict=True)
        cache.layers = [FixedLayer(keys[:n], values[:n], self.column) for keys, values in pairs]

        device = self.tokens.device.type
        is_cast = torch.is_autocast_enabled(device)
        weights = self.weights if is_cast else {}

        def forward(**inputs: Any) -> Any:
            return functional_call(model, weights, kwargs=inputs, tie_weights=False)

        # Autocast's cache would give a capture copies of parameters that are gone, or old, when the graph is replayed.
        with torch.autocast(device, torch.get_autocast_dtype(device), enabled=is_cast, cache_enabled=False):
            logits = next_logits(forward, cache, self.tokens[:n], self.visible[:n], self.positions[:n])
        self.column += 1
        self.draw(logits, sampling)

    def draw(self, logits: Tensor, sampling: Sampling) -> None:
        """Draw the next token of the first n rows from logits (n, V); padding where a row has ended."""
        n = len(logits)
        tokens, scores = draw_tokens(logits, sampling)
        tokens = tokens.where(~self.ended[:n], sampling.pad_id)
        places = (self.rows[:n], self.length.expand(n))
        self.completions.index_put_(places, tokens)
        if sampling.logprobs:
            self.logprobs.index_put_(places, -cross_entropy(scores, tokens, reduction="none"))
        for stop_id in sampling.stop_ids:
            self.ended[:n] |= tokens == stop_id
        self.tokens[:n] = tokens[:, None]
        self.length += 1


class FixedLayer(DynamicLayer):
    """A cache layer of whole buffers (n, heads, C, dim), written at a column (1,) int64 that the decoder moves."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor):
        super().__init__()
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True
        self.keys = keys
        self.values = values
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values
