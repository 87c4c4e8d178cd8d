"""What a GPU decides: whether a change of `benchmarks.gpu.candidates` pays, in turns with pspo as it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

import pspo.update.learner
from benchmarks.gpu import candidates as patches
from benchmarks.gpu.common import GROUP, Measurement, Options, in_turns, now
from benchmarks.gpu.measurements import Load, decoding_inputs, measure, training_inputs
from benchmarks.gpu.results import Rows, row
from pspo.model import autocast, token_logprobs
from pspo.rollout import generate
from pspo.rollout.graphs import GRAPH_DECODERS, GraphDecoder
from pspo.update import update

GAIN = 1.2  # times as fast as now, from which a candidate moves into pspo


@dataclass(frozen=True)
class Candidate:
    """A change of pspo, and what measures its gain."""

    name: str
    patches: Sequence[Callable[[PreTrainedModel], AbstractContextManager]]
    measure: Callable[[Options, Load, "Candidate"], Rows]  # `decode` or `train`

    @contextmanager
    def applied(self, policy: PreTrainedModel) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch(policy))
            yield

    def at(self, load: Load, seconds: int) -> Measurement:
        run = measure(self.measure, load, candidate=self)
        return Measurement(f"{self.measure.__name__}-{load}-{self.name}", run, seconds, is_candidate=True)


def compared(before: float, after: float, unit: str) -> Rows:
    return [row("now", before, unit), row("with it", after, unit), row("gain", before / after, "x", least=GAIN)]


def decode(options: Options, load: Load, candidate: Candidate) -> Rows:
    """A decoding step now and with a candidate, prefill excluded, and what their log-probs are off the trainer's."""
    device = options.device
    policy, tokenizer, prompts, sampling = decoding_inputs(options, load)
    patched = {"now": nullcontext, "with it": candidate.applied}
    decoders: dict[str, GraphDecoder] = {}
    apart = {}

    def draw(side: str, **how: object) -> tuple[float, object]:
        if side in decoders:
            GRAPH_DECODERS[policy] = decoders[side]
        start = now(device)
        with patched[side](policy), autocast("auto", device):
            rollout = generate(policy, tokenizer, prompts, replace(sampling, **how), GROUP)
        seconds = now(device) - start
        decoders[side] = GRAPH_DECODERS.pop(policy)
        return seconds, rollout

    def step(side: str) -> float:
        whole, _ = draw(side)
        prefill, _ = draw(side, max_completion_tokens=1)
        return 1e3 * (whole - prefill) / (load.tokens - 1)

    times = in_turns({side: partial(step, side) for side in patched})
    for side in patched:
        _, rollout = draw(side, max_completion_tokens=min(8, load.tokens), logprobs=True)
        with torch.no_grad(), autocast("auto", device):
            expected = token_logprobs(policy, *rollout.token_ids, sampling.temperature).cpu()
        apart[side] = (rollout.sampler_logprobs - expected).abs().mean().item()
    return [
        *compared(times["now"], times["with it"], "ms"),
        row("nats from the trainer's, now", apart["now"]),
        row("nats from the trainer's, with it", apart["with it"], most=1.5 * apart["now"] + 1e-5),
        row("completion tokens, with it", 1e3 * load.rows / times["with it"], "1/s"),
    ]


def train(options: Options, load: Load, candidate: Candidate) -> Rows:
    """An optimizer step now and with a candidate, and how far the candidate's gradient norm is off."""
    device = options.device
    inputs = training_inputs(options, load)
    learner = inputs[0]
    patched = {"now": nullcontext, "with it": candidate.applied}
    norms = {}

    def step(side: str) -> float:
        start = now(device)
        with patched[side](learner.policy):
            learner.shares_prompts = pspo.update.learner.shares_prompts(learner.policy)  # which a patch replaces
            (metrics,) = update(*inputs)
        norms.setdefault(side, metrics["grad_norm"])  # of the first step: the weights move a little
        return now(device) - start

    times = in_turns({side: partial(step, side) for side in patched})
    return [
        *compared(times["now"], times["with it"], "s"),
        row("gradient norm, over the one now", norms["with it"] / norms["now"], least=0.97, most=1.03),
        row("microbatches", learner.microbatch_tokens, "tokens"),  # halved where memory ran out
    ]


# ---------------------------------------------------------------- all, the most valuable first

SMALL, LARGE, WIDE, WIDEST = (
    Load("0.5B", 128, 128), Load("1.5B", 128, 128), Load("0.5B", 512, 128), Load("0.5B", 1024, 128)
)  # fmt: skip
BOTH = Candidate(
    "layers+fused+sampler", (patches.fused_products, patches.compiled_decoding, patches.compiled_sampler), decode
)
DECODERS = [
    Candidate("layers", (patches.compiled_decoding,), decode),
    Candidate("fused", (patches.fused_products,), decode),
    Candidate("sampler", (patches.compiled_sampler,), decode),
]
LAYERS = Candidate("layers", (patches.compiled_training,), train)
GRAPH = Candidate("graph", (patches.graphed_training,), train)

CANDIDATES = [
    *(candidate.at(SMALL, 70) for candidate in (*DECODERS, BOTH)),
    LAYERS.at(SMALL, 100),
    GRAPH.at(SMALL, 60),
    BOTH.at(LARGE, 90),
    LAYERS.at(LARGE, 110),
    GRAPH.at(LARGE, 80),
    *(BOTH.at(load, 80) for load in (WIDE, WIDEST)),
]
LAST = [candidate.at(LARGE, 70) for candidate in DECODERS]  # if there is time
