"""pspo compare: differences of two evaluations, paired by problem, and their p-values."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import nct, t, ttest_rel

from pspo.files import append_jsonl
from pspo_lab.compare import main


def record(i, sample, correct, temperature=0.0, gold=None):
    """A completion's record, as an evaluation writes it."""
    reward = 1.0 if correct else 0.05
    return {
        "temperature": temperature, "problem": i, "sample": sample, "prompt": f"problem {i}",
        "gold": gold or f"{100 + i}",
        "completion": f"#### {100 + i if correct else 1}", "correct": correct, "contains_gold": correct, "format": True,
        "reward": reward, "rewards": {"MathReward": reward}, "tokens": 3, "truncated": False,
    }  # fmt: skip


def write_evaluation(folder, records, result="results.json"):
    folder.mkdir(parents=True)
    append_jsonl(folder / "completions.jsonl", *records)
    (folder / result).write_text("{}")
    return folder


def compare(*paths):
    main(list(map(str, paths)))


def test_problems_are_paired(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    right = {"A": {0, 1}, "B": {1, 2, 3, 4, 5, 6}}
    for name, correct in right.items():
        write_evaluation(tmp_path / name, [record(i, 0, i in correct) for i in range(7)])
    compare("~/A", tmp_path / "B")
    out = capsys.readouterr().out
    reference = ttest_rel([0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0])
    ends = re.escape("[{:.1f}, {:.1f}]".format(*100 * np.array(reference.confidence_interval())))
    p = 2 * (1 + 6) / 2**6  # McNemar: one or fewer of six, on both sides
    row = rf"^accuracy +28\.6% +85\.7% +57\.1 points {ends} +{p:.2g} +1 : 5 +(.*) points$"
    detects = float(re.search(row, out, re.MULTILINE)[1]) / 100
    noncentrality = detects / np.std([-1, 0, 1, 1, 1, 1, 1], ddof=1) * 7**0.5
    assert nct.sf(t.ppf(0.975, 6), 6, noncentrality) == pytest.approx(0.8, abs=0.001)
    p = reference.pvalue  # rewards are neither 0 nor 1
    assert re.search(rf"^reward +0\.321 +0\.864 +0\.543 \[.*\] +{p:.2g} +- ", out, re.MULTILINE)


def test_of_several_samples_a_problem_has_their_mean(tmp_path, capsys):
    counts = {"A": [0, 1, 2, 0, 0, 1, 3], "B": [2, 1, 3, 1, 2, 0, 3]}  # of 4
    samples = [(i, sample) for i in range(7) for sample in range(4)]
    for name, right in counts.items():
        write_evaluation(tmp_path / name, [record(i, sample, sample < right[i], 0.6) for i, sample in samples])
    compare(tmp_path / "A", tmp_path / "B")
    out = capsys.readouterr().out
    p = ttest_rel(counts["B"], counts["A"]).pvalue
    assert re.search(rf"^accuracy +25\.0% +42\.9% +17\.9 points \[.*\] +{p:.2g} +- ", out, re.MULTILINE)
    assert re.findall("^(?:pass|maj)@.", out, re.MULTILINE) == ["pass@2", "pass@4", "maj@4"]  # @1 is accuracy
    assert re.search(r"^pass@4 +57\.1% +85\.7% +28\.6 points \[.*\] +0\.62 +1 : 3 ", out, re.MULTILINE)
    a, b = (100 * np.mean([(n > 2) + 0.5 * (n == 2) for n in right]) for right in counts.values())
    assert re.search(rf"^maj@4 +{a:.1f}% +{b:.1f}% ", out, re.MULTILINE)


def test_the_gain_of_sapo_on_asdiv_over_seeds_and_problems(tmp_path, capsys):
    """The study's page had [13.2, 16.3], over five seeds alone; its referee resampled both by hand: [9.7, 19.8]."""
    answers = pd.read_parquet("results/smollm2/asdiv.parquet")
    before = [record(i, 0, bool(x)) for i, x in enumerate(answers[answers["method"].isna()]["reward"])]
    sapo = answers[answers["method"] == "SAPO"].pivot(index="seed", columns="problem", values="reward").to_numpy()
    for seed, right in enumerate(sapo):
        folder = write_evaluation(tmp_path / f"sapo/seed-{seed}", [], "summary.json")
        (folder / "config.yaml").write_text(f"data: {{name: sums}}\nrun: {{seed: {seed}}}")
        append_jsonl(folder / "test-after.jsonl", *(record(i, 0, bool(value)) for i, value in enumerate(right)))
    compare(write_evaluation(tmp_path / "untrained", before), folder.parent)
    out = capsys.readouterr().out
    assert re.search(r"^T = 0, 291 problems, 5 seeds ", out, re.MULTILINE)
    assert re.search(r"^accuracy +37\.1% +51\.9% +14\.8 points \[9\.8, 19\.7\] ", out, re.MULTILINE)
    compare(folder, folder.parent)  # by seed: one run of several is compared with itself
    out = capsys.readouterr().out
    assert re.search(r"^T = 0, 291 problems  .*\naccuracy .* 0\.0 points \[0\.0, 0\.0\] ", out, re.MULTILINE)


def test_what_cannot_be_paired_is_refused(tmp_path, capsys):
    records = [record(i, 0, False) for i in range(7)]
    a = write_evaluation(tmp_path / "a", records)
    fewer = write_evaluation(tmp_path / "fewer", records[:6])
    warmer = write_evaluation(tmp_path / "warmer", [record(i, 0, False, temperature=1.0) for i in range(7)])
    other = write_evaluation(tmp_path / "other", [record(i, 0, False, gold="1") for i in range(7)])
    lacking = write_evaluation(tmp_path / "lacking", records + [record(0, j, False) for j in range(1, 8)])
    for method in ("PSPO", "Clip"):
        folder = write_evaluation(tmp_path / f"mixed/{method}", [], "summary.json")
        surrogate = f"data: {{name: sums}}\nalgorithm: {{surrogate: {{class_path: pspo.losses.{method}}}}}"
        (folder / "config.yaml").write_text(f"{surrogate}\nrun: {{seed: {len(method)}}}")
    for paths, message in (
        ((a, folder.parent), "mixed has runs that differ in more than the seed"),
        ((a, lacking), "lacking/completions.jsonl is damaged: its problems have different numbers of completions"),
        ((a, fewer), "not of the same problems (7 and 6, in order)"),
        ((a, other), "not of the same problems"),
        ((a, warmer), "no temperature in common"),
    ):
        with pytest.raises(SystemExit, match="2"):
            compare(*paths)
        assert message in capsys.readouterr().err
