"""Scripts beside the package."""

import copy
import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from processes import one_layer, run_command
from safetensors.torch import load_file
from scipy import stats

import pspo.train
from pspo.cli.files import read_jsonl
from pspo.losses.correction import correction_weights

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def imported(monkeypatch):
    """Imports a script, as the scripts import each other."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def call(monkeypatch):
    """Calls an imported script's command with its arguments."""

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, args)])
        script.main()

    return run


def test_masks_at_random(imported):
    """Every completion's weight, somewhere else, in each epoch at the same place."""
    sampler, old = -3 * torch.rand(2, 12, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(5) < torch.arange(1, 13)[:, None]
    weights = correction_weights(old, sampler, mask, "sequence_mask", 3.0)
    found = [imported("cuts").shuffled_sequence_mask(old, sampler, mask) for _ in range(2)]
    assert torch.equal(*found)
    assert found[0].tolist() != weights.amax(dim=1).tolist()
    assert sorted(found[0].tolist()) == sorted(weights.amax(dim=1).tolist())
    assert 0 < (found[0] == 0).sum() < 12
    own = correction_weights(old, sampler, mask, "sequence_truncate", 3.0).amax(dim=1)
    random = imported("cuts").random_mask(old, sampler, mask)
    assert (random == 0).sum() == (found[0] == 0).sum()
    assert (random == 0).tolist() != (weights.amax(dim=1) == 0).tolist()
    assert torch.equal(random[random > 0], own[random > 0])


def moves(reaches: dict[str, float]) -> list[dict]:
    """Forks of ten runs, two checkpoints each, at lag 8 and 0: changes around a surrogate's own reach."""
    draw = np.random.default_rng(0)
    return [
        {"run": f"seed-{run}", "rollouts": rollouts, "lag": lag, "surrogate": name, "aim": 0.004, "matched": True,
         "correct": 0.05 + reach + 0.001 * draw.standard_normal(), "kl_drawer": 0.02 + reach / 10,
         "kl_drawer_before": 0.019}
        for run in range(10) for rollouts in (9, 16) for lag in (8, 0) for name, reach in reaches.items()
    ]  # fmt: skip


def test_tables_of_moves(tmp_path, imported, call):
    reaches = {"NoClip": 0, "NoClip:grpo": 0.02, "PSPO": 0, "GSPO:grpo": 0, "NoClip::shuffled": -0.04}
    controls = {"NoClip": 0, "NoClip:grpo": 0.02, "Clip": -0.02, "DPPO": 0, "GSPO:grpo": -0.03, "GMPO:grpo": 0.03,
                "cuts.Cut(keep='nothing')": 0.01, "cuts.Cut(keep='outward')": 0}  # fmt: skip
    controls |= {name + ("::", ":")[":" in name] + "shuffled": reach - 0.04 for name, reach in controls.items()}
    lines, second = moves(reaches), [line for line in moves(controls) if line["lag"] == 8]
    files = [tmp_path / "base.jsonl", tmp_path / "base-controls.jsonl"]
    for file, found in zip(files, (lines, second), strict=True):
        file.write_text("".join(json.dumps(line) + "\n" for line in found))
    blocks = ("differences", "predictions", "controls", "verdicts")
    (tmp_path / "README.md").write_text("".join(f"<!-- table: {name} -->\n<!-- /table -->\n" for name in blocks))
    call(imported("moves"), tmp_path, *files)
    found = pd.read_csv(tmp_path / "differences.csv").set_index(["surrogate", "lag"])
    for name, base in (("PSPO", "NoClip"), ("GSPO:grpo", "NoClip:grpo"), ("NoClip::shuffled", "NoClip")):
        means = []  # of a run's two checkpoints
        for run in range(10):
            own, other = (
                [line["correct"] for line in lines if line["run"] == f"seed-{run}" and line["lag"] == 8
                 and line["surrogate"] == surrogate] for surrogate in (name, base)
            )  # fmt: skip
            means.append(sum(own) / 2 - sum(other) / 2)
        test = stats.ttest_1samp(means, 0)
        expected = [np.mean(means), *test.confidence_interval(0.95)]
        assert found.loc[(name, 8), ["mean", "low", "high"]].tolist() == pytest.approx(expected, rel=1e-4)
        if name == "GSPO:grpo":  # the smaller p of two
            assert found.loc[(name, 8), "holm"] == pytest.approx(2 * test.pvalue, rel=1e-4)
    page = (tmp_path / "README.md").read_text()
    assert re.search(r"\| 1: lag 8, .* failed: [+-]0.000 \[.*, -0.020 \[", page)
    assert re.search(r"4: .* +held: -0.0\d+ .*, -0.0", page)
    assert (tmp_path / "differences.svg").exists()
    text = next(line for line in page.splitlines() if line.startswith("| Clip "))
    change, shuffled, *cells = [
        [float(number) for number in re.findall(r"[+-]\d.\d+", cell)] for cell in text.split("|")[2:-1]
    ]
    assert (change, shuffled) == ([pytest.approx(0.03, abs=1e-3)], [pytest.approx(-0.01, abs=1e-3)])
    expected = [0.04, -0.02, -0.002, -0.001]  # its control, NoClip's, the drawer's KL minus NoClip's, minus before
    assert [cell[0] for cell in cells] == pytest.approx(expected, abs=1e-3)
    lines = [line.split("|")[2].strip() for line in page.splitlines() if re.match(r"\| (6|7|8|9|10):", line)]
    assert lines[:3] == [
        "held: of 4 intervals 4 there, 0 wholly elsewhere",
        "failed: of 4 intervals 2 there, 1 wholly elsewhere",
        "failed: of 4 intervals 2 there, 1 wholly elsewhere",
    ]
    assert lines[3].startswith("held: -0.0")
    assert lines[4] == "failed: of 5 intervals 4 there, 1 wholly elsewhere"
    assert re.match(r"failed: \+0.03.*, -0.01", lines[5])

    fourth = [line for line in second if line["surrogate"].partition(":")[0] not in ("GSPO", "GMPO")]
    for line in fourth:
        line |= {"aim": None, "matched": None, "kl": 0.002}
    files.append(tmp_path / "base-rate.jsonl")
    files[-1].write_text("".join(json.dumps(line) + "\n" for line in fourth))
    (tmp_path / "README.md").write_text("".join(
        f"<!-- table: {name} -->\n<!-- /table -->\n" for name in (*blocks, "rate", "rate verdicts")))  # fmt: skip
    call(imported("moves"), tmp_path, *files)
    page = (tmp_path / "README.md").read_text().partition("<!-- table: rate -->")[2]
    verdicts = [line.split("|")[2].split()[0] for line in page.splitlines() if re.match(r"\| 1[2-6]:", line)]
    assert verdicts == ["held:", "held:", "held", "failed:", "failed:"]
    change, apart, kl = next(line for line in page.splitlines() if line.startswith("| Clip  "))[:-1].split("|")[2:]
    assert [float(cell.split()[0]) for cell in (change, apart, kl)] == pytest.approx([0.03, -0.02, 0.002], abs=1e-3)

    sixth = [line for line in moves({"NoClip": 0, "Clip": 0.03, "NoClip::shuffled": -0.04})
             if line["run"] < "seed-5" and line["lag"] == 8]  # fmt: skip
    files.append(tmp_path / "smollm2-small.jsonl")
    files[-1].write_text("".join(json.dumps(line) + "\n" for line in sixth))
    (tmp_path / "README.md").write_text("".join(
        f"<!-- table: {name} -->\n<!-- /table -->\n" for name in
        (*blocks, "rate", "rate verdicts", "pretrained", "pretrained verdicts")))  # fmt: skip
    call(imported("moves"), tmp_path, *files)
    page = (tmp_path / "README.md").read_text().partition("<!-- table: pretrained -->")[2]
    assert re.findall(r"\| (?:19|20): .*\| +(\w+: [+-]\d\.\d+) ", page) == ["failed: +0.030", "held: -0.040"]


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


@pytest.mark.nightly
def test_equal_movement(tmp_path, imported, call):
    """Forks move as far as asked, by a KL computed row by row, and leave the run as if nothing had happened."""
    script, folder, output = imported("equal_movement"), tmp_path / "run", tmp_path / "moves.jsonl"
    args = (f"--model.name_or_path={one_layer()}", "--rollout.prompts=4", "--rollout.max_completion_tokens=8",
            "--algorithm.epochs=2", "--run.max_steps=8", "--run.validate_every=0", "--run.test_limit=0", "--run.quiet",
            "--reward.functions=[test_resume.Noisy]", "--data.limit=60")  # fmt: skip
    assert run_command(pspo.train.main, *args, f"--run.output_dir={folder}") == 0
    surrogates = ["NoClip", "Clip(epsilon=0.1)", "GSPO:grpo", "test_update.Unmasked", "NoClip::shuffled"]
    for rollouts, run, policies in script.replay(folder, 4, keep=2):
        if rollouts == 3:
            options = Namespace(lags=[1, 0], surrogates=surrogates, kl=[1e-3], lr=[], problems=6, held_out=5)
            cell = {"run": "run", "rollouts": 3}
            lines = list(script.forks(run, policies, options, cell, [], {}))
            options = Namespace(**vars(options) | {"lags": [1], "kl": [], "lr": [lines[1]["lr"]]})
            done = [cell | {"lag": 1, "surrogate": "NoClip", "aim": None, "lr": lines[1]["lr"]}]
            clip, *at_rate = script.forks(run, policies, options, cell, done, {})
    final = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(run.learner.policy.state_dict()[name], of) for name, of in final.items())
    assert [line["surrogate"] for line in lines] == 2 * surrogates
    assert lines[0]["reward"] != lines[-1]["reward"]
    assert [line for line in lines if not line["matched"] or abs(line["kl"] / line["aim"] - 1) > 0.02] == []
    assert [line["surrogate"] for line in at_rate] == surrogates[2:]
    noisy = {"reward": 0, "reward_se": 0}
    assert clip | noisy == lines[1] | {"aim": None, "matched": None} | noisy

    fork, before = script.Fork(run, 6, 5, seed=3), copy.deepcopy(run.learner.policy).double()
    rollout, advantages = fork.stale(policies[-2], *run.stream.next(4))
    config = replace(run.config, run=replace(run.config.run, max_steps=2))
    new, _ = fork.step(replace(config, optimizer=replace(config.optimizer, lr=1e-3)), rollout, advantages)
    after, drew = (copy.deepcopy(run.learner.policy).double() for _ in range(2))
    drew.load_state_dict(policies[-2])
    kl, kl_drawer = [], []
    for prompt, prompt_mask, completion, mask in zip(*fork.held.token_ids, strict=True):
        ids, start = torch.cat([prompt[prompt_mask], completion[mask]])[None], int(prompt_mask.sum()) - 1
        q, *others = ((model(ids).logits[0, start:-1] / 0.6).log_softmax(dim=1) for model in (after, before, drew))
        for p, found in zip(others, (kl, kl_drawer), strict=True):
            found += (p.exp() * (p - q)).sum(dim=1).tolist()
    for p, found in ((fork.old, kl), (fork.drew, kl_drawer)):
        assert script.mean_kl(p, new) == pytest.approx(sum(found) / len(found), rel=1e-3)
        assert 1e-4 < sum(found) / len(found) < 1

    command = [folder, "--rollouts", 3, "--lags", 1, "--kl", 1e-4, "--surrogates", "PSPO", "PSPO::shuffled",
               "--problems", 6, "--held-out", 5, "--output", output]  # fmt: skip
    call(script, *command)
    written = read_jsonl(output)
    assert [line["surrogate"] for line in written] == ["PSPO", "PSPO::shuffled"]
    call(script, *command)  # has it all
    assert read_jsonl(output) == written


