"""A model's folder whose files are broken is refused in one line that names it, and nothing in it runs."""

from pathlib import Path

import pytest
from processes import run_command

import pspo.train

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("here")]
TINY = (
    "--rollout.prompts=2", "--rollout.max_completion_tokens=4", "--run.max_steps=4", "--run.validate_every=0",
    "--run.test_limit=0", "--run.save_every=1", "--data.limit=5", "--run.output_dir=out",
)  # fmt: skip
BROKEN = {
    "config.json": (
        "[]", "{", "[" * 100_000, '{"vocab_size": 1}', {"hidden_size": 0}, {"num_attention_heads": 0},
        {"num_hidden_layers": "3"}, {"hidden_act": "x"}, {"vocab_size": -1}),
    "tokenizer.json": ("{}", "[]"),
    "tokenizer_config.json": ("[]",),
    "generation_config.json": ("[]",),
    "chat_template.jinja": (
        "{{ raise_exception('no') }}", "{% for %}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in BROKEN for content in BROKEN[name]])
def test_a_model_s_files_that_are_broken(capsys, model_folder, name, content):
    """Replaced by a text, or with an entry that no model can have."""
    folder = model_folder(**{"config": content} if isinstance(content, dict) else {})
    if isinstance(content, str):
        (folder / name).write_text(content)
    named = f"the chat template of {folder} " if name == "chat_template.jinja" else "--model.name_or_path"
    capsys.readouterr()
    assert run_command(pspo.train.main, *TINY, f"--model.name_or_path={folder}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert not Path("out").exists()
