"""What a GPU decides: candidates of `benchmarks.gpu.candidates` in turns with pspo as it is, and vLLM beside both."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.candidates import (
    compiled_decoding,
    compiled_sampler,
    compiled_training,
    fused_products,
    graphed_training,
)
from benchmarks.gpu.common import GPU, GROUP, Measurement, Options, now, random_policy, tiny_prompts
from benchmarks.gpu.measurements import COUNTED, Load, learner_of, machine, random_rollout, steps
from benchmarks.gpu.results import Rows, row
from benchmarks.vs_trl import run_pspo
from benchmarks.workloads import Workload, model_folder
from pspo.config import ModelConfig
from pspo.model import autocast, token_logprobs
from pspo.rollout import generate
from pspo.rollout.graphs import GRAPH_DECODERS, GraphDecoder
from pspo.update import update

GAIN = 1.2  # times as fast as now, from which a candidate moves into pspo
TURNS = 3


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
        run = partial(self.measure, load=load, candidate=self)
        return Measurement(f"{self.measure.__name__}-{load}-{self.name}", run, seconds, is_candidate=True)


def in_turns(sides: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of what each side returns, called in turns after a call of each."""
    values: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(1 + TURNS):
        for side, run in sides.items():
            value = run()
            if turn > 0:
                values[side].append(value)
    return {side: statistics.median(of_side) for side, of_side in values.items()}


def compared(before: float, after: float, unit: str) -> Rows:
    return [row("now", before, unit), row("with it", after, unit), row("gain", before / after, "x", least=GAIN)]


def decode(options: Options, load: Load, candidate: Candidate) -> Rows:
    """A decoding step now and with a candidate, prefill excluded, and what their log-probs are off the trainer's."""
    load = load.of(options)
    device = options.device
    policy = random_policy(options.shape(load.size), ModelConfig(), device)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    sampling = load.sampling(tokenizer.pad_token_id, "graphs")
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
    shape = options.shape(load.size)
    config = load.config()
    load = load.of(options)
    device = options.device
    policy = random_policy(shape, config.model, device)
    learner = learner_of(policy, config)
    rollout, _ = random_rollout(shape, load)
    advantages = torch.randn(load.rows)
    patched = {"now": nullcontext, "with it": candidate.applied}
    norms = {}

    def step(side: str) -> float:
        start = now(device)
        with patched[side](policy):
            (metrics,) = update(learner, rollout, advantages, config)
        norms.setdefault(side, metrics["grad_norm"])  # of the first step: the weights move a little
        return now(device) - start

    times = in_turns({side: partial(step, side) for side in patched})
    return [
        *compared(times["now"], times["with it"], "s"),
        row("gradient norm, over the one now", norms["with it"] / norms["now"], least=0.97, most=1.03),
        row("microbatches", learner.microbatch_tokens, "tokens"),  # halved where memory ran out
    ]


# ---------------------------------------------------------------- vLLM


def workload_of(options: Options, load: Load) -> Workload:
    return Workload(load.rows // GROUP, GROUP, load.rows, True, options.shape(load.size), tokens=load.tokens)


def vllm_alone(options: Options, load: Load) -> Rows:
    """Completion tokens per second, prompts included: of vLLM by itself, and of pspo's graphs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    load = load.of(options)
    device = options.device
    policy = random_policy(options.shape(load.size), ModelConfig(), device)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    sampling = load.sampling(tokenizer.pad_token_id, "graphs")
    with model_folder(workload_of(options, load), device=device) as folder:
        engine = LLM(folder, dtype="bfloat16", gpu_memory_utilization=0.4, max_model_len=1024, max_num_seqs=load.rows)
        draws = {"n": GROUP, "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": load.tokens}
        params = SamplingParams(**draws, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

        def by_vllm() -> float:
            start = now(device)
            engine.generate(inputs, params, use_tqdm=False)
            return now(device) - start

        def by_pspo() -> float:
            start = now(device)
            with autocast("auto", device):
                generate(policy, tokenizer, prompts, sampling, GROUP)
            return now(device) - start

        times = in_turns({"vLLM": by_vllm, "pspo": by_pspo})
    return [
        *(row(side, load.rows * load.tokens / seconds, "1/s") for side, seconds in times.items()),
        row("pspo / vLLM", times["vLLM"] / times["pspo"], "x", least=1),
    ]


def vllm_pushed(options: Options, load: Load) -> Rows:
    """A rollout by vLLM in a process of its own, with the weights pushed, and its two steps."""
    load = load.of(options)
    device = options.device
    workload = workload_of(options, load)
    with model_folder(workload, device=device) as folder:
        _, *records = run_pspo(workload, folder, COUNTED, vllm=True, by_vllm=True, dtype="bf16", device=device)
    middle = {key: statistics.median(record[key] for record in records) for key in ("generate", "total", "nats apart")}
    return [
        row("weights pushed and completions drawn", middle["generate"], "s"),
        row("rollout and two steps", middle["total"], "s"),
        row("log-probs, from the policy's in float32 on average", middle["nats apart"], "nats", most=0.1),
    ]


# ---------------------------------------------------------------- all, the most valuable first

SMALL, LARGE, WIDE, WIDEST = (
    Load("0.5B", 128, 128), Load("1.5B", 128, 128), Load("0.5B", 512, 128), Load("0.5B", 1024, 128)
)  # fmt: skip
BOTH = Candidate("layers+fused+sampler", (fused_products, compiled_decoding, compiled_sampler), decode)
DECODERS = [
    Candidate("layers", (compiled_decoding,), decode),
    Candidate("fused", (fused_products,), decode),
    Candidate("sampler", (compiled_sampler,), decode),
]
LAYERS = Candidate("layers", (compiled_training,), train)
GRAPH = Candidate("graph", (graphed_training,), train)

DECIDE = [
    Measurement("decide-machine", machine, 20),
    *(candidate.at(SMALL, 70) for candidate in (*DECODERS, BOTH)),
    LAYERS.at(SMALL, 100),
    GRAPH.at(SMALL, 60),
    BOTH.at(LARGE, 90),
    LAYERS.at(LARGE, 110),
    GRAPH.at(LARGE, 80),
    *(BOTH.at(load, 80) for load in (WIDE, WIDEST)),
    *(Measurement(f"vllm-alone-{load}", partial(vllm_alone, load=load), 150, ("vllm", GPU)) for load in (SMALL, WIDE)),
    Measurement(f"trl-vllm-{SMALL}", partial(steps, load=SMALL, vllm=True), 200, ("trl", "vllm", GPU)),
    Measurement(f"pushed-{SMALL}", partial(vllm_pushed, load=SMALL), 150, ("vllm", GPU)),
    *(candidate.at(LARGE, 70) for candidate in DECODERS),
]