def test_alarm_rules(imported):
    """Collapses by hand, and the AUC by counting pairs one by one."""
    tables = imported("alarm_tables")
    for rewards, at in (([0.5, 0.7, 0.6, 0.54, 0.5, 0.9], 4), ([0.7, 0.5, 0.7, 0.5, 0.7], math.inf),
                        ([0.7, 0.8, 0.6], math.inf)):  # fmt: skip
        assert tables.collapse(pd.Series(rewards, range(1, len(rewards) + 1))) == at

    generator, n, updates = np.random.default_rng(1), 8, 16
    rewards = np.clip(0.6 + generator.normal(size=(n, updates)).cumsum(axis=1) / 10, 0, 1)
    kl = generator.integers(0, 5, size=(n, updates))  # with ties
    lines = [{"run": f"r{i}", "method": "m", "update": u + 1, "reward": rewards[i, u], "kl": kl[i, u],
              "ess_sequence": -kl[i, u]} for i in range(n) for u in range(updates)]  # fmt: skip
    lines, right, total, any_total = pd.DataFrame(lines), 0, 0, 0
    at = [tables.collapse(pd.Series(row, range(1, updates + 1))) for row in rewards]
    assert 2 < sum(np.isfinite(at)) < n
    for i, u, j, v in np.ndindex(n, updates, n, updates):
        known = max(u, v) + 1 < updates - tables.AHEAD and i != j
        if known and u + 1 < at[i] <= u + 1 + tables.AHEAD and at[j] > v + 1 + tables.AHEAD:
            any_total += 1
            total += u == v
            right += (u == v) * ((kl[i, u] > kl[j, v]) + (kl[i, u] == kl[j, v]) / 2)
    for name in ("kl", "ess_sequence"):
        pairs, area, low, high = tables.auc(lines, name, True)
        assert (pairs, area) == (total, pytest.approx(right / total))
        assert low <= area <= high
    assert tables.auc(lines, "kl", False)[0] == any_total

    ess = {"a": [0, 5, 1, 9], "b": [9, 9, 3, 2], "c": [5, 6, 7, 8], "d": [6, 7, 8, 9]}  # of 4 runs the lowest has one
    lines = [{"run": run, "method": "m", "update": u, "ess_sequence": x} for run, of in ess.items()
             for u, x in enumerate([9, 9, *of], 1)] + [{"run": "a", "method": "m", "update": 30}]  # fmt: skip
    times = tables.fork_times(pd.DataFrame(lines))
    assert times[["alarm", "exchanged"]].to_dict("index") == {
        "a": {"alarm": 3, "exchanged": 6}, "b": {"alarm": 6, "exchanged": 3}}  # fmt: skip
    assert times["random"].between(3, 24).all()


