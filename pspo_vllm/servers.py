"""Rollouts by vLLM servers, on this machine or others: --rollout.servers, each started by ``pspo serve``.

Prompts are spread over the servers; what one does not answer another one is asked. vLLM tells with every completion
which weights drew it: only those that this process pushed last count.
"""

from __future__ import annotations

import secrets
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import requests
import safetensors.torch
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import RolloutConfig, TrainConfig
from pspo.model.adapters import weights_of_files
from pspo.rollout import Sampling
from pspo.rollout.engine import EngineError
from pspo_vllm.vllm import TESTED, pad_rows, require_vllm, sampling_params, tolerance

CHUNK_BYTES = 2**26  # of weights in one request
Rows = list[tuple[list[int], list[float]]]  # completions: token ids and log-probs


class Servers:
    """The servers of a run, as one engine.

    A server that fails is left out until the next push, when it is tried again, and gets the weights.

    Attributes:
        version: the name of the weights that were pushed last; no other process's weights have it.
        failures: why servers are left out, by address.
    """

    def __init__(self, config: TrainConfig, max_tokens: int, device: torch.device):
        urls, first = config.rollout.servers, dist.rank() % len(config.rollout.servers)
        self.urls = [*urls[first:], *urls[:first]]  # each rank begins with another one
        self.timeout = config.distributed.timeout / 2  # the other ranks wait longer than this one does for a server
        self.on_gpu = device.type == "cuda"
        self.post = partial(call, timeout=self.timeout)
        self.tolerance = tolerance(config.model.resolved(), device)
        self.name, self.version = dist.run_on_main(lambda: secrets.token_hex(4)), ""
        self.failures: dict[str, str] = {}
        self.threads, self.begun = ThreadPool(256), []  # none of which keeps a process that ends

    @staticmethod
    def check(config: RolloutConfig) -> None:
        """Raise ValueError if no server is there, or vLLM's NCCL classes are needed and missing."""
        if torch.cuda.is_available():
            require_vllm()
        failures = []
        for url in config.servers:
            try:
                return check_server(url)
            except EngineError as error:
                failures.append(str(error))
        raise ValueError(f"--rollout.servers: {'; '.join(failures)}")

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Give every server the policy's weights, with adapters merged, unless this version was pushed last."""
        if (name := f"{self.name}-{version}") == self.version:
            return
        self.version = name
        servers = self.each(self.urls if dist.is_main() else [], self.pause)  # the other ranks gather in step
        servers = self.send_by_nccl(policy, servers) if self.on_gpu else self.send(policy, servers)
        for url in self.each(servers, self.resume):
            self.failures.pop(url, None)
        self.failures = dist.gather_objects(self.failures)[0]

    def pause(self, url: str) -> None:
        """Wait until all is drawn that was asked for, and empty the caches."""
        check_server(url)
        self.post(url, "/pause?mode=wait", {})

    def resume(self, url: str) -> None:
        """Name the server's weights, and let it draw."""
        self.post(url, "/update_weight_version", {"new_version": self.version})
        self.post(url, "/resume", {})

    def send(self, policy: transformers.PreTrainedModel, servers: list[str]) -> list[str]:
        """Send the weights over HTTP; the servers that have taken them all."""
        servers = self.each(servers, self.start_update)
        for tensors in chunks(weights_of_files(policy)):
            packed = b64encode(safetensors.torch.save(tensors)).decode() if servers else ""
            body = {"update_info": {"safetensors": packed}}
            servers = self.each(servers, lambda url, body=body: self.post(url, "/update_weights", body))
        return self.each(servers, lambda url: self.post(url, "/finish_weight_update", {}))

    def start_update(self, url: str) -> None:
        try:
            self.post(url, "/start_weight_update", {})
        except EngineError:  # a trainer was killed while it pushed
            self.post(url, "/finish_weight_update", {})
            self.post(url, "/start_weight_update", {})

    def send_by_nccl(self, policy: transformers.PreTrainedModel, servers: list[str]) -> list[str]:
        from pspo.rollout.engine import nccl

        for url in dist.gather_objects(servers)[0]:
            nccl.send(policy, url, call(url, "/get_world_size")["world_size"], self.timeout)
        return servers

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Ask for all completions; every prompt has a seed from torch's global generator."""
        params = sampling_params(prompts, sampling, group_size)
        asked = [{"token_ids": list(ids), "sampling_params": its} for ids, its in zip(prompts, params, strict=True)]
        self.begun = [self.threads.apply_async(self.draw, which) for which in enumerate(asked)]

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int
    ) -> tuple[Tensor, Tensor | None, None]:
        """Completions (N * group_size, T), padded after their stop token; their log-probs; no nucleus."""
        if not self.begun:
            self.begin(prompts, sampling, group_size)
        begun, self.begun = self.begun, []
        return pad_rows([row for result in begun for row in result.get()], sampling.pad_id)

    def draw(self, index: int, request: dict[str, Any]) -> Rows:
        """Completions of a prompt by the server whose turn it is, or by another one if that fails."""
        while ready := [url for url in self.urls if url not in self.failures]:
            url = ready[index % len(ready)]
            try:
                return self.read_rows(url, request)
            except EngineError as error:
                self.fail(url, error)
        raise EngineError(self.reasons())

    def read_rows(self, url: str, request: dict[str, Any]) -> Rows:
        """A server's completions of a prompt; EngineError unless all are whole, and drawn with the last weights."""
        rows, limit = [], request["sampling_params"]["max_tokens"]
        answer = self.post(url, "/inference/v1/generate", request)
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            versions, ids = {span["version"] for span in choice["weight_versions"]}, choice["token_ids"]
            if versions != {self.version}:
                raise EngineError(f"{url} drew with weights {' and '.join(versions)}, not {self.version}")
            if choice["finish_reason"] != "stop" and len(ids) < limit:
                raise EngineError(f"{url} drew {len(ids)} of {limit} tokens ({choice['finish_reason']})")
            rows.append((ids, [token["logprob"] for token in choice["logprobs"]["content"]]))
        return rows

    def close(self) -> None:
        self.threads.terminate()

    def each(self, urls: Iterable[str], action: Callable[[str], Any]) -> list[str]:
        """Do something with several servers at once; those that did not fail."""

        def succeeds(url: str) -> bool:
            try:
                action(url)
            except EngineError as error:
                self.fail(url, error)
                return False
            return True

        return [url for url, done in zip(urls, self.threads.map(succeeds, urls), strict=True) if done]

    def fail(self, url: str, error: EngineError) -> None:
        """Leave a server out, and say so, once."""
        reason = str(error)
        if self.failures.setdefault(url, reason) is reason:
            tqdm.write(f"WARNING: {reason}: it draws nothing until it has taken weights again", file=sys.stderr)

    def reasons(self) -> str:
        return "; ".join(self.failures.values())


def check_server(url: str) -> None:
    version = str(call(url, "/version").get("version"))
    if not version.startswith(TESTED):
        raise EngineError(f"{url} runs vLLM {version}, not {TESTED}x")


def call(url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> dict[str, Any]:
    """A server's answer, to GET without a body; raises EngineError if it has none, or failed."""
    try:
        answer = requests.request("GET" if body is None else "POST", url + path, json=body, timeout=(10, timeout))
        if answer.ok:
            return answer.json()
    except requests.RequestException as error:
        raise EngineError(f"{url} does not answer {path} ({type(error).__name__})") from error
    start_it = ": start it by pspo serve" if answer.status_code == 404 else ""
    raise EngineError(f"{url} answers {path} by {answer.status_code} {answer.text[:200]}{start_it}")


def chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The weights on the CPU, about CHUNK_BYTES of them at a time."""
    chunk: dict[str, Tensor] = {}
    for name, tensor in weights:
        chunk[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)  # tied ones are there twice
        if sum(tensor.nbytes for tensor in chunk.values()) >= CHUNK_BYTES:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk
