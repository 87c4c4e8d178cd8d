"""Rollouts by vLLM servers, on this machine or others, each started by ``pspo serve``.

Prompts are spread over the servers. vLLM reports which weights drew each completion. Weights other than those that this
process pushed last are an EngineError.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import ApplyResult, ThreadPool
from typing import Any

import requests
import safetensors.torch
import torch
import transformers
from torch import Tensor

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model.find import resolve_adapters
from pspo.rollout import Sampling
from pspo.rollout.engine import EngineError
from pspo_vllm.vllm import TESTED, TOLERANCES, Row, engine_dtype, pad_rows, sampling_params, weights_of_files

SECONDS_TO_CONNECT = 10.0


@dataclass
class Servers:
    """Engine of all ranks: vLLM servers, started by ``pspo serve``. If one server fails, the engine fails."""

    urls: list[str]  # the servers' addresses, such as [http://a:8000]
    timeout: float = 300.0  # seconds to wait for an answer; the other ranks wait 600 for this one
    run_name: str = field(default="", init=False)  # prefix of the versions of this run's weights
    version: str = field(default="", init=False)  # of the weights pushed last; unique to this run
    tolerance: float | None = field(default=None, init=False)  # `start` sets it, and threads
    threads: ThreadPool | None = field(default=None, init=False)
    pending: list[ApplyResult] = field(default_factory=list, init=False)  # one result per prompt

    def check(self) -> None:
        """Raise ValueError unless every server answers, and runs a version of vLLM that this file was tested with."""
        if not self.urls:
            raise ValueError("--rollout.engine pspo_vllm.Servers: urls is empty: name the servers that draw")
        for url in self.urls:
            try:
                version = str(self.call(url, "/version").get("version"))
            except EngineError as error:
                raise ValueError(f"--rollout.engine pspo_vllm.Servers: {error}") from error
            if not version.startswith(TESTED):
                raise ValueError(f"--rollout.engine pspo_vllm.Servers: {url} runs vLLM {version}, not {TESTED}x")

    def start(self, config: TrainConfig, max_tokens: int, device: torch.device) -> None:
        """Choose a name for this run's weights; the servers are already running."""
        self.tolerance = TOLERANCES[engine_dtype(resolve_adapters(config.model), device)]
        self.run_name = dist.run_on_main(lambda: secrets.token_hex(4))
        self.threads = ThreadPool(256)  # daemons, which do not keep the process alive

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Give every server the policy's weights, with adapters merged, unless this version was pushed last.

        Rank 0 sends the weights. After a failure every rank still gathers the remaining weights; then all ranks raise.
        """
        name = f"{self.run_name}-{version}"
        if name == self.version:
            return
        failure = None
        for path, body in push_requests(policy, name):
            if dist.is_main() and failure is None:
                try:
                    self.threads.map(partial(self.call, path=path, body=body), self.urls)
                except EngineError as error:
                    failure = str(error)
        failure = dist.gather_objects(failure)[0]
        if failure is not None:
            raise EngineError(failure)
        self.version = name

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Request all completions; every prompt gets a seed from torch's global generator."""
        params = sampling_params(len(prompts), sampling, group_size)
        self.pending = []
        for index, (ids, values) in enumerate(zip(prompts, params, strict=True)):
            url = self.urls[(index + dist.rank()) % len(self.urls)]
            request = {"token_ids": list(ids), "sampling_params": values}
            self.pending.append(self.threads.apply_async(self.draw, (url, request)))

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> tuple[Tensor, Tensor]:
        """Completions (N * group_size, T), padded after their stop token, and their log-probs."""
        return pad_rows([row for result in self.pending for row in result.get()], sampling.pad_id)

    def draw(self, url: str, request: dict[str, Any]) -> list[Row]:
        """A server's completions of a prompt; EngineError unless all are complete, and drawn with the last weights."""
        limit = request["sampling_params"]["max_tokens"]
        answer = self.call(url, "/inference/v1/generate", request)
        rows = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            ids = choice["token_ids"]
            versions = {span["version"] for span in choice["weight_versions"]}
            if versions != {self.version}:
                raise EngineError(f"{url} drew with weights {' and '.join(versions)}, not {self.version}")
            if choice["finish_reason"] != "stop" and len(ids) < limit:
                raise EngineError(f"{url} drew {len(ids)} of {limit} tokens ({choice['finish_reason']})")
            rows.append((ids, [token["logprob"] for token in choice["logprobs"]["content"]]))
        return rows

    def close(self) -> None:
        if self.threads is not None:
            self.threads.terminate()

    def call(self, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a server's answer to a POST, or to a GET if body is None; EngineError if the request fails."""
        method = "GET" if body is None else "POST"
        try:
            answer = requests.request(method, url + path, json=body, timeout=(SECONDS_TO_CONNECT, self.timeout))
            if answer.ok:
                return answer.json()
        except requests.RequestException as error:
            raise EngineError(f"{url} does not answer {path} ({type(error).__name__})") from error
        fix = ": start it by pspo serve" if answer.status_code == 404 else ""
        raise EngineError(f"{url} answers {path} by {answer.status_code} {answer.text[:200]}{fix}")


def push_requests(policy: transformers.PreTrainedModel, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests (path, body) that give a server the weights under this name; all ranks gather the weights."""
    yield "/pause?mode=wait", {}  # waits until all requested completions are drawn, and empties the caches
    yield "/start_weight_update", {}
    for layer in weights_of_files(policy):
        file = b64encode(safetensors.torch.save(layer)).decode() if dist.is_main() else ""
        yield "/update_weights", {"update_info": {"safetensors": file}}
    yield "/finish_weight_update", {}
    yield "/update_weight_version", {"new_version": name}
    yield "/resume", {}
