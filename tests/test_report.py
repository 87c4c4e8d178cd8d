"""`python -m pspo.report` on run folders with known numbers."""

import csv
import json
import math
import re

import matplotlib.axes
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from pspo.report.__main__ import ablation_panels, ablations, main
from pspo.report.figures import FIGURE1, Panel, draw_curves, surrogate_and_slope
from pspo.report.runs import learning, read_runs, settings_of, smoothed, t_interval, t_quantile

DEFAULTS = {"Clip": {"epsilon": 0.2, "epsilon_high": None}, "NoClip": {}, "PSPO": {"alpha": 0.1}}
T2 = 4.302652729911275  # Student's t, 2 degrees of freedom, two-sided 95%: any table


def accuracy(value, n=100):
    """Half of a summary, the true accuracy a tenth above; the intervals are the hand-made value -0.1 and +0.2."""
    result = {"accuracy": value, "ci95": [value - 0.1, value + 0.2], "n": n}
    return result | {"true_accuracy": value + 0.1, "true_accuracy_ci95": [value, value + 0.3]}


@pytest.fixture
def make_run(tmp_path):
    """Writes a run: make_run("any/name", "PSPO", 1, rewards=[0.2], after=0.5, alpha=0.2, **{"optimizer.lr": 1})."""

    def make(name, method, seed=0, rewards=(0.2, 0.4), after=0.5, before=0.3, validation=(), metrics=None, **changes):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        arguments = {key: changes.pop(key, value) for key, value in DEFAULTS[method].items()}
        config = {
            "model": {"name_or_path": "tiny"},
            "data": {"name": "sums", "limit": None},
            "algorithm": {
                "surrogate": {"class_path": f"pspo.losses.{method}", "init_args": arguments},
                "epochs": 2,
            },
            "optimizer": {"lr": 1e-5, "max_grad_norm": 1.0},
            "run": {"output_dir": str(folder), "seed": seed, "max_steps": 40},
        }
        for key, value in changes.items():
            section, field = key.split(".")
            config[section][field] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        records = [{"step": 2 * i + 2, "reward": reward} for i, reward in enumerate(rewards)]
        for record, value in zip(records, validation, strict=False):
            record["validation_reward"] = value
        for key, values in (metrics or {}).items():
            for record, value in zip(records, values, strict=True):
                record[key] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if after is not None:
            summary = {"before": accuracy(before), "after": accuracy(after), "best_model": str(folder / "best")}
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


@pytest.fixture
def make_evaluation():
    """Writes an evaluation's folder with the given greedy accuracy."""

    def make(folder, model, value, data="products", n=50):
        folder.mkdir(parents=True)
        config = {"model": {"name_or_path": model}, "data": {"name": data}, "run": {"seed": 0}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        greedy = {
            "accuracy": {"value": value, "ci95": [value - 0.01, value + 0.01]},
            "true_accuracy": {"value": value + 0.1, "ci95": [value, value + 0.2]},
        }
        results = {"model": model, "data": data, "split": "test", "n": n, "temperatures": {"0": greedy}}
        results["temperatures"]["0.6"] = greedy | {"pass@4": {"value": value + 0.2, "ci95": [value, 1]}, "samples": 4}
        (folder / "results.json").write_text(json.dumps(results))

    return make


@pytest.fixture
def report(tmp_path, capsys):
    """Runs the command; returns {(task, table, row, column): (seeds, mean, low, high)}, report.md and stderr."""

    def run(*roots):
        main([*map(str, roots or [tmp_path / "runs"]), "--output_dir", str(tmp_path / "out")])
        with (tmp_path / "out/table.csv").open(newline="") as file:
            cells = {
                (row["task"], row["table"], row["row"], row["column"]): tuple(
                    float(row[key]) if row[key] else None for key in ("seeds", "mean", "low", "high")
                )
                for row in csv.DictReader(file)
            }
        return cells, (tmp_path / "out/report.md").read_text(), capsys.readouterr().err

    return run


SUMS = "tiny on sums"
ACCURACY, TRUE = "sums test, n = 100: accuracy", "sums test, n = 100: true accuracy"


def close(cell, *expected):
    return cell == pytest.approx(expected, abs=1e-9)


# Statistics


def test_t_quantiles_are_those_of_the_tables():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    for degrees, value in table.items():
        assert t_quantile(degrees) == pytest.approx(value, abs=5e-5)
    assert t_quantile(4, level=0.99) == pytest.approx(4.6041, abs=5e-5)
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - T2 / math.sqrt(3), 2 + T2 / math.sqrt(3)), abs=1e-9)
    with pytest.raises(ValueError, match="at least 2"):
        t_interval([1.0])


