"""pspo and TRL on the same work: time per phase, tokens per second and peak memory.

    python3 -m venv trl-env && trl-env/bin/pip install -c constraints.txt -e '.[peers]'
    trl-env/bin/python -m benchmarks.vs_trl tiny vocabulary        # from the repository root
    trl-env/bin/python -m benchmarks.vs_trl embedded --rollouts 49   # the whole of the default training
    trl-env/bin/python -m benchmarks.vs_trl smollm2 --model smollm2 --dtype bf16
    trl-env/bin/python -m benchmarks.vs_trl gsm8k --model smollm2 --data gsm8k

The sides take turns, each in a process of its own (so that peak memory is its own) with the same weights, prompts in
the same order, sampling settings, dtype, threads and schedule: 2 epochs over each rollout, one optimizer step each,
gradient checkpointing off, clip at 0.2, dapo; microbatches of so many rows for TRL, of as many tokens as so many rows
of full length have for pspo. One warm-up rollout, then the counted ones. Seconds are CPU seconds of the process, which
a busy machine disturbs less than wall time; with one thread (--threads 1) they are the work done. The workloads are
listed at `WORKLOADS`.

`python -m benchmarks.gpu` runs both sides on a GPU, also with rollouts by vLLM, TRL's in its own process (colocate).
Then there is no nucleus, rewards are random, and only the last token ends a completion, so that all draw as many. TRL
corrects by token_truncate, by a pass of its own; pspo corrects only vLLM's draws, without one.
"""

import argparse
import contextlib
import io
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    TrainerCallback,
)

from pspo import config as C
from pspo.losses import Clip
from pspo.model import load_policy, load_tokenizer, locate, stop_token_ids, token_logprobs
from pspo.rollout import How, PolicySampler, Prompts, Rollout, Sampling, encode_prompts, group_relative_advantages
from pspo.rollout.engine import EngineSampler
from pspo.tasks import load_problems, math_reward
from pspo.tasks.problem import Problem
from pspo.update import Learner, update
from pspo.update.optimizers import make_optimizer

CPU = torch.device("cpu")
SIDES = ("trl", "pspo")
COLUMNS = ("generate", "old log-probs", "train", "total", "tokens/s", "peak_over_loaded_mb")
PROMPT = 512  # tokens of a prompt at most, for vLLM
Records = list[dict[str, float]]  # of each rollout: seconds by phase, tokens and so on


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

    def config(self, model: C.ModelConfig, prompts: Sequence[Sequence[int]]) -> C.TrainConfig:
        """pspo's of a rollout over such prompts; a microbatch has as many tokens as TRL's rows of the longest have."""
        longest = max(map(len, prompts))
        tokens = self.microbatch // self.group_size * longest + self.microbatch * self.tokens
        return C.TrainConfig(
            model=model,
            rollout=C.RolloutConfig(prompts=self.prompts, group_size=self.group_size),
            algorithm=C.AlgorithmConfig(surrogate=Clip(0.2)),
            optimizer=C.OptimizerConfig(lr=self.lr, microbatch_tokens=tokens),
            run=C.RunConfig(max_steps=10**9),
        )


