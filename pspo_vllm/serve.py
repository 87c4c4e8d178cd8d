"""Start a vLLM server that draws for a trainer: ``pspo serve --model.name_or_path tiny-base --port 8000``.

It starts from random weights: a trainer, with --rollout.engine pspo_vllm.Servers, pushes its own before it draws.
``/health`` answers when it is ready.

``pspo serve --servers 2 -- torchrun --nproc-per-node 6 -m pspo.train ...`` starts two, on ports of their own, runs the
command with a --rollout.engine that names them, and ends them with it.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from jsonargparse.typing import PositiveInt

from pspo import distributed as dist
from pspo.cli.parse import parse, user_errors
from pspo.config import ModelConfig, require
from pspo_vllm.launch import launch
from pspo_vllm.vllm import require_vllm, vllm_options


@dataclass(frozen=True)
class ServeConfig:
    """Start a vLLM server that draws rollouts for a trainer; or several, and the trainer: ... -- COMMAND.

    Args:
        model: as in training
        host: address to listen on; 0.0.0.0 for all, in a network where nobody else may send it weights
        port: port to listen on; of several servers the first one's
        gpus: GPUs of a server, over which it splits the model (tensor parallel)
        servers: number of servers for the command behind --, each on GPUs of its own; the command has the others
        log_dir: folder for their logs, if there is a command
        max_tokens: most tokens of a prompt and its completion together
        max_rows: completions decoded at a time
        arguments: more arguments for vLLM's own server, such as [--tensor-parallel-size=2]
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    gpus: PositiveInt = 1
    servers: PositiveInt = 1
    log_dir: str = "."
    max_tokens: int = 1024
    max_rows: int = 256
    arguments: list[str] = field(default_factory=list)


def serve(config: ServeConfig) -> None:
    """Become vLLM's server."""
    require(config.servers == 1, "servers", "above 1 needs a command behind --", config.servers)
    require_vllm()
    device = dist.local_device()
    options = vllm_options(config.model.resolved(), device, config.max_tokens, config.max_rows)
    options |= {
        "host": config.host,
        "port": config.port,
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,
        "tensor_parallel_size": config.gpus,
        "weight_transfer_config": json.dumps({"backend": "nccl" if device.type == "cuda" else "http"}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        command += switch_words(name.replace("_", "-"), value)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": ",".join(filter(None, (os.environ.get("VLLM_PLUGINS"), "pspo"))),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.execve(sys.executable, [*command, *config.arguments], environment)


def switch_words(name: str, value: object) -> list[str]:
    """A switch of vLLM's server, as words of its command line; none for None."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def main(args: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if args is None else args)
    end = words.index("--") if "--" in words else len(words)
    switches, command = words[:end], words[end + 1 :]
    config, _ = parse(ServeConfig, "pspo serve", switches)
    with user_errors("pspo serve"):
        if not command:
            return serve(config)
        require_vllm()
        server_command = [sys.executable, "-m", "pspo_vllm.serve", *switches, "--servers=1"]
        ports = range(config.port, config.port + config.servers)
        raise SystemExit(launch(server_command, command, ports, config.host, config.gpus, config.log_dir))


if __name__ == "__main__":
    main()