def test_t_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covers = [low < 0 < high for low, high in (t_interval(rng.normal(size=4)) for _ in range(4000))]
    assert abs(np.mean(covers) - 0.95) < 0.014  # four standard errors


def test_learning_of_a_known_curve(make_run):
    rewards = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.9, 0.7, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.45]
    make_run("a", "Clip", rewards=rewards, validation=[0.1, 0.7, 0.3])
    (run,) = read_runs([make_run("b", "Clip", rewards=rewards, validation=[0.1, 0.7, 0.3])])
    found = learning(run)  # windows of two rollouts: the best is 1.0 and 0.9, the 6th and 7th
    assert found["peak reward"] == pytest.approx(0.95)
    assert found["final reward"] == pytest.approx(0.475)
    assert found["area under the curve"] == pytest.approx(sum(rewards) / 20)
    assert (found["rollouts to peak"], found["steps to peak"]) == (7, 14)
    assert found["best validation reward"] == 0.7
    assert smoothed([1.0, 2.0, 6.0]).tolist() == [1.0, 2.0, 6.0]  # up to ten rollouts: as they are


@pytest.mark.parametrize(("last", "collapsed"), [(0.5, False), (0.49, True), (0.0, True)])
def test_a_seed_has_collapsed_below_half_of_its_peak(make_run, last, collapsed):
    (run,) = read_runs([make_run("a", "Clip", rewards=[0.3, 1.0, last])])
    assert learning(run)["collapsed (%)"] is collapsed


# Tables


def test_accuracy_is_the_mean_over_seeds_with_its_interval(make_run, report):
    for seed, after in enumerate([0.5, 0.6, 0.7]):
        make_run(f"x{seed}", "Clip", seed, after=after)
    make_run("y", "PSPO", after=0.8)
    cells, text, err = report()
    half = T2 * 0.1 / math.sqrt(3)
    assert close(cells[SUMS, "Accuracy", "Clip", ACCURACY], 3, 0.6, 0.6 - half, 0.6 + half)
    assert close(cells[SUMS, "Accuracy", "Clip", TRUE], 3, 0.7, 0.7 - half, 0.7 + half)
    assert close(cells[SUMS, "Accuracy", "PSPO", ACCURACY], 1, 0.8, 0.7, 1.0)  # one seed: over problems
    assert close(cells[SUMS, "Accuracy", "tiny", ACCURACY], 0, 0.3, 0.2, 0.5)  # before training
    assert re.search(r"\| Clip +\| +3 \| +70.0 \[45.2, 94.8\] \| +60.0 \[35.2, 84.8\] \|", text)
    assert re.search(r"\| tiny +\| +– \| +40.0 \[30.0, 60.0\] \|", text)
    assert err == ""


def test_two_seeds_have_a_mean_and_no_interval(make_run, report):
    make_run("a", "Clip", 0, after=0.5)
    make_run("b", "Clip", 1, after=0.6)
    assert report()[0][SUMS, "Accuracy", "Clip", ACCURACY] == (2, 0.55, None, None)


