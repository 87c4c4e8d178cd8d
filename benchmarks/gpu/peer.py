"""Whole steps of pspo and of TRL's GRPOTrainer, by transformers' decoding or vLLM's, in one run."""

import gc
import statistics
import tempfile
from itertools import pairwise
from typing import Any

import torch

from benchmarks.gpu.common import GROUP, Options, Rows, checksum, now, random_policy, row, timed, tiny_prompts
from benchmarks.gpu.speed import MICROBATCH, Load
from pspo.checks.memory import peak_memory_gb
from pspo.config import SYSTEM_PROMPT, ModelConfig
from pspo.model import autocast
from pspo.optimizers import make_optimizer
from pspo.rollout import generate, group_relative_advantages
from pspo.tasks import load_problems
from pspo.update import Learner, update

EPOCHS, COUNTED = 2, 2  # optimizer steps of a rollout; rollouts after the warm-up


def steps(options: Options, load: Load, vllm: bool = False) -> Rows:
    """A rollout with its two optimizer steps, from the same random weights: seconds and memory of both sides."""
    load = load.of(options)
    with tempfile.TemporaryDirectory() as folder:
        policy = random_policy(options.shape(load.size), ModelConfig(), options.device)
        policy.save_pretrained(folder)
        tiny_prompts(1)[0].save_pretrained(folder)
        pspo, pspo_peak = pspo_step(options, load, policy)
        del policy
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU
        trl, trl_peak = trl_step(options, load, folder, vllm)
    goal = (None if load.size == "1.5B" else 1) if vllm else 2
    return [
        row("pspo", pspo, "s"),
        row("TRL", trl, "s"),
        row("TRL / pspo", trl / pspo, least=goal),
        row("pspo, peak memory", pspo_peak, "GB"),
        row("TRL, peak memory of torch's tensors", trl_peak, "GB"),
    ]


def pspo_step(options: Options, load: Load, policy: Any) -> tuple[float, float]:
    config, device = load.config(EPOCHS), options.device
    learner = Learner(policy, make_optimizer(policy, config.optimizer))
    tokenizer, prompts = tiny_prompts(load.rows // GROUP)

    def step() -> None:
        with autocast("auto", device):
            rollout = generate(policy, tokenizer, prompts, load.sampling(tokenizer.pad_token_id, "graphs"), GROUP)
        rewards = torch.tensor(checksum(rollout.completion_ids.tolist()), device=device)
        update(learner, rollout, group_relative_advantages(rewards, GROUP), config)

    return timed(step, device, COUNTED)


def trl_step(options: Options, load: Load, folder: str, vllm: bool) -> tuple[float, float]:
    """The same schedule, in microbatches of at most as many tokens, padding included."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    device, problems = options.device, load_problems("arithmetic", "train", limit=load.rows // GROUP)
    chats = [[{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": p.prompt}] for p in problems]
    width, microbatch = max(map(len, tiny_prompts(len(problems))[1])) + load.tokens, GROUP
    while 2 * microbatch <= min(load.rows, MICROBATCH // width):
        microbatch *= 2
    forced = {"min_tokens": load.tokens, "detokenize": False} if vllm else {"min_new_tokens": load.tokens}
    ends = []

    class PerRollout(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % EPOCHS == 0:
                ends.append(now(device))

    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOConfig(
            output_dir=scratch, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10**9,
            shuffle_dataset=False, per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=load.rows // microbatch, steps_per_generation=load.rows // microbatch,
            num_iterations=EPOCHS, num_generations=GROUP, max_steps=EPOCHS * (1 + COUNTED),
            max_completion_length=load.tokens, temperature=0.6, top_p=0.85, top_k=0,
            generation_kwargs=forced,
            loss_type="dapo", epsilon=0.2, beta=0.0, scale_rewards="none",
            learning_rate=1e-6, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
            bf16=device.type == "cuda", use_cpu=device.type == "cpu", gradient_checkpointing=False,
            use_vllm=vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=2048,
        )  # fmt: skip
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            checksum,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": chat} for chat in chats]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[PerRollout()],
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    return statistics.median(end - start for start, end in pairwise(ends)), peak_memory_gb(device)
