"""benchmarks.gpu on a CPU: its rehearsal, and measurements that fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.gpu.__main__ as gpu
from benchmarks.gpu.common import Measurement
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.results import row


def read(output: Path) -> dict[str, dict]:
    return json.loads((output / "results.json").read_text())


def test_what_fails_is_recorded_and_the_rest_is_measured(tmp_path, monkeypatch):
    def raises(options):
        raise RuntimeError("no kernel | image")

    def crashes(options):
        os.kill(os.getpid(), signal.SIGKILL)

    def works(options):
        return [row("seven", 7.0, "s", most=8), row("six", 6, least=7)]

    fails = [Measurement("raises", raises), Measurement("crashes", crashes)]
    rest = [Measurement("works", works), Measurement("elsewhere", works, needs=("a GPU", "no_such_package"))]
    monkeypatch.setitem(PARTS, "speed", [*fails, *rest])
    for name in ("HF_HUB_OFFLINE", "PYTORCH_NVML_BASED_CUDA_CHECK"):  # put back afterwards
        monkeypatch.setenv(name, "1")
    command = ["--rehearse", "--output", str(tmp_path), "--part", "speed"]
    gpu.main(command)
    results = read(tmp_path)
    assert [*results] == ["raises", "crashes", "works", "elsewhere"]
    assert results["raises"]["why"] == "error: exit code 1: RuntimeError: no kernel | image"
    assert results["crashes"]["why"] == f"error: exit code {-signal.SIGKILL}: no output"
    assert results["elsewhere"]["why"] == "skipped: needs a GPU and no_such_package"
    verdicts = [(r["value"], r["goal"], r["ok"]) for r in results["works"]["rows"]]
    assert verdicts == [(7.0, "at most 8", True), (6, "at least 7", False)]
    before = results["works"] | {"date": "of the first call"}
    (tmp_path / "results.json").write_text(json.dumps(results | {"works": before}))
    gpu.main(command)
    assert read(tmp_path)["works"] == before  # measured once


@pytest.mark.nightly
def test_the_whole_rehearsal(tmp_path):
    """Everything that a CPU without TRL and vLLM can run: each function of each part."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--part=all", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    results = read(tmp_path)
    assert {result["part"] for result in results.values()} == {*PARTS}
    skips = [result["why"] for result in results.values() if not result["rows"]]
    assert all(why.startswith("skipped: ") and ("a GPU" in why or "trl" in why) for why in skips)
    shares = [row["value"] for row in results["decoders"]["rows"] if "share of tokens" in row["what"]]
    assert shares == [1.0, 1.0]
    exact = [*PARTS["correctness"], *PARTS["decide"]]
    rows = [row for measurement in exact for row in results[measurement.name]["rows"] if row["goal"]]
    assert all(row["ok"] for row in rows if row["what"] != "gain")
