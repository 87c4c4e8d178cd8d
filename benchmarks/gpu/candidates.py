"""What may make a GPU faster, and no GPU has shown yet: each candidate changes pspo from outside, for a `with` block.

`python -m benchmarks.gpu --part decide` measures each beside pspo as it is. One that pays moves into `pspo`, by what it
does here; the others go. They know the decoder layers of Qwen2 and Llama as transformers writes them.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

import pspo.model.logprobs
import pspo.rollout.graphs
from benchmarks.gpu.common import UNSHARED
from pspo.model.shared_prompts import CACHE_ARGUMENT, PassCache, body_states, to_model
from pspo.rollout import Sampling
from pspo.rollout.drawing import RACE_MISS
from pspo.rollout.graphs import COLUMN_STEP, FixedLayer, GraphDecoder, round_rows

Candidate = Callable[[PreTrainedModel], contextlib.AbstractContextManager]


def compile_whole(function: Callable, **options: object) -> Callable:
    """The function, compiled without a break; as it is on a simulated GPU, which no compiler knows."""
    if torch.cuda.is_available() and torch.version.cuda is None:
        return function
    return torch.compile(function, fullgraph=True, options={"fallback_random": True}, **options)


@contextlib.contextmanager
def replaced(modules: dict[tuple[nn.Module, str], object]) -> Iterator[None]:
    """Set attributes of modules."""
    before = {(module, name): getattr(module, name) for module, name in modules}
    for (module, name), value in modules.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            if name == "forward":
                del module.forward  # the class has one
            else:
                setattr(module, name, value)


# ---------------------------------------------------------------- decoder layers, compiled one by one


class WrittenCache:
    """Cache of one decoding layer in a compiled pass: keys and values (n, heads, c, dim) are written at a column."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor):
        self.keys = keys
        self.values = values
        self.column = column

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.column, keys.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, values.to(self.values.dtype))
        return self.keys, self.values


class GrownCache:
    """Cache of one training layer in a compiled pass: keys and values (b, heads, t, dim), or None, grow."""

    def __init__(self, keys: Tensor | None, values: Tensor | None):
        self.keys = keys
        self.values = values

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=2)
        return self.keys, self.values


def decoding_pass(
    layer: nn.Module, hidden: Tensor, mask: Tensor, angles: tuple[Tensor, Tensor], *buffers: Tensor
) -> Tensor:
    cache = {CACHE_ARGUMENT: WrittenCache(*buffers)}
    return type(layer).forward(layer, hidden, attention_mask=mask, position_embeddings=angles, **cache)


