"""Numbers gone bad, through the command: steps, rewards and rollouts that no weight and no checkpoint may meet."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pspo.train
from pspo.config import TrainConfig
from pspo.model import ASSETS
from pspo.run.checkpoint import RunFailed, checkpoints
from pspo.run.cli import parse
from pspo.train import prepare

TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--rollout.temperature=1", "--run.max_steps=6",
    "--run.validate_every=0", "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--optimizer.lr=1e-3",
)  # fmt: skip
OWN = """
import math, time
from dataclasses import dataclass
from pathlib import Path
import torch
from pspo.losses import NoClip
from pspo.tasks import Reward

@dataclass(frozen=True)
class Broken(NoClip):
    kind: float = math.nan

    def __call__(self, logprobs, old_logprobs, advantages, mask):
        return super().__call__(logprobs, old_logprobs, advantages, mask) * self.kind

class Length(Reward):
    def __call__(self, completions, problems):
        return [len(text) + row % 3 for row, text in enumerate(completions)]  # never all the same

class Constant(Reward):
    def __call__(self, completions, problems):
        return [0.3] * len(completions)

@dataclass(frozen=True)
class Bad(Length):
    how: str
    call: int = 2

    def __call__(self, completions, problems):
        calls = Path("calls")
        n = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(n))
        values = super().__call__(completions, problems)
        if n != self.call:
            return values
        if self.how == "raises":
            raise KeyError("no such key")
        if self.how == "hangs":
            time.sleep(60)
        return {"short": values[:-1], "nothing": None, "nan": [math.nan, *values[1:]], "none": [None, *values[1:]]}[
            self.how]
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_parts.py").write_text(OWN)
    return tmp_path


def train(*args: str) -> list[dict]:
    pspo.train.main([*TINY, "--run.output_dir=out", *args])
    return metrics()


def metrics() -> list[dict]:
    return [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]


