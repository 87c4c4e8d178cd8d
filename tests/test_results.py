"""Results pages: the numbers of their tables are those of the runs beside them."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pspo_lab.power import estimate

RESULTS = Path(__file__).parents[1] / "results"
RELIABILITY = " ".join((RESULTS / "smollm2/reliability.md").read_text(encoding="utf-8").split())


def read_table(page: str, first: str, file: str = "README.md") -> pd.DataFrame:
    """The table of a page whose header begins so; rows by their first cell."""
    text = (RESULTS / page / file).read_text(encoding="utf-8")
    (block,) = re.findall(rf"^\| {first}.*\n(?:\|.*\n)+", text, flags=re.MULTILINE)
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
    return pd.DataFrame(rows, columns=header).set_index(header[0])


def assert_shows(cell: str, *values: float) -> None:
    """The numbers in the cell are these, rounded."""
    numbers = re.findall(r"[-+]?\d+(?:\.\d+)?", cell)
    assert len(numbers) == len(values), cell
    for number, value in zip(numbers, values, strict=True):
        assert abs(float(number) - value) <= 0.5001 * 10 ** -len(number.partition(".")[2]), f"{cell}: {value}"


def assert_column(cells: pd.Series, by_row: pd.DataFrame) -> None:
    """Every cell shows the mean of its row's seeds, or the mean and Student's 95% interval, or nothing."""
    for row, cell in cells[cells != ""].items():
        values = by_row[row].dropna()
        half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        ends = (values.mean() - half, values.mean() + half) if "[" in cell else ()
        assert_shows(cell, values.mean(), *ends)


def mean_text(by_seed: pd.Series) -> str:
    """The mean with Student's 95% interval, as pages write it."""
    half = stats.t.ppf(0.975, len(by_seed) - 1) * by_seed.sem()
    return f"{by_seed.mean():+.1f} [{by_seed.mean() - half:+.1f}, {by_seed.mean() + half:+.1f}]"


def holm(p: list[float]) -> np.ndarray:
    """The p-values, corrected by Holm (1979)."""
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * np.sort(p))
    return np.minimum(steps, 1)[np.argsort(p).argsort()]


def t_tests(differences: list[pd.Series | pd.DataFrame]) -> list[float]:
    """The p-values of the means over seeds, of which a table has a row each."""
    by_seed = [pd.DataFrame(of).mean(axis=1) for of in differences]
    return [stats.ttest_1samp(of, 0).pvalue if of.any() else 1.0 for of in by_seed]


def starred(differences: list[pd.Series]) -> list[bool]:
    """Which means are not 0 at 5% by Holm's correction of t-tests."""
    return list(holm(t_tests(differences)) < 0.05)


@pytest.mark.parametrize("model", ["tiny-base", "tiny-math"])
def test_tuned_methods(model):
    runs = pd.read_csv(RESULTS / "tiny-protocol/runs.csv").query("experiment == @model")
    accuracy = runs.replace({"method": {"NoClip": "NoClip, 1 epoch"}}).pivot(
        index="seed", columns="method", values="returned_accuracy"
    )
    table = read_table("tiny-protocol", model)
    assert {*table.index} == {*accuracy}
    assert_column(table["accuracy (%)"], accuracy)
    assert_column(table["minus NoClip"], accuracy.sub(accuracy["NoClip, 1 epoch"], axis=0))


def test_surrogates_in_trl():
    rewards = pd.read_csv(RESULTS / "trl/runs.csv").pivot(index="seed", columns="loss", values="eval_reward")
    table = read_table("../docs/guide", "loss in TRL", "bridge.md")
    assert_column(table["reward after 32 steps"], rewards)
    differences = rewards.sub(rewards["TRL"], axis=0)
    assert_column(table["minus TRL, 95% interval"], differences)
    for row in table.index[1:]:
        assert_shows(table.loc[row, "detects (80% power)"], float(estimate(differences[[row]].to_numpy()).detects()))


