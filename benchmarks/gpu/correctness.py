"""Whether a GPU computes what the CPU does: decoders, log-probs, ratios, exact resume, sampler, ranks."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import scipy.stats
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu.common import GROUP, Options
from benchmarks.gpu.results import Rows, row
from pspo.config import AlgorithmConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from pspo.losses import PSPO, Counts
from pspo.model import load_policy, load_tokenizer, locate, stop_token_ids, token_logprobs
from pspo.rollout import Batch, Rollout, Sampling, encode_prompts, generate
from pspo.rollout.drawing import sample_nucleus
from pspo.rollout.types import cat_padded
from pspo.tasks import load_problems
from pspo.train import main
from pspo.update import Learner, update
from pspo.update.step import backward

ROOT = Path(__file__).parents[2]
PROMPTS = 8
TEMPERATURE = 0.7
FLOAT32 = ModelConfig(autocast="none")
SHORT = ("--run.quiet=true", "--run.test_limit=0", "--run.validate_every=0", "--data.limit=64",
         "--rollout.prompts=8", "--rollout.max_completion_tokens=48")  # fmt: skip


def set_up(config: ModelConfig, device: torch.device, **sampling: Any) -> tuple[Any, Any, list[list[int]], Sampling]:
    """Policy, tokenizer, prompts and sampling: what `generate` takes, in its order."""
    policy = load_policy(config, device)
    tokenizer = load_tokenizer(config)
    problems = load_problems("arithmetic", "test", limit=PROMPTS)
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    return policy, tokenizer, prompts, Sampling(stop_token_ids(policy, tokenizer), tokenizer.pad_token_id, **sampling)


def decoders(options: Options, model: str = "tiny-base") -> Rows:
    """Greedy tokens of pspo's decoders against those of transformers' own loop, in float32."""
    config = replace(FLOAT32, name_or_path=model if model == "tiny-base" else str(options.smollm2))
    *inputs, sampling = set_up(config, options.device, temperature=0.0)
    expected = generate(*inputs, replace(sampling, decoder="hf"), GROUP)
    rows = []
    for decoder in ("pspo", "graphs"):
        share, gap = compare(inputs[0], expected, generate(*inputs, replace(sampling, decoder=decoder), GROUP))
        rows.append(row(f"{decoder}: share of tokens equal to hf's", share))
        rows.append(row(f"{decoder}: gap of the two best logits where rows first differ", gap, most=1e-4))
    return rows


@torch.no_grad()
def compare(policy: Any, expected: Rollout, found: Rollout) -> tuple[float, float]:
    """Share of equal tokens, and the largest gap between the two best logits at a row's first difference."""
    ids = [rollout.completion_ids.where(rollout.completion_mask, -1) for rollout in (expected, found)]
    a, b = cat_padded(ids, -1).chunk(2)  # (B, T), -1 after the end
    there = (a >= 0) | (b >= 0)
    differ = a != b
    gap = 0.0
    for i in differ.any(dim=1).nonzero().flatten().tolist():
        before = torch.cat([expected.prompt_ids[i, expected.prompt_mask[i]], a[i, : int(differ[i].long().argmax())]])
        first, second = policy(input_ids=before[None]).logits[0, -1].topk(2).values.tolist()
        gap = max(gap, first - second)
    return ((a == b) & there).sum().item() / there.sum().item(), gap


def logprobs(options: Options) -> Rows:
    """Log-probs and the gradient of the loss in float32, against the CPU's in float32 and in float64."""
    cpu = torch.device("cpu")
    close = {"most": 1e-4}
    *inputs, sampling = set_up(FLOAT32, cpu, temperature=TEMPERATURE)
    torch.manual_seed(0)
    rollout = generate(*inputs, sampling, GROUP)
    rows = []
    values, gradient = logprobs_and_gradient(rollout, options.device, torch.float32)
    for dtype in (torch.float32, torch.float64):
        values_there, gradient_there = logprobs_and_gradient(rollout, cpu, dtype)
        apart = (gradient - gradient_there).norm() / gradient_there.norm()
        kind = f"CPU's in {str(dtype)[6:]}"
        largest = (values - values_there).abs().max().item()
        rows.append(row(f"log-probs, largest difference to the {kind}", largest, **close))
        rows.append(row(f"gradient, relative difference to the {kind}", apart.item(), **close))

    policy = inputs[0].to(options.device)
    for decoder in ("pspo", "graphs"):
        drawn = generate(*inputs, replace(sampling, decoder=decoder, logprobs=True), GROUP)
        again = token_logprobs(policy, *drawn.token_ids, TEMPERATURE).cpu()
        apart = (drawn.sampler_logprobs - again).abs().max().item()
        rows.append(row(f"{decoder}: sampler's log-probs, largest difference to the trainer's", apart, **close))
    return rows


