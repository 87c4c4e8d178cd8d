"""Rollouts by vLLM servers, on this machine or others, each started by ``pspo serve``.

Prompts are spread over the servers; what one does not answer another one is asked. vLLM says of every completion
which weights drew it: only those that this process pushed last count.
"""

from __future__ import annotations

import re
import secrets
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import requests
import safetensors.torch
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.model.find import resolve_adapters
from pspo.rollout import Sampling
from pspo.rollout.engine import EngineError
from pspo_vllm.vllm import TESTED, Row, pad_rows, sampling_params, tolerance
from pspo_vllm.weights import weights_of_files

CHUNK_BYTES = 2**26  # of weights in one request
SECONDS_TO_CONNECT = 10.0


class Servers:
    """Engine of all ranks: several vLLM servers, started by ``pspo serve``.

    A server that fails is left out until the next push, when it is tried again, and gets the weights.

    Args:
        urls: the servers' addresses, such as [http://a:8000]
        timeout: seconds to wait for an answer; the other ranks wait 600 for this one

    Attributes:
        version: the name of the weights that were pushed last; no other process's weights have it.
        failures: why servers are left out, by address.
    """

    def __init__(self, urls: list[str], timeout: float = 300.0) -> None:
        well_formed = {url for url in urls if re.fullmatch(r"https?://[^/\s]+:\d+", url)}
        if not urls or len(well_formed) != len(urls):
            rule = "must be different addresses such as http://host:8000"
            raise ValueError(f"--rollout.engine pspo_vllm.Servers: urls {rule}, got {urls!r}")
        if not 0 < timeout < 2**31:
            rule = "must be above 0 and below 2^31"
            raise ValueError(f"--rollout.engine pspo_vllm.Servers: timeout {rule}, got {timeout!r}")
        self.urls = list(urls)
        self.timeout = timeout
        self.version = ""
        self.failures: dict[str, str] = {}
        self.threads: ThreadPool | None = None

    def check(self) -> None:
        """Raise ValueError if no server is there."""
        failures = []
        for url in self.urls:
            try:
                return check_server(url)
            except EngineError as error:
                failures.append(str(error))
        raise ValueError(f"--rollout.engine pspo_vllm.Servers: {'; '.join(failures)}")

    def start(self, config: TrainConfig, max_tokens: int, device: torch.device) -> None:
        """Name this run's weights; the servers run already."""
        first = dist.rank() % len(self.urls)
        self.urls = [*self.urls[first:], *self.urls[:first]]  # each rank begins with another one
        self.tolerance = tolerance(resolve_adapters(config.model), device)
        self.run_name = dist.run_on_main(lambda: secrets.token_hex(4))
        self.threads = ThreadPool(256)  # none of which keeps a process that ends

    def push(self, policy: transformers.PreTrainedModel, version: int) -> None:
        """Give every server the policy's weights, with adapters merged, unless this version was pushed last."""
        name = f"{self.run_name}-{version}"
        if name == self.version:
            return
        self.version = name
        servers = self.call_each(self.urls if dist.is_main() else [], self.pause)
        for url in self.call_each(self.send(policy, servers), self.resume):
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
        """Send the weights, which every rank helps to gather; returns the servers that have taken them all."""
        servers = self.call_each(servers, self.start_update)
        for tensors in chunks(weights_of_files(policy)):
            file = b64encode(safetensors.torch.save(tensors)).decode() if servers else ""
            body = {"update_info": {"safetensors": file}}
            servers = self.call_each(servers, lambda url, body=body: self.post(url, "/update_weights", body))
        return self.call_each(servers, lambda url: self.post(url, "/finish_weight_update", {}))

    def start_update(self, url: str) -> None:
        try:
            self.post(url, "/start_weight_update", {})
        except EngineError:  # a trainer was killed while it pushed
            self.post(url, "/finish_weight_update", {})
            self.post(url, "/start_weight_update", {})

    def begin(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> None:
        """Ask for all completions; every prompt has a seed from torch's global generator."""
        params = sampling_params(len(prompts), sampling, group_size)
        self.pending = []
        for index, (ids, values) in enumerate(zip(prompts, params, strict=True)):
            request = {"token_ids": list(ids), "sampling_params": values}
            self.pending.append(self.threads.apply_async(self.draw, (index, request)))

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int) -> tuple[Tensor, Tensor]:
        """Completions (N * group_size, T), padded after their stop token, and their log-probs."""
        return pad_rows([row for result in self.pending for row in result.get()], sampling.pad_id)

    def draw(self, index: int, request: dict[str, Any]) -> list[Row]:
        """Completions of a prompt by the server whose turn it is, or by another one if that fails."""
        while ready := [url for url in self.urls if url not in self.failures]:
            url = ready[index % len(ready)]
            try:
                return self.read_rows(url, request)
            except EngineError as error:
                self.leave_out(url, error)
        raise EngineError("; ".join(self.failures.values()))

    def read_rows(self, url: str, request: dict[str, Any]) -> list[Row]:
        """A server's completions of a prompt; EngineError unless all are complete, and drawn with the last weights."""
        limit = request["sampling_params"]["max_tokens"]
        answer = self.post(url, "/inference/v1/generate", request)
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

    def post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return call(url, path, body, self.timeout)

    def call_each(self, urls: Iterable[str], action: Callable[[str], Any]) -> list[str]:
        """Call an action with several servers at once; returns those with which it did not fail."""

        def succeeds(url: str) -> bool:
            try:
                action(url)
            except EngineError as error:
                self.leave_out(url, error)
                return False
            return True

        return [url for url, success in zip(urls, self.threads.map(succeeds, urls), strict=True) if success]

    def leave_out(self, url: str, error: EngineError) -> None:
        """Ask a server for nothing until the next push, and print why, once."""
        reason = str(error)
        if self.failures.setdefault(url, reason) is reason:  # one step: several threads may get here
            tqdm.write(f"WARNING: {reason}: it draws nothing until it has taken weights again", file=sys.stderr)


def check_server(url: str) -> None:
    """Raise EngineError unless a server answers, and runs a version of vLLM that this file was tested with."""
    version = str(call(url, "/version").get("version"))
    if not version.startswith(TESTED):
        raise EngineError(f"{url} runs vLLM {version}, not {TESTED}x")


def call(url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> dict[str, Any]:
    """A server's answer, to GET without a body; raises EngineError if it has none, or failed."""
    method = "GET" if body is None else "POST"
    try:
        answer = requests.request(method, url + path, json=body, timeout=(SECONDS_TO_CONNECT, timeout))
        if answer.ok:
            return answer.json()
    except requests.RequestException as error:
        raise EngineError(f"{url} does not answer {path} ({type(error).__name__})") from error
    fix = ": start it by pspo serve" if answer.status_code == 404 else ""
    raise EngineError(f"{url} answers {path} by {answer.status_code} {answer.text[:200]}{fix}")


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