def test_paired_differences_are_of_the_same_seed(make_run, report):
    for seed, (clip, noclip, pspo) in enumerate([(0.5, 0.5, 0.6), (0.6, 0.4, 0.7), (0.7, 0.6, 0.9)]):
        make_run(f"c{seed}", "Clip", seed, after=clip, rewards=[clip, clip])
        make_run(f"n{seed}", "NoClip", seed, after=noclip, rewards=[noclip, noclip])
        make_run(f"p{seed}", "PSPO", seed, after=pspo, rewards=[pspo, pspo])
    make_run("p7", "PSPO", 7, after=0.0)  # no partner
    make_run("elsewhere/p/seed-0", "PSPO", 0, after=0.0, **{"algorithm.epochs": 1})  # another experiment
    cells, _, _ = report()
    half = T2 * np.std([0.1, 0.1, 0.2], ddof=1) / math.sqrt(3)
    row = "PSPO (epochs=2) - Clip (epochs=2)"
    for column in (ACCURACY, TRUE, "final reward", "peak reward", "area under the curve"):
        assert close(cells[SUMS, "Paired differences", row, column], 3, 0.4 / 3, 0.4 / 3 - half, 0.4 / 3 + half), column
    half = T2 * np.std([0.1, 0.3, 0.3], ddof=1) / math.sqrt(3)
    row = "PSPO (epochs=2) - NoClip (epochs=2)"
    assert close(cells[SUMS, "Paired differences", row, ACCURACY], 3, 0.7 / 3, 0.7 / 3 - half, 0.7 / 3 + half)
    rows = {row for _, table, row, _ in cells if table == "Paired differences"}
    assert len(rows) == 3  # and NoClip - Clip, once


def test_pairs_may_differ_in_algorithm_and_optimizer_but_not_in_what_they_saw(make_run, report):
    make_run("c", "Clip", 0, after=0.5)
    make_run("s", "NoClip", 0, after=0.75, **{"algorithm.aggregation": "grpo", "optimizer.lr": 1e-4})
    make_run("p", "PSPO", 0, after=0.9, **{"data.seed": 8})
    cells, _, _ = report()
    pairs = {row: cell for (_, table, row, column), cell in cells.items()
             if table == "Paired differences" and column == ACCURACY}  # fmt: skip
    assert [(row.split()[0], cell[1]) for row, cell in pairs.items()] == [("NoClip", pytest.approx(0.25))]


def test_collapse_is_a_share_of_seeds_with_wilsons_interval(make_run, report):
    for seed, last in enumerate([0.1, 0.9, 0.9, 0.9]):
        make_run(f"c{seed}", "Clip", seed, rewards=[0.5, 1.0, last])
    cells, _, _ = report()
    assert close(cells[SUMS, "Learning", "Clip", "collapsed"], 4, 0.25, 0.0455872608, 0.6993581574)  # Wilson, 1 of 4
    assert close(cells[SUMS, "Learning", "Clip", "steps to peak"], 4, 4, 4, 4)


def test_diagnostics_are_means_over_rollouts(make_run, report):
    metrics = {"ess": [0.9, 0.7], "zero_weight_share": [0.0, 0.5], "grad_norm": [0.5, 1.5], "tv": [0.2, None]}
    make_run("a", "Clip", metrics=metrics)
    cells, _, err = report()
    row = {column: cell[1] for (_, table, _, column), cell in cells.items() if table == "Off-policy diagnostics"}
    expected = {"ess": 0.8, "zero_weight_share": 0.25, "grad_norm": 1.0, "tv": 0.2, "gradients clipped": 0.5}
    assert row == pytest.approx(expected)
    assert "1 values that were not finite" in err


def test_settings_come_from_the_configuration_alone(make_run):
    make_run("PSPO-0.1/seed-0", "Clip", 3)
    make_run("PSPO-0.1/seed-1", "PSPO", 0, alpha=0.1)
    make_run("b", "PSPO", 1, alpha=0.1)
    make_run("c", "PSPO", 0, alpha=0.4, **{"optimizer.lr": 1e-6})
    settings = settings_of(read_runs([make_run("d", "NoClip").parent]))
    assert [(setting.label, list(setting.runs)) for setting in settings] == [
        ("Clip (lr=1e-05)", [3]),
        ("NoClip (lr=1e-05)", [0]),
        ("PSPO (alpha=0.1, lr=1e-05)", [0, 1]),
        ("PSPO (alpha=0.4, lr=1e-06)", [0]),
    ]


