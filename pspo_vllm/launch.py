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
from pspo.cli.failures import EXIT_STOPPED
from pspo.config import require
from pspo.tasks.files import local_path

FORWARDED_SIGNALS = {  # to the trainer, which saves and ends
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGTERM,  # a scheduler's warning
}
SECONDS_TO_END = 10  # of servers; then they are killed


def launch(
    server_command: Sequence[str], command: Sequence[str], ports: range, host: str, gpus_each: int, log_dir: str
) -> int:
    """Start servers, run the command with their addresses once they answer, end them with it; its exit code.

    On GPUs every server has its own, and the command the first ones. ``server_command`` lacks the port alone. Raises
    ValueError for too few GPUs, a command that is none, and ports in use.
    """
    host = "127.0.0.1" if host == "0.0.0.0" else host
    gpus = dist.visible_gpus()
    trainer_gpus = len(gpus) - gpus_each * len(ports)
    rule = f"must leave the command some of {len(gpus)} GPUs, with --gpus {gpus_each}"
    require(not gpus or trainer_gpus > 0, "servers", rule, len(ports))
    if shutil.which(command[0]) is None:
        raise ValueError(f"-- {command[0]}: there is no such command")
    for port in ports:
        require(is_free(host, port), "port", f"must leave ports {ports[0]} to {ports[-1]} that are free", port)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")  # ranks end their rollout and save
    trainer: subprocess.Popen[bytes] | None = None

    def forward_signal(number: int, _: FrameType | None) -> None:
        if trainer is None:
            raise SystemExit(EXIT_STOPPED)
        trainer.send_signal(FORWARDED_SIGNALS[number])

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward_signal)
    log_folder = local_path(log_dir)
    log_folder.mkdir(parents=True, exist_ok=True)
    urls = [f"http://{host}:{port}" for port in ports]
    logs = [log_folder / f"server-{port}.log" for port in ports]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for port, log in zip(ports, logs, strict=True):
            first = trainer_gpus + gpus_each * len(servers)
            servers.append(start_process([*server_command, f"--port={port}"], gpus[first : first + gpus_each], log))
        for url, server, log in zip(urls, servers, logs, strict=True):
            wait_until_ready(url, server, log)
        engine = {"class_path": "pspo_vllm.Servers", "init_args": {"urls": urls}}
        trainer = start_process([*command, f"--rollout.engine={json.dumps(engine)}"], gpus[:trainer_gpus])
        code = trainer.wait()
        return code if code >= 0 else 128 - code
    finally:
        end_processes(servers)


def is_free(host: str, port: int) -> bool:
    """True if nothing listens on a port."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def start_process(command: Sequence[str], gpus: Sequence[str], log: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a process that sees these GPUs, prints into a log, and ends with this one, however that ends (Linux)."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    with log.open("wb") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is this process's
            preexec_fn=dist.end_with_parent,
        )


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers; exits in one line if it ends."""
    while (code := server.poll()) is None:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.2)
    raise SystemExit(f"pspo serve: the server at {url} ended with exit code {code} before it was ready: see {log}")


def end_processes(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End servers, and what they have started."""
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, None)):
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(seconds)
