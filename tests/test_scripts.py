"""Scripts beside the package."""

import copy
import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import one_layer, run_command
from safetensors.torch import load_file

import pspo.train
from pspo.records.files import read_jsonl

SCRIPTS = Path(__file__).parents[1] / "scripts"


def script(name: str, *args: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPTS / name, *map(str, args)], capture_output=True, encoding="utf-8")


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


def test_equal_movement(tmp_path, monkeypatch):
    """Forks move as far as asked, by a KL computed row by row, and leave the run as if nothing had happened."""
    specification = importlib.util.spec_from_file_location("equal_movement", SCRIPTS / "equal_movement.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    folder, output = tmp_path / "run", tmp_path / "moves.jsonl"
    args = (f"--model.name_or_path={one_layer()}", "--rollout.prompts=4", "--rollout.max_completion_tokens=8",
            "--algorithm.epochs=2", "--run.max_steps=8", "--run.validate_every=0", "--run.test_limit=0", "--run.quiet",
            "--reward.functions=[test_resume.Noisy]", "--data.limit=60")  # fmt: skip
    assert run_command(pspo.train.main, *args, f"--run.output_dir={folder}") == 0
    surrogates = ["NoClip", "Clip(epsilon=0.1)", "GSPO:grpo", "test_update.Unmasked"]
    for rollouts, run, policies in script.replay(folder, 4, keep=2):
        if rollouts == 3:
            options = Namespace(lags=[1, 0], surrogates=surrogates, kl=[1e-4, 1e-3], problems=6, held_out=5)
            lines = list(script.forks(run, policies, options, {"run": "run", "rollouts": 3}, set(), {}))
    final = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(run.learner.policy.state_dict()[name], of) for name, of in final.items())
    assert [line["surrogate"] for line in lines[:10:2]] == [*surrogates, script.CONTROL]
    assert len(lines) == 2 * 5 * 2
    assert all(line["matched"] and abs(line["kl"] / line["aim"] - 1) <= 0.02 for line in lines)

    fork, before = script.Fork(run, 6, 5, seed=3), copy.deepcopy(run.learner.policy).double()
    rollout, advantages = fork.stale(policies[-2], *run.stream.next(4))
    config = replace(run.config, run=replace(run.config.run, max_steps=2))
    moved, _ = fork.step(replace(config, optimizer=replace(config.optimizer, lr=1e-3)), rollout, advantages)
    after, kl = copy.deepcopy(run.learner.policy).double(), []
    for prompt, prompt_mask, completion, mask in zip(*fork.held.token_ids, strict=True):
        ids, start = torch.cat([prompt[prompt_mask], completion[mask]])[None], int(prompt_mask.sum()) - 1
        old, new = ((model(ids).logits[0, start:-1] / 0.6).log_softmax(dim=1) for model in (before, after))
        kl += (old.exp() * (old - new)).sum(dim=1).tolist()
    assert moved == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert 1e-4 < moved < 1

    command = [folder, "--rollouts", 3, "--lags", 1, "--kl", 1e-4, "--surrogates", "PSPO", "--problems", 6,
               "--held-out", 5, "--output", output]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["equal_movement.py", *map(str, command)])
    script.main()
    written = read_jsonl(output)
    assert [line["surrogate"] for line in written] == ["PSPO", script.CONTROL]
    script.main()  # has it all
    assert read_jsonl(output) == written