WORKLOADS = {
    "tiny": Workload(16, 4, 16, True, Shape(256, 1024, 4, 4, 2, 4096, True, head_dim=64)),
    "embedded": Workload(32, 4, 32, False, lr=3e-5),  # as the embedded model trains
    "smollm2": Workload(4, 4, 8, True),  # SmolLM2-135M-Instruct, --model FOLDER
    "gsm8k": Workload(4, 4, 8, False, data="gsm8k"),  # the same on GSM8K, --data FOLDER
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


def resident_mb() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    """Seconds by phase: of the CPU by this process; with ``wall`` or on a GPU, of the wall."""

    def __init__(self, device: torch.device, wall: bool = False):
        self.seconds: dict[str, float] = {}
        self.gpu = device.type == "cuda"
        self.read = time.perf_counter if wall else time.process_time

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return self.read()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.now() - start


def run_pspo(
    workload: Workload, folder: str, rollouts: int, vllm: bool = False, by_vllm: bool = False, dtype: str = "fp32",
    lora: int = 0, data: str | None = None, device: torch.device = CPU, decoder: str = "pspo",
) -> Records:  # fmt: skip
    """Train on a warm-up's rollout and these; ``vllm``: by that comparison's rules, ``by_vllm``: draw by it."""
    model = C.ModelConfig(folder, autocast="bf16" if dtype == "bf16" else "none", lora=C.LoraConfig(rank=lora))
    tokenizer = load_tokenizer(model)
    policy = load_policy(model, device)
    problems = workload.problems(rollouts, data)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], C.SYSTEM_PROMPT)
    config = workload.config(model, prompts)
    stop_ids = () if workload.forced or vllm else stop_token_ids(policy, tokenizer)
    limits = {"max_completion_tokens": workload.tokens, "max_rows": max(256, workload.rows), "decoder": decoder}
    sampling = Sampling(stop_ids, tokenizer.pad_token_id, **limits)
    engine = None
    if vllm:
        sampling = replace(sampling, top_p=1.0, logprobs=True)
    if by_vllm:
        from pspo_vllm.vllm import VLLM

        config = replace(config, algorithm=replace(config.algorithm, correction="token_truncate", correction_cap=3.0))
        engine = VLLM()
        engine.start(config, PROMPT + workload.tokens, device)
    learner = Learner(policy, make_optimizer(policy, config.optimizer))
    records = []
    loaded = resident_mb()
    sampler = PolicySampler(tokenizer, config.model.autocast)
    how = How(sampling, policy if engine is None else None)
    if engine is not None:
        sampler = EngineSampler(engine, learner, sampler)
    torch.manual_seed(0)
    for first in range(0, len(prompts), workload.prompts):
        clock = Clock(device, wall=vllm)
        rows = slice(first, first + workload.prompts)
        with clock("generate"):
            rollout = sampler.draw(Prompts(problems[rows], prompts[rows]), workload.group_size, how)
        with clock("reward"):
            advantages = workload.advantages(rollout, problems[rows])
        record = {"tokens": rollout.tokens, "old log-probs": 0.0, "loaded_mb": loaded}
        if vllm:
            with torch.no_grad():  # not timed
                expected = token_logprobs(policy, *rollout.token_ids, sampling.temperature)
            apart = (rollout.sampler_logprobs - expected)[rollout.completion_mask].abs().mean()
            record["nats apart"] = apart.item()
        with clock("train"):
            update(learner, rollout, advantages, config)
        records.append(clock.seconds | {"total": sum(clock.seconds.values())} | record)
    return records


