"""pspo on a simulated GPU, which needs g++: configurations run to their end, with the CPU's numbers.

Most are nightly tests. Where there is a real GPU, they run on that.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from processes import metric_lines, one_layer, run_command

import pspo.evaluate.__main__
from pspo.config import ModelConfig, RolloutConfig
from pspo.losses import Surrogate
from pspo.model import autocast, default_max_rows, default_microbatch_tokens, load_tokenizer
from pspo.rollout import generate, make_sampling
from pspo.train import main

HAS_GPU = torch.cuda.is_available()
CAN_SIMULATE = shutil.which("g++") is not None and torch.version.cuda is None
pytestmark = pytest.mark.skipif(not HAS_GPU and not CAN_SIMULATE, reason="needs a GPU, or g++ and torch for CPUs")

TESTS = Path(__file__).parent


# ---------------------------------------------------------------- pieces of a user


@dataclass(frozen=True)
class TensorLoss(Surrogate):
    """A clipped surrogate that makes tensors: a scalar on the CPU, zeros on the GPU."""

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        largest = torch.tensor(1.2)
        ratio = torch.minimum((logprobs - old_logprobs).exp(), largest)
        return torch.where(mask, -ratio * advantages, torch.zeros(mask.shape, device=mask.device))


def spread_reward(completions):
    """Rewards that differ between prompts, also of equal completions of one: by their lengths."""
    return [(len(completion) % 5) / 4 for completion in completions]


def tensor_reward(completions):
    return torch.tensor([float(len(completion) % 3) for completion in completions])


def raw_advantages(rewards, group_size, lengths):
    """Advantages that do not cancel where the completions of a group are equal."""
    baseline = torch.tensor(0.3)
    return rewards - baseline + 0.1 * (lengths % 2)


# ---------------------------------------------------------------- runs

TINY = (
    f"--model.name_or_path={one_layer()}", "--rollout.prompts=4", "--rollout.group_size=2",
    "--rollout.max_completion_tokens=12", "--data.limit=40", "--run.max_steps=2", "--run.test_limit=0",
    "--run.validate_every=0", "--run.quiet", "--optimizer.lr=1e-3",
    "--reward.functions=[test_simulated_gpu.spread_reward]",
)  # fmt: skip
SAME_DRAWS = ("--rollout.top_k=1", "--model.autocast=none", "--algorithm.advantages=test_simulated_gpu.raw_advantages")
SAMPLED = {  # whose draws are another generator's: they only run to their end
    "default": (),
    "pspo": ("--rollout.decoder=pspo",),
    "hf": ("--rollout.decoder=hf",),
    "nucleus": ("--algorithm.nucleus=replay", "--algorithm.minibatches=2"),
    "bf16 weights": ("--model.dtype=bfloat16",),
    "LoRA under autocast": ("--model.lora.rank=4",),
}
COMPARED = {
    "default": (),
    "microbatches": ("--optimizer.microbatch_tokens=200",),
    "KL": ("--algorithm.beta=0.1",),
    "entropy": ("--algorithm.entropy_coef=0.01",),
    "correction": ("--algorithm.correction=token_truncate", "--algorithm.minibatches=2"),
    "lag, proximal": ("--rollout.lag=1", "--algorithm.ratio_to=proximal", "--run.max_steps=4"),
    "LoRA, KL": ("--model.lora.rank=4", "--algorithm.beta=0.1"),
    "environment": ("--rollout.environment=test_episodes.TwoTurns",),
    "checkpointing": ("--model.gradient_checkpointing=true",),
    "bf16 autocast": ("--model.autocast=bf16",),
    "graphs": ("--rollout.decoder=graphs", "--rollout.max_completion_tokens=40", "--rollout.prompts=8"),
    "pspo": ("--rollout.decoder=pspo", "--rollout.max_completion_tokens=40"),
    "hf": ("--rollout.decoder=hf",),
    "stop strings": ('--rollout.stop_strings=["="]',),
    "a user's tensors": (
        "--algorithm.surrogate=test_simulated_gpu.TensorLoss", "--reward.functions=[test_simulated_gpu.tensor_reward]",
    ),
    "validation": ("--run.validate_every=1", "--run.validation_limit=8", "--run.test_limit=8"),
    "SGD, schedule": ("--optimizer.name=sgd", "--optimizer.schedule=cosine", "--optimizer.warmup_steps=1"),
}  # fmt: skip


def run_on_gpu(*args: str | Path, cwd: Path) -> str:
    """Run a command on the GPU, to a good end; what it prints."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    simulation = () if HAS_GPU else (str(TESTS / "simulated_gpu.py"),)
    command = [sys.executable, *simulation, *map(str, args)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_on_gpu(folder: Path, *args: str) -> None:
    run_on_gpu("-m", "pspo.train", *TINY, f"--run.output_dir={folder}", *args, cwd=folder.parent)


def run_on_cpu(main: Callable[[Sequence[str]], None], *args: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert run_command(main, *args) == 0


def assert_good(run: Path) -> list[dict[str, float]]:
    """Assert that a run has ended and no step was skipped; its metrics."""
    lines = metric_lines(run)
    assert (run / "summary.json").exists()
    assert not any(line["step_skipped"] for line in lines)
    assert all(math.isfinite(value) for line in lines for value in line.values() if value is not None)
    return lines


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if SAMPLED[name] else pytest.mark.slow) for name in SAMPLED]
)
def test_runs_to_its_end(tmp_path, name):
    train_on_gpu(tmp_path / "gpu", *SAMPLED[name])
    assert_good(tmp_path / "gpu")


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPARED)
def test_has_the_cpus_numbers(tmp_path, name):
    train_on_gpu(tmp_path / "gpu", *SAME_DRAWS, *COMPARED[name])
    run_on_cpu(main, *TINY, f"--run.output_dir={tmp_path / 'cpu'}", *SAME_DRAWS, *COMPARED[name])
    tolerance = {"rel": 0.1, "abs": 0.02} if name == "bf16 autocast" else {"rel": 1e-4, "abs": 1e-5}
    runs = (assert_good(tmp_path / name) for name in ("gpu", "cpu"))
    for line, expected in zip(*runs, strict=True):
        assert line == pytest.approx(expected, **tolerance)


