"""Whole steps beside TRL's; whole runs, SmolLM2 on word problems, in slices; and all GPUs of the machine as ranks."""

import gc
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

import pspo.train
from benchmarks.gpu.common import GROUP, Options, Rows, row
from benchmarks.gpu.correctness import ROOT, SHORT, torchrun
from benchmarks.gpu.speed import MICROBATCH, Load
from benchmarks.vs_trl import run_pspo, run_trl
from benchmarks.workloads import Workload, model_folder
from pspo.cli.files import read_json, read_jsonl
from pspo.model.device import peak_memory_gb

HELD_OUT = 976  # problems of ASDiv and SVAMP
PROMPT, COUNTED = 115, 2  # tokens, about; rollouts after the warm-up


def steps(options: Options, load: Load, vllm: bool = False) -> Rows:
    """A rollout with its two optimizer steps, from the same random weights: seconds and memory of both sides."""
    load, device, microbatch, found = load.of(options), options.device, GROUP, {}
    while 2 * microbatch <= min(load.rows, MICROBATCH // (PROMPT + load.tokens)):
        microbatch *= 2
    shape = options.shape(load.size)
    workload = Workload(load.rows // GROUP, GROUP, microbatch, forced=True, shape=shape, tokens=load.tokens)
    how = {"dtype": "bf16" if device.type == "cuda" else "fp32", "device": device, "vllm": vllm}
    with model_folder(workload, device=device) as folder:
        for side, run in (("pspo", partial(run_pspo, decoder="graphs")), ("TRL", run_trl)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _, *records = run(workload, folder, COUNTED, **how)
            found[side] = statistics.median(record["total"] for record in records), peak_memory_gb(device)
            gc.collect()
            torch.cuda.empty_cache()  # does nothing without a GPU
    goal = (None if load.size == "1.5B" else 1) if vllm else 2
    return [
        *(row(side, seconds, "s") for side, (seconds, _) in found.items()),
        row("TRL / pspo", found["TRL"][0] / found["pspo"][0], least=goal),
        row("pspo, peak memory", found["pspo"][1], "GB"),
        row("TRL, peak memory of torch's tensors", found["TRL"][1], "GB"),
    ]


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


def ranks(options: Options, strategy: str) -> Rows:
    """Rollouts of 32 x 4 x 128 tokens for every GPU, by `pspo.train` under torchrun; with "none", without, on one."""
    processes = 1 if strategy == "none" else max(1, torch.cuda.device_count())
    prompts, tokens, rollouts = (2, 6, 2) if options.rehearse else (32, 128, 4)
    workload = Workload(prompts, GROUP, GROUP, forced=True, shape=options.shape("0.5B"))
    with model_folder(workload) as folder, tempfile.TemporaryDirectory() as output:
        args = [
            f"--model.name_or_path={folder}", "--reward.functions=[benchmarks.workloads.checksum]",
            f"--rollout.prompts={prompts * processes}", f"--rollout.group_size={GROUP}",
            f"--rollout.max_completion_tokens={tokens}",
            f"--optimizer.microbatch_tokens={MICROBATCH}", f"--run.max_steps={2 * rollouts}", "--run.save_every=0",
            "--run.validate_every=0", "--run.test_limit=0", "--run.quiet=true", f"--run.output_dir={output}",
            f"--distributed.strategy={strategy}",
        ]  # fmt: skip
        pspo.train.main(args) if strategy == "none" else torchrun(processes, *args)
        lines = read_jsonl(Path(output) / "metrics.jsonl")[1:]  # the first is the warm-up
        peak = read_json(Path(output) / "summary.json")["peak_memory_gb"]
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