def test_off_policy_controls(imported):
    """Slopes by numpy's fit, rates chosen by the other seeds in plain loops."""
    script, generator = imported("off_policy_controls"), np.random.default_rng(0)
    cells = itertools.product(["NoClip", "Clip", "P3O", "TOPR"], [0, 8], [1, 2, 4, 8], range(4))
    runs = pd.DataFrame(cells, columns=["method", "lag", "epochs", "seed"]).assign(final=generator.random(128))
    values = runs.set_index(["lag", "method", "seed", "epochs"])["final"]
    slopes = script.slopes(runs)
    for lag, seed in slopes.index:
        for method in slopes:
            slope, _ = np.polyfit([0, 1, 2, 3], values[lag, method, seed].loc[[1, 2, 4, 8]], 1)
            assert slopes.loc[(lag, seed), method] == pytest.approx(slope)
    expected = [values[8, "Clip", 3, 2] + values[8, "TOPR", 3, 2], values[8, "NoClip", 3, 2] + values[8, "P3O", 3, 2]]
    assert script.lead(runs).loc[3, 2] == pytest.approx((expected[0] - expected[1]) / 2)

    chosen = script.chosen(runs.rename(columns={"epochs": "lr"}))
    for method, lag in chosen:
        for seed in range(4):
            others = {lr: sum(values[lag, method, other, lr] for other in range(4) if other != seed)
                      for lr in (1, 2, 4, 8)}  # fmt: skip
            assert chosen.loc[seed, (method, lag)] == values[lag, method, seed, max(others, key=others.get)]
