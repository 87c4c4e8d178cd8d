"""Rollouts by vLLM itself, in a process and by servers: its tokens, log-probs and weights are the policy's."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

import pytest
import reference
import requests
import torch
from architectures import each, tiny
from engines import CPU, needs_vllm, train
from processes import forked, kill_at_step, until
from safetensors.torch import load_file
from test_servers import engine_of

from pspo.config import DataConfig, LoraConfig, ModelConfig, RolloutConfig, TrainConfig
from pspo.files import read_jsonl
from pspo.model import load_policy, load_tokenizer, token_logprobs
from pspo.rollout import How, PolicySampler, Prompts, load_prompts, make_sampling
from pspo.rollout.drawing import Generators
from pspo.rollout.engine import EngineError, EngineSampler, find_engine
from pspo.tasks import Problem
from pspo.update.learner import Learner
from pspo_vllm import Servers
from pspo_vllm.vllm import weights_of_files

pytestmark = pytest.mark.usefixtures("here")


class VLLMServer:
    """A real one, of tiny-base, in processes of its own."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "pspo", "serve", f"--port={self.port}", "--max_tokens=256"]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.process = Popen(command, env=variables, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)

    def is_ready(self) -> bool:
        assert self.process.poll() is None
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=60).ok
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def begun(self) -> float:
        """Completions that it has drawn since it was started, or is drawing."""
        metrics = requests.get(f"{self.url}/metrics", timeout=60).text
        counts = re.findall(r"^vllm:(?:num_requests_running|request_success_total){.*} (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, counts))

    @property
    def version(self) -> str:
        return requests.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"]


@pytest.fixture(scope="module")
def vllm_servers() -> Iterator[list[VLLMServer]]:
    both = [VLLMServer(), VLLMServer()]
    try:
        for server in both:
            server.start()
        until(lambda: all(server.is_ready() for server in both), 400)
        yield both
    finally:
        for server in both:
            server.kill()


@pytest.fixture(scope="module", params=["process", "servers"])
def served(request):
    """An engine's sampler, with the weights of its learner."""
    by_servers = request.param == "servers"
    spec = servers_spec(request.getfixturevalue("vllm_servers")) if by_servers else {"class_path": "pspo_vllm.VLLM"}
    config = TrainConfig(model=ModelConfig("tiny-base"), rollout=RolloutConfig(engine=spec))
    policy = load_policy(config.model, CPU)
    engine = find_engine(spec)
    engine.start(config, 256, CPU)
    served = sampler_of(engine, policy)
    yield served
    for _ in range(0 if by_servers else 2):  # its first error ends the process, and is told again
        with pytest.raises(EngineError, match=r"^(?!its process)"):
            draw_too_long(served)
    engine.close()
    assert by_servers or engine.process.poll() is not None


def servers_spec(servers: list[VLLMServer]) -> dict:
    return {"class_path": "pspo_vllm.Servers", "init_args": {"urls": [server.url for server in servers]}}


class Served(NamedTuple):
    sampler: EngineSampler
    how: How


def sampler_of(engine, policy, **changed) -> Served:
    """An engine's sampler for a policy that a learner holds, and how it draws; with other sampling fields."""
    tokenizer = load_tokenizer(ModelConfig(policy.name_or_path))
    sampling = replace(make_sampling(policy, tokenizer, RolloutConfig()), logprobs=True, **changed)
    learner = Learner(policy, torch.optim.SGD(policy.parameters(), lr=0.0))
    return Served(EngineSampler(engine, learner, PolicySampler(tokenizer)), How(sampling))


def draw_too_long(served: Served) -> None:
    served.sampler.draw(Prompts([Problem("?")], [[7] * 999]), 4, served.how)


@pytest.fixture(scope="module")
def prompts():
    return load_prompts(DataConfig(), load_tokenizer(ModelConfig()), "train", limit=24)


def logprob_errors(served, prompts):
    """Differences between an engine's log-probs and the policy's, (B, T), of groups of 4."""
    sampler, how = served
    drawn = sampler.draw(prompts, 4, how)
    expected = token_logprobs(sampler.learner.policy, *drawn.token_ids, how.sampling.temperature)
    return drawn, drawn.sampler_logprobs - expected


@needs_vllm
def test_logprobs_are_the_policys(served, prompts):
    if isinstance(served.sampler.engine, Servers):  # after a draw that failed, too; a process ends
        with pytest.raises(EngineError):
            draw_too_long(served)
    drawn, errors = logprob_errors(served, prompts)
    assert drawn.completion_ids.shape[0] == 96
    assert drawn.terminated.any()
    assert errors.abs().max() < 1e-4


@needs_vllm
@pytest.mark.parametrize("served", ["process"], indirect=True)  # a server draws fewer at a time
@pytest.mark.parametrize(("top_p", "top_k"), [(0.85, 0), (1.0, 6), (1.0, 0)])
def test_first_tokens_have_the_frequencies_of_the_cut_distribution(served, prompts, top_p, top_k):
    policy = served.sampler.learner.policy
    n, prompt = 4000, prompts.ids[0][:9]
    sampling = replace(served.how.sampling, temperature=2.0, top_p=top_p, top_k=top_k, max_completion_tokens=1)
    torch.manual_seed(1)
    one = Prompts(prompts.problems[:1], [prompt])
    drawn = served.sampler.draw(one, n, How(sampling)).completion_ids[:, 0]
    with torch.no_grad():
        logits = policy(torch.tensor([prompt])).logits[0, -1] / 2.0
    exact = reference.nucleus(logits, top_p, top_k)
    assert (n * exact >= 5).sum() >= 4
    reference.assert_drawn_from(exact, drawn, least=1e-3)


@each("pspo", "hf", in_ci=("deepseek_v3", "gpt2", "jamba", "mixtral"))
def test_what_is_pushed_is_what_a_file_would_hold(name, tmp_path):
    """Engines know the names and shapes of files: there a mixture's experts are not fused, for one."""
    model = tiny(name)
    model.save_pretrained(tmp_path)
    pushed = dict(named for layer in weights_of_files(model) for named in layer.items())
    for weight, saved in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(pushed[weight], saved, rtol=0, atol=0)


@needs_vllm
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_weights_pushed_are_the_weights_used_with_adapters_merged(served, prompts, lora):
    trained = served.sampler.learner
    policy = load_policy(ModelConfig(trained.policy.name_or_path, lora=lora), CPU)
    changed = Served(replace(served.sampler, learner=Learner(policy, trained.optimizer, trained.steps)), served.how)

    def error() -> float:
        return logprob_errors(changed, prompts.take(range(4)))[1].abs().max().item()

    assert error() < 1e-4
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.1 if lora.rank else 0.01)
    assert error() > 0.01  # the engine has this version already
    changed.sampler.learner.steps += 1
    assert error() < 1e-3
    trained.steps += 2


