"""What the benchmarks share: workloads, and pspo's side of them.

| workload   | model                                          | rollout                                             |
|------------|------------------------------------------------|-----------------------------------------------------|
| tiny       | random Qwen2, hidden 256, 4 layers, V = 4,096  | 16 prompts x 4, forced to 128 tokens, random reward |
| embedded   | tiny-base                                      | 32 x 4, natural lengths and rewards, lr 3e-5        |
| smollm2    | SmolLM2-135M-Instruct (--model FOLDER)         | 4 x 4, forced to 128 tokens, random reward          |
| gsm8k      | the same, on GSM8K (--data FOLDER)             | 4 x 4, natural lengths and rewards                  |
| vocabulary | random Qwen2, hidden 64, 2 layers, V = 151,936 | 4 x 4, forced to 128 tokens, random reward          |
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig, Qwen2Config

from pspo.config import (
    AlgorithmConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from pspo.losses import Clip
from pspo.model import locate
from pspo.rollout import Rollout, group_relative_advantages
from pspo.tasks import load_problems, math_reward
from pspo.tasks.problem import Problem

CPU = torch.device("cpu")


def checksum(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that looks random, for completions of forced lengths; pspo and TRL call it alike."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


@dataclass(frozen=True)
class Shape:
    """A Qwen2 or Llama: grouped-query attention, SwiGLU, RMSNorm. Counts elements, and bytes in bf16."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    head_dim: int = 128
    qkv_bias: bool = True

    @property
    def layer(self) -> int:
        """Elements of a layer's matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def matrices(self) -> int:
        """Elements that a token is multiplied by; those of an untied input embedding are looked up."""
        return self.layers * self.layer + self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Workload:
    prompts: int
    group_size: int
    microbatch: int  # rows
    forced: bool  # completions of exactly `tokens` tokens and random rewards
    shape: Shape | None = None  # of a random model; None takes a model folder
    data: str = "arithmetic"
    lr: float = 1e-6
    tokens: int = 128  # of a completion, at most

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    def problems(self, rollouts: int, data: str | None) -> list[Problem]:
        """Problems of so many rollouts and of a warm-up."""
        return load_problems(self.data, "train", data, limit=(rollouts + 1) * self.prompts)

    def rewards(self, completion_ids: Sequence[Sequence[int]], texts: Sequence[str], golds: Sequence) -> list[float]:
        return checksum(completion_ids) if self.forced else list(map(math_reward, texts, golds))

    def advantages(self, rollout: Rollout, problems: Sequence[Problem]) -> Tensor:
        """(B,) float32, of a rollout over these problems."""
        ids = rollout.completion_ids
        golds = [problem.answer for problem in problems for _ in range(self.group_size)]
        rewards = self.rewards(ids.tolist(), rollout.texts, golds)
        return group_relative_advantages(torch.tensor(rewards, device=ids.device), self.group_size)

    def config(self, model: ModelConfig, prompts: Sequence[Sequence[int]]) -> TrainConfig:
        """pspo's of a rollout over such prompts; a microbatch has as many tokens as TRL's rows of the longest have."""
        longest = max(map(len, prompts))
        tokens = self.microbatch // self.group_size * longest + self.microbatch * self.tokens
        return TrainConfig(
            model=model,
            rollout=RolloutConfig(prompts=self.prompts, group_size=self.group_size),
            algorithm=AlgorithmConfig(surrogate=Clip(0.2)),
            optimizer=OptimizerConfig(lr=self.lr, microbatch_tokens=tokens),
            run=RunConfig(max_steps=10**9),
        )


WORKLOADS = {
    "tiny": Workload(16, 4, 16, True, Shape(256, 1024, 4, 4, 2, 4096, True, head_dim=64)),
    "embedded": Workload(32, 4, 32, False, lr=3e-5),
    "smollm2": Workload(4, 4, 8, True),
    "gsm8k": Workload(4, 4, 8, False, data="gsm8k"),
    "vocabulary": Workload(4, 4, 8, True, Shape(64, 256, 2, 4, 2, 151_936, True, head_dim=16)),
}


def shape_config(shape: Shape) -> PretrainedConfig:
    """Configuration of a model of this shape for transformers."""
    return (Qwen2Config if shape.qkv_bias else LlamaConfig)(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )  # fmt: skip


@contextlib.contextmanager
def model_folder(workload: Workload, model: str | None = None, device: torch.device = CPU) -> Iterator[str]:
    """The given folder, the embedded model's, or one of a random model with the embedded tokenizer, removed later."""
    if workload.shape is None:
        yield model or locate("tiny-base")
        return
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = AutoTokenizer.from_pretrained(locate("tiny-base"))
        config = shape_config(workload.shape)
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
        torch.manual_seed(0)
        with device:
            AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        yield scratch