def trl_arguments(workload: Workload, rollouts: int, vllm: bool, bf16: bool, gpu: bool) -> dict[str, Any]:
    """TRL's, of what pspo does with the workload."""
    accumulate = workload.rows // workload.microbatch
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_steps": 1 if vllm else 10**9, "shuffle_dataset": False, "use_cpu": not gpu,
        "dataloader_pin_memory": gpu, "per_device_train_batch_size": workload.microbatch,
        "gradient_accumulation_steps": accumulate, "steps_per_generation": accumulate, "num_iterations": 2,
        "num_generations": workload.group_size, "max_steps": 2 * (rollouts + 1),
        "max_completion_length": workload.tokens, "temperature": 0.6, "top_p": 0.85, "top_k": 0, "loss_type": "dapo",
        "epsilon": 0.2, "beta": 0.0, "scale_rewards": "none", "learning_rate": workload.lr,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": bf16,
        "gradient_checkpointing": False,
    }  # fmt: skip
    if vllm:
        arguments |= {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": PROMPT + workload.tokens, "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 3.0, "top_p": 1.0,
            "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        }  # fmt: skip
    elif workload.forced:
        arguments["generation_kwargs"] = {"min_new_tokens": workload.tokens}
    return arguments


class RolloutTimer(TrainerCallback):
    """Keeps the records of a trainer of TRL's, each of a rollout and its two optimizer steps."""

    def __init__(self, trainer: Any, clock: Clock):
        self.clock = clock
        self.records: Records = []
        self.loaded = resident_mb()
        self.began = 0.0
        self.tokens = 0  # up to the last record
        trainer._generate = clock("generate")(trainer._generate)
        trainer._generate_and_score_completions = clock("rollout")(trainer._generate_and_score_completions)
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 2 == 0:
            self.clock.seconds.clear()
            self.began = self.clock.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 2 == 0:
            s = self.clock.seconds
            total = self.clock.now() - self.began
            tokens = int(state.num_input_tokens_seen)
            self.records.append({"generate": s["generate"], "old log-probs": s["rollout"] - s["generate"],
                                 "train": total - s["rollout"], "total": total, "tokens": tokens - self.tokens,
                                 "loaded_mb": self.loaded})  # fmt: skip
            self.tokens = tokens


def run_trl(
    workload: Workload, folder: str, rollouts: int, vllm: bool = False, dtype: str = "fp32", lora: int = 0,
    data: str | None = None, device: torch.device = CPU,
) -> Records:  # fmt: skip
    """The same by TRL's trainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list, completion_ids: list, gold: list, **_: Any) -> list[float]:
        return workload.rewards(completion_ids, [completion[0]["content"] for completion in completions], gold)

    bf16 = dtype == "bf16"
    system = {"role": "system", "content": C.SYSTEM_PROMPT}
    problems = workload.problems(rollouts, data)
    rows = [{"prompt": [system, {"role": "user", "content": p.prompt}], "gold": int(p.answer)} for p in problems]
    frozen_in_bf16 = lora > 0 and bf16  # as pspo's
    adapters = LoraConfig(r=lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if frozen_in_bf16 else torch.float32),
        reward,
        args=GRPOConfig(**trl_arguments(workload, rollouts, vllm, bf16, gpu=device.type == "cuda")),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapters,
    )
    timer = RolloutTimer(trainer, Clock(device, wall=vllm))
    trainer.train()
    if vllm:
        name = "sampling/sampling_logp_difference/mean"
        logged = [log[name] for log in trainer.state.log_history if name in log]  # once a rollout
        for record, apart in zip(timer.records, logged, strict=True):
            record["nats apart"] = apart
    return timer.records


def measure(side: str, workload: Workload, folder: str, options: argparse.Namespace) -> Records:
    """Records of the counted rollouts, in a process of its own."""
    torch.set_num_threads(options.threads)
    run = run_pspo if side == "pspo" else run_trl
    how = {"dtype": options.dtype, "lora": options.lora, "data": options.data}
    with contextlib.redirect_stdout(io.StringIO()):
        _, *records = run(workload, folder, options.rollouts, **how)
    for record in records:
        record["peak_over_loaded_mb"] = resident_mb() - record.pop("loaded_mb")
        record["tokens/s"] = record["tokens"] / record["total"]
    return records


def spread(values: Sequence[float]) -> str:
    """Median [min, max]."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def report(records: dict[str, Records]) -> None:
    """Print a line for each quantity: TRL, pspo, and the ratio of their medians."""
    for key in COLUMNS:
        trl, pspo = ([record[key] for record in records[side]] for side in SIDES)
        base = statistics.median(pspo)
        ratio = f"{statistics.median(trl) / base:.2f}" if base else ""
        print(f"  {key:20} trl       {spread(trl):30} pspo      {spread(pspo):30} {ratio}")
    trl, pspo = (sum(record["total"] for record in records[side]) for side in SIDES)
    print(f"  {'all counted rollouts':20} trl       {trl:<30.2f} pspo      {pspo:<30.2f} {trl / pspo:.2f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("workloads", nargs="+", choices=WORKLOADS)
    arguments.add_argument("--model", help="model folder for smollm2 and gsm8k")
    arguments.add_argument("--data", help="GSM8K's folder for gsm8k; unset, from the hub")
    arguments.add_argument("--rollouts", type=int, default=3, help="counted rollouts a side and turn")
    arguments.add_argument("--turns", type=int, default=1)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank")
    options = arguments.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in options.workloads:
        workload = WORKLOADS[name]
        records: dict[str, Records] = {side: [] for side in SIDES}
        with model_folder(workload, options.model) as folder:
            for side in [*records] * options.turns:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    records[side] += process.submit(measure, side, workload, folder, options).result()
        what = f"{name}, {options.dtype}" + (f", LoRA of rank {options.lora}" if options.lora else "")
        print(f"\n{what}, {options.threads} thread(s), median [min, max] of {len(records['pspo'])}")
        report(records)


if __name__ == "__main__":
    main()
