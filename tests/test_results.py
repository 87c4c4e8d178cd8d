"""Results pages: running their script changes nothing; what `scripts/answers.py` counts."""

import importlib
import json
import shutil
import subprocess
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


def script(name: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *map(str, args)], capture_output=True, encoding="utf-8"
    )


def evaluation(path: Path, answers: list[tuple[str, str, bool]]) -> Path:
    records = [
        {"problem": i, "prompt": f"problem {i}", "gold": gold, "completion": text, "correct": right,
         "contains_gold": gold in text} for i, (text, gold, right) in enumerate(answers)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records[::-1]))  # in any order
    return path


def test_changed_answers(tmp_path):
    before = [
        ("7 - 2 = 5", "9", False),
        ("2 + 3 + 4 = 9", "9", True),
        ("12 * 3 - 4 = 32", "32", True),
        ("x", "1", False),
    ]
    after = [
        ("so $7 + 2 = $9.", "9", True),
        ("3 * 3 = 10", "9", False),
        ("1,000 / 2 = 500", "32", False),
        ("1", "1", True),
    ]
    files = [evaluation(tmp_path / name, answers) for name, answers in (("a", before), ("b", after))]
    done = script("answers.py", "changed", *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "correct, 4 problems: 2 now, 2 no longer",
        "contains_gold, 4 problems: 2 now, 2 no longer",
        "before: 1 answers with an equation; first one computed right 1, its value is the gold 0, both 0",
        "after:  3 answers with an equation; first one computed right 2, its value is the gold 2, both 1",
    ]
    other = evaluation(tmp_path / "c", before[:3])
    assert "not of the same problems" in script("answers.py", "changed", files[0], other).stderr


def test_solvable_problems(tmp_path):
    completions = evaluation(tmp_path / "completions.jsonl", [("7 of 9", "9", False), ("x", "1", False)])
    done = script("answers.py", "solvable", completions, tmp_path / "problems" / "train.jsonl")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "problems" / "train.jsonl").read_text()) == {"prompt": "problem 0", "answer": "9"}
