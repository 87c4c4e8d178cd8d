"""README and docs/: commands run, or parse if they need more than this machine; examples run; what is named exists."""

import re
import runpy
import shlex
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from matplotlib.figure import Figure
from processes import one_layer
from torch.distributed.run import get_args_parser

import pspo.evaluate.__main__
import pspo.losses
import pspo_lab.report.__main__
import pspo_lab.sweep.__main__
import pspo.train
from pspo_lab.plan.cost import PlanConfig
from pspo.cli.parse import parse
from pspo.config import EvaluateConfig, TrainConfig
from pspo.cli.files import read_jsonl
from pspo_vllm.serve import ServeConfig
from pspo_lab.sweep.__main__ import SweepConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
CONFIGS = {"pspo.train": TrainConfig, "pspo.evaluate": EvaluateConfig, "pspo_vllm.serve": ServeConfig}
CONFIGS |= {"pspo_lab.plan": PlanConfig}
SMALL = ["--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--run.max_steps=2", "--run.test_limit=0",
         "--run.validate_every=0", "--run.output_dir=runs/mine", "--data.limit=40"]  # fmt: skip
ONE_LAYER = [f"--model.name_or_path={one_layer()}", "--rollout.temperature=1"]
BY_LENGTH = ["--reward.functions=[SoftOverlong]", "--reward.functions.buffer=8"]  # any model's lengths differ


def blocks(language: str) -> list[tuple[str, str]]:
    """All fenced blocks of a language: the file that the marker before it names, or "", and the text."""
    pattern = rf"(?:<!-- test: (\S+) -->\n)?```{language}\n(.*?)```"
    return [match for text in TEXTS.values() for match in re.findall(pattern, text, re.DOTALL)]