def test_second_epoch():
    runs = pd.read_csv(RESULTS / "tiny-control/runs.csv").query("experiment != 'alpha'")
    alpha = runs["alpha"].where(runs["method"] == "PSPO").map(" {}".format, na_action="ignore").fillna("")
    epochs = runs["epochs"].map({1: ", 1 epoch", 2: ", 2 epochs"})
    kind = runs["experiment"].map({"tokens": "", "path": ", twice the rate", "steps": ", twice the tokens"})
    runs["row"] = runs["method"] + alpha + epochs + kind
    values = runs.pivot(index="seed", columns=["max_grad_norm", "row"], values=["validation", "accuracy"])
    values = values.sort_index(axis=1)
    table = read_table("tiny-control", "learning rate 3e-5")
    assert_column(table["reward"], values["validation", 0.0])
    differences = {}
    measures = [("validation", 0.0), ("accuracy", 0.0), ("validation", 0.1)]
    for column, measure in zip(table.columns[1:], measures, strict=True):
        for row in table.index[1:]:
            base = "NoClip, 2 epochs" + ", twice the tokens" * row.endswith("tokens")
            differences[row, column] = values[measure][row] - values[measure][base]
            assert_column(table.loc[[row], column], differences[row, column].to_frame(row))
    stars = [table.loc[place].endswith("*") for place in differences]
    assert stars == starred([*differences.values()])


def test_decoupled_ratios():
    runs = pd.read_csv(RESULTS / "stale-rollouts/decoupled.csv")
    runs = runs[~runs["experiment"].str.endswith("-search")]
    name = runs["method"] + (" " + runs["epsilon"].astype(str)).where(runs["method"] == "Clip", "")
    name += runs["ratio_to"].map({"proximal": ", decoupled"}).fillna("")
    rewards = runs.assign(name=name + runs["lag"].map({0: ", on time"}).fillna(""))
    rewards = rewards.pivot(index="seed", columns="name", values="validation")
    table = read_table("stale-rollouts", "96 rollouts")
    assert {*table.index} == {*rewards}
    assert_column(table["final reward"], rewards)
    assert_column(table["decoupled Clip minus it"], -rewards.sub(rewards["Clip 0.2, decoupled"], axis=0))
    pairs = [("Clip 0.2, on time", "NoClip, on time"), ("Clip 0.2", "NoClip"), ("Clip 0.2, decoupled", "NoClip")]
    for (_, cells), (arm, base) in zip(read_table("..", "where").iloc[:-3].iterrows(), pairs, strict=True):
        apart = estimate(rewards[[arm]].sub(rewards[base], axis=0).to_numpy())
        assert_shows(cells["found"], apart.mean, *apart.interval())
        assert_shows(cells["detects"], float(apart.detects()))


def with_arms(rows: pd.DataFrame) -> pd.DataFrame:
    """SmolLM2's runs or answers with their arm; those of the untrained model have none."""
    arm = rows["method"].mask(rows["epochs"] == 1, rows["method"] + ", 1 epoch")
    if "ratio_to" in rows:
        arm = arm.mask(rows["ratio_to"] == "proximal", arm + ", decoupled")
    return rows.assign(arm=arm.mask(rows["experiment"] == "smollm2-clip", "Clip, 1e-4"))


