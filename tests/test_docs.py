"""README and docs/: commands parse, examples run, and what a page names exists."""

import argparse
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pspo.__main__
from pspo.config import EvaluateConfig, TrainConfig, find_switches

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
COMMAND = re.compile(
    r"(?:-m pspo\.(train|evaluate)|(?<![\w.-])pspo (train|evaluate|export|view|report|sweep|compare|serve))"
    r"(?= |$)([^\n]*)",
    re.MULTILINE,
)
ARGPARSE = ("view", "report", "compare")  # the other commands have --print_config


def blocks(language: str) -> list[tuple[str, str]]:
    """All fenced blocks of a language: the file that the marker before it names, or "", and the text."""
    pattern = rf"(?:<!-- test: (\S+) -->\n)?```{language}\n(.*?)```"
    return [match for text in TEXTS.values() for match in re.findall(pattern, text, re.DOTALL)]


def code() -> Iterator[str]:
    """Lines of shell blocks, and code inside sentences."""
    for text in TEXTS.values():
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            yield from block.replace("\\\n", " ").splitlines()
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            yield span.replace("\n", " ")


def commands() -> list[tuple[str, str]]:
    """Every command with its arguments, up to the shell's next operator; those in sentences if they have arguments."""
    found = set()
    for line in code():
        for module, name, rest in COMMAND.findall(line):
            rest = re.sub(r"\$\(\(.*?\)\)", "1", rest)  # what the shell computes
            rest = re.sub(r"\$\(IFS=,;.*?\)", "http://b:8000", rest)
            words = shlex.split(rest, comments=True)
            end = next((i for i, word in enumerate(words) if word in (">", "&", "&&")), len(words))
            if words[:end]:
                found.add((module or name, shlex.join(words[:end])))
    return sorted(found)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """The folder that the pages assume: their example files, configs/, and a data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "run.yaml").symlink_to(ROOT / "configs/tiny.yaml")
    for name, text in blocks("python"):
        (tmp_path / (name or "example.py")).write_text(text, encoding="utf-8")
    (data,) = (text for _, text in blocks("json"))
    (tmp_path / "my_problems").mkdir()
    (tmp_path / "my_problems/train.jsonl").write_text(data, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("command", "switches"), commands())
def test_command_parses(workspace, monkeypatch, capsys, command, switches):
    words = shlex.split(switches)
    if command in ARGPARSE:
        parse_args = argparse.ArgumentParser.parse_args

        def parse_and_exit(parser, args):
            parse_args(parser, args)
            raise SystemExit(0)

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_exit)
    elif not {"--help", "--print_config"} & {*words}:
        words.append("--print_config")
    monkeypatch.setattr(sys, "argv", ["pspo", command, *words])
    with pytest.raises(SystemExit) as exit_info:
        pspo.__main__.main()
    assert not exit_info.value.code, capsys.readouterr().err


@pytest.mark.parametrize("text", [text for _, text in blocks("python")])
def test_python_example(tmp_path, text):
    (tmp_path / "example.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))


def test_every_name_in_the_api_exists():
    entry = r"^::: (pspo[\w.]*)\n    options:\n.*\n      members: \[([^]]*)\]"
    entries = re.findall(entry, TEXTS["docs/api.md"], re.MULTILINE)
    assert len(entries) > 10
    for module, members in entries:
        for name in re.findall(r"\w+", members):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_names_exists(page):
    known = find_switches(TrainConfig) | find_switches(EvaluateConfig)
    pieces = ("algorithm.surrogate.", "algorithm.advantages.", "experiments.")  # whose arguments are open
    for switch in re.findall(r"--([a-z]+\.[a-z_0-9.]*\w)", TEXTS[page]):
        assert switch in known or switch.startswith(pieces), switch
    for path in re.findall(r"`((?:pspo|pspo_lab|pspo_vllm|tests|configs|benchmarks|scripts)/[\w./+-]+)`", TEXTS[page]):
        assert (ROOT / path).exists(), path
