"""What a GPU decides: candidates of `benchmarks.gpu.candidates` in turns with pspo as it is, and vLLM beside both."""

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.candidates import DECODING, TRAINING, applied
from benchmarks.gpu.common import GPU, GROUP, Measurement, Options, Rows, now, random_policy, row, tiny_prompts
from benchmarks.gpu.measurements import COUNTED, Load, learner_of, machine, random_rollout, steps
from benchmarks.vs_trl import run_pspo
from benchmarks.workloads import Workload, model_folder
from pspo.config import ModelConfig
from pspo.model import autocast, token_logprobs
from pspo.rollout import generate
from pspo.rollout.graphs import GRAPH_DECODERS, GraphDecoder
from pspo.update import update

GAIN = 1.2  # times as fast as now, from which a candidate moves into pspo
TURNS = 3


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


def decoding(options: Options, load: Load, name: str) -> Rows:
    """A decoding step now and with a candidate, prefill excluded, and what their log-probs are off the trainer's."""
    load = load.of(options)
    device = options.device
    policy = random_policy(options.shape(load.size), ModelConfig(), device)
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)
    sampling = load.sampling(tokenizer.pad_token_id, "graphs")
    candidates = {"now": [], "with it": DECODING[name]}
    decoders: dict[str, GraphDecoder] = {}
    apart = {}

    def draw(side: str, **how: object) -> tuple[float, object]:
        if side in decoders:
            GRAPH_DECODERS[policy] = decoders[side]
        start = now(device)
        with applied(candidates[side], policy), autocast("auto", device):
            rollout = generate(policy, tokenizer, prompts, replace(sampling, **how), GROUP)
        seconds = now(device) - start
        decoders[side] = GRAPH_DECODERS.pop(policy)
        return seconds, rollout

    def step(side: str) -> float:
        whole, _ = draw(side)
        prefill, _ = draw(side, max_completion_tokens=1)
        return 1e3 * (whole - prefill) / (load.tokens - 1)

    times = in_turns({side: partial(step, side) for side in candidates})
    for side in candidates:
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


def training(options: Options, load: Load, name: str) -> Rows:
    """An optimizer step now and with a candidate, and how far the candidate's gradient norm is off."""
    shape = options.shape(load.size)
    config = load.config()
    load = load.of(options)
    device = options.device
    policy = random_policy(shape, config.model, device)
    learner = learner_of(policy, config)
    rollout, _ = random_rollout(shape, load)
    advantages = torch.randn(load.rows)
    candidates = {"now": [], "with it": TRAINING[name]}
    norms = {}

    def step(side: str) -> float:
        start = now(device)
        with applied(candidates[side], policy):
            (metrics,) = update(learner, rollout, advantages, config)
        norms.setdefault(side, metrics["grad_norm"])  # of the first step: the weights move a little
        return now(device) - start

    times = in_turns({side: partial(step, side) for side in candidates})
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
BOTH = "layers+fused+sampler"


def decode_with(name: str, load: Load, seconds: int) -> Measurement:
    return Measurement(f"decode-{load}-{name}", partial(decoding, load=load, name=name), seconds)


def train_with(name: str, load: Load, seconds: int) -> Measurement:
    return Measurement(f"train-{load}-{name}", partial(training, load=load, name=name), seconds)


DECIDE = [
    Measurement("decide-machine", machine, 20),
    *(decode_with(name, SMALL, 70) for name in DECODING),
    train_with("layers", SMALL, 100),
    train_with("graph", SMALL, 60),
    decode_with(BOTH, LARGE, 90),
    train_with("layers", LARGE, 110),
    train_with("graph", LARGE, 80),
    *(decode_with(BOTH, load, 80) for load in (WIDE, WIDEST)),
    *(Measurement(f"vllm-alone-{load}", partial(vllm_alone, load=load), 150, ("vllm", GPU)) for load in (SMALL, WIDE)),
    Measurement(f"trl-vllm-{SMALL}", partial(steps, load=SMALL, vllm=True), 200, ("trl", "vllm", GPU)),
    Measurement(f"pushed-{SMALL}", partial(vllm_pushed, load=SMALL), 150, ("vllm", GPU)),
    *(decode_with(name, LARGE, 70) for name in DECODING if name != BOTH),
]
