"""All measurements by part, each part in the order of their value."""

from functools import partial

from benchmarks.gpu.common import GPU, Measurement
from benchmarks.gpu.correctness import decoders, logprobs, ranks_on_one_gpu, ratios, resume, sampler
from benchmarks.gpu.decide import CANDIDATES, LAST, WIDE
from benchmarks.gpu.measurements import Load, decode, machine, measure, ranks, steps, train, vllm_alone, vllm_pushed

LOADS = [
    *(Load(size, 128, 128) for size in ("0.5B", "1.5B", "135M")),
    *(Load(size, 512, 512) for size in ("0.5B", "1.5B", "135M")),
]
BASE = LOADS[0]
VARIANTS = {
    "microbatch-4096": {"microbatch": 4096},
    "microbatch-65536": {"microbatch": 65536},
    "checkpointing": {"gradient_checkpointing": True},
    "adamw8bit": {"optimizer": "adamw8bit"},
}
STRATEGIES = ("ddp", "fsdp2")
NEEDS = {"adamw8bit": ("bitsandbytes", GPU)}


def of_load(load: Load) -> list[Measurement]:
    """Decoding by each decoder, training, and whole steps beside TRL's."""
    costs = {"graphs": 40, "pspo": 60, "hf": 90}
    return [
        *(Measurement(f"decode-{load}-{decoder}", measure(decode, load, decoder=decoder), seconds)
          for decoder, seconds in costs.items()),
        Measurement(f"train-{load}", measure(train, load)),
        Measurement(f"trl-{load}", measure(steps, load), 150, ("trl",)),
    ]  # fmt: skip


PARTS = {
    "correctness": [
        Measurement("decoders", decoders),
        Measurement("log-probs", logprobs),
        Measurement("ratios", ratios),
        Measurement("resume", partial(resume, deterministic=True)),
        Measurement("sampler", sampler),
        *(Measurement(strategy, partial(ranks_on_one_gpu, strategy=strategy, processes=1)) for strategy in STRATEGIES),
        Measurement("decoders-smollm2", partial(decoders, model="SmolLM2-135M"), 90, ("--smollm2", GPU)),
        Measurement("resume-default", partial(resume, deterministic=False), needs=(GPU,)),
        Measurement("resume-adamw8bit", partial(resume, deterministic=False, optimizer="adamw8bit"), 60,
                    ("bitsandbytes", GPU)),
    ],
    "speed": [
        Measurement("machine", machine, 20),
        *of_load(BASE),
        *(Measurement(f"train-{BASE}-{name}", measure(train, BASE, **how), 90, NEEDS.get(name, ()))
          for name, how in VARIANTS.items()),
        *(measurement for load in LOADS[1:] for measurement in of_load(load)),
    ],
    "fsdp": [
        *(Measurement(f"two-ranks-{strategy}", partial(ranks_on_one_gpu, strategy=strategy, processes=2), 90)
          for strategy in STRATEGIES),
        Measurement("ranks-none", partial(ranks, strategy="none"), 120),
        Measurement("ranks-fsdp2", partial(ranks, strategy="fsdp2"), 120),
        Measurement("ranks-ddp", partial(ranks, strategy="ddp"), 120, (GPU,)),
    ],
    "vllm": [
        Measurement(f"vllm-{load}", measure(steps, load, vllm=True), 200, ("trl", "vllm", GPU)) for load in LOADS
    ],
    "decide": [
        Measurement("decide-machine", machine, 20),
        *CANDIDATES,
        *(Measurement(f"vllm-alone-{load}", measure(vllm_alone, load), 150, ("vllm", GPU)) for load in (BASE, WIDE)),
        Measurement(f"trl-vllm-{BASE}", measure(steps, BASE, vllm=True), 200, ("trl", "vllm", GPU)),
        Measurement(f"pushed-{BASE}", measure(vllm_pushed, BASE), 150, ("vllm", GPU)),
        *LAST,
    ],
}  # fmt: skip
