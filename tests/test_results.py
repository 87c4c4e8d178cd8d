"""Results pages: the numbers of their tables are those of the runs beside them."""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

RESULTS = Path(__file__).parents[1] / "results"


def read_tables(page: str) -> dict[str, pd.DataFrame]:
    """Tables of a page by the first word of their header; rows by their first cell."""
    tables = {}
    for block in re.findall(r"(?:^\|.*\n)+", (RESULTS / page).read_text(encoding="utf-8"), flags=re.MULTILINE):
        header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines())
        tables[header[0]] = pd.DataFrame(rows, columns=header).set_index(header[0])
    return tables


def assert_shows(cell: str, *values: float) -> None:
    """Every number in the cell is the value in its place, rounded."""
    numbers = re.findall(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?", cell)
    assert len(numbers) == len(values), cell
    for number, value in zip(numbers, values, strict=True):
        decimals = len(number.partition(".")[2]) if "e" not in number else 9
        assert abs(float(number) - value) <= 0.5001 * 10**-decimals, f"{cell}: {value}"


def with_interval(values: pd.Series) -> tuple[float, float, float]:
    """Mean, and the ends of Student's 95% interval."""
    values = values.dropna()
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return values.mean(), values.mean() - half, values.mean() + half


def detectable(differences: pd.Series) -> float:
    """Smallest mean difference that a t-test at 5% finds with a power of 80%."""
    n = len(differences)
    limit = stats.t.ppf(0.975, n - 1)
    return differences.sem() * optimize.brentq(lambda shift: stats.nct.sf(limit, n - 1, shift) - 0.8, 0, 10)


def starred(differences: Iterable[pd.Series]) -> list[bool]:
    """Which means are not 0 at 5% by Holm's correction (1979) of t-tests."""
    p = np.array([stats.ttest_1samp(of.dropna(), 0).pvalue if of.any() else 1.0 for of in differences])
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * np.sort(p))
    return list(steps[p.argsort().argsort()] < 0.05)


@pytest.mark.parametrize("model", ["tiny-base", "tiny-math"])
def test_tuned_methods(model):
    runs = pd.read_csv(RESULTS / "tiny-protocol/runs.csv")
    accuracy = runs[runs["experiment"] == model].pivot(index="seed", columns="method", values="returned_accuracy")
    table = read_tables("tiny-protocol/README.md")[model]
    for row, cells in table.iterrows():
        of_method = accuracy[row.partition(",")[0]]
        assert_shows(cells["accuracy (%)"], *with_interval(of_method))
        if cells["minus NoClip"]:
            assert_shows(cells["minus NoClip"], *with_interval(of_method - accuracy["NoClip"]))
    assert len(table) == accuracy.shape[1]


def test_second_epoch():
    runs = pd.read_csv(RESULTS / "tiny-control/runs.csv").set_index("seed")
    table = read_tables("tiny-control/README.md")["learning rate 3e-5"]
    columns = {
        "minus NoClip, 2 epochs": (0.0, "validation"),
        "accuracy minus": (0.0, "accuracy"),
        "reward minus, norms clipped": (0.1, "validation"),
    }

    def select(experiment: str, row: str, clip: float) -> pd.DataFrame:
        method, alpha, epochs = re.match(r"(\w+) ?([\d.]*), (\d) epoch", row).groups()
        chosen = runs.query(f"experiment == @experiment and method == {method!r} and epochs == {epochs}")
        return chosen.query("max_grad_norm == @clip" + (f" and alpha == {alpha}" if alpha else ""))

    differences = {}
    for row, cells in table.iterrows():
        experiment = {"twice the rate": "path", "twice the tokens": "steps"}.get(row.split(", ")[-1], "tokens")
        base = "steps" if experiment == "steps" else "tokens"
        assert_shows(cells["reward"], select(experiment, row, 0.0)["validation"].mean())
        for column, (clip, measure) in columns.items():
            if cells[column]:
                base_values = select(base, "NoClip, 2 epochs", clip)[measure]
                differences[row, column] = select(experiment, row, clip)[measure] - base_values
    assert len(differences) == 18
    for (place, values), star in zip(differences.items(), starred(differences.values()), strict=True):
        assert_shows(table.loc[place], *with_interval(values))
        assert table.loc[place].endswith("*") == star


