"""Hostile input: checkpoints and model folders that nobody meant.

Bad input is one line and exit code 2 (a damaged checkpoint is named and passed over), never a traceback, and nothing
that came with it is run.
"""

import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pspo.train
from pspo.run.checkpoint import checkpoints, describe
from pspo.run.resume import find_checkpoint

# --- checkpoints that somebody changed --------------------------------------------------------------------------------

TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=4", "--rollout.temperature=1", "--run.max_steps=4",
    "--run.validate_every=0", "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--run.output_dir=out",
)  # fmt: skip


class Payload:
    """What creates a file where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with two checkpoints, whose summary is gone, as a kill would have it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pspo.train.main([*TINY])
    for name in ("summary.json", "final"):
        path = folder / "out" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert len(checkpoints(folder / "out")) == 2
    return folder / "out"


@pytest.fixture
def here(saved, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "out")
    return tmp_path


def vouch(folder: Path) -> None:
    """Make the manifest again, so that sizes and hashes are right."""
    files = {path.name: describe(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(files))


def change_state(folder: Path, **changes: object) -> None:
    file = folder / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_training(folder: Path, change) -> None:
    state = torch.load(folder / "training.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "training.pt")


def pickled_model(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")


def other_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor[..., :1].contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


def thin_moments(state: dict) -> None:
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg"] = moments["exp_avg"][..., :1]


TAMPERED = {
    "a payload for optimizer": lambda f: torch.save({"optimizer": Payload()}, f / "training.pt"),
    "a payload, pickled": lambda f: (f / "training.pt").write_bytes(pickle.dumps(Payload())),
    "a payload beside the rest": lambda f: change_training(f, lambda state: state.update(more=Payload())),
    "training.pt: none": lambda f: (f / "training.pt").unlink(),
    "state.json: none": lambda f: (f / "state.json").unlink(),
    "training.pt: text": lambda f: (f / "training.pt").write_text("hello"),
    "training.pt: empty": lambda f: (f / "training.pt").write_bytes(b""),
    "training.pt: a list": lambda f: torch.save([1, 2], f / "training.pt"),
    "training.pt: no scheduler": lambda f: change_training(f, lambda state: state.pop("scheduler")),
    "training.pt: a method of the scheduler": lambda f: change_training(f, lambda s: s["scheduler"].update(step=5)),
    "training.pt: other moments": lambda f: change_training(f, thin_moments),
    "training.pt: short random state": lambda f: change_training(f, lambda s: s.update(random=[[torch.zeros(3)]])),
    "model.safetensors: a pickle": lambda f: (f / "model.safetensors").write_bytes(pickle.dumps(Payload())),
    "pytorch_model.bin in its place": pickled_model,
    "model.safetensors: other shapes": other_shapes,
    "config.json: a list": lambda f: (f / "config.json").write_text("[]"),
    "state.json: a list": lambda f: (f / "state.json").write_text("[]"),
    "state.json: deep": lambda f: (f / "state.json").write_text("[" * 100_000),
    "state.json: not UTF-8": lambda f: (f / "state.json").write_bytes(b"\xff"),
    "state.json: unknown field": lambda f: change_state(f, more=1),
    "state.json: steps": lambda f: change_state(f, steps="many"),
    "state.json: steps below 0": lambda f: change_state(f, steps=-1),
    "state.json: tokens": lambda f: change_state(f, tokens=float("nan")),
    "state.json: prompts": lambda f: change_state(f, prompts=True),
    "state.json: seconds": lambda f: change_state(f, seconds=None),
    "state.json: best": lambda f: change_state(f, best={"step": "x"}),
    "state.json: validated": lambda f: change_state(f, validated=[1]),
    "state.json: random": lambda f: change_state(f, random=[{"python": [3, [1, 2], None], "numpy": []}]),
    "state.json: random of numpy": lambda f: change_state(
        f, random=[{"python": [3, list(random.getstate()[1]), None], "numpy": ["MT19937", [-1], 0, 0, 0.0]}]),
}  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_checkpoint_that_its_manifest_vouches_for_is_passed_over(here, capsys, tamper):
    newest, older = checkpoints(here / "out")
    tamper(newest)
    vouch(newest)
    assert find_checkpoint(here / "out", "auto") == newest  # sizes and hashes are right; nothing was removed
    pspo.train.main([*TINY])
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "passed over" in line]
    assert line.startswith(f"out/checkpoints/{newest.name} is damaged: ")
    assert f"going on with out from {older.name}\n" in out
    assert not Path("executed").exists()
    assert json.loads(Path("out/summary.json").read_text())["optimizer_steps"] == 4


def test_with_all_checkpoints_tampered_the_run_is_left_alone(here, capsys):
    for folder in checkpoints(here / "out"):
        torch.save({"optimizer": Payload()}, folder / "training.pt")
        vouch(folder)
    left = sorted(here.rglob("*"))
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY])
    *damage, line = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert [text.partition(" is damaged: training.pt is not what a run saves (")[0] for text in damage] == [
        "out/checkpoints/step-000004", "out/checkpoints/step-000002"]  # fmt: skip
    assert line.endswith("no checkpoint that could be gone on from; choose another folder")
    assert sorted(here.rglob("*")) == left


def test_a_payload_would_have_been_executed(here):
    """What the tests above rely on."""
    torch.save(Payload(), "payload.pt")
    torch.load("payload.pt", weights_only=False)
    assert Path("executed").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: ["), ("config.yaml", "5"), ("config.yaml", "\x00"), ("config.yaml", "[" * 5000),
        ("summary.json", "{"), ("summary.json", "[]"), ("summary.json", "{}"), ("summary.json", "[" * 100_000),
    ],
)  # fmt: skip
def test_a_run_s_own_files_changed(here, capsys, name, content):
    (here / "out" / name).write_text(content)
    (here / "out/summary.json").touch()
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY])
    line = capsys.readouterr().err
    assert (exit_.value.code, line.count("\n")) == (2, 1)
    assert f"out/{name} is damaged" in line


# --- model folders ----------------------------------------------------------------------------------------------------

REMOTE = """
from pathlib import Path
Path("executed").touch()
from transformers import PretrainedConfig

