"""What the benchmarks share: workloads, the same training set up for pspo and for TRL, turns of processes, and medians.

| workload   | model                                          | rollout                                             |
|------------|------------------------------------------------|-----------------------------------------------------|
| tiny       | random Qwen2, hidden 256, 4 layers, V = 4,096  | 16 prompts x 4, forced to 128 tokens, random reward |
| embedded   | tiny-base                                      | 32 x 4, natural lengths and rewards, lr 3e-5        |
| smollm2    | SmolLM2-135M-Instruct (--model FOLDER)         | 4 x 4, forced to 128 tokens, random reward          |
| gsm8k      | the same, on GSM8K (--data FOLDER)             | 4 x 4, natural lengths and rewards                  |
| vocabulary | random Qwen2, hidden 64, 2 layers, V = 151,936 | 4 x 4, forced to 128 tokens, random reward          |
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from pspo.config import (
    SYSTEM_PROMPT,
    AlgorithmConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from pspo.losses import Clip
from pspo.model import load_policy, load_tokenizer, locate, stop_token_ids
from pspo.rollout import Rollout, Sampling, encode_prompts, group_relative_advantages
from pspo.tasks import load_problems, math_reward
from pspo.tasks.problem import Problem
from pspo.update import Learner

TOKENS = 128  # of a completion, at most
RECORDS = "RECORDS "  # a child's last line begins so


@dataclass(frozen=True)
class Workload:
    prompts: int
    group_size: int
    microbatch: int  # rows
    forced: bool  # completions of exactly 128 tokens and random rewards
    shape: dict[str, int] | None = None  # of a random model; None takes a model folder
    data: str = "arithmetic"
    lr: float = 1e-6

    def problems(self, rollouts: int, data: str | None) -> list[Problem]:
        """Problems of so many rollouts and of a warm-up."""
        return load_problems(self.data, "train", data, limit=(rollouts + 1) * self.prompts)

    def reward(self, text: str, gold: Any) -> float:
        return zlib.crc32(text.encode()) % 1000 / 1000 if self.forced else math_reward(text, gold)

    def advantages(self, rollout: Rollout, problems: Sequence[Problem]) -> Tensor:
        """(B,) float32, of a rollout over these problems."""
        golds = [problem.answer for problem in problems for _ in range(self.group_size)]
        rewards = [self.reward(text, gold) for text, gold in zip(rollout.texts, golds, strict=True)]
        return group_relative_advantages(torch.tensor(rewards), self.group_size)


WORKLOADS = {
    "tiny": Workload(16, 4, 16, True, {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 4096}),
    "embedded": Workload(32, 4, 32, False, lr=3e-5),
    "smollm2": Workload(4, 4, 8, True),
    "gsm8k": Workload(4, 4, 8, False, data="gsm8k"),
    "vocabulary": Workload(4, 4, 8, True, {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 151_936}),
}


@contextlib.contextmanager
def model_folder(workload: Workload, model: str | None) -> Iterator[str]:
    """The given folder, the embedded model's, or one of a random model with the embedded tokenizer, removed later."""
    if workload.shape is None:
        yield model or locate("tiny-base")
        return
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = AutoTokenizer.from_pretrained(locate("tiny-base"))
        torch.manual_seed(0)
        config = Qwen2Config(
            **workload.shape, intermediate_size=4 * workload.shape["hidden_size"], num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        yield scratch


@dataclass(frozen=True)
class Setup:
    """pspo's side of a workload."""

    config: TrainConfig
    tokenizer: Any
    policy: Any
    sampling: Sampling
    problems: list[Problem]
    prompts: list[list[int]]

    def learner(self) -> Learner:
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        lr = self.config.optimizer.lr
        return Learner(self.policy, torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=True))  # as TRL's


def set_up(
    workload: Workload, folder: str, rollouts: int, dtype: str = "fp32", lora: int = 0, data: str | None = None
) -> Setup:
    model = ModelConfig(folder, autocast="bf16" if dtype == "bf16" else "none", lora=LoraConfig(rank=lora))
    tokenizer, policy = load_tokenizer(model), load_policy(model, torch.device("cpu"))
    problems = workload.problems(rollouts, data)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], SYSTEM_PROMPT)
    longest = max(map(len, prompts))
    tokens = workload.microbatch // workload.group_size * longest + workload.microbatch * TOKENS
    config = TrainConfig(
        model=model,
        rollout=RolloutConfig(prompts=workload.prompts, group_size=workload.group_size),
        algorithm=AlgorithmConfig(surrogate=Clip(0.2)),
        optimizer=OptimizerConfig(lr=workload.lr, microbatch_tokens=tokens),
        run=RunConfig(max_steps=10**9),
    )
    sampling = Sampling(
        stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, 0.6, 0.85, max_completion_tokens=TOKENS,
        min_completion_tokens=TOKENS if workload.forced else 0,
    )  # fmt: skip
    return Setup(config, tokenizer, policy, sampling, problems, prompts)


def trl_trainer(
    folder: str, problems: Sequence[Problem], reward: Callable, rows: int, microbatch: int, group_size: int,
    rollouts: int, lr: float = 1e-6, tokens: int = TOKENS, bf16: bool = False, lora: int = 0, **switches: Any,
) -> Any:  # fmt: skip
    """TRL's GRPOTrainer on the same schedule: 2 epochs of one step over each rollout, clip 0.2, dapo, plain AdamW."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    accumulate = rows // microbatch
    args = GRPOConfig(**{
        "output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_steps": 10**9, "shuffle_dataset": False, "dataloader_pin_memory": False,
        "per_device_train_batch_size": microbatch, "gradient_accumulation_steps": accumulate,
        "steps_per_generation": accumulate, "num_iterations": 2, "num_generations": group_size,
        "max_steps": 2 * rollouts, "max_completion_length": tokens, "temperature": 0.6, "top_p": 0.85, "top_k": 0,
        "loss_type": "dapo", "epsilon": 0.2, "beta": 0.0, "scale_rewards": "none", "learning_rate": lr,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": bf16,
        "gradient_checkpointing": False, **switches,
    })  # fmt: skip
    adapters = None
    if lora:
        from peft import LoraConfig as Adapters

        adapters = Adapters(r=lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    chats = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": p.prompt}] for p in problems]
    data = [{"prompt": chat, "gold": int(p.answer)} for chat, p in zip(chats, problems, strict=True)]
    frozen_in_bf16 = lora > 0 and bf16  # as pspo's
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if frozen_in_bf16 else torch.float32),
        reward,
        args=args,
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapters,
    )


def run_child(module: str, *words: object, **environment: str) -> list[dict[str, float]]:
    """Records that a benchmark's child process prints; this process ends with its error if it fails."""
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith(RECORDS))
    return json.loads(line.removeprefix(RECORDS))


def print_records(records: list[dict[str, float]]) -> None:
    print(RECORDS + json.dumps(records))


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median [min, max]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def parser(doc: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
