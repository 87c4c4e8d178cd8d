"""Results pages: running their scripts changes nothing, and their main tables are what the runs say, computed anew."""

import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

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


# The main table of every page, without the scripts


def table(page: str, name: str) -> dict[str, list[str]]:
    """Cells of a table by its rows' first cells."""
    text = (RESULTS / page / "README.md").read_text(encoding="utf-8")
    lines = text.partition(f"<!-- table: {name} -->")[2].partition("<!-- /table -->")[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {first: cells for first, *cells in rows}


def interval(values) -> list[float]:
    """Mean and ends of the 95% t-interval."""
    values = np.asarray(values, dtype=float)
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


def assert_shown(cell: str, numbers: list[float]) -> None:
    """A cell's numbers are these, to the last digit that it shows."""
    shown = re.findall(r"[-+]?\d+(?:\.\d+)?", cell)
    assert len(shown) == len(numbers), (cell, numbers)
    for text, number in zip(shown, numbers, strict=True):
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(number, abs=0.501 * 10**-digits), (cell, numbers)


def greedy_accuracy(page: str, stage: str) -> pd.Series:
    """Accuracy in percent by experiment, setting and seed, of models returned (after) or final."""
    values = pd.read_parquet(RESULTS / page / "runs.parquet").query(
        "measure == 'accuracy' and temperature == '0' and evaluation == 'summary'"
    )
    values = values[values["group"].isna() & (values["stage"] == stage)]
    return 100 * values.set_index(["experiment", "setting", "seed"])["value"].sort_index()


def rollouts(page: str, column: str) -> pd.Series:
    """A metric of every rollout that has it, in order, by experiment, setting and seed."""
    metrics = pd.read_parquet(RESULTS / page / "runs.parquet").sort_values("step").dropna(subset=column)
    return metrics.set_index(["experiment", "setting", "seed"])[column]


def final_rewards(page: str) -> pd.Series:
    return rollouts(page, "validation_reward").groupby(level=[0, 1, 2]).last()


def test_tiny_protocol():
    shown = table("tiny-protocol", "accuracy")
    for stage, column in (("after", 0), ("final", 1)):
        for (model, setting), values in greedy_accuracy("tiny-protocol", stage).groupby(level=[0, 1]):
            (row,) = (name for name in shown if name.split(",")[0] == setting.split(" ")[0])
            assert len(values) == 5
            assert_shown(shown[row][column + 3 * (model == "tiny-math")], interval(values))
    assert len(shown) == 6


def test_tiny_control():
    accuracy, area = greedy_accuracy("tiny-control", "final"), rollouts("tiny-control", "reward")
    area, validation = area.groupby(level=[0, 1, 2]).mean(), final_rewards("tiny-control")
    shown = table("tiny-control", "differences")
    for name in ("Clip", "NoClip 1 epoch"):  # rows with clipping come last, and are those that are left by this name
        setting = name.replace(" 1 epoch", "") + (" (epochs=1, " if "epoch" in name else " (") + "max_grad_norm=0.1)"
        for part, experiment in enumerate(("tokens", "steps")):
            for column, values in enumerate((area, validation, accuracy)):
                apart = values[experiment, setting] - values[experiment, "NoClip (max_grad_norm=0.1)"]
                assert len(apart) == 8
                assert_shown(shown[name][1 + 3 * part + column], interval(apart))


def test_tiny_comparisons():
    final, returned = (greedy_accuracy("tiny-comparisons", stage) for stage in ("final", "after"))
    rewards, shown = final_rewards("tiny-comparisons"), table("tiny-comparisons", "reuse")
    for setting, cells in shown.items():
        for cell, values in zip(cells[:3], (final, rewards, returned), strict=True):
            assert_shown(cell, interval(values["off-policy", setting]))
    assert len(shown) == 12


def test_smollm2():
    """Wilson's intervals, from the share and the number of problems."""
    values = pd.read_parquet(RESULTS / "smollm2/runs.parquet")
    values = values[(values["measure"] == "accuracy") & values["group"].isna()].set_index("evaluation")
    shown = table("smollm2", "evaluations")
    for row, evaluation in (("before", "before"), ("seed 0, after stage 2", "seed-0"),
                            ("seed 1, after stage 2", "seed-1")):  # fmt: skip
        for column, name in ((0, "word-problems"), (4, "gsm8k")):
            share, n = values.loc[f"{evaluation}-{name}", ["value", "n"]].astype(float)
            z = stats.norm.ppf(0.975)
            centre, half = share + z**2 / (2 * n), z * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
            ends = [(centre + sign * half) / (1 + z**2 / n) for sign in (-1, 1)]
            assert_shown(shown[row][column], [100 * share, 100 * ends[0], 100 * ends[1]])


def test_off_policy():
    """Every cell of cells.csv that is on the page's grid, and the best of four settings."""
    rewards = final_rewards("off-policy")
    cells = pd.read_csv(RESULTS / "off-policy/cells.csv").query("arm == 'coupled'")
    cells = cells.set_index(["model", "epochs", "lr", "method", "lag"])
    best: dict[tuple[str, str, str], float] = {}
    seen = 0
    for (experiment, setting), values in rewards.groupby(level=[0, 1]):
        model, _, epochs = experiment.removesuffix("-others").partition("-")
        if model not in ("base", "math"):
            continue
        arguments = dict(re.findall(r"(\w+)=([^,)]+)", setting))
        method = "LUSPO" if arguments.get("aggregation") == "dr_grpo" else setting.split(" ")[0]
        cell = cells.loc[(f"tiny-{model}", int(epochs), float(arguments["lr"]), method, int(arguments["lag"]))]
        assert np.allclose(cell[["final", "low", "high"]].astype(float), interval(values), rtol=0, atol=1e-5)
        key = (method, model, arguments["lag"])
        best[key] = max(best.get(key, 0.0), values.mean())
        seen += 1
    assert seen == len(cells) == 13 * 5 * 4 * 2
    for method, (_, *shown) in table("off-policy", "best").items():
        if method != "untrained":
            means = [shown[column].split(" ")[0] for column in (0, 1, 3, 4)]
            for text, key in zip(means, itertools.product(("base", "math"), "08"), strict=True):
                assert_shown(text, [best[method, *key]])


def test_off_policy_controls():
    rewards, shown = final_rewards("off-policy-controls"), table("off-policy-controls", "paths")
    for row, cells in shown.items():
        method, _, lag = row.partition(", lag ")
        arguments = (["aggregation=grpo"] if method == "TOPR" else []) + (["lag=8"] if lag == "8" else [])
        setting = f"{method} ({', '.join(arguments)})" if arguments else method
        values = np.array([rewards[f"path-{epochs}", setting].sort_index() for epochs in (1, 2, 4, 8)])  # (4, seeds)
        for cell, mean in zip(cells[:4], values.mean(axis=1), strict=True):
            assert_shown(cell, [mean])
        assert values.shape == (4, 8)
        assert_shown(cells[4], interval(np.polyfit([0, 1, 2, 3], values, 1)[0]))
    assert len(shown) == 8


@pytest.mark.parametrize(("model", "lag", "column"), [("tiny-base", 8, 0), ("tiny-base", 0, 1), ("tiny-math", 8, 2)])
def test_equal_movement(model, lag, column):
    """Both checkpoints of a run are one value; Holm's stars over a model's surrogates at a lag."""
    moves = pd.read_csv(RESULTS / "equal-movement/moves.csv").query("model == @model and lag == @lag")
    moves = moves[(moves["stage"] == "first") & (abs(moves["kl"] / moves["aim"] - 1) <= 0.02)]
    correct = moves.set_index(["surrogate", "run", "rollouts"])["correct"]
    shown = {name: cells[column] for name, cells in table("equal-movement", "differences").items() if cells[column]}
    p_values = {}
    for name, cell in shown.items():
        base = "NoClip:grpo" if name.endswith(":grpo") else "NoClip"
        apart = correct[name] if name == base else correct[name] - correct[base]
        by_run = apart.groupby("run").mean().dropna()
        assert len(by_run) == 10
        assert_shown(cell.removesuffix(" itself").rstrip("*"), interval(by_run))
        if not name.startswith("NoClip"):
            p_values[name] = stats.ttest_1samp(by_run, 0).pvalue
    starred = {name for name, cell in shown.items() if cell.endswith("*")}
    for rank, name in enumerate(sorted(p_values, key=p_values.get)):
        assert (name in starred) == (p_values[name] * (len(p_values) - rank) < 0.05)


@pytest.mark.parametrize(("model", "metric"), [("tiny-base", "adam"), ("tiny-math", "plain")])
def test_gradient_bias(model, metric):
    lines = pd.read_parquet(RESULTS / "gradient-bias/gradients.parquet")
    lines = lines.query("model == @model and metric == @metric and lag == 8").set_index(["surrogate", "run"])
    cosine, signal = lines["dot"] / (lines["norm2"] * lines["target2"]) ** 0.5, lines["norm2"] / lines["second"]
    shown = table("gradient-bias", model)
    assert shown.keys() == set(lines.index.unique("surrogate"))
    for name, (_, of_cosine, apart, _, _, *rest) in shown.items():
        assert_shown(of_cosine, interval(cosine[name]))
        if apart:
            base = "NoClip:grpo" if name.endswith(":grpo") else "NoClip"
            assert_shown(apart, interval(cosine[name] - cosine[base]))
        means = (signal[name].mean(), (cosine[name] * signal[name] ** 0.5).mean(), lines["back"][name].mean())
        for cell, mean in zip(rest, means, strict=True):
            assert_shown(cell, [mean])


@pytest.mark.parametrize("model", ["base", "math"])
def test_alarms(model):
    """AUCs at the same update, pair by pair, with the seeds drawn again for the intervals."""
    lines = pd.read_parquet(RESULTS / "alarms/alarms.parquet").query(f"model == 'tiny-{model}' and treatment.isna()")
    runs = {name: of.sort_values("update").set_index("update") for name, of in lines.groupby("run")}
    collapse = {}
    for name, of in runs.items():
        rewards = of["reward"].tolist()
        low = [i > 0 and reward <= max(rewards[:i]) - 0.15 for i, reward in enumerate(rewards)]
        collapse[name] = next((i + 1 for i in range(len(low) - 1) if low[i] and low[i + 1]), 1000)
        of["drop"] = of["reward"].cummax() - of["reward"]
    seeds = {name: int(name.rpartition(" ")[2]) for name in runs}
    first_seed = min(seeds.values())
    draws = np.random.default_rng(1).multinomial(16, np.full(16, 1 / 16), 2000)  # (draws, seeds)
    for alarm, sign in (("ess_sequence", -1), ("kl", 1), ("cosine", -1), ("drop", 1)):
        right, total = np.zeros((2, 16, 16))
        for one, other in itertools.permutations(runs, 2):
            if runs[one]["method"].iloc[0] == runs[other]["method"].iloc[0]:
                for update in range(1, lines["update"].max() - 5):
                    if update < collapse[one] <= update + 5 < collapse[other]:
                        x, y = (sign * runs[name].at[update, alarm] for name in (one, other))
                        cell = seeds[one] - first_seed, seeds[other] - first_seed
                        right[cell] += (x > y) + (x == y) / 2
                        total[cell] += 1
        drawn = [(weights @ right @ weights) / (weights @ total @ weights) for weights in draws]
        shown = [float(text) for text in re.findall(r"\d\.\d+", table("alarms", model)[alarm][0])]
        assert shown[0] == pytest.approx(right.sum() / total.sum(), abs=0.0051)
        assert shown[1:] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)


# scripts/answers.py


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
