"""Whole steps beside TRL's; whole runs, SmolLM2 on word problems, in slices; and all GPUs of the machine as ranks."""

import gc
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import pspo.train
from benchmarks.gpu.common import GROUP, Options, Rows, checksum, now, random_policy, row, timed, tiny_prompts
from benchmarks.gpu.correctness import ROOT, SHORT, torchrun, train
from benchmarks.gpu.speed import MICROBATCH, Load
from benchmarks.workloads import trl_trainer
from pspo.checks.memory import peak_memory_gb
from pspo.config import ModelConfig
from pspo.model import autocast
from pspo.optimizers import make_optimizer
from pspo.records.files import read_json, read_jsonl
from pspo.rollout import generate, group_relative_advantages
from pspo.tasks import load_problems
from pspo.update import Learner, update

HELD_OUT = 976  # problems of ASDiv and SVAMP
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
    from transformers import TrainerCallback

    device, problems = options.device, load_problems("arithmetic", "train", limit=load.rows // GROUP)
    width, microbatch = max(map(len, tiny_prompts(len(problems))[1])) + load.tokens, GROUP
    while 2 * microbatch <= min(load.rows, MICROBATCH // width):
        microbatch *= 2
    forced = {"min_tokens": load.tokens, "detokenize": False} if vllm else {"min_new_tokens": load.tokens}
    trainer = trl_trainer(
        folder, problems, checksum, load.rows, microbatch, GROUP, 1 + COUNTED, tokens=load.tokens,
        bf16=device.type == "cuda", use_cpu=device.type == "cpu", generation_kwargs=forced, use_vllm=vllm,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=2048,
        dataloader_pin_memory=True,
    )  # fmt: skip
    ends = []

    class PerRollout(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % EPOCHS == 0:
                ends.append(now(device))

    trainer.add_callback(PerRollout())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return statistics.median(end - start for start, end in pairwise(ends)), peak_memory_gb(device)


def word_problems(options: Options, surrogate: str, seed: int) -> Rows:
    """Greedy accuracy on held-out problems before and after training; SIGTERM stops it, saved, to be resumed."""
    output = options.output / "train" / f"{surrogate}-{seed}"
    args = [*SHORT, "--run.max_steps=2", "--run.test_limit=8"]
    if not options.rehearse:
        args = [
            f"--config={ROOT / 'configs/smollm2-word-problems/2-all.yaml'}", f"--data.path={options.data}",
            f"--model.name_or_path={options.smollm2}", "--model.autocast=auto", "--rollout.decoder=graphs",
            "--rollout.max_rows=512", f"--optimizer.microbatch_tokens={MICROBATCH}", f"--run.test_limit={HELD_OUT}",
        ]  # fmt: skip
    pspo.train.main([*args, f"--algorithm.surrogate={surrogate}", f"--run.seed={seed}", f"--run.output_dir={output}"])
    summary = read_json(output / "summary.json")
    return [
        *(row(f"accuracy {when}", 100 * summary[when]["accuracy"], "%") for when in ("before", "after")),
        row("optimizer steps", summary["optimizer_steps"]),
        row("all slices together", summary["seconds"], "s"),
    ]


def ranks(options: Options, strategy: str, gather: str = "microbatch") -> Rows:
    """Rollouts of 32 x 4 x 128 tokens for every GPU, by `pspo.train` under torchrun; with "none", without, on one."""
    processes = 1 if strategy == "none" else max(1, torch.cuda.device_count())
    prompts, tokens, rollouts = (2, 6, 2) if options.rehearse else (32, 128, 4)
    with tempfile.TemporaryDirectory() as scratch:
        folder, output = Path(scratch) / "model", Path(scratch) / "run"
        random_policy(options.shape("0.5B"), ModelConfig(), torch.device("cpu")).save_pretrained(folder)
        tiny_prompts(1)[0].save_pretrained(folder)
        args = [
            f"--model.name_or_path={folder}", "--reward.functions=[benchmarks.gpu.common.checksum]",
            f"--rollout.prompts={prompts * processes}", f"--rollout.group_size={GROUP}",
            f"--rollout.max_completion_tokens={tokens}", f"--rollout.min_completion_tokens={tokens}",
            f"--optimizer.microbatch_tokens={MICROBATCH}", f"--run.max_steps={2 * rollouts}", "--run.save_every=0",
            "--run.validate_every=0", "--run.test_limit=0", "--run.quiet=true", f"--run.output_dir={output}",
            f"--distributed.strategy={strategy}", f"--distributed.gather={gather}",
        ]  # fmt: skip
        train(*args) if strategy == "none" else torchrun(processes, *args)
        lines = read_jsonl(output / "metrics.jsonl")[1:]  # the first is the warm-up
        peak = read_json(output / "summary.json")["peak_memory_gb"]
    generate, update = (
        statistics.median(line[f"seconds/{phase}"] for line in lines) for phase in ("generate", "train")
    )
    return [
        row("ranks", processes),
        row("rollout", generate, "s"),
        row("its 2 optimizer steps", update, "s"),
        row("completion tokens", prompts * GROUP * processes * tokens / (generate + update), "1/s"),
        row("peak memory of a rank", peak, "GB"),
    ]
