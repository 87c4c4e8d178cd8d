"""What may make a GPU faster, and no GPU has shown yet: each patch changes pspo from outside, for a `with` block.

`python -m benchmarks.gpu --part decide` measures each beside pspo as it is. One that pays moves into `pspo`, by what it
does here; the others go. They know the decoder layers of Qwen2 and Llama as transformers writes them.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

import pspo.model.logprobs
import pspo.rollout.graphs
import pspo.update.learner
from pspo.model.shared_prompts import CACHE_ARGUMENT, PassCache, body_states, to_model
from pspo.rollout import Sampling
from pspo.rollout.drawing import RACE_MISS
from pspo.rollout.graphs import COLUMN_STEP, FixedLayer, round_rows


def compile_whole(function: Callable, dynamic: bool) -> Callable:
    """The function, compiled without a break; as it is on a simulated GPU, which no compiler knows."""
    if torch.cuda.is_available() and torch.version.cuda is None:
        return function
    return torch.compile(function, fullgraph=True, dynamic=dynamic, options={"fallback_random": True})


# ---------------------------------------------------------------- decoder layers, compiled one by one


@contextmanager
def compiled_decoding(policy: PreTrainedModel) -> Iterator[None]:
    """Steps of "graphs" run one compiled layer, of fixed shapes, for all layers."""
    kind = type(policy.base_model.layers[0])
    plain = kind.forward

    def run(layer: nn.Module, hidden: Tensor, mask: Tensor, angles: tuple[Tensor, Tensor], *buffers: Tensor) -> Tensor:
        cache = {CACHE_ARGUMENT: FixedLayer(*buffers)}
        return plain(layer, hidden, attention_mask=mask, position_embeddings=angles, **cache)

    compiled = compile_whole(run, dynamic=False)

    def forward(layer: nn.Module, hidden: Tensor, **inputs: object) -> Tensor:
        cache = inputs[CACHE_ARGUMENT]
        buffers = None if cache is None else cache.layers[layer.self_attn.layer_idx]
        if not isinstance(buffers, FixedLayer):
            return plain(layer, hidden, **inputs)
        angles = inputs["position_embeddings"]
        return compiled(layer, hidden, inputs["attention_mask"], angles, buffers.keys, buffers.values, buffers.column)

    with mock.patch.object(kind, "forward", forward):
        yield


@contextmanager
def compiled_training(policy: PreTrainedModel) -> Iterator[None]:
    """Passes with and without gradient run one compiled layer, of any number of rows and columns, for all layers."""
    kind = type(policy.base_model.layers[0])
    plain = kind.forward

    def run(
        layer: nn.Module, hidden: Tensor, mask: Tensor | None, angles: tuple[Tensor, Tensor], *below: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache = cached_layer(*below)
        hidden = plain(layer, hidden, attention_mask=mask, position_embeddings=angles, **{CACHE_ARGUMENT: cache})
        return hidden, cache.keys, cache.values

    compiled = compile_whole(run, dynamic=True)

    def forward(layer: nn.Module, hidden: Tensor, **inputs: object) -> Tensor:
        cache = inputs[CACHE_ARGUMENT]
        if cache is not None and type(cache) is not PassCache:
            return plain(layer, hidden, **inputs)
        place = layer.self_attn.layer_idx
        below = DynamicLayer() if cache is None else copy.copy(cache.layers[place])
        if cache is not None and cache.rows is not None:
            below.batch_select_indices(cache.rows)
        mask = inputs["attention_mask"]
        angles = inputs["position_embeddings"]
        hidden, keys, values = compiled(layer, hidden, mask, angles, below.keys, below.values)
        if cache is not None and cache.filled[place] is None and not cache.last:
            cache.filled[place] = cached_layer(keys, values)
        return hidden

    with mock.patch.object(kind, "forward", forward):
        yield


def cached_layer(keys: Tensor | None, values: Tensor | None) -> DynamicLayer:
    """The cache of a layer, with keys and values (b, heads, t, dim) or empty."""
    layer = DynamicLayer()
    if keys is not None:
        layer.lazy_initialization(keys, values)
        layer.keys = keys
        layer.values = values
    return layer


# ---------------------------------------------------------------- products fused in the decoding weights


class FirstLinear(nn.Module):
    """In place of the first of several layers with one input: it computes all, one above the other."""

    def __init__(self, layers: list[nn.Linear], others: list[Tensor]):
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        has_bias = layers[0].bias is not None
        self.joined = nn.Linear(layers[0].in_features, sum(self.sizes), bias=has_bias, device="meta")
        for name, _ in layers[0].named_parameters():
            weights = torch.cat([getattr(layer, name).detach() for layer in layers])
            setattr(self.joined, name, nn.Parameter(weights, requires_grad=False))
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.joined(x).split(self.sizes, dim=-1)
        self.others.extend(others)
        return first


class LaterLinear(nn.Module):
    """In place of one of the others: it returns what the first has computed."""

    def __init__(self, others: list[Tensor]):
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        return self.others.pop(0)


@contextmanager
def fused_products(policy: PreTrainedModel) -> Iterator[None]:
    """q, k and v come of one product, and gate and up of one. Graphs must decode under autocast: they copy weights."""
    with ExitStack() as stack:
        for layer in policy.base_model.layers:
            for parent, names in (
                (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
                (layer.mlp, ("gate_proj", "up_proj")),
            ):
                layers = [getattr(parent, name) for name in names]
                others: list[Tensor] = []
                setattr(parent, names[0], FirstLinear(layers, others))
                for name in names[1:]:
                    setattr(parent, name, LaterLinear(others))
                for name, linear in zip(names, layers, strict=True):
                    stack.callback(setattr, parent, name, linear)
        yield


# ---------------------------------------------------------------- drawing a token


def race_in_one_pass(probs: Tensor, top_p: float) -> Tensor:
    """`sample_race` without a bisection: the mass above every candidate at once, sums that a compiler fuses."""
    race = probs / torch.empty_like(probs).exponential_()
    if top_p >= 1:
        return race.argmax(dim=1)
    k = min(math.ceil(math.log(RACE_MISS) / math.log1p(-top_p)), probs.shape[1])
    candidates = torch.cat([race.topk(k, dim=1).indices, probs.argmax(dim=1, keepdim=True)], dim=1)  # (b, k + 1)
    p = probs.gather(1, candidates)
    above = torch.stack([(probs * (probs > p[:, i, None])).sum(dim=1) for i in range(k + 1)], dim=1)
    first = (above < top_p).long().argmax(dim=1, keepdim=True)
    return candidates.gather(1, first).squeeze(1)


@contextmanager
def compiled_sampler(policy: PreTrainedModel) -> Iterator[None]:
    """Tokens of "graphs" are drawn by compiled code, at a temperature above 0."""
    race = compile_whole(lambda scores, top_p: race_in_one_pass(scores.softmax(dim=1), top_p), dynamic=False)

    def draw_tokens(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        scores = logits.float() / sampling.temperature
        return race(scores, sampling.top_p), scores

    with mock.patch.object(pspo.rollout.graphs, "draw_tokens", draw_tokens):
        yield


# ---------------------------------------------------------------- the training pass as a CUDA graph


# Of each model, by rows and columns: they stay for the next block.
TRAINING_GRAPHS: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, ...], Callable]] = WeakKeyDictionary()


class Body(nn.Module):
    """A pass through a model's body: tokens, columns that they attend to and positions, to hidden states."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        self.body = policy.base_model

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return self.body(**inputs, use_cache=False).last_hidden_state