def test_a_pretrained_model():
    answers = with_arms(pd.read_parquet(RESULTS / "smollm2/asdiv.parquet"))
    table = read_table("smollm2", "arm")
    right = answers.pivot_table(index="seed", columns="arm", values="reward") * 100
    untrained = answers[answers["arm"].isna()].set_index("problem")["reward"]
    differences = right.sub(right["NoClip"], axis=0)
    assert_column(table["right"], right)
    runs = with_arms(pd.read_csv(RESULTS / "smollm2/runs.csv")).query("experiment != 'smollm2-search'")
    runs["gain"] = runs["capitals_gold_anywhere"] - runs["untrained_capitals_gold_anywhere"]
    assert_column(table["capitals"], runs.pivot(index="seed", columns="arm", values="gain"))
    rewards = {arm: of.pivot(index="seed", columns="problem", values="reward") for arm, of in answers.groupby("arm")}
    for arm, cells in table.iterrows():
        assert_shows(cells["lowest"], right[arm].min())
        gained = estimate(100 * (rewards[arm] - untrained).to_numpy())
        apart = estimate(100 * (rewards[arm] - rewards["NoClip"]).to_numpy())
        for column, of in (("gained", gained), ("minus NoClip", apart)):
            if cells[column]:
                assert_shows(cells[column], of.mean, *of.interval())
        if arm != "NoClip":
            assert_shows(cells["detects"], apart.detects())
    planned = [*table.index[:-1]]
    stars = starred([*(right[arm] - 100 * untrained.mean() for arm in planned),
                     *(differences[arm] for arm in planned[1:]), right["PSPO, 1 epoch"] - right["PSPO"]])  # fmt: skip
    assert stars == [cell.endswith("*") for cell in table["gained"][planned]] + [False] * 7


def solved(experiment: str, first: str) -> tuple[dict, dict]:
    """What the table that begins so shows: percent solved, (seeds, problems), by test and arm; failed seeds by arm."""
    answers = with_arms(pd.read_parquet(RESULTS / "smollm2/reliability.parquet"))
    answers = answers.fillna({"arm": "untrained", "seed": 0, "experiment": experiment})
    answers = answers[answers["experiment"] == experiment]
    best = 100 * answers.groupby(["evaluation", "arm", "seed", "problem"])["reward"].max()  # pass@8: of eight samples
    right = {of: best[of].unstack() for of in best.index.droplevel([2, 3]).unique()}  # (test, arm): seeds x problems
    table = read_table("smollm2", first, "reliability.md")
    assert {*table.index} == {*answers["arm"]}
    for column, test in {"right": "asdiv", "SVAMP": "svamp", "pass@8": "pass8"}.items():
        assert_column(table[column], pd.DataFrame({arm: right[test, arm].mean(axis=1) for arm in table.index}))
    failed = {}
    for arm, cells in table.iloc[1:].iterrows():
        by_seed = right["asdiv", arm].mean(axis=1)
        failed[arm] = 100.0 * (by_seed < 49).to_frame()  # 142 of the 291 are 48.8%, 143 are 49.1%
        assert_shows(cells["SD"], by_seed.std())
        assert_shows(cells["lowest"], by_seed.min())
        assert_shows(cells["failed"], (failed[arm] > 0).sum().item())
    return right, failed


def assert_compared(rows: pd.DataFrame) -> None:
    """Rows of a page show what follows from the differences, (seeds, problems), in their column ``of``."""
    for _, row in rows.iterrows():
        found = estimate(row["of"].to_numpy())
        if "over seeds" in row:
            assert_column(row[["over seeds"]], row["of"].mean(axis=1).to_frame("over seeds"))
            assert_shows(row["over seeds and problems"], *found.interval())
        else:
            assert_shows(row["found"], found.mean, *found.interval())
        assert_shows(row["detects"], found.detects())
        if "p" in row:
            assert_shows(row["p"], row["q"])