def start() -> dict[str, torch.Tensor]:
    return load_file(ASSETS / "tiny-base/model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name].float()) for name in one)


# --- optimizer steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [".nan", ".inf"])
def test_steps_gone_bad_in_a_row_end_the_run_and_leave_its_last_good_checkpoint(here, capsys, kind):
    args = ["--reward.functions=[own_parts.Length]", "--algorithm.surrogate=own_parts.Broken",
            f"--algorithm.surrogate.kind={kind}", "--optimizer.max_skipped=3", "--optimizer.microbatch_tokens=100000",
            "--run.max_steps=40"]  # fmt: skip
    with pytest.raises(SystemExit) as exit_:
        train(*args)
    assert exit_.value.code == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith(
        "pspo.train: 3 optimizer steps in a row were skipped, for loss (nan)" if kind == ".nan" else ""
    )
    assert "last good checkpoint: out/checkpoints/step-000002" in err
    assert [line["steps_skipped"] for line in metrics()] == [2, 2]
    assert same(load_file("out/checkpoints/step-000002/model.safetensors"), start())

    with pytest.raises(SystemExit):  # the two skipped before the checkpoint count on
        train(*args)
    assert [line["step"] for line in metrics()] == [2, 4]


def test_a_good_step_in_between_starts_the_count_again(here, monkeypatch):
    calls, clip = [], torch.nn.utils.clip_grad_norm_

    def broken(*args):
        calls.append(clip(*args))
        return calls[-1] if len(calls) == 3 else calls[-1] * math.nan

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    with pytest.raises(SystemExit):
        train("--reward.functions=[own_parts.Length]", "--algorithm.epochs=1", "--optimizer.max_skipped=3",
              "--run.max_steps=8", "--run.keep=8")  # fmt: skip
    assert [line["steps_skipped"] for line in metrics()] == [1, 1, 0, 1, 1, 1]
    two, three, five = (load_file(f"out/checkpoints/step-00000{n}/model.safetensors") for n in (2, 3, 5))
    assert same(two, start())
    assert not same(three, start())
    assert same(three, five)


def test_weights_that_are_not_finite_are_not_saved(here):
    config, resolved = parse(TrainConfig, "", [*TINY, "--run.output_dir=out"])
    setup = prepare(config, resolved)
    setup.saver.save(0, "", setup.progress)
    next(setup.learner.policy.parameters()).data[0, 0] = math.inf
    with pytest.raises(RunFailed, match="no longer finite at step 2"):
        setup.saver.save(2, "", setup.progress)
    assert [folder.name for folder in checkpoints(Path("out"))] == ["step-000000"]


# --- rewards ----------------------------------------------------------------------------------------------------------

BAD = {
    "raises": (KeyError, "no such key"),
    "hangs": (TimeoutError, "reward Bad took longer than --reward.timeout 0.3 seconds"),
    "short": (ValueError, "reward Bad returned 7 values for 8 completions"),
    "nothing": (ValueError, "reward Bad returned None"),
    "nan": (ValueError, "reward Bad returned nan for completion 0"),
    "none": (ValueError, "reward Bad returned None for completion 0"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_reward_ends_the_run_or_counts_as_none(here, how):
    kind, message = BAD[how]
    args = ["--reward.functions=[own_parts.Bad]", f"--reward.functions.how={how}", "--reward.timeout=0.3"]
    began = time.monotonic()
    with pytest.raises(kind, match=message):  # main lets it through: a traceback
        train(*args)
    assert time.monotonic() - began < 20
    assert [line["step"] for line in metrics()] == [2]
    assert checkpoints(Path("out"))[0].name == "step-000002"

    Path("calls").write_text("1")
    lines = train(*args, "--reward.on_error=none")  # goes on from there
    share = 1 / 8 if how in ("nan", "none") else 1.0
    assert [line["reward_unknown_share"] for line in lines] == [0, share, 0]
    assert lines[1]["zero_advantage_share"] >= share
    assert lines[1]["step_skipped"] == 0
    assert (lines[1]["reward"] is None) == (share == 1)
    assert (lines[1]["grad_norm"] == 0) == (share == 1)


def test_unknown_rewards_leave_the_others_mean_alone(here):
    config, _ = parse(TrainConfig, "", [*TINY, "--reward.functions=[own_parts.Bad]", "--reward.functions.how=nan",
                                        "--reward.functions.call=1", "--reward.on_error=none"])  # fmt: skip
    texts = ["a" * n for n in (7, 1, 0, 3, 5, 4, 0, 3)]
    rollout = pspo.train.Rollout(*[torch.zeros(8, 1)] * 5, texts)
    rewards, by_name, advantages = pspo.train.reward(config, rollout, [None] * 8)
    assert math.isnan(rewards[0])
    assert rewards[1:] == by_name["Bad"][1:] == [2, 2, 3, 6, 6, 0, 4]
    assert advantages[:4].tolist() == pytest.approx([0, -1 / 3, -1 / 3, 2 / 3])
    assert advantages[4:].tolist() == [2, 2, -4, 0]


def test_a_rollout_whose_rewards_are_all_equal_moves_nothing_and_is_seen(here):
    lines = train("--reward.functions=[own_parts.Constant]", "--algorithm.advantage_scale=group")
    for line in lines:
        assert line["zero_advantage_share"] == 1
        assert line["reward_std"] == line["grad_norm"] == 0
    assert same(load_file("out/final/model.safetensors"), start())


def test_empty_and_truncated_completions_are_counted():
    rollout = pspo.train.Rollout(
        *[torch.zeros(4, 1)] * 3, torch.ones(4, 1), torch.tensor([True, True, False, False]), ["", " \n", "a", "b c"]
    )
    seen = pspo.train.rollout_metrics(rollout, [0.0, 1.0, math.nan, 0.5], {"A": [math.nan] * 4}, torch.zeros(4))
    assert (seen["empty_share"], seen["truncated_share"], seen["reward_unknown_share"]) == (0.5, 0.5, 0.25)
    assert seen["reward"] == 0.5
    assert math.isnan(seen["reward/A"])


# --- memory -----------------------------------------------------------------------------------------------------------

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
    "--run.test_limit=0", "--reward.functions=[own_parts.Length]", "--optimizer.microbatch_tokens=1000000",
    "--algorithm.epochs=2", "--algorithm.surrogate=TOPR",
)  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_process_without_memory_goes_on_with_smaller_microbatches(here):
    """The real fault: an address space that ends 180 MB above what is in use when training begins."""

    def command(megabytes: int, *args: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
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

    refused = command(180, "--run.output_dir=refused", "--optimizer.halve_on_oom=false")
    assert refused.returncode == 1
    assert "pspo.train: out of memory: " in refused.stderr
    assert "Lower --optimizer.microbatch_tokens" in refused.stderr
    assert "Traceback" not in refused.stderr
