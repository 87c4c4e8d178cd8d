"""benchmarks.gpu on a CPU: its rehearsal, measurements that fail, the verdict, and candidates against pspo as it is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import benchmarks.gpu.__main__ as gpu
import pspo.rollout.drawing
from benchmarks.gpu.candidates import DECODING, TRAINING, applied, race_in_one_pass
from benchmarks.gpu.common import TINY, Measurement, Options, random_policy, row
from benchmarks.gpu.decide import compared
from benchmarks.gpu.parts import PARTS
from pspo.config import AlgorithmConfig, ModelConfig, RunConfig, TrainConfig
from pspo.losses import PSPO, Counts
from pspo.model import autocast, load_tokenizer
from pspo.rollout import Batch, Sampling, generate
from pspo.rollout.drawing import sample_race
from pspo.update import Learner
from pspo.update.step import backward

CPU = torch.device("cpu")


def read(output: Path) -> dict[str, dict]:
    return json.loads((output / "results.json").read_text())


def values(result: dict) -> dict[str, float]:
    return {row["what"]: row["value"] for row in result["rows"]}


@pytest.fixture
def here(monkeypatch):
    """Runs the command in this process."""
    for name in ("HF_HUB_OFFLINE", "PYTORCH_NVML_BASED_CUDA_CHECK"):  # put back afterwards
        monkeypatch.setenv(name, "1")
    return lambda output, *args: gpu.main(["--rehearse", "--output", str(output), *args])


def test_what_fails_is_recorded_and_the_rest_is_measured(tmp_path, here, monkeypatch):
    def raises(options):
        raise RuntimeError("no kernel | image")

    def crashes(options):
        os.kill(os.getpid(), signal.SIGKILL)

    def works(options):
        return [row("seven", 7.0, "s", most=8), row("six", 6, least=7)]

    fails = [Measurement("raises", raises), Measurement("crashes", crashes)]
    rest = [Measurement("works", works), Measurement("elsewhere", works, needs=("a GPU", "no_such_package"))]
    monkeypatch.setitem(PARTS, "speed", [*fails, *rest])
    here(tmp_path, "--part", "speed")
    results = read(tmp_path)
    assert [*results] == ["raises", "crashes", "works", "elsewhere"]
    assert results["raises"]["error"] == "exit code 1: RuntimeError: no kernel | image"
    assert results["crashes"]["error"] == f"exit code {-signal.SIGKILL}: no output"
    assert results["elsewhere"]["skipped"] == "needs a GPU and no_such_package"
    assert [(r["value"], r["goal"], r["ok"]) for r in results["works"]["rows"]] == [
        (7.0, "at most 8", True),
        (6, "at least 7", False),
    ]
    before = results["works"] | {"date": "of the first call"}
    (tmp_path / "results.json").write_text(json.dumps(results | {"works": before}))
    here(tmp_path, "--part", "speed")
    assert read(tmp_path)["works"] == before  # measured once


def test_the_verdict_names_candidates_that_gain_and_compute_the_same():
    """Gains of 1.3, of 1.1, and of 2 with other numbers."""
    gpu_name = {"environment": {"gpu": "a card"}}
    results = {
        "pays": {"rows": compared(1.3, 1.0, "ms")} | gpu_name,
        "slower": {"rows": compared(1.1, 1.0, "ms")} | gpu_name,
        "inexact": {"rows": [*compared(2.0, 1.0, "s"), row("off", 2.0, most=1)]} | gpu_name,
        "failed": {"error": "out of memory"},
    }
    *table, _, line = gpu.verdict(results)
    assert line == "Gain of at least 1.2, with the same numbers: pays."
    assert table[-3:] == [
        "| pays | 1.3 ms | 1 ms | 1.3 x | yes | a card |",
        "| slower | 1.1 ms | 1 ms | 1.1 x | yes | a card |",
        "| inexact | 2 s | 1 s | 2 x | no | a card |",
    ]


# ---------------------------------------------------------------- candidates


@pytest.mark.parametrize("top_p", [0.5, 0.85, 1.0])
def test_a_race_in_one_pass_draws_what_the_race_with_a_bisection_does(top_p):
    for scale in (0.1, 1.0, 10.0):
        probs = (scale * torch.randn(200, 64)).softmax(dim=1)
        torch.manual_seed(0)
        expected = sample_race(probs, top_p)
        torch.manual_seed(0)
        assert torch.equal(race_in_one_pass(probs, top_p), expected)


PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [20]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "bf16"])
def test_decoding_candidates_draw_what_is_drawn_now(monkeypatch, mode):
    """Compiled for this CPU without a break: one code for all layers, one for the draw."""
    monkeypatch.setattr(pspo.rollout.drawing, "sample_nucleus", sample_race)
    policy = random_policy(TINY, ModelConfig(), CPU)
    sampling = Sampling([], 0, 0.9, 0.85, max_completion_tokens=20, decoder="graphs", logprobs=True)
    rollouts = []
    counters.clear()
    for candidates in ([], DECODING["layers+fused+sampler"]):
        pspo.rollout.graphs.GRAPH_DECODERS.clear()
        torch.manual_seed(0)
        with applied(candidates, policy), autocast(mode, CPU):
            rollouts.append(generate(policy, load_tokenizer(ModelConfig()), PROMPTS, sampling, 2))
    now, candidate = rollouts
    assert torch.equal(candidate.completion_ids, now.completion_ids)
    tolerance = 1e-5 if mode == "none" else 5e-3
    torch.testing.assert_close(candidate.sampler_logprobs, now.sampler_logprobs, rtol=0, atol=tolerance)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("mode", ["none", "bf16"])
def test_training_candidates_have_the_gradient_of_now(name, mode):
    """Of minibatches of two shapes; compiled, at most three codes serve all layers and shapes."""
    config = TrainConfig(
        model=ModelConfig(autocast=mode), algorithm=AlgorithmConfig(surrogate=PSPO()), run=RunConfig(max_steps=10)
    )
    policy = random_policy(TINY, config.model, CPU)
    tokenizer = load_tokenizer(config.model)
    sampling = Sampling([], 0, 0.9, max_completion_tokens=20)
    rollouts = [generate(policy, tokenizer, prompts, sampling, 2) for prompts in (PROMPTS, [[7] * 9, [3] * 4, [4, 5]])]
    learner = Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    counters.clear()
    for rollout in rollouts:
        gradients = []
        for candidates in ([], TRAINING[name]):
            batch = Batch(rollout, torch.linspace(-1, 1, len(rollout))[:, None], indices=torch.arange(len(rollout)))
            counts = Counts(int(rollout.loss_mask.sum()), len(rollout), 20)
            with applied(candidates, policy):
                for _ in range(2):  # which add up
                    backward(learner, batch, counts, config)
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
            learner.optimizer.zero_grad()
        now, candidate = gradients
        assert (candidate - now).norm() < (1e-5 if mode == "none" else 1e-2) * now.norm()
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.nightly
def test_the_whole_rehearsal(tmp_path):
    """Everything that a CPU without TRL and vLLM can run: each function of each part."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--part=all", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    results = read(tmp_path)
    assert {result["part"] for result in results.values()} == {*PARTS}
    assert not [result["error"] for result in results.values() if "error" in result]
    skipped = {name: result["skipped"] for name, result in results.items() if "skipped" in result}
    assert all("a GPU" in why or "trl" in why for why in skipped.values())
    options = Options(tmp_path, rehearse=True)
    assert {*skipped} == {each.name for part in PARTS.values() for each in part if options.lacks(each.needs)}
    equal = values(results["decoders"])
    assert [equal[f"{decoder}: share of tokens equal to hf's"] for decoder in ("pspo", "graphs")] == [1.0, 1.0]
    assert [*values(results["ratios"]).values()] == [1.0, 1.0, 1.0]
    assert {"torch", "transformers"} <= {*results["decoders"]["environment"]["packages"]}
    assert results["decoders"]["date"]
    assert values(results["resume"]) == {"weights equal, bit for bit": True}
    for name, most in (("ddp", 1e-6), ("fsdp2", 1e-4)):
        assert max(values(results[name]).values()) < most
    exact = [*PARTS["correctness"], *PARTS["decide"]]
    rows = [row for measurement in exact for row in results[measurement.name].get("rows", []) if row["goal"]]
    assert all(row["ok"] for row in rows if row["what"] != "gain")