def test_reliability():
    right, failed = solved("reliability", "arm, on time")

    def contrast(of):
        return (of["NoClip"] + of["PSPO"] - of["Clip"] - of["P3O"]) / 2

    differences = [contrast({arm: right[test, arm] for arm in failed}) for test in ("asdiv", "svamp", "pass8")]
    differences += [contrast(failed), right["asdiv", "PSPO, 1 epoch"] - right["asdiv", "PSPO"]]
    p = t_tests(differences)
    p[3] = stats.permutation_test([differences[3][0]], np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
    rows = read_table("smollm2", "comparison", "reliability.md")
    assert_compared(rows.assign(of=differences, q=[p[0], *holm(p[1:])]))
    apart = read_table("smollm2", "minus the mean", "reliability.md")
    affine = (right["asdiv", "NoClip"] + right["asdiv", "PSPO"]) / 2
    apart["of"] = [right["asdiv", arm] - affine for arm in apart.index]
    assert_compared(apart)
    assert_compared(read_table("..", "where").iloc[-3:-1].assign(of=[*apart["of"]]))
    by_seed = differences[0].mean(axis=1)
    for part in (by_seed.drop(212), by_seed.loc[:211], by_seed.loc[213:]):
        assert mean_text(part) in RELIABILITY
    by_arm = pd.DataFrame({arm: right["asdiv", arm].mean(axis=1) for arm in failed})
    assert f"{mean_text(by_arm['Clip'] - by_arm['P3O'])} over seeds." in RELIABILITY
    pairs = [(by_arm[arm], by_arm["Clip"]) for arm in ("NoClip", "PSPO")]
    p = [stats.pearsonr(a + b, a - b).pvalue for a, b in pairs] + [stats.levene(*pair).pvalue for pair in pairs]
    shown = "p {:.3f} and {:.3f}, Brown and Forsythe's, which outliers sway less, {:.2f} and {:.2f}"
    assert shown.format(*p) in RELIABILITY  # Pitman 1939, Morgan 1939: of two correlated variances
    runs = pd.read_csv(RESULTS / "smollm2/reliability.csv").set_index(["experiment", "method"])
    assert runs.loc["bits"].groupby("seed")[["tokens", "adapters"]].nunique().eq(1).all(axis=None)
    clip = runs.loc[("reliability", "Clip")]
    assert f"drops only {clip['zero_weight_share'].mean():.1%} of the tokens" in RELIABILITY
    assert f"KL from the old policy is {clip['kl_old_new'].mean():.3f}." in RELIABILITY
    solid = by_arm.where(pd.concat(failed, axis=1).droplevel(1, axis=1) == 0)
    without = (solid[["NoClip", "PSPO"]].mean(axis=1) - solid[["Clip", "P3O"]].mean(axis=1)).dropna()
    assert f"difference is {without.mean():.1f} (p {stats.ttest_1samp(without, 0).pvalue:.2f})" in RELIABILITY
    n = len(by_arm)
    sd = (by_arm["NoClip"] - by_arm["PSPO"]).std()
    correlation = stats.pearsonr(by_arm["NoClip"], by_arm["PSPO"])  # its interval is Fisher's
    floor = read_table("smollm2", "noise floor", "reliability.md")["value"]
    assert_shows(floor.iloc[0], sd, *(sd * np.sqrt((n - 1) / stats.chi2.ppf([0.975, 0.025], n - 1))))
    assert_shows(floor.iloc[1], correlation.statistic, *correlation.confidence_interval())


def test_control():
    right, _ = solved("control", "arm, four late")
    rows = read_table("smollm2", "minus NoClip, late", "reliability.md")
    differences = [right["asdiv", arm] - right["asdiv", "NoClip"] for arm in rows.index]
    assert_compared(rows.assign(of=differences, q=holm(t_tests(differences))))
    assert_compared(read_table("..", "where").iloc[-1:].assign(of=differences[:1]))
    assert f"is {mean_text((differences[1] - differences[0]).mean(axis=1))} over seeds" in RELIABILITY
    runs = with_arms(pd.read_csv(RESULTS / "smollm2/reliability.csv")).query("experiment == 'control'")
    runs = runs.assign(dropped=runs["zero_weight_share"], KL=runs["kl_sampler_old"].fillna(runs["kl_old_new"]))
    for column, cells in read_table("smollm2", "arm, four late", "reliability.md")[["dropped", "KL"]].items():
        assert_column(cells, runs.pivot(index="seed", columns="arm", values=column))