@contextmanager
def graphed_training(policy: PreTrainedModel) -> Iterator[None]:
    """A pass with gradient, each row with its prompt, is two CUDA graphs, of rows and columns rounded up."""
    graphs = TRAINING_GRAPHS.setdefault(policy, {})

    def graphed_states(
        model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: object = None
    ) -> Tensor:
        if not torch.is_grad_enabled() or cache is not None:
            return body_states(model, ids, mask, positions, cache)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:  # a graph's own would be overwritten by its replay
                parameter.grad = torch.zeros_like(parameter)
        b, t = ids.shape
        places = torch.arange(round_rows(b)).clamp(max=b - 1)  # the last row again
        inputs = to_model(model, *(pad(tensor[places], (0, -t % COLUMN_STEP)) for tensor in (ids, mask, positions)))
        shape = tuple(inputs[0].shape)
        device = model.device.type
        is_cast = torch.is_autocast_enabled(device)
        with torch.autocast(device, torch.get_autocast_dtype(device), enabled=is_cast, cache_enabled=False):
            if shape not in graphs:
                body = Body(model)
                graphs[shape] = torch.cuda.make_graphed_callables(body, inputs) if device == "cuda" else body
            return graphs[shape](*inputs)[:b, :t]

    unshared = mock.patch.object(pspo.update.learner, "shares_prompts", return_value=False)
    with unshared, mock.patch.object(pspo.model.logprobs, "body_states", graphed_states):
        yield