def logprobs_and_gradient(rollout: Rollout, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(B, T) log-probs, and the whole gradient of PSPO's loss; in float64, on the CPU."""
    policy = load_policy(FLOAT32, device).to(dtype)
    advantages = torch.linspace(-1, 1, len(rollout))[:, None]
    batch = Batch(rollout, advantages, indices=torch.arange(len(rollout)))
    config = TrainConfig(model=FLOAT32, rollout=RolloutConfig(temperature=TEMPERATURE))
    values = token_logprobs(policy, *batch.rollout.token_ids, TEMPERATURE).detach()
    learner = Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    backward(learner, batch, Counts(int(rollout.loss_mask.sum()), len(rollout), 128), config)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    return values.double().cpu(), gradient.double().cpu()


def ratios(options: Options) -> Rows:
    """Ratios of a policy that does not move, under bf16 autocast: exactly 1, whichever pass old log-probs come from."""
    policy, *inputs = set_up(FLOAT32, options.device, temperature=TEMPERATURE)
    with torch.autocast(options.device.type, torch.bfloat16):
        rollout = generate(policy, *inputs, GROUP)
    advantages = torch.linspace(-1, 1, len(rollout))
    learner = Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    rows = []
    for what, schedule in {
        "first visit": {"epochs": 1},
        "old log-probs from a pass before (minibatches 2)": {"epochs": 1, "minibatches": 2},
        "second visit (epochs 2)": {"epochs": 2},
    }.items():
        config = TrainConfig(
            model=ModelConfig(autocast="bf16"),
            algorithm=AlgorithmConfig(surrogate=PSPO(), **schedule),
            rollout=RolloutConfig(prompts=PROMPTS, group_size=GROUP, temperature=TEMPERATURE),
            run=RunConfig(max_steps=100),
        )
        steps = update(learner, rollout, advantages, config)
        found = [step[f"ratio_{end}"] for step in steps for end in ("min", "max")]
        rows.append(row(f"{what}: ratio furthest from 1", max(found, key=lambda r: abs(r - 1)), least=1, most=1))
    return rows


def resume(options: Options, deterministic: bool, optimizer: str = "adamw") -> Rows:
    """Weights after 6 steps, of an undisturbed run and of one that ended after 4 and was resumed.

    Deterministic algorithms where there are some: sampling's sums along the vocabulary have none.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    args = (*SHORT, "--run.save_every=2", "--reward.functions=[MathReward]", f"--optimizer.name={optimizer}")
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        stopped = Path(scratch) / "stopped"
        for output, steps in ((whole, 6), (stopped, 4), (stopped, 6)):
            main([*args, f"--run.max_steps={steps}", f"--run.output_dir={output}"])
        one, other = (load_file(run / "final/model.safetensors") for run in (whole, stopped))
    equal = all(torch.equal(one[name], other[name]) for name in one)
    goal = {"least": 1, "most": 1} if deterministic else {}
    return [row("weights equal, bit for bit", equal, **goal)]


def torchrun(processes: int, *args: str, module: str = "pspo.train") -> None:
    """Run a module under torchrun; RuntimeError if it fails. SIGTERM stops its ranks, in sessions of their own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10"}
    with subprocess.Popen([*launcher, "-m", module, *args], cwd=ROOT, env=environment) as started:
        signal.signal(signal.SIGTERM, lambda *_: started.terminate())
        if started.wait():
            raise RuntimeError(f"torchrun ended with code {started.returncode}; its output is in the log")


def uneven_advantages(rewards: Tensor, group_size: int, lengths: Tensor) -> Tensor:
    """Advantages that do not cancel where all completions of a group are equal."""
    return rewards - 0.3 + 0.1 * (lengths % 2)


def ranks_on_one_gpu(options: Options, strategy: str, processes: int) -> Rows:
    """Weights of two float32 steps by ranks on one GPU against those without ranks; the draws are the likeliest tokens.

    One rank takes NCCL on a GPU; several, and all on a CPU, take gloo.
    """
    args = (
        *SHORT, "--run.max_steps=2", "--model.autocast=none", "--optimizer.name=sgd", "--optimizer.lr=1",
        "--rollout.top_k=1", "--algorithm.advantages=benchmarks.gpu.correctness.uneven_advantages",
    )  # fmt: skip
    module = "pspo.train" if processes == 1 else "benchmarks.gpu.one_gpu"
    start = load_file(Path(locate("tiny-base")) / "model.safetensors")
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        ranked = Path(scratch) / strategy
        main([*args, f"--run.output_dir={plain}"])
        torchrun(processes, *args, f"--distributed.strategy={strategy}", f"--run.output_dir={ranked}", module=module)
        one, other = (load_file(run / "final/model.safetensors") for run in (plain, ranked))
    apart, moved = (
        torch.cat([(weights[name].double() - one[name].double()).flatten() for name in one]).norm().item()
        for weights in (other, start)
    )
    return [row("distance of the weights from those without, by the distance moved", apart / moved, most=1e-3)]


def sampler(options: Options) -> Rows:
    """Frequencies of sampled tokens against the nucleus by its definition, in float64."""
    torch.manual_seed(0)
    logits = 0.5 * torch.randn(64)
    top_p = 0.85
    draws = 20_000
    probs, order = logits.double().softmax(dim=0).sort(descending=True)
    kept = torch.where(probs.cumsum(dim=0) - probs < top_p, probs, 0.0)
    expected = torch.zeros_like(kept).scatter(0, order, draws * kept / kept.sum())
    drawn = sample_nucleus(logits.softmax(dim=0).to(options.device).expand(draws, -1), top_p)
    seen = drawn.bincount(minlength=64).cpu()
    inside = expected > 0
    p = scipy.stats.chisquare(seen[inside].numpy(), expected[inside].numpy()).pvalue
    return [
        row("draws outside the nucleus", int(seen[~inside].sum()), most=0),
        row("chi-square test, p", float(p), least=1e-6),
    ]
