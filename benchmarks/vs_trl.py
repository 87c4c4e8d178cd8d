"""pspo and TRL on the same work: time per phase, tokens per second and peak memory.

    python3 -m venv trl-env && trl-env/bin/pip install -r benchmarks/requirements.txt
    trl-env/bin/python -m benchmarks.vs_trl tiny vocabulary        # from the repository root
    trl-env/bin/python -m benchmarks.vs_trl embedded --rollouts 49   # the whole of the default training
    trl-env/bin/python -m benchmarks.vs_trl smollm2 --model smollm2 --dtype bf16
    trl-env/bin/python -m benchmarks.vs_trl gsm8k --model smollm2 --data gsm8k

Both sides take turns, each in a process of its own (so that peak memory is its own) with the same weights, prompts in
the same order, sampling settings, dtype, threads and schedule: 2 epochs over each rollout, one optimizer step each,
gradient checkpointing off, clip at 0.2, dapo; microbatches of so many rows for TRL, of as many tokens as so many rows
of full length have for pspo. One warm-up rollout, then the counted ones. Seconds are CPU seconds of the process, which
a busy machine disturbs less than wall time; with one thread (--threads 1) they are the work done.

| workload   | model                                          | rollout                                             |
|------------|------------------------------------------------|-----------------------------------------------------|
| tiny       | random Qwen2, hidden 256, 4 layers, V = 4,096  | 16 prompts x 4, forced to 128 tokens, random reward |
| embedded   | tiny-base                                      | 32 x 4, natural lengths and rewards, lr 3e-5        |
| smollm2    | SmolLM2-135M-Instruct (--model FOLDER)         | 4 x 4, forced to 128 tokens, random reward          |
| gsm8k      | the same, on GSM8K (--data FOLDER)             | 4 x 4, natural lengths and rewards                  |
| vocabulary | random Qwen2, hidden 64, 2 layers, V = 151,936 | 4 x 4, forced to 128 tokens, random reward          |
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@dataclass(frozen=True)
class Workload:
    prompts: int
    group_size: int
    microbatch: int  # rows
    forced: bool  # completions of exactly 128 tokens and random rewards
    shape: dict | None = None  # of a random model; None takes a model folder
    data: str = "arithmetic"
    lr: float = 1e-6


WORKLOADS = {
    "tiny": Workload(16, 4, 16, True, {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 4096}),
    "embedded": Workload(32, 4, 32, False, lr=3e-5),
    "smollm2": Workload(4, 4, 8, True),
    "gsm8k": Workload(4, 4, 8, False, data="gsm8k"),
    "vocabulary": Workload(4, 4, 8, True, {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 151_936}),
}
TOKENS = 128


def model_folder(workload: Workload, model: str | None, scratch: Path) -> str:
    """Where the model lies: a given folder, the embedded one, or a random one made here with the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from pspo.model import locate

    if workload.shape is None:
        return model or locate("tiny-base")
    tokenizer = AutoTokenizer.from_pretrained(locate("tiny-base"))
    torch.manual_seed(0)
    config = Qwen2Config(
        **workload.shape,
        intermediate_size=4 * workload.shape["hidden_size"],
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    return str(scratch)


class Clock:
    """CPU seconds of this process by phase."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def __call__(self, phase):
        start = time.process_time()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.process_time() - start

    def timed(self, phase, function):
        def wrapper(*args, **kwargs):
            with self(phase):
                return function(*args, **kwargs)

        return wrapper


def reward_of(text: str, gold, forced: bool) -> float:
    from pspo.tasks import math_reward

    return zlib.crc32(text.encode()) % 1000 / 1000 if forced else math_reward(text, gold)


def problems_for(workload: Workload, rollouts: int, data: str | None):
    from pspo.tasks import load_problems

    return load_problems(workload.data, "train", data, limit=(rollouts + 1) * workload.prompts)


def set_up_pspo(workload: Workload, folder: str, options: argparse.Namespace):
    """Configuration, tokenizer, policy, sampling, problems and encoded prompts of a workload."""
    import torch

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
    from pspo.model import load_policy, load_tokenizer, stop_token_ids
    from pspo.rollout import Sampling, encode_prompts

    cast = "bf16" if options.dtype == "bf16" else "none"
    model = ModelConfig(folder, autocast=cast, lora=LoraConfig(rank=getattr(options, "lora", 0)))
    tokenizer, policy = load_tokenizer(model), load_policy(model, torch.device("cpu"))
    problems = problems_for(workload, options.rollouts, options.data)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems], SYSTEM_PROMPT)
    longest = max(map(len, prompts))
    config = TrainConfig(
        model=model,
        rollout=RolloutConfig(prompts=workload.prompts, group_size=workload.group_size),
        algorithm=AlgorithmConfig(surrogate=Clip(0.2)),
        optimizer=OptimizerConfig(
            lr=workload.lr,
            microbatch_tokens=workload.microbatch // workload.group_size * longest + workload.microbatch * TOKENS,
        ),
        run=RunConfig(max_steps=10**9),
    )
    sampling = Sampling(
        stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, 0.6, 0.85, max_completion_tokens=TOKENS,
        min_completion_tokens=TOKENS if workload.forced else 0,
    )  # fmt: skip
    return config, tokenizer, policy, sampling, problems, prompts


def advantages_of(workload: Workload, rollout, problems):
    """(B,) float32, of a rollout over these problems."""
    import torch

    from pspo.rollout import group_relative_advantages

    golds = [problem.answer for problem in problems for _ in range(workload.group_size)]
    rewards = [reward_of(text, gold, workload.forced) for text, gold in zip(rollout.texts, golds, strict=True)]
    return group_relative_advantages(torch.tensor(rewards), workload.group_size)


def run_pspo(workload: Workload, folder: str, options: argparse.Namespace) -> list[dict]:
    import torch

    from pspo.model import autocast
    from pspo.rollout import generate
    from pspo.update import Learner, update

    config, tokenizer, policy, sampling, problems, prompts = set_up_pspo(workload, folder, options)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=workload.lr, weight_decay=0.0, fused=True)  # as TRL's
    learner = Learner(policy, optimizer)
    torch.manual_seed(0)
    records = []
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for first in range(0, len(prompts), workload.prompts):
        clock = Clock()
        rows = slice(first, first + workload.prompts)
        with clock("total"):
            with clock("generate"), autocast(config.model.autocast, policy.device):
                rollout = generate(policy, tokenizer, prompts[rows], sampling, workload.group_size)
            advantages = advantages_of(workload, rollout, problems[rows])
            with clock("train"):
                update(learner, rollout, advantages, config)
        records.append(clock.seconds | {"old log-probs": 0.0, "tokens": rollout.tokens, "loaded_kb": loaded})
    return records


def run_trl(workload: Workload, folder: str, options: argparse.Namespace) -> list[dict]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from pspo.config import SYSTEM_PROMPT

    problems = problems_for(workload, options.rollouts, options.data)
    data = Dataset.from_list(
        [
            {
                "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem.prompt}],
                "gold": int(problem.answer),
            }
            for problem in problems
        ]
    )

    def reward(completions, gold, **_):
        return [
            reward_of(completion[0]["content"], answer, workload.forced)
            for completion, answer in zip(completions, gold, strict=True)
        ]

    rows = workload.prompts * workload.group_size
    accumulate = rows // workload.microbatch
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=workload.microbatch,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_iterations=2,
        num_generations=workload.group_size,
        max_completion_length=TOKENS,
        temperature=0.6,
        top_p=0.85,
        top_k=0,
        generation_kwargs={"min_new_tokens": TOKENS} if workload.forced else None,
        loss_type="dapo",
        epsilon=0.2,
        beta=0.0,
        scale_rewards="none",
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=2 * (options.rollouts + 1),
        bf16=options.dtype == "bf16",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10**9,
        dataloader_pin_memory=False,
    )
    adapters = None
    if options.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=options.lora, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    frozen_bf16 = options.lora and options.dtype == "bf16"  # as pspo's
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if frozen_bf16 else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        model, reward, args=args, train_dataset=data, processing_class=tokenizer, peft_config=adapters
    )
    records, clock, start = [], Clock(), [0.0]
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer._generate = clock.timed("generate", trainer._generate)
    trainer._generate_and_score_completions = clock.timed("rollout", trainer._generate_and_score_completions)
    seen = [0]

    class PerRollout(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step % 2 == 0:
                clock.seconds.clear()
                start[0] = time.process_time()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % 2 == 0:
                total = time.process_time() - start[0]
                tokens = int(trainer.state.num_input_tokens_seen) - seen[0]
                seen[0] += tokens
                s = clock.seconds
                records.append(
                    {
                        "total": total,
                        "generate": s["generate"],
                        "old log-probs": s["rollout"] - s["generate"],
                        "train": total - s["rollout"],
                        "tokens": tokens,
                        "loaded_kb": loaded,
                    }
                )

    trainer.add_callback(PerRollout())
    trainer.train()
    return records


def child(side: str, name: str, folder: str, options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(options.threads)
    run = run_pspo if side == "pspo" else run_trl
    records = run(WORKLOADS[name], folder, options)[1:]  # the first is the warm-up
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for record in records:
        record["peak_over_loaded_mb"] = (peak - record.pop("loaded_kb")) / 1024
    print("RECORDS " + json.dumps(records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--model", help="model folder for smollm2 and gsm8k")
    parser.add_argument("--data", help="GSM8K's folder for gsm8k; unset, from the hub")
    parser.add_argument("--rollouts", type=int, default=3, help="counted rollouts a side and turn")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train LoRA adapters of this rank")
    parser.add_argument("--json", type=Path, help="write all records there")
    parser.add_argument("--child", choices=("pspo", "trl"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.workloads[0], options.model, options)
        return

    everything = {}
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(WORKLOADS[name], options.model, Path(scratch))
            records = {"trl": [], "pspo": []}
            for _ in range(options.turns):
                for side, kept in records.items():
                    command = [sys.executable, "-m", "benchmarks.vs_trl", name, "--child", side, "--model", folder]
                    for option in ("rollouts", "threads", "dtype", "lora", "data"):
                        if getattr(options, option) is not None:
                            command += [f"--{option}", str(getattr(options, option))]
                    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
                    done = subprocess.run(command, capture_output=True, text=True, env=environment)
                    if done.returncode:
                        sys.exit(done.stderr)
                    line = next(line for line in done.stdout.splitlines() if line.startswith("RECORDS "))
                    kept += json.loads(line.removeprefix("RECORDS "))
        everything[name] = records
        what = f"{name}, {options.dtype}" + (f", LoRA of rank {options.lora}" if options.lora else "")
        print(f"\n{what}, {options.threads} thread(s), median [min, max] of {len(records['pspo'])}")
        for record in (*records["trl"], *records["pspo"]):
            record["tokens/s"] = record["tokens"] / record["total"]
        for key in ("generate", "old log-probs", "train", "total", "tokens/s", "peak_over_loaded_mb"):
            cells, medians = [], []
            for side in ("trl", "pspo"):
                values = [record[key] for record in records[side]]
                medians.append(statistics.median(values))
                cells.append(f"{side} {medians[-1]:9.2f} [{min(values):.2f}, {max(values):.2f}]")
            ratio = f"{medians[0] / medians[1]:.2f}" if medians[1] else ""
            print(f"  {key:20} {cells[0]:38} {cells[1]:38} {ratio}")
        sums = [sum(record["total"] for record in records[side]) for side in ("trl", "pspo")]
        print(f"  all counted rollouts trl {sums[0]:9.2f} {'':28} pspo {sums[1]:8.2f} {'':28} {sums[0] / sums[1]:.2f}")
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
