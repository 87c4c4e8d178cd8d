"""Servers, and a trainer that draws by them, on one machine: started together and ended together."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import requests

from pspo import distributed as dist
from pspo.cli.signals import EXIT_STOPPED
from pspo.config import require

PASSED_ON = {  # to the trainer, which saves and ends
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGTERM,  # a scheduler's warning
}
SECONDS_TO_END = 10  # of servers; then they are killed


def launch(words: Sequence[str], command: Sequence[str], ports: range, host: str, gpus_each: int, log_dir: str) -> int:
    """Start servers, run the command with their addresses once they answer, end them with it; its exit code.

    On GPUs every server has its own, and the command the first ones. ``words`` start a server, but for its port.
    """
    host, gpus = "127.0.0.1" if host == "0.0.0.0" else host, dist.visible_gpus()
    left = len(gpus) - gpus_each * len(ports)
    rule = f"must leave the command some of {len(gpus)} GPUs, with --gpus {gpus_each}"
    require(not gpus or left > 0, "servers", rule, len(ports))
    if shutil.which(command[0]) is None:
        raise ValueError(f"-- {command[0]}: there is no such command")
    for port in ports:
        require(is_free(host, port), "port", f"must leave ports {ports[0]} to {ports[-1]} that are free", port)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # ranks end their rollout and save
    trainer: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        if trainer is None:
            raise SystemExit(EXIT_STOPPED)
        trainer.send_signal(PASSED_ON[number])

    for number in PASSED_ON:
        signal.signal(number, stop)
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    urls = [f"http://{host}:{port}" for port in ports]
    logs = [Path(log_dir) / f"server-{port}.log" for port in ports]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for port, log in zip(ports, logs, strict=True):
            first = left + gpus_each * len(servers)
            servers.append(start([*words, f"--port={port}"], gpus[first : first + gpus_each], log))
        for url, server, log in zip(urls, servers, logs, strict=True):
            wait_until_ready(url, server, log)
        switches = ["--rollout.engine=vllm", f"--rollout.servers={json.dumps(urls)}"]
        trainer = start([*command, *switches], gpus[:left])
        code = trainer.wait()
        return code if code >= 0 else 128 - code
    finally:
        end(servers)


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False


def start(words: Sequence[str], gpus: Sequence[str], log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a process that sees these GPUs, prints into a log, and ends with this one, however that ends (Linux)."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    with log.open("wb") if log else contextlib.nullcontext() as file:
        own = {"start_new_session": True, "preexec_fn": dist.end_with_parent}  # Ctrl-C is this process's
        return subprocess.Popen(words, env=environment, stdout=file, stderr=file, **own)


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers; exits in one line if it ends."""
    while (code := server.poll()) is None:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.2)
    raise SystemExit(f"pspo serve: the server at {url} ended with exit code {code} before it was ready: see {log}")


def end(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End servers, and what they have started."""
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, None)):
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(seconds)
