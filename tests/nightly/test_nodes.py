"""Nodes with addresses of their own: network namespaces on a bridge. Processes are killed, and links go down."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import assert_same, until
from rank_runs import torchrun

pytestmark = pytest.mark.nightly


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


class Node:
    """A namespace with an address, on a wire to the switch's."""

    def __init__(self, switch: str, number: int):
        self.switch, self.name, self.port = switch, f"{switch}-{number}", f"port{number}"
        self.address = f"10.99.0.{number}"
        ip("netns", "add", self.name)
        ip("-n", switch, "link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("-n", switch, "link", "set", self.port, "master", "bridge", "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")

    def start(self, args: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
        with log.open("a") as output:
            command = ["ip", "netns", "exec", self.name, *args]
            return subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)

    def set_link(self, state: str) -> None:
        ip("-n", self.switch, "link", "set", self.port, state)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    switch = f"pspo{os.getpid()}"
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2")
    try:
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.strip()}")
        ip("-n", switch, "link", "set", "bridge", "up")
        yield [Node(switch, number) for number in (1, 2)]
    finally:
        names = [line.split()[0] for line in ip("netns", "list").stdout.splitlines()]
        for name in (name for name in names if name.partition("-")[0] == switch):
            for process in ip("netns", "pids", name).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "delete", name)


@pytest.fixture(autouse=True)
def links(nodes) -> Iterator[None]:
    """All up again after a test."""
    yield
    for node in nodes:
        node.set_link("up")


class Job:
    """A training by two agents, one rank each."""

    def __init__(self, nodes: list[Node], output: Path):
        self.nodes, self.output = nodes, output
        self.logs = [output.with_suffix(f".{number}") for number in range(2)]

    def start(self) -> None:
        first = self.nodes[0].address
        self.agents = []
        for number, node in enumerate(self.nodes):
            meeting = (
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={first}:29500",
                f"--rdzv-conf=is_host={number == 0},read_timeout=600",
            )
            options = ("--nnodes=2", "--nproc-per-node=1", *meeting, f"--local-addr={node.address}")
            command = torchrun(self.output, "ddp", *options)
            env = command["env"] | {"GLOO_SOCKET_IFNAME": "eth0"}
            self.agents.append(node.start(command["args"], env, self.logs[number]))

    def begin(self) -> None:
        """Start it, and wait for its first checkpoint."""
        self.start()
        until(lambda: self.has_saved(2), 240)

    def ends(self, seconds: float = 240.0) -> list[int]:
        return [agent.wait(timeout=seconds) for agent in self.agents]

    def rank(self, number: int) -> int:
        """Its process."""
        pid = self.agents[number].pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def has_saved(self, step: int) -> bool:
        return (self.output / f"checkpoints/step-{step:06}").exists()


@pytest.fixture(scope="module")
def whole(nodes, tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    job = Job(nodes, run)
    job.start()
    assert job.ends() == [0, 0], job.logs[0].read_text()
    return run


def kill_rank(number: int) -> Callable[[Job], None]:
    return lambda job: os.kill(job.rank(number), signal.SIGKILL)


def kill_agent(number: int) -> Callable[[Job], None]:
    return lambda job: job.agents[number].kill()


@pytest.mark.parametrize(
    "fault", [kill_rank(0), kill_rank(1), kill_agent(0), kill_agent(1)], ids=["rank 0", "rank 1", "agent 0", "agent 1"]
)
def test_a_job_of_which_one_process_is_killed_resumes_exactly(nodes, whole, tmp_path, fault):
    job = Job(nodes, tmp_path / "run")
    job.begin()
    fault(job)
    assert_failed(job)
    job.start()
    assert job.ends() == [0, 0]
    assert_same(whole, job.output)


def assert_failed(job: Job) -> None:
    """It has ended early, and a rank that is left says what to do."""
    codes = job.ends()
    assert all(codes)
    assert not job.has_saved(6)
    logs = [log.read_text() for log in job.logs]
    assert any("resumes from the last checkpoint" in log for log in logs), logs


@pytest.mark.parametrize("number", [0, 1])
def test_a_job_waits_for_a_link_that_is_down_for_seconds(nodes, whole, tmp_path, number):
    job = Job(nodes, tmp_path / "run")
    job.begin()
    nodes[number].set_link("down")
    time.sleep(8)
    assert not job.has_saved(6)
    nodes[number].set_link("up")
    assert job.ends() == [0, 0]
    assert_same(whole, job.output)