def train_by(servers: list[VLLMServer], output: str, *args: str) -> int:
    engine = json.dumps(servers_spec(servers))
    return train(output, f"--rollout.engine={engine}", "--model.name_or_path=tiny-base", *args)


@needs_vllm
@pytest.mark.parametrize("lag", [0, 1])
def test_servers_draw_for_a_run_and_for_the_one_that_resumes_it(vllm_servers, lag):
    def killed() -> int:
        kill_at_step(3)
        return train_by(vllm_servers, "out", f"--rollout.lag={lag}")

    assert forked(killed) == -signal.SIGKILL
    left = {server.version for server in vllm_servers}
    assert len(left) == 1
    assert train_by(vllm_servers, "out", f"--rollout.lag={lag}") == 0
    lines = read_jsonl(Path("out/metrics.jsonl"))
    assert [line["step"] for line in lines] == [2, 4, 6]
    if lag == 0:  # else ratios are to the log-probs of the servers' own, older weights
        assert all(abs(line["kl_sampler_old"]) < 1e-6 for line in lines)
    names = {server.version for server in vllm_servers}
    assert len(names) == 1
    assert names != left


@needs_vllm
def test_no_completion_is_drawn_by_two_versions(vllm_servers, prompts):
    """Of a push while servers draw: what was asked for before is drawn before; then the first weights are gone."""
    prompts = prompts.take(range(8))
    mine, other = load_policy(ModelConfig("tiny-base"), CPU), load_policy(ModelConfig("tiny-base"), CPU)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.05)
    with engine_of(vllm_servers) as engine, engine_of(vllm_servers) as intruder:
        sampler, how = sampler_of(engine, mine, stop_ids=(), max_completion_tokens=160)
        how = replace(how, generators=Generators(CPU, 0))
        before = sum(server.begun for server in vllm_servers)
        sampler.begin(prompts, 16, how)
        until(lambda: sum(server.begun for server in vllm_servers) == before + 128)  # takes seconds from here on
        intruder.push(other, 0)
        drawn = sampler.complete()
        errors = drawn.sampler_logprobs - token_logprobs(mine, *drawn.token_ids, how.sampling.temperature)
        assert errors.abs().max() < 1e-4
        assert {server.version for server in vllm_servers} == {intruder.version}
        with pytest.raises(EngineError, match=f"drew with weights {intruder.version}, not {engine.version}"):
            sampler.draw(prompts, 4, how)
