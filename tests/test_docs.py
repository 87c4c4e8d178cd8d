"""The commands in docs/ parse: no switch, file or experiment that they name is missing."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.plan.__main__ import PlanConfig
from pspo.config import EvaluateConfig, TrainConfig
from pspo.run.cli import parse
from pspo.sweep.__main__ import SweepConfig

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
CLASSES = {"train": TrainConfig, "evaluate": EvaluateConfig, "sweep": SweepConfig, "plan": PlanConfig}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_parses(page, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    commands = re.findall(
        r"^python -m pspo\.(train|evaluate|sweep|plan) (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    for name, switches in commands:
        args = [f"{word}=true" if word == "--dry_run" else word for word in shlex.split(switches)]
        config, _ = parse(CLASSES[name], f"pspo.{name}", args)
        for experiment in getattr(config, "only", None) or []:
            assert experiment in config.experiments


def test_the_switches_of_the_table_of_differences_exist():
    page = (REPOSITORY / "docs" / "reproducing.md").read_text(encoding="utf-8")
    table = page[page.index("## Where the paper") :]
    parts = [shlex.split(code) for code in re.findall(r"`(--[^`]+)`", table)]
    complete = [args for args in parts if len(args) > 1 and "N" not in args]
    assert len(complete) >= 8
    for args in complete:
        surrogate = ["--algorithm.surrogate=TOPR"] if "--algorithm.surrogate.level" in args else []
        parse(TrainConfig, "pspo.train", [*surrogate, *args])
    _, text = parse(TrainConfig, "pspo.train", ["--algorithm.surrogate=P3O"])
    for switch in {word for args in parts for word in args if word.startswith("--")}:
        *_, section, field = switch.removeprefix("--").split(".")
        assert re.search(rf"\b{field}:", text) or field in ("epsilon", "level", "surrogate"), switch
        assert section in text, switch