def test_the_same_run_twice_counts_once(make_run, report, tmp_path):
    folder = make_run("a", "Clip", after=0.5)
    make_run("b", "Clip", after=0.9)
    make_run("0", "Clip", after=None)  # stopped, and then run again
    cells, _, err = report(tmp_path / "runs", folder, tmp_path / "runs/../runs")
    assert cells[SUMS, "Accuracy", "Clip", ACCURACY][:2] == (1, 0.5)
    assert re.search(r"runs/b: the same setting and seed as .*runs/a; left out", err)


def test_evaluations_go_to_their_run_or_to_the_untrained_model(make_run, make_evaluation, report, tmp_path):
    folder = make_run("a", "Clip", after=0.5)
    make_evaluation(folder / "evaluation", "moved/elsewhere/best", 0.6)
    make_evaluation(folder / "evaluation-last", str(folder / "final"), 0.1)
    make_evaluation(tmp_path / "runs/apart", str(folder / "best"), 0.7, data="quotients")
    make_evaluation(tmp_path / "runs/base", "tiny", 0.2)
    make_evaluation(tmp_path / "runs/stranger", "somebody/else", 0.4)
    cells, _, err = report()
    products, quotients = "products test, n = 50: accuracy", "quotients test, n = 50: accuracy"
    assert close(cells[SUMS, "Accuracy", "Clip", products], 1, 0.6, 0.59, 0.61)
    assert close(cells[SUMS, "Accuracy", "Clip", quotients], 1, 0.7, 0.69, 0.71)
    assert close(cells[SUMS, "Accuracy", "tiny", products], 0, 0.2, 0.19, 0.21)
    assert close(cells[SUMS, "Accuracy", "tiny", ACCURACY], 0, 0.3, 0.2, 0.5)
    assert close(cells["Other evaluations", "Accuracy", "somebody/else", products], 0, 0.4, 0.39, 0.41)
    sampled = "products test, n = 50, T = 0.6: pass@4"
    assert close(cells[SUMS, "Accuracy of samples", "Clip", sampled], 1, 0.8, 0.6, 1)
    assert close(cells[SUMS, "Accuracy of samples", "tiny", sampled], 0, 0.4, 0.2, 1)
    assert "evaluation-last: evaluates" in err


def test_latex_rows_have_the_columns_they_declare(make_run, report, tmp_path):
    make_run("a", "Clip", metrics={"ess": [1.0, 1.0]}, **{"data.name": "a_b"})
    report()
    for table in (tmp_path / "out/table.tex").read_text().split("\n\n"):
        columns = re.search(r"begin\{tabular\}\{(l(r+))\}", table)[1]
        rows = [line for line in table.splitlines() if line.endswith(r"\\")]
        assert rows
        assert {row.count(" & ") for row in rows} == {len(columns) - 1}
        assert not re.search(r"(?<!\\)[_&%](?! )", "".join(rows))


# Bad input