def test_decoupled_ratios():
    runs = pd.read_csv(RESULTS / "stale-rollouts/decoupled.csv")
    runs = runs[~runs["experiment"].str.endswith("-search")]
    name = runs["method"] + (" " + runs["epsilon"].astype(str)).where(runs["method"] == "Clip", "")
    name += (runs["ratio_to"] == "proximal").map({True: ", decoupled", False: ""})
    runs["name"] = name + (runs["lag"] == 0).map({True: ", on time", False: ""})
    rewards = runs.pivot(index="seed", columns="name", values="validation")
    table = read_tables("stale-rollouts/README.md")["96 rollouts"]
    assert {*table.index} == {*rewards}
    for row, cells in table.iterrows():
        assert_shows(cells["final reward"], rewards[row].mean())
        if cells.iloc[2]:
            assert_shows(cells.iloc[2], *with_interval(rewards["Clip 0.2, decoupled"] - rewards[row]))
        if cells.iloc[3]:
            assert_shows(cells.iloc[3], *with_interval(rewards["Clip 0.2, on time"] - rewards[row]))


def read_answers() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The untrained model's answers by problem, and those of runs, with their arm."""
    answers = pd.read_parquet(RESULTS / "smollm2/asdiv.parquet")
    arm = answers["method"].mask(answers["epochs"] == 1, answers["method"] + ", 1 epoch")
    answers["arm"] = arm.mask(answers["experiment"] == "smollm2-clip", "Clip, 1e-4")
    return answers[answers["arm"].isna()].set_index("problem"), answers[answers["arm"].notna()]


def resampled(gains: np.ndarray) -> np.ndarray:
    """Ends of the 95% interval of the mean of gains (seeds, problems), both resampled."""
    rng = np.random.default_rng(0)
    seeds, problems = gains.shape
    means = [
        gains[rng.integers(seeds, size=seeds)].mean(axis=0)[rng.integers(problems, size=problems)].mean()
        for _ in range(4000)
    ]
    return np.quantile(means, [0.025, 0.975])


def test_a_pretrained_model():
    runs = pd.read_csv(RESULTS / "smollm2/runs.csv").query("experiment != 'smollm2-search'")
    runs["arm"] = runs["method"].mask(runs["epochs"] == 1, runs["method"] + ", 1 epoch")
    runs["arm"] = runs["arm"].mask(runs["experiment"] == "smollm2-clip", "Clip, 1e-4")
    runs["capitals"] = runs["capitals_gold_anywhere"] - runs["untrained_capitals_gold_anywhere"]
    by_arm = runs.pivot(index="seed", columns="arm", values=["asdiv_reward", "capitals", "lr"])
    right = by_arm["asdiv_reward"]
    untrained, trained = read_answers()
    table = read_tables("smollm2/README.md")["arm"]
    planned = table.index[:-1]
    gains = [right[arm] - 100 * untrained["reward"].mean() for arm in planned]
    gains += [right[arm] - right["NoClip"] for arm in planned if arm != "NoClip"]
    stars = starred([*gains, right["PSPO, 1 epoch"] - right["PSPO"]])
    for arm, star in zip(planned, stars, strict=False):
        assert table.loc[arm, "gained"].endswith("*") == star
    assert not any(stars[len(planned) :])
    for arm, cells in table.iterrows():
        assert_shows(cells["rate"], by_arm["lr"][arm].iloc[0])
        assert_shows(cells["right"], right[arm].mean())
        assert_shows(cells["lowest"], right[arm].min())
        assert_shows(cells["capitals"], by_arm["capitals"][arm].mean())
        by_problem = trained[trained["arm"] == arm].pivot(index="seed", columns="problem", values="reward")
        gains = 100 * (by_problem - untrained["reward"]).to_numpy()
        assert_shows(cells["gained"], gains.mean(), *resampled(gains))
        if arm != "NoClip":
            difference = right[arm] - right["NoClip"]
            assert_shows(cells["minus NoClip"], *with_interval(difference))
            assert_shows(cells["detects"], detectable(difference))


def test_how_a_pretrained_model_answers():
    untrained, trained = read_answers()
    trained = trained[trained["experiment"] == "smollm2"]
    is_long = untrained["completion"].str.count(r"\d+(\.\d+)?") > 2
    is_addition = untrained["category"].isin(["Addition", "Sum"])
    for answers in (untrained, trained):
        operator = answers["completion"].str.extract(r"\d *([-+*/])", expand=False)
        answers["chosen"] = operator.eq("+").where(answers["category"].isin(["Addition", "Sum"]), operator.eq("-"))
    by_problem = trained.groupby("problem")[["reward", "chosen"]].mean()
    rows = [("reward", ~is_long), ("reward", is_long), ("chosen", is_addition), ("chosen", ~is_addition)]
    table = read_tables("smollm2/README.md")["share in percent"]
    for (row, cells), (measure, problems) in zip(table.iterrows(), rows, strict=True):
        assert_shows(row, problems.sum())
        assert_shows(cells["untrained"], 100 * untrained.loc[problems, measure].mean())
        assert_shows(cells["trained"], 100 * by_problem.loc[problems, measure].mean())
