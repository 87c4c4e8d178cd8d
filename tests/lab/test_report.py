"""`pspo report` on run folders with known numbers."""

import json
import math
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import ttest_1samp

from pspo.losses import DPPO, Clip, NoClip
from pspo_lab.identities import gradient
from pspo_lab.power import estimate
from pspo_lab.report_command import main
from pspo_lab.runs import read_runs
from pspo_lab.tables import Column, Value, make_cells
from scripts.condense_runs import main as condense

DEFAULTS = {"Clip": {"epsilon": 0.2, "epsilon_high": None}, "NoClip": {}, "PSPO": {"alpha": 0.1}}
T2 = 4.302652729911275 / math.sqrt(3)  # Student's t, 2 degrees of freedom, two-sided 95%: any table
SUMS = "tiny on sums"
ACCURACY, ANYWHERE = "sums test, n = 100: accuracy", "sums test, n = 100: gold anywhere"
PRODUCTS = "products test, n = 50: accuracy"


def accuracy(value, n=100):
    """Half of a summary, gold anywhere a tenth above; the intervals are the hand-made value -0.1 and +0.2."""
    result = {"accuracy": value, "accuracy_ci95": [value - 0.1, value + 0.2], "n": n}
    return result | {"gold_anywhere": value + 0.1, "gold_anywhere_ci95": [value, value + 0.3]}


@pytest.fixture
def make_run(tmp_path):
    """Writes a run: make_run("any/name", "PSPO", 1, rewards=[0.2], after=0.5, alpha=0.2, **{"optimizer.lr": 1})."""

    def make(
        name, method, seed=0, rewards=(0.2, 0.4), after=0.5, metrics=None, module="pspo.losses", ended=(), own=None,
        **changes,
    ):  # fmt: skip
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        arguments = {key: changes.pop(key, value) for key, value in (own or DEFAULTS.get(method, {})).items()}
        surrogate = {"class_path": f"{module}.{method}", "init_args": arguments}
        config = {
            "model": {"name_or_path": "tiny"},
            "data": {"name": "sums", "limit": None},
            "algorithm": {"surrogate": surrogate, "epochs": 2},
            "reward": {"functions": [{"class_path": "pspo.tasks.MathReward"}]},
            "optimizer": {"lr": 1e-5, "max_grad_norm": 1.0},
            "run": {"output_dir": str(folder), "seed": seed, "max_steps": 40},
        }
        for key, value in changes.items():
            section, field = key.split(".", 1)
            config.setdefault(section, {})[field] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        table = {"step": range(2, 2 * len(rewards) + 2, 2), "reward": rewards} | (metrics or {})
        records = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if after is not None:
            summary = {"before": accuracy(0.3), "after": accuracy(after), "best_model": str(folder / "best")}
            summary |= {"seconds": 1.5, "best_step": 2} | dict(ended)
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return make


@pytest.fixture
def make_evaluation():
    """Writes an evaluation's folder with the given greedy accuracy."""

    def make(folder, model, value, data="products", of_one=False, step=None):
        folder.mkdir(parents=True)
        ci95 = None if of_one else [value - 0.01, value + 0.01]
        greedy = {"samples": 1, "accuracy": value, "accuracy_ci95": ci95, "gold_anywhere": value, "mean_reward": value}
        sampled = {"samples": 4, "accuracy": {"value": value}, "pass@4": {"value": value + 0.2, "ci95": [value, 1]}}
        temperatures = {"0": greedy, "0.6": sampled}  # the latter as earlier commits wrote it
        results = {"model": model, "data": data, "split": "test", "n": 50, "step": step, "temperatures": temperatures}
        (folder / "results.json").write_text(json.dumps(results))

    return make