def test_what_cannot_be_read_is_named_and_the_rest_reported(make_run, make_evaluation, report, tmp_path):
    good = make_run("good", "Clip", rewards=[0.1, 0.2, 0.3], after=0.5)
    with (good / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')  # killed while writing
    make_evaluation(good / "evaluation", "x/best", 0.6)
    results = good / "evaluation/results.json"
    results.write_text(results.read_text()[:80])
    (make_run("silent", "Clip", 1) / "metrics.jsonl").unlink()
    make_run("running", "Clip", 2, rewards=[0.5, 0.5], after=None)
    (make_run("broken", "Clip", 3) / "config.yaml").write_text("model: [")
    (make_run("bare", "Clip", 4) / "config.yaml").write_text("model: {}")
    unseen = make_run("unseen", "NoClip")
    summary = json.loads((unseen / "summary.json").read_text())
    (unseen / "summary.json").write_text(json.dumps(summary | {"before": {}, "after": {}}))  # --run.test_limit 0
    make_evaluation(good / "evaluation-2", "x/best", 0.6)
    (good / "evaluation-2/results.json").rename(good / "evaluation-2/completions.jsonl")
    (tmp_path / "runs/empty").mkdir()
    cells, text, err = report(tmp_path / "runs", tmp_path / "runs/empty", tmp_path / "nowhere")
    assert close(cells[SUMS, "Accuracy", "Clip", ACCURACY], 1, 0.5, 0.4, 0.7)
    assert close(cells[SUMS, "Learning", "Clip", "area under the curve"], 1, 0.2, None, None)
    assert close(cells[SUMS, "Learning", "NoClip", "area under the curve"], 1, 0.3, None, None)
    for line in (
        r"good/metrics.jsonl: line 4 is cut off",
        r"evaluation/results.json: cut off or not JSON",
        r"silent: neither metrics nor results",
        r"evaluation-2: an evaluation that is not finished",
        r"running: not finished",
        r"unseen: no accuracy",
        r"broken: no readable config.yaml",
        r"bare: config.yaml says nothing of data.name, model.name_or_path, run.seed",
        r"empty: no run and no evaluation in it",
        r"nowhere: there is no such folder",
    ):
        assert re.search(line, err), line
    assert all(line.startswith("pspo.report: ") for line in err.splitlines())
    assert re.search("in the curves alone: .*running", text)


def test_tasks_are_never_mixed(make_run, report, tmp_path):
    make_run("a", "Clip", 0, after=0.5)
    make_run("b", "Clip", 1, after=0.9, **{"data.name": "roots"})
    make_run("c", "Clip", 2, after=0.7, **{"model.name_or_path": "org/other"})
    cells, text, err = report()
    assert cells[SUMS, "Accuracy", "Clip", ACCURACY][:2] == (1, 0.5)
    assert cells["tiny on roots", "Accuracy", "Clip", "roots test, n = 100: accuracy"][:2] == (1, 0.9)
    assert cells["org/other on sums", "Accuracy", "Clip", ACCURACY][:2] == (1, 0.7)
    assert "runs of 3 tasks" in err
    assert {"tiny-sums-curves.png", "tiny-roots-curves.png", "other-sums-curves.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    assert all((tmp_path / "out" / name).exists() for name in re.findall(r"\]\((\S+)\)", text))


def test_runs_that_are_not_finished_have_curves_and_no_tables(make_run, report, tmp_path):
    make_run("running", "Clip", after=None)
    cells, text, err = report()
    assert cells == {}
    assert "running: not finished" in err
    assert "![curves](curves.png)" in text
    assert (tmp_path / "out/curves.png").exists()


def test_an_ablation_of_which_nothing_is_finished_has_curves_alone(make_run, report):
    make_run("a", "PSPO", alpha=0.1, after=None)
    make_run("b", "PSPO", alpha=0.2, after=None)
    cells, text, _ = report()
    assert cells == {}
    assert "curves" in text


def test_settings_of_classes_with_one_name_stay_apart(make_run, report):
    for module in ("v1", "v2"):
        file = make_run(module, "NoClip", after=0.2 if module == "v1" else 0.8) / "config.yaml"
        file.write_text(file.read_text().replace("pspo.losses.NoClip", f"{module}.NoClip"))
    cells, _, _ = report()
    assert [cells[SUMS, "Accuracy", f"{module}.NoClip", ACCURACY][1] for module in ("v1", "v2")] == [0.2, 0.8]


def test_no_value_and_null_are_the_same_setting(make_run, report):
    make_run("old", "PSPO", 0)
    make_run("new", "PSPO", 1, **{"run.max_tokens": None})
    assert report()[0][SUMS, "Accuracy", "PSPO", ACCURACY][0] == 2


def test_a_run_inside_another_keeps_what_is_its_own(make_run, make_evaluation, report, tmp_path):
    make_run("a", "PSPO", after=0.2)
    inner = make_run("a/b", "NoClip", after=0.9)
    make_evaluation(inner / "evaluation", str(inner / "best"), 0.88)
    cells, _, _ = report()
    assert cells[SUMS, "Accuracy", "PSPO", ACCURACY][1] == 0.2
    assert cells[SUMS, "Accuracy", "NoClip", ACCURACY][1] == 0.9
    assert cells[SUMS, "Accuracy", "NoClip", "products test, n = 50: accuracy"][1] == 0.88
    assert (SUMS, "Accuracy", "PSPO", "products test, n = 50: accuracy") not in cells


def test_an_evaluation_of_what_a_run_began_with_is_not_the_run_s(make_run, make_evaluation, report, tmp_path):
    """A second stage, which begins with one `final` and returns another."""
    first = str(tmp_path / "elsewhere/final")
    run = make_run("two", "PSPO", **{"model.name_or_path": first})
    summary = json.loads((run / "summary.json").read_text()) | {"best_model": str(run / "final")}
    (run / "summary.json").write_text(json.dumps(summary))
    make_evaluation(run / "before", first, 0.11)
    cells, _, _ = report()
    title = "products test, n = 50: accuracy"
    rows = {row: mean for (_, _, row, column), (_, mean, _, _) in cells.items() if column == title}
    assert list(rows.values()) == [0.11]
    assert "PSPO" not in rows


def test_a_second_evaluation_on_the_same_data_is_named(make_run, make_evaluation, report):
    run = make_run("a", "PSPO")
    for name, value in (("e1", 0.2), ("e2", 0.6)):
        make_evaluation(run / name, str(run / "best"), value)
    cells, _, err = report()
    assert cells[SUMS, "Accuracy", "PSPO", "products test, n = 50: accuracy"][1] == 0.6
    assert "several evaluations on products test, n = 50" in err


def test_pictures_of_models_of_one_name_are_not_each_other_s(make_run, report, tmp_path):
    for stage in ("one", "two"):
        make_run(stage, "PSPO", **{"model.name_or_path": f"runs/{stage}/final"})
    _, text, _ = report()
    pictures = re.findall(r"\((.*curves\.png)\)", text)
    assert pictures == ["runs-one-final-sums-curves.png", "runs-two-final-sums-curves.png"]
    assert all((tmp_path / "out" / picture).exists() for picture in pictures)


def test_a_reward_below_zero_is_no_collapse(make_run):
    run = make_run("a", "PSPO", rewards=[-1.0] * 20)
    assert "collapsed (%)" not in learning(read_runs([run])[0])


def test_nothing_to_report_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "--output_dir", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "error: nothing to report in" in capsys.readouterr().err


# Pictures


def closed_forms(r, a):
    """J(r) - J(1) + A and dJ/dr of each method, by hand; sigma is 1 / (1 + exp(-x))."""

    def sigma(x):
        return 1 / (1 + np.exp(-x))

    def gate(tau):
        s = sigma(tau * (r - 1))
        return a * (1 + 4 / tau * (s - 0.5)), 4 * s * (1 - s) * a

    inside = r < 1.2 if a > 0 else r > 0.8
    weight = np.ones_like(r) if a > 0 else np.minimum(r, 1)
    return {
        "Clip": (np.where(inside, r, 1.2 if a > 0 else 0.8) * a, np.where(inside, a, 0.0)),
        "NoClip": (r * a, np.full_like(r, a)),
        "P3O": gate(4.0),
        "PSPO": ((0.8 * r + 0.2) * a, np.full_like(r, 0.8 * a)),
        "SAPO": gate(1.0 if a > 0 else 3.0),
        "TOPR": (a + weight * a * np.log(r), weight * a / r),
    }


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.5])
def test_figure_1_is_the_closed_forms(advantage):
    ratio = torch.linspace(0.01, 2, 400, dtype=torch.float64)  # no kink of Clip's among them
    expected = closed_forms(ratio.numpy(), advantage)
    for label, surrogate in FIGURE1.items():
        value, slope = surrogate_and_slope(surrogate, ratio, advantage)
        known_value, known_slope = expected.pop(re.split(r"\W", label)[0])
        assert np.allclose(value, known_value, rtol=0, atol=1e-12), label
        assert np.allclose(slope, known_slope, rtol=1e-12, atol=1e-12), label
    assert not expected


