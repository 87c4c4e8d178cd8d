"""Memory that really runs out: an address space with an end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_faults import start

pytestmark = pytest.mark.nightly
LIMITED = """
import resource, sys
import pspo.train, pspo.update
from pathlib import Path

def update(*args):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    limit = int(line.split()[1]) * 1024 + int(sys.argv[1]) * 2**20
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, unlimited[1]))
    try:
        return pspo.update.update(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)

pspo.train.update = update
pspo.train.main(sys.argv[2:])
"""
BIG = (
    "--rollout.prompts=32", "--rollout.temperature=1", "--run.max_steps=2", "--run.validate_every=0",
    "--run.test_limit=0", "--reward.functions=[test_faults.Length]", "--optimizer.microbatch_tokens=1000000",
    "--algorithm.epochs=2", "--algorithm.surrogate=TOPR",
)  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_process_without_memory_continues_with_smaller_microbatches(tmp_path, monkeypatch):
    """The real fault: an address space that ends 180 MB above what is in use when training begins."""
    monkeypatch.chdir(tmp_path)

    def command(megabytes: int, *args: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
            "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed leaves the address space
            "ATEN_CPU_CAPABILITY": "avx2",  # without oneDNN, which needs some for code
        }
        return subprocess.run(
            [sys.executable, "-c", LIMITED, str(megabytes), *BIG, *args],
            capture_output=True, text=True, timeout=120, env=environment, check=False,
        )  # fmt: skip

    assert command(400_000, "--run.output_dir=whole").returncode == 0
    ended = command(180, "--run.output_dir=halved")
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stderr.splitlines() if "out of memory" in line]
    assert said
    assert all("(--optimizer.microbatch_tokens)" in line for line in said)
    whole, halved = (load_file(f"{name}/final/model.safetensors") for name in ("whole", "halved"))
    moved = max((whole[name] - start()[name]).abs().max() for name in whole)
    assert moved > 1e-5
    for name in whole:
        torch.testing.assert_close(halved[name], whole[name], rtol=0, atol=2e-6)
