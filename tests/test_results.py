"""Results pages: running their script changes nothing."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("tiny-protocol", "tiny-control", "tiny-comparisons", "smollm2")  # the others are of finished studies


@pytest.mark.parametrize("name", PAGES)
def test_running_the_script_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    folder, readme = tmp_path / name, tmp_path / "README.md"
    shutil.copytree(RESULTS / name, folder)
    shutil.copy(ROOT / "README.md", readme)
    options = ["--readme", str(readme)] if name == "tiny-protocol" else []
    script = importlib.import_module("page_tables")
    monkeypatch.setattr(sys, "argv", ["page_tables", str(folder), *options])
    script.main()
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert written == (RESULTS / name / "README.md").read_text(encoding="utf-8")
    assert readme.read_text(encoding="utf-8") == (ROOT / "README.md").read_text(encoding="utf-8")
