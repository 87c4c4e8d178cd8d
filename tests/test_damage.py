# ruff: noqa: F811 (fixtures)
"""A checkpoint that is damaged, and a disk that fails: what was saved before stays, and the error says what to do."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from processes import Payload, assert_same, before, forked
from test_resume import cut_off, killed, train, whole, whole_with  # noqa: F401 (fixtures)

import pspo.run.recorder
from pspo.cli.parse import read_config
from pspo.files import checkpoints, describe_file, read_jsonl
from pspo.run.checkpointer import Checkpointer
from pspo.run.run import find_checkpoint

pytestmark = pytest.mark.usefixtures("here")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one bit": flip,
    "missing": Path.unlink,
}


def test_a_damaged_checkpoint_is_named_and_skipped(cut_off, whole, capfd):
    newest = cut_off / "checkpoints/step-000004"
    shutil.copytree(newest, "kept")
    for name in ("model.safetensors", "parts.pt", "manifest.json"):
        for spoil in DAMAGE.values():
            spoil(newest / name)
            assert find_checkpoint(cut_off, read_config(cut_off / "config.yaml")).name == "step-000002"
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith(f"{newest} is damaged: ")
            assert name in line or name == "manifest.json"  # which vouches for the others
            shutil.copytree("kept", newest, dirs_exist_ok=True)
    flip(newest / "model.safetensors")
    assert train("out") == 0
    assert "resuming out from step-000002" in capfd.readouterr().out
    assert_same(whole, cut_off)


def test_a_crafted_checkpoint_is_not_executed(cut_off):
    newest = cut_off / "checkpoints/step-000004"
    torch.save({"learner": Payload()}, newest / "parts.pt")
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["parts.pt"] = describe_file(newest / "parts.pt")
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(pickle.UnpicklingError):
        train("out")
    assert not Path("executed").exists()


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


SPOILT = {  # how a run's folder is spoiled, and what is said
    "every checkpoint is damaged": (
        lambda run: [flip(folder / "parts.pt") for folder in checkpoints(run)], "--run.output_dir out"
    ),
    "the best model is damaged": (
        lambda run: flip(run / "best/model.safetensors"), "out/best is damaged: model.safetensors is not what was saved"
    ),
    "no step": (lambda run: (run / "metrics.jsonl").write_text("{}\n"), "metrics.jsonl is damaged: KeyError('step')"),
    "config.yaml": (lambda run: (run / "config.yaml").write_text("model: {na"), "out/config.yaml is damaged"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
def test_a_run_that_cannot_be_resumed_is_left_alone(cut_off, capfd, spoil, said):
    spoil(cut_off)
    left = stamps(cut_off)
    assert train("out") == 2
    assert said in capfd.readouterr().err.splitlines()[-1]
    assert stamps(cut_off) == left


def test_a_save_that_finds_the_disk_full_leaves_the_old_checkpoint(whole, capfd):
    """There is room for the weights, and not for the larger optimizer state."""

    def fill(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500 * 2**10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def action() -> int:
        before("save_snapshot", fill, Checkpointer, nth=2)
        return train("out")

    assert forked(action) == 1
    steps = [line["step"] for line in read_jsonl(Path("out/metrics.jsonl"))]
    assert steps == [2, 4]
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "cannot write out/checkpoints/step-000004 (" in err.splitlines()[-1]
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step-000002"]
    assert train("out") == 0
    assert_same(whole, Path("out"))


def test_a_disk_too_full_for_the_records_ends_the_run(capfd):
    def action() -> int:
        before("append_jsonl", lambda path, *_: path.exists() or path.symlink_to("/dev/full"), pspo.run.recorder)
        return train("out", "--run.save_every=0")

    assert forked(action) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "cannot write out/metrics.jsonl (" in err.splitlines()[-1]