def training_pass(
    layer: nn.Module,
    hidden: Tensor,
    mask: Tensor | None,
    angles: tuple[Tensor, Tensor],
    keys: Tensor | None,
    values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    cache = GrownCache(keys, values)
    arguments = {"attention_mask": mask, "position_embeddings": angles, CACHE_ARGUMENT: cache}
    return type(layer).forward(layer, hidden, **arguments), cache.keys, cache.values


@contextlib.contextmanager
def compiled_decoding(policy: PreTrainedModel) -> Iterator[None]:
    """Steps of "graphs" run one compiled layer, of fixed shapes, for all layers."""
    compiled = compile_whole(decoding_pass, dynamic=False)

    def forward(layer: nn.Module, place: int, hidden: Tensor, **inputs: object) -> Tensor:
        cache = inputs[CACHE_ARGUMENT]
        buffers = None if cache is None else cache.layers[place]
        if not isinstance(buffers, FixedLayer):
            return type(layer).forward(layer, hidden, **inputs)
        angles = inputs["position_embeddings"]
        return compiled(layer, hidden, inputs["attention_mask"], angles, buffers.keys, buffers.values, buffers.column)

    with plain_products(policy), replaced(forwards(policy, forward)):
        yield


@contextlib.contextmanager
def compiled_training(policy: PreTrainedModel) -> Iterator[None]:
    """Passes with and without gradient run one compiled layer, of any number of rows and columns, for all layers."""
    compiled = compile_whole(training_pass)

    def forward(layer: nn.Module, place: int, hidden: Tensor, **inputs: object) -> Tensor:
        cache = inputs[CACHE_ARGUMENT]
        if cache is not None and type(cache) is not PassCache:
            return type(layer).forward(layer, hidden, **inputs)
        below = None
        keys = None
        values = None
        if cache is not None:
            below = copy.copy(cache.layers[place])
            if cache.rows is not None:
                below.batch_select_indices(cache.rows)
            if below.is_initialized:
                keys = below.keys
                values = below.values
        mask = inputs["attention_mask"]
        angles = inputs["position_embeddings"]
        for tensor, dims in ((hidden, (0, 1)), (mask, (0, 2, 3)), (keys, (0, 2)), (values, (0, 2))):
            for dim in dims if tensor is not None else ():
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
        for angle in angles:
            torch._dynamo.maybe_mark_dynamic(angle, 1)
        hidden, keys, values = compiled(layer, hidden, mask, angles, keys, values)
        if cache is not None and cache.filled[place] is None and not cache.last:
            below.lazy_initialization(keys, values)
            below.keys = keys
            below.values = values
            cache.filled[place] = below
        return hidden

    with plain_products(policy), replaced(forwards(policy, forward)):
        yield


def forwards(policy: PreTrainedModel, forward: Callable) -> dict[tuple[nn.Module, str], object]:
    return {(layer, "forward"): partial(forward, layer, i) for i, layer in enumerate(policy.base_model.layers)}


@contextlib.contextmanager
def plain_products(policy: PreTrainedModel) -> Iterator[None]:
    """On a CPU, take out the products by oneDNN, which make each layer's code another one."""
    changed = {module: module.__dict__.pop("forward") for module in policy.modules() if "forward" in module.__dict__}
    try:
        yield
    finally:
        for module, forward in changed.items():
            module.forward = forward


# ---------------------------------------------------------------- products fused in the decoding weights


class Fused:
    """Layers with one input: their weights in autocast's dtype, one above the other, and outputs not yet asked for."""

    def __init__(self, names: list[str]):
        self.names = names
        self.weight: Tensor | None = None  # (O1 + O2 + ..., I)
        self.bias: Tensor | None = None
        self.sizes: list[int] = []
        self.outputs: list[Tensor] = []

    def fuse(self, weights: dict[str, Tensor]) -> None:
        """Make the decoding weights of these layers views of one tensor, if they are there."""
        if f"{self.names[0]}.weight" not in weights:
            self.weight = None
            return
        self.weight = self.join(weights, "weight")
        self.bias = self.join(weights, "bias") if f"{self.names[0]}.bias" in weights else None

    def join(self, weights: dict[str, Tensor], kind: str) -> Tensor:
        parts = [weights[f"{name}.{kind}"] for name in self.names]
        self.sizes = [len(part) for part in parts]
        joined = parts[0]._base  # of an earlier block: captured graphs read it
        if joined is None:
            joined = torch.cat(parts)
            for name, part in zip(self.names, joined.split(self.sizes), strict=True):
                weights[f"{name}.{kind}"] = part
        return joined


class FirstLinear(nn.Linear):
    """The first of fused layers; it computes all of them where its weight is the decoding one."""

    def __init__(self, layer: nn.Linear, fused: Fused):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight = layer.weight
        self.bias = layer.bias
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        fused = self.fused
        if fused.weight is None or self.weight.dtype != fused.weight.dtype:
            return linear(x, self.weight, self.bias)
        first, *fused.outputs = linear(x, fused.weight, fused.bias).split(fused.sizes, dim=-1)
        return first


class LaterLinear(FirstLinear):
    """One of the others; it returns what the first has computed."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.fused.outputs
        return outputs.pop(0) if outputs else linear(x, self.weight, self.bias)


@contextlib.contextmanager
def fused_products(policy: PreTrainedModel) -> Iterator[None]:
    """Steps of "graphs" under autocast compute q, k and v in one product, and gate and up in one."""
    places = {module: name for name, module in policy.named_modules()}
    layers = {}
    all_fused = []
    for layer in policy.base_model.layers:
        for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
            fused = Fused([f"{places[parent]}.{name}" for name in names])
            all_fused.append(fused)
            for name, kind in zip(names, (FirstLinear, LaterLinear, LaterLinear), strict=False):
                layers[parent, name] = kind(getattr(parent, name), fused)
    original = GraphDecoder.cast_weights

    def cast_weights(decoder: GraphDecoder, model: PreTrainedModel) -> None:
        original(decoder, model)
        for fused in all_fused:
            fused.fuse(decoder.weights)

    with replaced(layers), mock.patch.object(GraphDecoder, "cast_weights", cast_weights):
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


@contextlib.contextmanager
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


@contextlib.contextmanager
def graphed_training(policy: PreTrainedModel) -> Iterator[None]:
    """A pass with gradient, each row with its prompt, is two CUDA graphs, of rows and columns rounded up."""
    graphs = TRAINING_GRAPHS.setdefault(policy, {})

    def graphed_states(
        model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: object = None
    ) -> Tensor:
        if not torch.is_grad_enabled() or cache is not None:
            return body_states(model, ids, mask, positions, cache)
        for (
            parameter
        ) in model.parameters():  # or its gradient would be the graph's own, which the next replay overwrites
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        b, t = ids.shape
        places = torch.arange(round_rows(b)).clamp(max=b - 1)  # the last row again
        columns = (0, -t % COLUMN_STEP)
        inputs = to_model(model, *(pad(tensor[places], columns) for tensor in (ids, mask, positions)))
        shape = tuple(inputs[0].shape)
        device = model.device.type
        is_cast = torch.is_autocast_enabled(device)
        with torch.autocast(device, torch.get_autocast_dtype(device), enabled=is_cast, cache_enabled=False):
            if shape not in graphs:
                graphs[shape] = Body(model)
                if device == "cuda":
                    graphs[shape] = torch.cuda.make_graphed_callables(graphs[shape], inputs)
            return graphs[shape](*inputs)[:b, :t]

    with UNSHARED(), mock.patch.object(pspo.model.logprobs, "body_states", graphed_states):
        yield


DECODING: dict[str, list[Candidate]] = {
    "layers": [compiled_decoding],
    "fused": [fused_products],
    "sampler": [compiled_sampler],
    "layers+fused+sampler": [fused_products, compiled_decoding, compiled_sampler],
}
TRAINING: dict[str, list[Candidate]] = {"layers": [compiled_training], "graph": [graphed_training]}


@contextlib.contextmanager
def applied(candidates: list[Candidate], policy: PreTrainedModel) -> Iterator[None]:
    """All of these candidates."""
    with contextlib.ExitStack() as stack:
        for candidate in candidates:
            stack.enter_context(candidate(policy))
        yield
