"""``pspo serve ... -- COMMAND``: servers and a trainer, here processes that only look like the real ones."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import exit_code, fork, until

from pspo_vllm.launch import launch

pytestmark = [pytest.mark.usefixtures("here"), pytest.mark.skipif(sys.platform != "linux", reason="needs PDEATHSIG")]

SERVER = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[-1].removeprefix("--port="))
if os.path.exists(f"broken-{port}"):
    sys.exit(3)
child = subprocess.Popen(["sleep", "600"])  # as vLLM has
open(f"server-{port}", "w").write(f"{os.getpid()} {child.pid} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
class Routes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Routes).serve_forever()
"""
TRAINER = """
import json, os, signal, sys, time, urllib.request
for url in json.loads(sys.argv[-1].removeprefix("--rollout.engine="))["init_args"]["urls"]:
    urllib.request.urlopen(url + "/health")
def save(number, _):
    open("saved", "w").write(signal.Signals(number).name)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, save)
with open("began", "w") as file:
    json.dump([os.getpid(), sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES")], file)
os.rename("began", "trainer")
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def ports() -> range:
    """Two neighbouring ports that are free."""
    while True:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            other.bind(("127.0.0.1", port + 1))
            return range(port, port + 2)


def launched(ports: range, what: str, logs: str = "logs") -> int:
    """A process that starts two servers and a trainer, which ends with a code, or waits for a signal; its id."""
    words, command = [sys.executable, "-c", SERVER], [sys.executable, "-c", TRAINER, what]
    return fork(lambda: end(lambda: launch(words, command, ports, "127.0.0.1", 1, logs)))


def end(action: Callable[[], int]) -> int:
    try:
        return action()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1


def processes() -> list[int]:
    """Those that were started: servers, their children, and the trainer."""
    started = [int(word) for file in Path().glob("server-*") for word in file.read_text().split()[:2]]
    return started + [json.loads(file.read_text())[0] for file in Path().glob("trainer")]


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    with contextlib.suppress(OSError):
        return stat.read_text().rpartition(") ")[2][0] != "Z"
    return False


def test_the_command_gets_the_addresses_and_the_other_gpus_and_all_ends_with_its_code(ports, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert exit_code(launched(ports, "7")) == 7
    _, words, gpus = json.loads(Path("trainer").read_text())
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    name, _, engine = words[1].partition("=")
    assert (words[0], name) == ("7", "--rollout.engine")
    assert json.loads(engine) == {"class_path": "pspo_vllm.Servers", "init_args": {"urls": addresses}}
    assert gpus == "4,5"
    assert [Path(f"server-{port}").read_text().split()[2] for port in ports] == ["6", "7"]
    assert len(processes()) == 5
    assert not any(map(is_running, processes()))


@pytest.mark.parametrize(("number", "passed"), [("SIGINT", "SIGINT"), ("SIGUSR1", "SIGTERM")])
def test_a_signal_is_the_trainer_s_which_saves(ports, number, passed):
    launcher = launched(ports, "wait")
    until(Path("trainer").exists)
    os.kill(launcher, signal.Signals[number])
    assert exit_code(launcher) == 75
    assert Path("saved").read_text() == passed
    assert not any(map(is_running, processes()))


def test_nothing_outlives_a_launcher_that_is_killed(ports):
    launcher = launched(ports, "wait")
    until(Path("trainer").exists)
    os.kill(launcher, signal.SIGKILL)
    assert exit_code(launcher) == -signal.SIGKILL
    servers_and_trainer = processes()[::2]  # without what servers have started, which is for them to end
    until(lambda: not any(map(is_running, servers_and_trainer)))
    for process in processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
