"""What the README shows runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import pspo.train
from pspo.config import EvaluateConfig, TrainConfig
from pspo.run.cli import parse

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def surrogate_example(tmp_path, monkeypatch) -> str:
    """The example module, as a user would save it; returns the switches of the command that follows it."""
    match = re.search(
        r"<!-- test: (my_loss\.py) -->\n```python\n(.*?)```\n\n```bash\npython -m pspo\.train (.*?)\n```",
        README.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    name, code, switches = match.groups()
    (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return switches


def test_the_example_surrogate_trains(surrogate_example, tmp_path):
    small = ["--rollout.prompts=4", "--run.max_steps=2", "--run.test_limit=0", "--run.validate_every=0"]
    pspo.train.main([*shlex.split(surrogate_example), *small, "--run.output_dir=out"])
    (line,) = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 2
    assert line["ratio_max"] > 1 > line["ratio_min"]


def test_the_example_surrogate_is_the_formula_it_shows(surrogate_example):
    config, _ = parse(TrainConfig, "pspo.train", shlex.split(surrogate_example))
    surrogate = config.algorithm.surrogate
    assert surrogate.width == 0.3
    ratios = torch.tensor([[0.25, 0.9, 1.0, 1.1, 4.0]], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    old, advantages = torch.zeros_like(ratios), torch.tensor([[2.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    loss = surrogate(logprobs, old, advantages, mask)
    expected = -(1 + 0.3 * ((ratios - 1) / 0.3).tanh()) * 2 * mask
    assert torch.allclose(loss, expected, rtol=0, atol=1e-12)
    loss.sum().backward()
    slope = -2 * ratios * (1 - ((ratios - 1) / 0.3).tanh() ** 2) * mask
    assert torch.allclose(logprobs.grad, slope, rtol=0, atol=1e-12)


def test_every_command_of_the_readme_parses():
    text = README.read_text(encoding="utf-8").replace("configs/", f"{README.parent}/configs/")
    commands = re.findall(r"^python -m pspo\.train (.+?)(?:\s{2,}#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        if "my_loss" not in command and "--help" not in command:
            parse(TrainConfig, "pspo.train", shlex.split(command))
    evaluations = re.findall(r"^python -m pspo\.evaluate (.+)$", text, re.MULTILINE)
    assert len(evaluations) >= 2
    for command in evaluations:
        parse(EvaluateConfig, "pspo.evaluate", shlex.split(command))


def test_the_table_of_methods_names_every_surrogate_and_its_defaults():
    import pspo.losses

    text = README.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.MULTILINE))
    for name in ("PSPO", "NoClip", "Clip", "P3O", "SAPO", "TOPR"):
        surrogate = getattr(pspo.losses, name)()
        for parameter, value in re.findall(r"(\w+)=([\w.]+)", rows[name]):
            assert str(getattr(surrogate, parameter)) in (value, f"{value}.0"), (name, parameter)