def test_sizes_are_what_the_memory_of_a_gpu_allows(monkeypatch):
    """Of a model as Qwen2.5-0.5B, 0.6 (15/16 memory - 16 x 494e6) / (24 (30 x 896 + 8 x 4864)) tokens."""
    gpu = torch.device("cuda")
    text = SimpleNamespace(hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    config = SimpleNamespace(get_text_config=lambda: text)
    weights = [torch.empty(494_000_000, device="meta", requires_grad=True)]
    model = SimpleNamespace(device=gpu, config=config, parameters=lambda: weights)
    for gib, tokens, rows in ((16, 2048, 128), (24, 4096, 192), (80, 16384, 640), (140, 32768, 1120)):
        properties = SimpleNamespace(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, answer=properties: answer)
        assert default_microbatch_tokens(model, recomputes=False) == tokens
        assert default_max_rows(gpu) == rows
    assert default_microbatch_tokens(model, recomputes=True) == 2**19  # 0.6 x 133.0e9 / (24 x 4 x 896 + 65,792)


# ---------------------------------------------------------------- commands, one after the other


@pytest.mark.nightly
def test_resumes_forks_evaluates_and_exports(tmp_path):
    steps = ("--run.save_every=2", "--run.max_steps=4")
    train_on_gpu(tmp_path / "whole", *steps)
    train_on_gpu(tmp_path / "parts", *steps, "--run.max_steps=2")
    train_on_gpu(tmp_path / "parts", *steps)
    assert assert_good(tmp_path / "parts") == assert_good(tmp_path / "whole")
    fork = f"--run.fork_from={tmp_path / 'parts'}"
    train_on_gpu(tmp_path / "fork", *steps, fork, "--run.max_steps=6", "--optimizer.lr=1e-4")
    assert_good(tmp_path / "fork")

    model = f"--model.name_or_path={tmp_path / 'whole/final'}"
    args = (model, "--model.autocast=none", "--data.limit=8", "--eval.max_completion_tokens=24", "--run.quiet")
    run_on_gpu("-m", "pspo.evaluate", *args, "--run.output_dir=gpu", cwd=tmp_path)
    run_on_cpu(pspo.evaluate.__main__.main, *args, f"--run.output_dir={tmp_path / 'cpu'}")
    gpu, cpu = (tmp_path / name / "completions.jsonl" for name in ("gpu", "cpu"))
    assert gpu.read_bytes() == cpu.read_bytes()  # greedy
    train_on_gpu(tmp_path / "lora", "--model.lora.rank=4")
    export = ("export", f"--model.name_or_path={tmp_path / 'lora/final'}", "--output_dir=out")
    run_on_gpu("-m", "pspo", *export, cwd=tmp_path)
    assert (tmp_path / "out/model.safetensors").exists()


# ---------------------------------------------------------------- in one process: the simulation's rules, and graphs


def check_rules() -> None:
    """What a GPU refuses is refused, and a graph replays into the same memory."""
    gpu = torch.arange(4.0, device="cuda")
    cpu = torch.ones(4)
    for mix in (lambda: gpu + cpu, lambda: gpu @ cpu, lambda: torch.cat([gpu, cpu]), lambda: cpu[gpu > 1]):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    with pytest.raises(TypeError, match="convert cuda"):
        gpu.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    assert (gpu * torch.tensor(2.0))[torch.tensor([1, 3])].tolist() == [2.0, 6.0]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu += 1
        double = gpu * 2
    assert gpu.tolist() == [0.0, 1.0, 2.0, 3.0]  # a capture computes nothing
    for _ in range(2):
        graph.replay()
    assert double.tolist() == [4.0, 6.0, 8.0, 10.0]
    gpu.zero_()
    graph.replay()
    assert double.tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gpu.sum().item()


def check_biases() -> None:
    """A graph captured under autocast sees biases that have changed since: Qwen2's, of q, k and v."""
    tokenizer = load_tokenizer(ModelConfig())
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2Config(**shape, num_key_value_heads=2, vocab_size=len(tokenizer), initializer_range=0.2)
    policy = transformers.AutoModelForCausalLM.from_config(config).to("cuda").eval()
    sampling = make_sampling(policy, tokenizer, RolloutConfig(decoder="graphs"))
    graphs = replace(sampling, stop_ids=(), temperature=0.0, max_completion_tokens=12)
    for _ in range(2):
        with autocast("bf16", policy.device):
            drawn = generate(policy, tokenizer, [[1, 2, 3]], graphs)
            expected = generate(policy, tokenizer, [[1, 2, 3]], replace(graphs, decoder="pspo"))
        assert torch.equal(drawn.completion_ids, expected.completion_ids)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name.endswith("bias"):
                    parameter += torch.randn(parameter.shape, device="cuda")


@pytest.mark.skipif(not HAS_GPU, reason="the simulated GPU does it in a process of its own")
def test_graphs():
    check_biases()


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_the_simulation_refuses_what_a_gpu_refuses_and_replays_graphs(tmp_path):
    run_on_gpu(__file__, cwd=tmp_path)


if __name__ == "__main__":
    check_rules()
    check_biases()