def commands() -> list[tuple[str, str]]:
    """Every `-m pspo.COMMAND SWITCHES`, in a block or in a line, up to the shell's next operator."""
    text = "\n".join(TEXTS.values()).replace("\\\n", " ")
    found = set()
    names = r"pspo\.(?:train|evaluate|serve|sweep|report)|benchmarks\.plan"
    for command, switches in re.findall(rf"-m ({names})\b(?= *([^\n`]*))", text):
        switches = re.sub(r"\$\(\(.*?\)\)", "1", switches)  # what the shell computes
        switches = re.sub(r"\$\(IFS=,;.*?\)", "http://b:8000", switches)
        words = shlex.split(switches, comments=True)
        end = next((i for i, word in enumerate(words) if word in (">", "&", "&&", "--")), len(words))
        found.add((command, shlex.join(words[:end])))
    return sorted(found)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """The folder that the pages assume: their example files, configs/, and a data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "run.yaml").symlink_to(ROOT / "configs/tiny.yaml")
    for name, code in blocks("python"):
        (tmp_path / (name or "example.py")).write_text(code, encoding="utf-8")
    (data,) = (text for _, text in blocks("json"))
    (tmp_path / "my_problems").mkdir()
    (tmp_path / "my_problems/train.jsonl").write_text(data, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    pspo.train.main([*SMALL, *ONE_LAYER, f"--run.output_dir={folder}"])
    return folder


@pytest.mark.parametrize(("command", "switches"), commands())
def test_command(workspace, finished_run, monkeypatch, command, switches):
    args = shlex.split(switches)
    if {"--help", "--print_config"} & {*args}:
        with pytest.raises(SystemExit, match="0"):
            pspo.train.main(args)
    elif "--compare" in args:
        assert command == "pspo.evaluate"  # of finished evaluations: tests/test_evaluate.py
    elif command == "pspo_lab.sweep":
        flags = [f"{word}=true" if word == "--dry_run" else word for word in args]
        config, _ = parse(SweepConfig, command, flags)
        assert {*(config.only or [])} <= {*config.experiments}
    elif command == "pspo_lab.report":
        monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())  # test_report.py draws
        shutil.copytree(finished_run, workspace / args[0] / "mine")
        pspo_lab.report.__main__.main(args)
    elif command in ("pspo_vllm.serve", "pspo_lab.plan"):
        parse(CONFIGS[command], command, args)
    else:
        config, _ = parse(CONFIGS[command], command, args)
        here = config.model.name_or_path in ("tiny-base", "tiny-math", "tiny-text")
        here &= config.data.name in ("arithmetic", "letters", "sums") or Path(str(config.data.path)).exists()
        if command == "pspo.evaluate" and here:
            pspo.evaluate.__main__.main([*args, "--data.limit=4", "--eval.max_completion_tokens=8"])
        elif command == "pspo.train" and here and config.distributed.strategy == "none" and not config.rollout.servers:
            if config.rollout.external:
                pytest.importorskip("vllm")
            small = [*SMALL, *(ONE_LAYER if config.model.name_or_path == "tiny-base" else [])]
            pspo.train.main([*args, *small, *(BY_LENGTH if "reward" not in switches else [])])
            assert read_jsonl(workspace / "runs/mine/metrics.jsonl")[-1]["step"] == 2


def torchruns() -> list[str]:
    text = "\n".join(TEXTS.values()).replace("\\\n", " ")
    return sorted({*re.findall(r"torchrun ([^\n`]*?) -m pspo\.", text)})


@pytest.mark.parametrize("options", torchruns())
def test_torchrun_knows_the_options(options):
    get_args_parser().parse_args([*shlex.split(options), "script"])


@pytest.mark.parametrize("code", [code for _, code in blocks("python")])
def test_python_example(tmp_path, code):
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))


def test_every_name_that_a_page_imports_is_in_the_api():
    pages = (ROOT / "docs").rglob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    known = set(re.findall(r"\w+", " ".join(re.findall(r"^(?:::: |    options: )(.*)$", text, re.MULTILINE))))
    code = "\n".join(text for _, text in blocks("python"))
    lines = re.findall(r"^from pspo[\w.]* import (.+)$", code, re.MULTILINE)
    imported = {name for names in lines for name in re.findall(r"\w+", names)}
    assert len(imported) > 15
    assert imported <= known, imported - known


def test_example_of_a_sweep(workspace, capsys):
    first, second = (text for _, text in blocks("yaml"))
    assert first in (ROOT / "configs/sweep/first.yaml").read_text(encoding="utf-8")
    (workspace / "mine.yaml").write_text(second, encoding="utf-8")
    pspo_lab.sweep.__main__.main(["--config", "mine.yaml", "--dry_run"])
    assert re.search(r"full +25 ", capsys.readouterr().out)


def test_the_example_loss_is_the_formula_it_shows(workspace):
    (switches,) = (switches for _, switches in commands() if "my_loss" in switches)
    surrogate = parse(TrainConfig, "pspo.train", shlex.split(switches))[0].algorithm.surrogate
    assert surrogate.width == 0.3
    ratios = torch.tensor([[0.25, 0.9, 1.0, 1.1, 4.0]], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    advantages, mask = torch.full((1, 1), 2.0, dtype=torch.float64), torch.tensor([[True, True, True, True, False]])
    loss = surrogate(logprobs, torch.zeros_like(ratios), advantages, mask)
    loss.sum().backward()
    soft = ((ratios - 1) / 0.3).tanh()
    assert torch.allclose(loss, -(1 + 0.3 * soft) * 2 * mask, rtol=0, atol=1e-12)
    assert torch.allclose(logprobs.grad, -2 * ratios * (1 - soft**2) * mask, rtol=0, atol=1e-12)


def test_the_table_of_losses_has_every_default():
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(\S+\) \|([^|]*)\|", TEXTS["README.md"], re.MULTILINE))
    for name in ("PSPO", "NoClip", "Clip", "P3O", "SAPO", "TOPR"):
        surrogate = getattr(pspo.losses, name)()
        for parameter, value in re.findall(r"(\w+)=([\w.]+)", rows[name]):
            assert str(getattr(surrogate, parameter)) in (value, f"{value}.0"), (name, parameter)


def switches_of(config_class: type, prefix: str = "") -> set[str]:
    hints, names = get_type_hints(config_class), {part.name for part in fields(config_class)}
    below = (switches_of(hints[name], f"{prefix}{name}.") for name in names if is_dataclass(hints[name]))
    return {f"{prefix}{name}" for name in names}.union(*below)


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_names_exists(page):
    text = TEXTS[page]
    known = set().union(*map(switches_of, CONFIGS.values()))
    for switch in re.findall(r"--([a-z]+\.[a-z_0-9.]*\w)", text):
        own = ("algorithm.surrogate.", "algorithm.advantages.", "experiments.")
        assert switch in known or switch.startswith(own), switch
    for path in re.findall(r"`((?:pspo|tests|configs|benchmarks|scripts|results)/[\w./+-]+)`", text):
        assert (ROOT / path).exists(), path
    if page.startswith("docs/methods"):
        results = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("results/tiny-*/README.md"))
        for number in re.findall(r"-?\d+\.\d \[-?\d+\.\d, -?\d+\.\d\]", text):
            assert number in results, number
