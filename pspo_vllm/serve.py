"""Start a vLLM server that draws for a trainer: ``pspo serve --model.name_or_path tiny-base --max_tokens 512``.

The server starts with random weights. A trainer, with --rollout.engine pspo_vllm.Servers, pushes its weights before it
draws. ``/health`` answers when the server is ready.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pspo import distributed as dist
from pspo.cli.parse import parse
from pspo.config import ModelConfig, Section, switch
from pspo.endings import user_errors
from pspo.model.find import resolve_adapters
from pspo_vllm.vllm import VLLM_VARIABLES, require_vllm, vllm_options


@dataclass(frozen=True)
class ServeConfig(Section):
    """Start a vLLM server that draws rollouts for a trainer."""

    model: ModelConfig = field(default_factory=ModelConfig)
    host: str = switch("127.0.0.1", "address; 0.0.0.0 for all, in a network where nobody else can send weights")
    port: int = switch(8000, "port to listen on")
    gpus: int = switch(1, "number of GPUs over which the model is split (tensor parallel)", above=0)
    max_tokens: int = switch(1024, "most tokens of a prompt and its completion together")
    max_rows: int = switch(256, "completions decoded at a time")
    arguments: list[str] = switch(list, 'more arguments for vLLM\'s own server, such as ["--dtype=float32"]')


def serve(config: ServeConfig) -> None:
    """Replace this process by vLLM's server."""
    require_vllm()
    device = dist.local_device()
    options = vllm_options(resolve_adapters(config.model), device, config.max_tokens, config.max_rows)
    options |= {
        "host": config.host,
        "port": config.port,
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,
        "tensor_parallel_size": config.gpus,
        "weight_transfer_config": json.dumps({"backend": "pspo"}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        switch = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{switch}" if value else f"--no-{switch}")
        elif value is not None:
            command += [f"--{switch}", str(value)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        **os.environ,
        **VLLM_VARIABLES,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": ",".join(filter(None, (os.environ.get("VLLM_PLUGINS"), "pspo"))),
    }
    os.execve(sys.executable, [*command, *config.arguments], environment)


def main(args: Sequence[str] | None = None) -> None:
    config, _ = parse(ServeConfig, "pspo serve", args)
    with user_errors("pspo serve"):
        serve(config)