@pytest.fixture
def report(tmp_path, capsys, monkeypatch):
    """Runs the command; returns {(task, table, row, column): (seeds, mean, low, high)}, report.txt and stderr."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*roots):
        main([*map(str, roots or ["~/runs"]), "--output_dir", "~/out"])
        table = pd.read_csv(tmp_path / "out/table.csv").astype(object)
        lines = table.where(table.notna(), None).to_numpy().tolist()
        cells = {tuple(line[:4]): line[4:8] for line in lines}
        return cells, (tmp_path / "out/report.txt").read_text(), capsys.readouterr().err

    return run


def close(cell, *expected):
    return list(cell) == pytest.approx(list(expected), abs=1e-9)


# Numbers


@pytest.mark.parametrize(("end", "collapsed"), [([0.5, 0.45], 0), ([0.5, 0.449], 1), ([0.0, 0.0], 1)])
def test_learning_of_a_known_curve(make_run, report, end, collapsed):
    rewards = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.9, *[0.5] * 11, *end]
    make_run("a", "Clip", rewards=rewards, metrics={"validation_reward": [0.1, 0.7, *[0.3] * 18]})
    cells, _, _ = report()
    columns = ("final reward", "peak reward", "mean reward", "collapsed", "best trained validation reward",
               "final validation reward", "returned untrained")  # fmt: skip
    learning = [cells[SUMS, "Learning", "Clip", column][1] for column in columns]
    expected = [sum(end) / 2, 0.95, sum(rewards) / 20, collapsed, 0.7, 0.3, 0]
    assert learning == pytest.approx(expected)  # windows of two rollouts: the best is 1.0 and 0.9, the 6th and 7th


def test_collapses_and_untrained_models_are_shares_of_seeds_without_an_interval(make_run, report):
    for seed, last in enumerate([0.1, 0.9, 0.9, 0.9]):
        ended = {"best_step": 2 * (seed == 3), "final": accuracy(0.1 * seed)}
        make_run(f"c{seed}", "Clip", seed, rewards=[0.5, 1.0, last], after=0.3, ended=ended)
    make_run("negative", "PSPO", rewards=[-1.0, -1.0])
    cells, _, _ = report()
    assert cells[SUMS, "Learning", "Clip", "collapsed"] == [4, 0.25, None, None]  # 1 of 4
    assert cells[SUMS, "Learning", "Clip", "returned untrained"] == [4, 0.75, None, None]
    assert (SUMS, "Learning", "PSPO", "collapsed") not in cells  # half of a negative peak is above it
    assert close(cells[SUMS, "Accuracy", "Clip", ACCURACY][:2], 4, 0.3)
    assert close(cells[SUMS, "Accuracy", "Clip", "sums test, n = 100: final accuracy"][:2], 4, 0.15)


def test_accuracy_is_the_mean_over_seeds_with_its_interval(make_run, report):
    for seed, after in enumerate([0.5, 0.6, 0.7]):
        make_run(f"x{seed}", "Clip", seed, after=after)
        if seed < 2:
            make_run(f"z{seed}", "NoClip", seed, after=after)
    make_run("y", "PSPO", after=0.8)
    cells, _, err = report()
    half = 0.1 * T2
    assert close(cells[SUMS, "Accuracy", "Clip", ACCURACY], 3, 0.6, 0.6 - half, 0.6 + half)
    assert close(cells[SUMS, "Accuracy", "Clip", ANYWHERE], 3, 0.7, 0.7 - half, 0.7 + half)
    assert cells[SUMS, "Accuracy", "NoClip", ACCURACY] == [2, 0.55, None, None]
    assert close(cells[SUMS, "Accuracy", "PSPO", ACCURACY], 1, 0.8, 0.7, 1.0)  # one seed: over problems
    assert close(cells[SUMS, "Accuracy", "tiny", ACCURACY], 0, 0.3, 0.2, 0.5)  # before training
    assert err == ""


def test_paired_differences_are_of_the_same_seed_and_experiment(make_run, report):
    for seed, (clip, noclip, smoothed_) in enumerate([(0.5, 0.5, 0.6), (0.6, 0.4, 0.7), (0.7, 0.6, 0.9)]):
        for method, value in (("Clip", clip), ("NoClip", noclip), ("PSPO", smoothed_)):
            make_run(f"{method}{seed}", method, seed, after=value, rewards=[value, value])
    make_run("p7", "PSPO", 7, after=0.0)  # no partner
    make_run("elsewhere/p/seed-0", "PSPO", 0, after=0.0, **{"algorithm.epochs": 1})  # another experiment
    make_run("other", "PSPO", 0, after=0.9, **{"data.seed": 8})  # saw other prompts
    for seed in range(2):  # a second experiment with a baseline of the first
        make_run(f"second/Clip/seed-{seed}", "Clip", seed, after=0.5 + seed / 10)
        make_run(f"second/SAPO/seed-{seed}", "SAPO", seed, after=0.8)
    cells, _, _ = report()
    pairs = {key[2:]: cell for key, cell in cells.items() if key[1] == "Paired differences"}
    assert close(pairs.pop(("SAPO - Clip", ACCURACY)), 2, 0.25, None, None)
    pairs = {key: cell for key, cell in pairs.items() if key[0] != "SAPO - Clip"}
    row, noclip = (f"PSPO - {method}" for method in ("Clip", "NoClip"))
    assert {row for row, _ in pairs} == {row, noclip, "NoClip - Clip"}
    half = T2 * np.std([0.1, 0.1, 0.2], ddof=1)
    for column in (ACCURACY, ANYWHERE, "final reward", "mean reward"):
        assert close(pairs[row, column], 3, 0.4 / 3, 0.4 / 3 - half, 0.4 / 3 + half), column
    half = T2 * np.std([0.1, 0.3, 0.3], ddof=1)
    assert close(pairs[noclip, ACCURACY], 3, 0.7 / 3, 0.7 / 3 - half, 0.7 / 3 + half)


def test_differences_are_corrected_for_their_number(make_run, report, tmp_path):
    rng, values = np.random.default_rng(0), {}
    for seed in range(5):
        for i, method in enumerate(("Clip", "NoClip", "PSPO")):
            values[method, seed] = 0.2 + 0.1 * i + 0.02 * rng.random()
            make_run(f"{method}{seed}", method, seed, after=values[method, seed], rewards=rng.random(4).tolist())
    _, text, _ = report()
    table = pd.read_csv(tmp_path / "out/table.csv").query("table == 'Paired differences'").reset_index()
    n, row = len(table), table[(table["row"] == "PSPO - Clip") & (table["column"] == ACCURACY)].iloc[0]
    differences = [values["PSPO", seed] - values["Clip", seed] for seed in range(5)]
    assert row["p"] == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert f"for all {n} of these tables" in " ".join(text.split())
    for i in range(n):  # the smallest level at which Holm's procedure rejects this one: it stops at the first failure
        levels = [(n - k) * p for k, p in enumerate(sorted(table["p"])) if p <= table["p"][i]]
        assert table["holm"][i] == pytest.approx(min(1, max(levels)))
    lines = [line for line in text.splitlines() if line.startswith(("NoClip - Clip", "PSPO - "))]
    assert sum(line.count("*") for line in lines) == (table["holm"] < 0.05).sum() > 0


# Settings and evaluations


def test_labels_have_the_switches_that_differ_unless_they_are_at_their_default(make_run):
    for alpha in (0.1, 0.4):
        make_run(f"pspo-{alpha}", "PSPO", alpha=alpha, **{"model.lora": {"alpha": None}})
    runs = read_runs([make_run("clip", "Clip", **{"optimizer.name": "adamw"}).parent])
    assert sorted(runs.labels.values()) == ["Clip", "PSPO", "PSPO (alpha=0.4)"]
    make_run("noclip", "NoClip", **{"algorithm.epochs": 1, "algorithm.aggregation": "grpo"})
    make_run("older", "NoClip", **{"algorithm.of_an_older_version": 1})
    runs = read_runs([make_run("sgd", "Clip", **{"optimizer.name": "sgd"}).parent])
    assert sorted(runs.labels.values()) == [
        "Clip", "Clip (optimizer.name=sgd)", "NoClip (aggregation=grpo, epochs=1)", "NoClip (of_an_older_version=1)",
        "PSPO", "PSPO (alpha=0.4)",
    ]  # fmt: skip


def test_a_label_names_rewards_as_a_person_would(make_run):
    math = {"class_path": "pspo.tasks.MathReward", "init_args": {"tolerance": 1e-6, "marker": "last"}}
    first = math | {"init_args": math["init_args"] | {"marker": "first"}}
    both = [math, {"class_path": "pspo.tasks.FormatReward", "init_args": {}}]
    for name, functions, weights in (("a", [first], None), ("b", both, [1.0, 0.1]), ("c", both, [1.0, 0.5])):
        folder = make_run(name, "Clip", **{"reward.functions": functions, "reward.weights": weights})
    assert sorted(read_runs([folder.parent]).labels.values()) == [
        "Clip (functions=MathReward + 0.1 FormatReward)", "Clip (functions=MathReward + 0.5 FormatReward)",
        "Clip (functions=MathReward(marker=first))",
    ]  # fmt: skip


def test_one_algorithm_under_two_names_is_named_and_who_won_comes_first(make_run, report):
    """PSPO(0.1) with a KL penalty of 0.09 is NoClip with 0.1, as is PSPO(0.5) with 0.05 unless a norm is clipped."""
    for seed in range(3):
        for method, alpha, beta, norm in (("PSPO", 0.1, 0.09, 0.9), ("NoClip", 0, 0.1, 0.9), ("PSPO", 0.5, 0.05, 1.5)):
            after = 0.5 + 0.1 * seed + 0.02 * (alpha == 0.1) * (-1) ** seed
            metrics = {"grad_norm": [0.4, 0.4], "grad_norm_max": [0.4, norm]}  # of the last step, of all steps
            own = {"alpha": alpha} if alpha else {}
            make_run(f"{alpha}{seed}", method, seed, after=after, metrics=metrics, own=own, **{"algorithm.beta": beta})
    _, text, _ = report()
    verdict = " ".join(text.split("\n\n")[0].split())
    alike = [0.5, 0.6, 0.7, 0.52, 0.58, 0.72]  # NoClip and PSPO(0.1)
    floor = f"{100 * math.sqrt(2 * (6 * np.var(alike) + 2 * 0.01) / 7):.1f} points"
    assert re.search(rf"differ by {floor} \(.*\. NoClip \(beta=0.1\) and PSPO \(beta=0.09\) are one algo", verdict)
    assert re.match(r"Result: PSPO \(.*\) came first with 60\.7% \(untrained 30\.0%\) accuracy on sums test", verdict)
    apart = [(DPPO(epsilon=0.6), NoClip()), (Clip(0.26), Clip(0.28)), (Clip(0.01), Clip(1e-3)), (Clip(delta=9), Clip())]
    assert not any(np.array_equal(gradient(one, False), gradient(other, False)) for one, other in apart)
    assert "That cannot be told from luck: 0.7 points [-5.1, 6.4]; 3 seeds would detect 7.5 points." in verdict
    assert Column("", "accuracy").difference_text(-4e-4, (-0.2, 0.1)) == "0.0 points [-20.0, 10.0]"  # not -0.0


def test_a_winner_may_be_behind_on_shared_seeds(make_run, report):
    for seed in range(6):
        make_run(f"c{seed}", "Clip", seed, after=0.4 if seed < 3 else 0.8)
        if seed < 3:
            make_run(f"n{seed}", "NoClip", seed, after=0.5 + 0.001 * seed)
    make_run("fewer-problems", "Clip", 7, ended={"after": accuracy(1.0, n=50)})
    verdict = " ".join(report()[1].split())
    assert re.search(r"^Result: Clip came first with 60\.0% .* n = 100, .* it is behind: -10\.1 points", verdict)


def test_a_class_of_a_user_s_is_named_by_all_arguments_and_files_between_runs_are_left_out(make_run, report):
    for width in (0.1, 0.2):
        own = {"a_parameter_of_many_letters": "and_a_value", "width": width, "reward": f"mine{width}.score"}
        folder = make_run(f"own/width={width}/seed-0", "Long", module="mine", own=own)
        folder.with_suffix(".log").touch()
    cells, text, _ = report(*folder.parent.parent.glob("*/*"))
    assert max(map(len, text.splitlines())) < 120
    assert "Holm" not in text  # there is no comparison
    assert {row for _, _, row, _ in cells} - {"tiny"} == {
        f"Long (a_parameter_of_many_letters=and_a_value, reward=mine{width}.score, width={width})"
        for width in (0.1, 0.2)
    }


def test_evaluations_go_to_their_run_or_to_the_untrained_model(make_run, make_evaluation, report, tmp_path):
    folder, runs = make_run("a", "Clip", after=0.5), tmp_path / "runs"
    make_evaluation(folder / "evaluation", "moved/elsewhere/best", 0.6)
    make_evaluation(folder / "evaluation-last", str(folder / "final"), 0.1)
    make_evaluation(folder / "evaluation-middle", str(folder / "checkpoints/step-000002"), 0.3)
    make_evaluation(folder / "z-stale", str(folder / "best"), 0.9, step=1)  # the run got longer: its best is step 2
    make_evaluation(folder / "before", "tiny", 0.2)  # what the run began with is not the run's
    spelt = make_run("spelt", "SAPO", **{"model.name_or_path": "models/best"})  # what it began with, spelt otherwise
    make_evaluation(spelt / "before", "models/best/", 0.9)
    make_evaluation(runs / "apart", str(folder / "best"), 0.7, data="sums")
    make_evaluation(runs / "stranger", "somebody/else", 0.4, of_one=True)  # of one problem: without an interval
    inner = make_run("a/b", "NoClip", after=0.9)  # a run inside another keeps what is its own
    make_evaluation(inner / "e1", str(inner / "best"), 0.1)
    make_evaluation(inner / "e2", str(inner / "best"), 0.88)
    cells, _, err = report()
    assert close(cells[SUMS, "Accuracy", "Clip", PRODUCTS], 1, 0.6, 0.59, 0.61)
    assert close(cells[SUMS, "Accuracy", "Clip", "sums test, n = 50: accuracy"], 1, 0.7, 0.69, 0.71)
    assert close(cells[SUMS, "Accuracy", "tiny", PRODUCTS], 0, 0.2, 0.19, 0.21)
    assert close(cells[SUMS, "Accuracy", "NoClip", PRODUCTS], 1, 0.88, 0.87, 0.89)
    assert {
        key[2]: cell[1] for key, cell in cells.items() if key[0] == "models/best on sums" and key[3] == PRODUCTS
    } == {"models/best": 0.9}
    assert cells["Other evaluations", "Accuracy", "somebody/else", PRODUCTS] == [0, 0.4, None, None]
    sampled = "products test, n = 50, T = 0.6: pass@4"
    assert close(cells[SUMS, "Accuracy", "Clip", sampled], 1, 0.8, 0.6, 1)
    assert close(cells[SUMS, "Accuracy", "tiny", sampled], 0, 0.4, 0.2, 1)
    assert close(cells[SUMS, "Accuracy", "Clip", PRODUCTS.replace("acc", "final acc")], 1, 0.1, 0.09, 0.11)
    assert "evaluation-middle: evaluates" in err
    assert "z-stale: evaluates step 1, but the run has replaced this model by that of step 2" in err


def test_a_run_is_condensed_with_its_answers(make_run, make_evaluation, tmp_path):
    run = make_run("e/seed-1", "Clip", 1)
    for folder, model in ((run, run / "best"), (tmp_path / "runs/e", "tiny")):
        make_evaluation(folder / "asdiv", str(model), 0.6)
        records = [{"problem": 1, "sample": 0, "temperature": t, "completion": f"{t}", "reward": t} for t in (0, 0.6)]
        (folder / "asdiv/completions.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    condense([f"{tmp_path}/runs", f"--output={tmp_path}/runs.csv", "--answers", "asdiv"])
    row = pd.read_csv(tmp_path / "runs.csv").loc[0]
    assert row[["seed", "reward", "asdiv_reward"]].tolist() == [1, 0.3, 60]
    answers = pd.read_parquet(tmp_path / "runs.parquet").astype(object).fillna("").drop(columns="experiment")
    expected = [[t, 1, 0, f"{t}", t, "asdiv", *of_run] for of_run in (["Clip", 1], [""] * 2) for t in (0, 0.6)]
    assert answers.values.tolist() == expected


def test_runs_of_a_search_and_forks_of_other_parents_are_settings_of_their_own(make_run, tmp_path):
    for seed in (0, 1):
        for parent in ("a", "b"):
            make_run(f"e/{parent}/seed-{seed}", "Clip", seed, **{"run.fork_from": f"runs/{parent}/seed-{seed}"})
        make_run(f"e/one-parent/seed-{seed}", "Clip", seed, **{"run.fork_from": "runs/c/seed-7"})
        make_run(f"e/plain/seed-{seed + 2}", "Clip", seed + 2)
        make_run(f"e-search/plain/seed-{seed}", "Clip", seed)
    assert Counter(read_runs([tmp_path / "runs"]).labels.values()) == {
        "Clip": 2, "Clip (search=True)": 2,
        **{f"Clip (forked=runs/{parent}/seed-*)": 2 for parent in "abc"},
    }  # fmt: skip


def test_tasks_and_limits_are_never_mixed(make_run, report):
    make_run("a", "Clip", 0, after=0.5)
    make_run("b", "Clip", 1, after=0.9, **{"data.name": "roots"})
    make_run("c", "Clip", 1, after=0.2, **{"data.name": "file", "data.path": "mine"})
    for limit, before in ((64, 0.1), (512, 0.2)):
        ended = {"before": accuracy(before)}
        settings = {"data.name": "limits", "rollout.max_completion_tokens": limit}
        make_run(f"{limit}", "Clip", after=0.5, ended=ended, **settings)
        settings = {"data.name": "prompts", "data.system_prompt": f"s{limit}"}
        make_run(f"prompts-{limit}", "Clip", after=0.5, ended=ended, **settings)
    cells, _, _ = report()
    assert cells[SUMS, "Accuracy", "Clip", ACCURACY][:2] == [1, 0.5]
    assert cells["tiny on roots", "Accuracy", "Clip", "roots test, n = 100: accuracy"][:2] == [1, 0.9]
    assert cells["tiny on mine", "Accuracy", "Clip", "mine test, n = 100: accuracy"][:2] == [1, 0.2]
    for limit, before in ((64, 0.1), (512, 0.2)):
        column = f"limits test, n = 100, {limit} tokens: accuracy"
        assert cells["tiny on limits", "Accuracy", "tiny", column][1] == before
        row = f"tiny, as in Clip (system_prompt=s{limit})"
        assert cells["tiny on prompts", "Accuracy", row, "prompts test, n = 100: accuracy"][1] == before


def test_a_mean_is_over_the_problems_of_its_interval():
    answers = ([0, 1, math.nan], [0, 1, 1], [1, 1, 0])
    values = [Value(None, "a", Column("", "reward"), np.nanmean(of), answers=pd.Series(of)) for of in answers]
    (cell,) = make_cells(values)
    assert cell.mean == pytest.approx(4 / 6)
    assert cell.interval == pytest.approx(estimate(np.array(answers)[:, :2]).interval())


def test_whatever_cannot_be_read_is_named_and_the_rest_reported(make_run, make_evaluation, report, tmp_path):
    good = make_run("good", "Clip", rewards=[0.1, 0.2, 0.3], after=0.5)
    with (good / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')  # killed while writing: as if it had not begun
    make_evaluation(good / "e1", "x/best", 0.6)
    (good / "e1/results.json").write_text('{"model": "x/be')
    (make_run("silent", "Clip", 1) / "metrics.jsonl").unlink()
    make_run("running", "Clip", 2, rewards=[0.5, 0.5], after=None)
    (make_run("broken", "Clip", 3) / "config.yaml").write_text("model: [")
    (make_run("torn", "Clip", 5) / "metrics.jsonl").write_text('{"step": 2\n{"step": 4}\n')
    (make_run("stopped", "Clip", 0, after=None, rewards=[0.9]))  # and then run again
    unseen = make_run("unseen", "NoClip")
    (unseen / "summary.json").write_text('{"before": {}, "after": {}, "best_step": 2}')  # --run.test_limit 0
    cells, _, err = report(tmp_path / "runs", good)
    assert close(cells[SUMS, "Accuracy", "Clip", ACCURACY], 1, 0.5, 0.4, 0.7)
    assert close(cells[SUMS, "Learning", "Clip", "mean reward"], 1, 0.2, None, None)
    assert close(cells[SUMS, "Learning", "NoClip", "mean reward"], 1, 0.3, None, None)
    for line in ("e1: .*damaged", "broken: .*damaged", "torn: .*damaged", "stopped: the same setting and seed"):
        assert re.search(line, err), line


# Text of others

TEXT = (  # the specials of HTML, Markdown, links, TeX, terminals, paths, and of our own texts
    "# head\n> [here](javascript:alert(1)) ![](http://example.com/x.svg) [x][a] <http://example.com>\n"
    "<script>alert(1)</script><img src=x onerror=alert(1)> &lt;b&gt; &amp; \"'\n"
    "\x1b[2J\x1b]0;title\x07\x9b31m red\x00\x08\r\x85\u2028\u202eleft\u2066\n"
    "\\input{/etc/passwd} $\\frac$ $x$ 50% & # _ { } ~ ^^M\n\\write18{ls}"
)  # fmt: skip


def test_what_others_wrote_is_shown_and_does_nothing(make_run, make_evaluation, tmp_path, capsys):
    """Runs and evaluations that have a text in every place."""
    shared = {"model.name_or_path": TEXT, "data.name": TEXT, "optimizer.max_grad_norm": TEXT}
    for seed in range(3):
        make_run(f"base-{seed}", "NoClip", seed, own={}, **shared)
        make_run(f"mine-{seed}", TEXT, seed, module="mine", own={TEXT: seed + 0.5, "text": TEXT}, **shared)
    make_run("named", "Clip", after=None, metrics={TEXT: [0.0, 1.0]}, **shared | {"data.path": TEXT})
    folder = make_run("alpha", "PSPO", alpha=TEXT, **shared | {"rollout." + TEXT: [TEXT]})
    make_run(re.sub("[/\0]", "", TEXT)[-100:], "Clip", TEXT, **shared)
    make_evaluation(folder / "evaluation", TEXT, 0.5, data=TEXT)
    make_evaluation(tmp_path / "runs/other", f"{TEXT}!", 0.5, data=TEXT)
    before = {*tmp_path.rglob("*")}
    main([str(tmp_path / "runs"), "--output_dir", str(tmp_path / "out")])
    assert {path.parent for path in {*tmp_path.rglob("*")} - before} == {tmp_path / "out", tmp_path}
    files = {path.name: path.read_text("utf-8") for path in (tmp_path / "out").iterdir()}
    printed = "".join(capsys.readouterr())
    assert files.keys() == {"report.txt", "table.csv"}
    for content in (printed, *files.values()):
        assert all(letter.isprintable() for letter in content.replace("\n", ""))
    shown = re.findall(r"[a-z]{3,}", " ".join(TEXT.split()))
    assert all(word in content for word in shown for content in (printed, files["report.txt"]))
