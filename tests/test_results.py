"""Results pages: running their script changes nothing."""

import importlib
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = ("tiny-protocol", "tiny-control", "smollm2", "stale-rollouts")


def test_running_the_script_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    shutil.copytree(RESULTS, tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    for page in (tmp_path / "README.md", *tmp_path.glob("results/*/README.md")):
        content = page.read_text(encoding="utf-8")
        content = re.sub(r"(<!-- n: [^>]+ -->)[^<]*<!-- /n -->", r"\1<!-- /n -->", content)
        content = re.sub(r"(<!-- table: [^>]+ -->\n).*?(<!-- /table -->)", r"\1\2", content, flags=re.DOTALL)
        page.write_text(content, encoding="utf-8")
    script = importlib.import_module("results_pages")
    monkeypatch.setattr(sys, "argv", ["results_pages", "--root", str(tmp_path)])
    script.main()
    for page in ("README.md", *(f"results/{name}/README.md" for name in PAGES)):
        assert (tmp_path / page).read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
