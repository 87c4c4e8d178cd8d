"""Whole runs: SmolLM2 on word problems, in slices from call to call; and all GPUs of the machine as ranks."""

import statistics
import tempfile
from pathlib import Path

import torch

import pspo.train
from benchmarks.gpu.common import GROUP, Options, Rows, random_policy, row, tiny_prompts
from benchmarks.gpu.correctness import ROOT, SHORT, torchrun, train
from benchmarks.gpu.speed import MICROBATCH
from pspo.config import ModelConfig
from pspo.records.files import read_json, read_jsonl

HELD_OUT = 976  # problems of ASDiv and SVAMP


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
