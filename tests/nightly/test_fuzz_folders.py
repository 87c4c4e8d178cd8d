"""Hostile folders: broken runs, models and chat templates end in one line and exit code 2, and nothing in them runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import run_command

import pspo.train
from pspo.records.folders import checkpoints, damage

pytestmark = pytest.mark.nightly
TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=4", "--run.max_steps=4", "--run.validate_every=0",
    "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--run.output_dir=out",
)  # fmt: skip


class Payload:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys, *args: str) -> str:
    """The one line with which training refuses."""
    capsys.readouterr()
    assert run_command(pspo.train.main, *TINY, *args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not Path("executed").exists()
    return line


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run with two checkpoints."""
    run = tmp_path_factory.mktemp("run") / "out"
    assert run_command(pspo.train.main, *TINY, f"--run.output_dir={run}") == 0
    return run


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_of_a_checkpoint_is_damage(saved, tmp_path, data):
    """Bytes anywhere overwritten, cut or put in."""
    shutil.copytree(checkpoints(saved)[0], tmp_path / "step-000004", dirs_exist_ok=True)
    file = tmp_path / "step-000004" / data.draw(st.sampled_from(["model.safetensors", "parts.pt", "rank-0.pt"]))
    before = file.read_bytes()
    place, cut = data.draw(st.integers(0, len(before))), data.draw(st.integers(0, 9))
    after = before[:place] + data.draw(st.binary(max_size=9)) + before[place + cut :]
    file.write_bytes(after)
    assert (damage(tmp_path / "step-000004") is None) == (after == before)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
@pytest.mark.parametrize("content", ["a: [", "5", "\x00", "{", "[]", ""])
def test_a_run_s_own_files_damaged(saved, capsys, name, content):
    shutil.copytree(saved, "out")
    (Path("out") / name).write_text(content)
    assert f"out/{name} is damaged" in refused(capsys)


# --- models -----------------------------------------------------------------------------------------------------------


def refused_model(capsys, folder: Path) -> str:
    line = refused(capsys, f"--model.name_or_path={folder}")
    assert not Path("out").exists()
    return line


def test_remote_code_that_is_not_needed_is_not_run(model_folder):
    folder = model_folder(config={"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}})
    (folder / "custom_generate").mkdir()
    for file in ("own.py", "custom_generate/generate.py"):
        (folder / file).write_text("from pathlib import Path\nPath('executed').touch()\n")
    assert run_command(pspo.train.main, *TINY, f"--model.name_or_path={folder}", "--run.max_steps=2") == 0
    assert not Path("executed").exists()


@pytest.mark.parametrize("content", [pickle.dumps(Payload()), b"junk", b""], ids=["a pickle", "text", "nothing"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_what_is_no_weights(capsys, model_folder, name, content):
    folder = model_folder(without=["model.safetensors"])
    (folder / name).write_bytes(content)
    assert f"--model.name_or_path {folder}" in refused_model(capsys, folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"), ("config.json", "{"), ("config.json", "[" * 100_000), ("tokenizer.json", "{}"),
        ("config.json", '{"vocab_size": 1}'), ("tokenizer.json", "[]"), ("tokenizer_config.json", "[]"),
        ("generation_config.json", "[]"),
    ],
)  # fmt: skip
def test_files_of_another_kind(capsys, model_folder, name, content):
    folder = model_folder()
    (folder / name).write_text(content)
    assert "--model.name_or_path" in refused_model(capsys, folder)


@pytest.mark.parametrize("field", [
    {"hidden_size": 0}, {"num_attention_heads": 0}, {"num_hidden_layers": "3"}, {"hidden_act": "x"}, {"vocab_size": -1},
], ids=json.dumps)  # fmt: skip
def test_a_configuration_that_no_model_can_have(capsys, model_folder, field):
    assert "--model.name_or_path" in refused_model(capsys, model_folder(config=field))


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no') }}", "{% for %}", "{{ a.b.c }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}", "{% for i in range(10 ** 9) %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% if false %}x{% endif %}",
])  # fmt: skip
def test_chat_templates_that_fail(capsys, model_folder, template):
    folder = model_folder()
    (folder / "chat_template.jinja").write_text(template)
    assert f"the chat template of {folder} " in refused_model(capsys, folder)


@pytest.mark.parametrize("template", [5, {"a": "b"}, [{"name": "a", "template": "x"}]], ids=["int", "dict", "list"])
def test_chat_templates_that_are_no_text(capsys, model_folder, template):
    folder = model_folder(tokenizer_config={"chat_template": template}, without=["chat_template.jinja"])
    assert "--model.name_or_path" in refused_model(capsys, folder)