def test_figure_1_needs_no_runs_and_plots_what_was_tested(tmp_path, monkeypatch, capsys):
    drawn = []
    plot = matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes, "plot", lambda axes, *xy, **look: drawn.append(xy) or plot(axes, *xy, **look)
    )
    main(["--output_dir", str(tmp_path)])
    assert capsys.readouterr().out.split() == [str(tmp_path / f"surrogates.{kind}") for kind in ("png", "svg")]
    assert len(drawn) == 24  # six methods, surrogate and gradient, two signs
    for i, (x, y) in enumerate(drawn):
        expected = closed_forms(x.numpy(), 1.0 if i < 12 else -1.0)
        method = sorted(expected)[i % 12 // 2]
        assert np.allclose(y, expected[method][i % 2], rtol=1e-12, atol=1e-12), (i, method)


def test_bands_are_t_intervals_over_seeds(tmp_path, monkeypatch):
    bands = []
    fill = matplotlib.axes.Axes.fill_between
    monkeypatch.setattr(
        matplotlib.axes.Axes, "fill_between", lambda axes, *xs, **look: bands.append(xs) or fill(axes, *xs, **look)
    )
    seeds = [([2, 4], [0.1, 0.2]), ([2, 4], [0.2, 0.4]), ([2, 4, 6], [0.3, 0.9, 1.0])]
    files = draw_curves([Panel("reward", {"A": seeds, "B": seeds[:2]})], "step", 1, f"{tmp_path}/curves")
    assert [file.name for file in files] == ["curves.png", "curves.svg"]
    ((x, low, high),) = bands  # two seeds have none, nor has a step that only one seed reached
    assert list(x) == [2, 4]
    half = T2 * np.array([0.1, np.std([0.2, 0.4, 0.9], ddof=1)]) / math.sqrt(3)
    assert np.allclose(low, np.array([0.2, 0.5]) - half)
    assert np.allclose(high, np.array([0.2, 0.5]) + half)


def test_ablations_are_of_one_number_alone(make_run):
    for lr in (1e-5, 1e-6):
        for alpha in (0.1, 0.4):
            for seed in (0, 1):
                after = alpha + 100 * lr + seed / 10
                make_run(f"{lr}-{alpha}-{seed}", "PSPO", seed, alpha=alpha, after=after, **{"optimizer.lr": lr})
    root = make_run("clip", "Clip").parent
    found = ablations(settings_of(read_runs([root])))
    assert set(found) == {("PSPO", "alpha")}
    panels = {panel.title: panel.curves for panel in ablation_panels(found["PSPO", "alpha"])}
    curves = panels["sums test, n = 100: accuracy (%)"]
    assert list(curves) == ["PSPO (alpha, lr=1e-05)", "PSPO (alpha, lr=1e-06)"]
    for seed, (x, y) in enumerate(curves["PSPO (alpha, lr=1e-05)"]):
        assert x == (0.1, 0.4)
        assert y == pytest.approx((10.1 + 10 * seed, 40.1 + 10 * seed))


def test_pictures_are_transparent_deterministic_and_their_text_is_text(make_run, report, tmp_path):
    make_run("a", "Clip")
    make_run("b", "PSPO", alpha=0.1)
    make_run("c", "PSPO", alpha=0.2)
    report()
    names = ("curves", "diagnostics", "PSPO-alpha")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(before) >= {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    report()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    svg = before["curves.svg"].decode()
    assert re.search(r"<text[^>]*>PSPO \(alpha=0.2\)</text>", svg)
    assert "<dc:date>" not in svg
    image = Image.open(tmp_path / "out/curves.png")
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0))[3] == 0
