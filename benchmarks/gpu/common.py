"""What measurements share: options, rows of results, random models, prompts, and the clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import pspo.model.linear
from benchmarks.gpu.results import Rows
from benchmarks.vs_trl import Shape, shape_config
from pspo.config import ModelConfig
from pspo.model import load_tokenizer
from pspo.model.device import peak_memory_gb
from pspo.model.load import prepare_policy
from pspo.rollout import encode_prompts
from pspo.tasks import load_problems

GPU = "a GPU"
GROUP = 4  # completions of a prompt
TINY = Shape(32, 48, 2, 4, 2, 600, True, 8)  # in place of every shape in a rehearsal
SHAPES = {  # of Qwen2.5 and SmolLM2, by their config.json
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True, 64),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "135M": Shape(576, 1536, 30, 9, 3, 49152, True, 64, qkv_bias=False),
}


@dataclass(frozen=True)
class Options:
    """What the command was given."""

    output: Path
    rehearse: bool = False
    smollm2: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a rehearsal hides a real GPU

    def shape(self, size: str) -> Shape:
        return TINY if self.rehearse else SHAPES[size]

    def lacks(self, needs: Sequence[str]) -> list[str]:
        """What of a measurement's needs is not there."""
        there = {GPU: not self.rehearse, "--smollm2": self.smollm2}
        return [need for need in needs if not (there[need] if need in there else find_spec(need))]


@dataclass(frozen=True)
class Measurement:
    """A measurement, of a process of its own.

    Attributes:
        seconds: that it may take on a GPU, by guess: not started with less time left.
        needs: a GPU, options or packages without which it is skipped.
        is_candidate: it measures the gain of a change of pspo.
    """

    name: str
    run: Callable[[Options], Rows]
    seconds: int = 60
    needs: tuple[str, ...] = ()
    is_candidate: bool = False


def random_policy(shape: Shape, config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """A model of this shape with random weights, otherwise as `pspo.model.load_policy` makes it."""
    torch.manual_seed(0)
    with device:
        policy = AutoModelForCausalLM.from_config(shape_config(shape))
    with mock.patch.object(pspo.model.linear, "has_avx512", return_value=False):  # on a CPU, too, plain products
        prepare_policy(policy, config)
    return policy


def tiny_prompts(n: int) -> tuple[PreTrainedTokenizerBase, list[list[int]]]:
    """tiny-base's tokenizer, and n prompts of word problems, with the system prompt."""
    tokenizer = load_tokenizer(ModelConfig())
    return tokenizer, encode_prompts(tokenizer, [p.prompt for p in load_problems("arithmetic", "train", limit=n)])


def now(device: torch.device) -> float:
    """Seconds, once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    start = now(device)
    function()
    return now(device) - start


def in_turns(sides: dict[str, Callable[[], float]], turns: int = 3) -> dict[str, float]:
    """The median of what each side returns, called in turns after a call of each."""
    for run in sides.values():
        run()
    values = [{side: run() for side, run in sides.items()} for _ in range(turns)]
    return {side: statistics.median(turn[side] for turn in values) for side in sides}


def timed(function: Callable[[], Any], device: torch.device, repeats: int = 3) -> tuple[float, float]:
    """Median seconds of a call, after a warm-up, and peak memory in GB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = in_turns({"": partial(seconds_of, function, device)}, repeats)
    return seconds[""], peak_memory_gb(device)