class Own(PretrainedConfig):
    model_type = "own"
"""


def refused(capsys, folder: Path, *args: str) -> str:
    """The one line on stderr with which training refuses the model."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        pspo.train.main([*TINY, f"--model.name_or_path={folder}", *args])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (2, 1), err
    assert not Path("out").exists()
    assert not Path("executed").exists()
    return err


@pytest.fixture
def away(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_that_needs_remote_code_is_refused_and_runs_nothing(away, capsys, model_folder):
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    folder = model_folder(config={"auto_map": auto_map, "model_type": "own"})
    (folder / "own.py").write_text(REMOTE)
    line = refused(capsys, folder)
    assert "--model.trust_remote_code is off" in line
    assert str(folder) in line


def test_remote_code_that_is_not_needed_is_not_run(away, model_folder):
    folder = model_folder(config={"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}})
    (folder / "own.py").write_text(REMOTE)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(REMOTE)
    pspo.train.main([*TINY, f"--model.name_or_path={folder}", "--run.max_steps=2"])
    assert not (away / "executed").exists()


WEIGHTS = {
    "model.safetensors, a pickle": ("model.safetensors", pickle.dumps(Payload())),
    "a pickle": ("pytorch_model.bin", pickle.dumps(Payload())),
    "text": ("pytorch_model.bin", b"junk"),
    "nothing": ("pytorch_model.bin", b""),
}


@pytest.mark.parametrize(("name", "content"), WEIGHTS.values(), ids=WEIGHTS)
def test_a_pickle_in_place_of_weights_is_not_loaded(away, capsys, model_folder, name, content):
    folder = model_folder(without=["model.safetensors"])
    (folder / name).write_bytes(content)
    assert f"--model.name_or_path {folder}" in refused(capsys, folder)


def test_a_payload_among_weights_is_not_loaded(away, capsys, model_folder):
    folder = model_folder(without=["model.safetensors"])
    torch.save({"model.embed_tokens.weight": Payload()}, folder / "pytorch_model.bin")
    assert f"--model.name_or_path {folder}" in refused(capsys, folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"), ("config.json", "{"), ("config.json", "[" * 100_000), ("tokenizer.json", "{}"),
        ("config.json", '{"vocab_size": 1}'), ("tokenizer.json", "[]"), ("tokenizer_config.json", "[]"),
        ("generation_config.json", "[]"), ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [99999999]}'),
    ],
)  # fmt: skip
def test_a_folder_with_files_of_another_kind(away, capsys, model_folder, name, content):
    folder = model_folder()
    (folder / name).write_text(content)
    assert "--model.name_or_path" in refused(capsys, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "3"},
        {"hidden_act": "x"},
        {"vocab_size": -1},
    ],
)
def test_a_configuration_that_no_model_can_have(away, capsys, model_folder, changes):
    assert "--model.name_or_path" in refused(capsys, model_folder(config=changes))


TEMPLATES = {
    "raises": ("{{ raise_exception('no') }}", "failed (no)"),
    "syntax": ("{% for %}", "failed ("),
    "undefined": ("{{ a.b.c }}", "failed ('a' is undefined)"),
    "division": ("{{ 1 / 0 }}", "failed (division by zero)"),
    "other objects": ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    "another file": ("{% include 'x' %}", "failed ("),
    "range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    "nothing": ("{% if false %}x{% endif %}", "makes a prompt of nothing"),
}


@pytest.mark.parametrize(("template", "said"), TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_that_fail(away, capsys, model_folder, template, said):
    folder = model_folder()
    (folder / "chat_template.jinja").write_text(template)
    line = refused(capsys, folder)
    assert f"the chat template of {folder} " in line
    assert said in line


@pytest.mark.parametrize("template", [5, {"a": "b"}, [{"name": "a", "template": "x"}]], ids=["int", "dict", "list"])
def test_chat_templates_that_are_no_text(away, capsys, model_folder, template):
    folder = model_folder(tokenizer_config={"chat_template": template}, without=["chat_template.jinja"])
    assert "--model.name_or_path" in refused(capsys, folder)
