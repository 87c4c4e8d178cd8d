"""Two ranks: a full disk, kills in the middle of a save, and two launchers that are one job."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from processes import assert_same, at_call, before, kill_at_file_event, states
from rank_runs import torchrun, train

from pspo.run.checkpointer import Checkpointer

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of two ranks that nothing happened to."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(run, "fsdp2") == [0, 0]
    return run


def test_a_full_disk_ends_every_rank_and_the_run_resumes_when_there_is_room(whole, tmp_path, capfd):
    """Room for what rank 0 writes before, not for a rank's shards: files may have 1.5 MB."""
    output = tmp_path / "run"
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    full = train(output, "fsdp2", fault=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard)))
    assert full == [1, 1]
    assert capfd.readouterr().err.count(f"cannot write {output / 'checkpoints/step-000002'}") == 1
    assert list((output / "checkpoints").iterdir()) == []
    assert train(output, "fsdp2") == [0, 0]
    assert_same(whole, output)


@pytest.mark.parametrize(("rank", "n"), [(0, 3), (0, 40), (1, 3)])
def test_a_rank_killed_in_the_middle_of_a_save_ends_the_run_which_resumes_exactly(whole, tmp_path, rank, n):
    """At its n-th file event: while the shards are written, or after."""

    def fault() -> None:
        if os.environ["RANK"] == str(rank):
            before("save", at_call(2, lambda: kill_at_file_event(n)), Checkpointer)

    codes = train(tmp_path / "run", "fsdp2", fault=fault)
    assert codes[rank] == -signal.SIGKILL
    assert train(tmp_path / "run", "fsdp2") == [0, 0]
    assert_same(whole, tmp_path / "run")


def test_another_number_of_ranks_draws_anew_what_waited(tmp_path):
    """What waits under a lag is a rank's share of a rollout: one rank cannot train on it."""
    lag, prompts = "--rollout.lag=1", {}
    assert train(tmp_path / "two", "ddp", lag, "--run.max_steps=4") == [0, 0]
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    for name, number in (("two", 2), ("one", 1)):
        assert train(tmp_path / name, "ddp", lag, number=number) == [0] * number
        parts = states(tmp_path / name / "checkpoints/step-000006/parts.pt")
        prompts[name] = parts["stream"]["position"]
    assert prompts["one"] == prompts["two"] + 2  # one rollout's


def test_two_launchers_are_one_job(whole, tmp_path):
    """As on two nodes: they meet at an address; one is killed in the middle, and the job is started again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    output = tmp_path / "run"
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=job")
    command = torchrun(output, "fsdp2", *options, "--max-restarts=0", f"--log-dir={tmp_path / 'logs'}")

    def launch() -> list[subprocess.Popen]:
        return [subprocess.Popen(**command) for _ in range(2)]

    job, end = launch(), time.monotonic() + 240
    while not (output / "checkpoints/step-000002").exists() and time.monotonic() < end:
        time.sleep(0.02)
    children = ["ps", "-o", "pid=", "--ppid", str(job[1].pid)]
    listed = subprocess.run(children, capture_output=True, text=True, check=True)
    for process in [*map(int, listed.stdout.split()), job[1].pid]:  # a node that is gone
        os.kill(process, signal.SIGKILL)
    assert all(node.wait(timeout=120) != 0 for node in job)
    assert [node.wait(timeout=240) for node in launch()] == [0, 0]
    assert_same(whole, output)
