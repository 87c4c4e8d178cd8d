"""A process killed at every single point where it touches the disk."""

import importlib
import shutil
import signal
from pathlib import Path

import pytest
from processes import assert_same, forked, kill_at_file_event, one_layer, run_command

import pspo.train

pytestmark = pytest.mark.nightly


MODES = {  # switches, and every how many of its file events a run is killed
    "plain": ((), 1),
    "stale": (("--rollout.lag=1", "--rollout.resample=1"), 3),
    "lora": (("--model.lora.rank=2", "--model.dtype=bfloat16"), 3),
}


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_any_file_event_of_a_run_the_same_command_ends_it_and_nothing_is_left(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    switches, stride = MODES[mode]
    for module in ("peft", "test_resume"):  # their files would be opened in every process
        importlib.import_module(module)
    small = (
        f"--model.name_or_path={one_layer()}",
        "--rollout.prompts=2", "--rollout.max_completion_tokens=4", "--run.max_steps=4", "--run.validate_every=2",
        "--run.validation_limit=2", "--run.test_limit=2", "--run.save_every=2", "--run.keep=1", "--data.limit=5",
        "--optimizer.lr=1e-3", "--run.quiet", "--reward.functions=[test_resume.Noisy]",
    )  # fmt: skip

    def train(output: str) -> int:
        return run_command(pspo.train.main, *small, *switches, f"--run.output_dir={output}")

    def killed(n: int) -> int:
        kill_at_file_event(n)
        return train("out")

    assert forked(lambda: train("whole")) == 0
    n, codes = 1, []
    while not codes or codes[-1] != 0:
        shutil.rmtree("out", ignore_errors=True)
        codes.append(forked(lambda n=n: killed(n)))
        assert forked(lambda: train("out")) == 0, n
        assert_same(Path("whole"), Path("out"))
        n += stride
    assert set(codes) == {-signal.SIGKILL, 0}
    assert len(codes) > 100 / stride, len(codes)
    print(f"{mode}: {len(codes) - 1} kills")
