"""Numbers and pictures of the results pages: python scripts/results_pages.py

Reads the tables of runs in results/, writes every text between <!-- table: NAME --> and <!-- /table --> or between
<!-- n: NAME --> and <!-- /n --> on the four pages and in the README, and draws the pages' pictures. Intervals are
Student's at 95% over seeds or runs, if not said otherwise; differences are paired; a star is p < 0.05 by Holm (1979).
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.stats import t

from pspo.cli.files import write_text
from pspo_lab.figures import COLOURS, GREY, INK, picture
from pspo_lab.tables import add_holm

METHODS = ["NoClip", "Clip", "PSPO", "P3O", "SAPO", "TOPR"]
MODELS = ["tiny-base", "tiny-math"]
UNTRAINED = {"tiny-base": 0.381, "tiny-math": 0.829}  # validation reward at step 0 of stale-rollouts, in every run

Texts = dict[str, str]
Interval = tuple[float, float, float]


def interval(values: pd.Series) -> Interval:
    """Mean and the ends of its 95% t-interval."""
    values = values.dropna()
    half = t.ppf(0.975, len(values) - 1) * values.sem()
    return values.mean(), values.mean() - half, values.mean() + half


def text(values: pd.Series, digits: int = 3, sign: str = "") -> str:
    """Mean and interval, with one digit more where an end would be a zero that hides its sign."""
    numbers = interval(values)
    if any(1e-9 < abs(end) < 0.5 * 10**-digits for end in numbers[1:]):
        digits += 1
    mean, low, high = (f"{round(number, digits) + 0.0:{sign}.{digits}f}" for number in numbers)
    return f"{mean} [{low}, {high}]"


def scientific(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---" for _ in header], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def holm_p_values(differences: dict[str, pd.Series]) -> pd.Series:
    """By name, the p-value of a mean difference from 0, corrected for all of them together."""
    rows = {name: {"mean": of.mean(), "sem": of.sem(), "seeds": len(of)} for name, of in differences.items()}
    return add_holm(pd.DataFrame.from_dict(rows, orient="index"))["holm"]


def holm_stars(differences: dict[str, pd.Series]) -> dict[str, str]:
    """A star for each mean difference that is not 0 at 5%, of all of them together."""
    adjusted = holm_p_values(differences)
    return {name: "*" if adjusted[name] < 0.05 else "" for name in differences}


def label_ends(axes: Axes, ends: dict[str, tuple[float, float]], gap: float) -> None:
    """Write names right of the ends (x, y) of lines, at least ``gap`` apart."""
    height = -np.inf
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = max(y, height + gap)
        axes.text(1.15 * x, height, name, va="center")


def draw_rows(axes: Axes, rows: dict[str, pd.Series], reference: float) -> None:
    """Draw each row's seeds, mean and interval, the first row on top."""
    for y, (name, values) in enumerate(reversed(rows.items())):
        mean, low, high = interval(values)
        colour = COLOURS[re.match(r"\w+", name)[0]]
        axes.plot(values, np.full(len(values), y), ".", color=GREY, markersize=3, alpha=0.6)
        axes.plot([low, high], [y, y], "-", color=colour, linewidth=2)
        axes.plot(mean, y, "o", color=colour, markersize=5)
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.axvline(reference, color=GREY, ls=":", linewidth=1)


# Tuned, do the methods differ?

SEARCHED = ("epsilon", "alpha", "tau", "tau_neg", "b_pos")


def read_protocol(folder: Path) -> pd.DataFrame:
    runs = pd.read_csv(folder / "runs.csv")
    return runs.pivot(index="seed", columns=["experiment", "method"], values=["returned_accuracy", "accuracy"])


def selected_constants(folder: Path, model: str, method: str) -> str:
    """What the search chose, as in "lr 3e-5, epsilon 0.4"."""
    choices = pd.read_csv(folder / "selection.csv").query("selected and experiment == @model")
    setting = choices.set_index("method").loc[[method.lower()], "setting"].iloc[0]
    constants = dict(re.findall(r"(\w+)=([\w.]+(?:-\d\d)?)", setting))
    chosen = [f"{name} {float(constants[name]):g}" for name in SEARCHED if name in constants]
    return ", ".join([f"lr {scientific(float(constants['lr']))}", *chosen])


def protocol_texts(folder: Path) -> Texts:
    accuracy = read_protocol(folder)
    apart = {}
    for measure in ("returned_accuracy", "accuracy"):
        for model in MODELS:
            for method in METHODS[1:]:
                of_model = accuracy[measure][model]
                apart[f"{measure} {model} {method}"] = of_model[method] - of_model["NoClip"]
    adjusted = holm_p_values(apart)
    stars = holm_stars(apart)

    tables = {}
    for model in MODELS:
        rows = []
        for method in METHODS:
            name = f"returned_accuracy {model} {method}"
            cells = [f"{method}, 1 epoch" if method == "NoClip" else method]
            cells.append(text(accuracy["returned_accuracy"][model][method], 1))
            cells.append(text(apart[name], 1, "+") + stars[name] if name in apart else "")
            cells.append(selected_constants(folder, model, method))
            rows.append(cells)
        tables[model] = table([model, "accuracy (%)", "minus NoClip", "chosen"], rows)

    excluding = [name for name, of in apart.items() if not interval(of)[1] <= 0 <= interval(of)[2]]
    level = [interval(apart[f"returned_accuracy {model} {method}"]) for model in MODELS for method in METHODS[1:4]]
    means, lows, highs = zip(*level, strict=True)
    lower = [-apart[f"returned_accuracy tiny-base {method}"].mean() for method in METHODS[4:]]
    untrained = pd.read_csv(folder / "runs.csv").groupby("experiment")["untrained_accuracy"].first()
    return {
        **tables,
        "largest": f"{max(map(abs, means)):.1f}",
        "ends": f"{min(lows):+.1f} to {max(highs):+.1f}",
        "lower": " and ".join(f"{points:.1f}" for points in lower),
        "lower p": " and ".join(f"{adjusted[f'returned_accuracy tiny-base {method}']:.2f}" for method in METHODS[4:]),
        "untrained": f"{untrained['tiny-base']:.0f}%, tiny-math {untrained['tiny-math']:.0f}%",
        "excluding": f"{len(excluding)} of {len(apart)} exclude 0, {sum(map(bool, stars.values()))}",
        "topr final": text(apart["accuracy tiny-base TOPR"], 1, "+"),
    }


def draw_protocol(folder: Path) -> None:
    accuracy = read_protocol(folder)["returned_accuracy"]
    untrained = pd.read_csv(folder / "runs.csv").groupby("experiment")["untrained_accuracy"].first()
    with picture(
        folder / "accuracy.svg", 7.6, 2.3, "greedy accuracy of the returned model (% of 500 problems)"
    ) as figure:
        for axes, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
            draw_rows(axes, {method: accuracy[model][method] for method in METHODS}, untrained[model])
            axes.text(untrained[model], 2.5, " untrained", va="center")
            axes.set_title(f"{model}, five seeds")


# PSPO, its second epoch and alpha

BASE = "NoClip, 2 epochs"
CONTROL_ROWS = {  # experiment, method, alpha and epochs of each row
    BASE: ("tokens", "NoClip", None, 2),
    "PSPO 0.1, 2 epochs": ("tokens", "PSPO", 0.1, 2),
    "PSPO 0.4, 2 epochs": ("tokens", "PSPO", 0.4, 2),
    "Clip, 2 epochs": ("tokens", "Clip", None, 2),
    "NoClip, 1 epoch": ("tokens", "NoClip", None, 1),
    "NoClip, 1 epoch, twice the rate": ("path", "NoClip", None, 1),
    "NoClip, 1 epoch, twice the tokens": ("steps", "NoClip", None, 1),
}

CONTROL_COLUMNS = [(0.0, "validation"), (0.0, "accuracy"), (0.1, "validation")]  # gradient norm (0: any), measure


def read_control(folder: Path) -> dict[tuple[str, float], pd.DataFrame]:
    """(row, gradient norm): mean training reward, final validation reward and accuracy by seed."""
    runs = pd.read_csv(folder / "runs.csv")
    cells = {}
    for clip in (0.0, 0.1):
        for name, (experiment, method, alpha, epochs) in {
            **CONTROL_ROWS,
            "steps": ("steps", "NoClip", None, 2),
        }.items():
            chosen = (runs["experiment"] == experiment) & (runs["method"] == method) & (runs["max_grad_norm"] == clip)
            chosen &= (runs["epochs"] == epochs) & (runs["alpha"].eq(alpha) if alpha else True)
            cells[name, clip] = runs[chosen].set_index("seed")[["reward", "validation", "accuracy"]].sort_index()
    return cells


def control_texts(folder: Path) -> Texts:
    cells = read_control(folder)
    apart = {}
    for name in list(CONTROL_ROWS)[1:]:
        base_name = "steps" if name.endswith("tokens") else BASE
        for clip, measure in CONTROL_COLUMNS:
            apart[f"{name} {clip} {measure}"] = cells[name, clip][measure] - cells[base_name, clip][measure]
    stars = holm_stars(apart)

    rows = []
    for name in CONTROL_ROWS:
        row = [name, f"{cells[name, 0.0]['validation'].mean():.3f}"]
        for clip, measure in CONTROL_COLUMNS:
            key = f"{name} {clip} {measure}"
            digits = 1 if measure == "accuracy" else 3
            row.append("" if name == BASE else text(apart[key], digits, "+") + stars[key])
        rows.append(row)
    header = ["learning rate 3e-5", "reward", "minus NoClip, 2 epochs", "accuracy minus", "reward minus, norms clipped"]
    twice = cells["NoClip, 1 epoch, twice the rate", 0.0] - cells[BASE, 0.0]
    once = cells["NoClip, 1 epoch", 0.0] - cells[BASE, 0.0]
    other_base = cells["steps", 0.0].mean()

    errors = deviations(alpha_curves(folder)) / 8**0.5  # of a mean over the eight seeds
    return {
        "control": table(header, rows),
        "accuracy": text(cells[BASE, 0.0]["accuracy"], 1),
        "differences": str(len(apart)),
        "area": text(twice["reward"], 3, "+"),
        "made up": f"{100 * (1 - twice['validation'].mean() / once['validation'].mean()):.0f}%",
        "other base": f"reward {other_base['validation']:.3f}, accuracy {other_base['accuracy']:.1f}%",
        "errors": f"{errors.min():.3f} to {errors.max():.3f}",
        **alpha_differences(folder),
        **comparison_texts(folder),
    }


PAPERS_SPREAD = 0.149  # validation reward of Qwen2-Math-1.5B at alpha 0.1, 0.2, 0.4 and 0.5, highest minus lowest
VARIANT = ["advantage_scale", "max_grad_norm", "dtype"]


def alpha_curves(folder: Path) -> pd.DataFrame:
    """By variant: mean and standard deviation over seeds at each alpha."""
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False, na_values=[""])
    runs = runs[runs["experiment"] == "alpha"]
    return runs.groupby([*VARIANT, "alpha"])["validation"].agg(["mean", "std"]).unstack("alpha")


def deviations(curves: pd.DataFrame) -> pd.Series:
    """By variant: standard deviation of a single seed around the mean."""
    return (curves["std"] ** 2).mean(axis=1) ** 0.5


def alpha_differences(folder: Path) -> Texts:
    """Differences from alpha 0 of the same variant: means, and how many intervals exclude 0."""
    runs = pd.read_csv(folder / "runs.csv", keep_default_na=False, na_values=[""])
    values = runs[runs["experiment"] == "alpha"].pivot(index=[*VARIANT, "seed"], columns="alpha", values="validation")
    apart = values.drop(columns=0.0).sub(values[0.0], axis=0)
    ends = [interval(of) for _, variant in apart.groupby(level=VARIANT) for _, of in variant.items()]
    excluding = sum(low > 0 or high < 0 for _, low, high in ends)
    means = [mean for mean, _, _ in ends]
    plain = apart.loc[("none", 0.0, "float32")].abs().max()  # by alpha, the largest of all seeds
    same = plain[plain == 0].index.max()
    divided = apart.loc[("group", 0.0, "float32")]
    within = f"means within {divided.mean().abs().max():.3f}, seeds within {divided.abs().max(axis=None):.3f}"
    return {
        "excluding": f"{excluding or 'none'} of {len(ends)}",
        "alpha means": f"{min(means):+.3f} to {max(means):+.3f}",
        "identical": f"equal up to alpha {same}; if advantages are divided, {within}",
    }


def comparison_texts(folder: Path) -> Texts:
    """Sixteen steps on each rollout from tiny-math, and alpha under SGD."""
    runs = pd.read_csv(folder / "comparisons.csv")
    reuse = runs[runs["experiment"] == "off-policy"]
    falls = (reuse["accuracy"] - reuse["untrained_accuracy"]).groupby(
        [reuse["method"], reuse["alpha"].fillna(0), reuse["epsilon"].fillna(0)]
    )
    below = [interval(of)[2] < 0 for _, of in falls]
    means = falls.mean()
    others = means.drop("TOPR", level="method")

    sgd = runs[(runs["experiment"] == "control") & (runs["name"] == "sgd") & (runs["max_grad_norm"] == 0)]
    by_seed = sgd.pivot(index="seed", columns=["method", "lr"], values="returned_accuracy")  # of the final models
    pspo = by_seed["PSPO", 0.1]
    return {
        "below": f"{sum(below)} of {len(means)}",
        "falls": f"{-others.max():.0f} to {-others.min():.0f}",
        "topr": text(falls.get_group(("TOPR", 0, 0)), 1, "+"),
        "hidden": f"{(reuse['best_step'] == 0).sum()} of {len(reuse)}",
        "sgd": text(pspo - by_seed["NoClip", 0.1], 1, "+"),
        "sgd shorter": text(pspo - by_seed["NoClip", 0.06], 1, "+"),
    }


def draw_control(folder: Path) -> None:
    cells = read_control(folder)
    curves = alpha_curves(folder)
    with picture(folder / "alpha.svg", 7.6, 2.8, "") as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
        rows = {name: cells[name, 0.0]["validation"] for name in CONTROL_ROWS}
        draw_rows(left, rows, rows[BASE].mean())
        left.set(title="no gradient clipping, eight seeds", xlabel="final validation reward (128 problems)")

        alphas = curves["mean"].columns
        main = ("none", 0.0, "float32")
        for variant, means in curves["mean"].iterrows():
            if variant != main:
                right.plot(alphas, means, "o-", color=GREY, linewidth=0.8, markersize=3)
        mean = curves["mean"].loc[main]
        deviation = deviations(curves)[main]
        right.plot(alphas, mean, "o-", color=COLOURS["PSPO"], linewidth=2, markersize=3)
        right.fill_between(alphas, mean - deviation, mean + deviation, color=COLOURS["PSPO"], alpha=0.15, linewidth=0)
        right.text(0.02, 0.765, "grey: seven other variants", va="bottom")
        right.text(0.02, 0.705, "float32, no clipping;\nband: deviation of one seed", va="top")
        right.errorbar(0.9, 0.735, PAPERS_SPREAD / 2, color=INK, capsize=3)
        right.text(0.88, 0.80, f"spread of the paper's rewards, {PAPERS_SPREAD}", ha="right", va="center")
        right.set(
            title="PSPO after 16 rollouts, eight seeds",
            xlabel="alpha",
            ylabel="final validation reward (256 problems)",
            ylim=(0.64, 0.83),
        )


# A pretrained model on two CPU cores

ONE_EPOCH = "PSPO, 1 epoch"
ARMS = [*METHODS, ONE_EPOCH]
AFTERWARDS = "Clip, 1e-4"  # no part of the 14 comparisons


def read_study(folder: Path, table: str = "runs.csv") -> pd.DataFrame:
    """Runs or answers with their arm; an answer of the untrained model has none."""
    path = folder / table
    rows = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    arm = rows["method"].mask(rows["epochs"] == 1, ONE_EPOCH)
    rows["arm"] = arm.mask(rows["experiment"] == "smollm2-clip", AFTERWARDS)
    return rows


def full_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """(seed; measure, arm) of the full runs, with what they gained in accuracy and capitals, in points."""
    runs = runs.query("experiment != 'smollm2-search'")
    runs["gain"] = runs["asdiv_reward"] - runs["untrained_asdiv_reward"]
    runs["capitals"] = runs["capitals_gold_anywhere"] - runs["untrained_capitals_gold_anywhere"]
    return runs.pivot(index="seed", columns="arm", values=["lr", "asdiv_reward", "gain", "capitals"])


def study_texts(folder: Path) -> Texts:
    runs = read_study(folder)
    full = full_runs(runs)
    apart = {f"{arm} gain": full["gain"][arm] for arm in ARMS}
    apart |= {arm: full["gain"][arm] - full["gain"]["NoClip"] for arm in ARMS[1:]}
    apart["epochs"] = full["gain"][ONE_EPOCH] - full["gain"]["PSPO"]
    stars = holm_stars(apart)
    adjusted = holm_p_values(apart)

    rows = []
    for arm in [*ARMS, AFTERWARDS]:
        gain = full["gain"][arm]
        accuracy = full["asdiv_reward"][arm]
        row = [arm, scientific(full["lr"][arm].iloc[0]), f"{accuracy.mean():.1f}", f"{accuracy.min():.1f}"]
        row.append(text(gain, 1, "+") + stars.get(f"{arm} gain", ""))
        row.append("" if arm == "NoClip" else text(gain - full["gain"]["NoClip"], 1, "+") + stars.get(arm, ""))
        row.append(text(full["capitals"][arm], 1, "+"))
        rows.append(row)
    header = ["", "rate", "right (%)", "lowest seed", "gained", "minus NoClip", "capitals"]

    trained = full["asdiv_reward"][ARMS]
    others = [arm for arm in ARMS if arm != "Clip"]
    _, lows, highs = zip(*(interval(apart[arm]) for arm in ARMS[1:]), strict=True)
    grid = runs[runs["experiment"] == "smollm2-search"].pivot(index=["lr", "seed"], columns="arm", values="reward")
    pairs = (grid["PSPO"] - grid["NoClip"]).abs().dropna()
    afterwards = full["asdiv_reward"][AFTERWARDS]
    capitals = full["capitals"][ARMS]
    return {
        "study": table(header, rows),
        "untrained": f"{runs['untrained_asdiv_reward'].max():.1f}%",
        "right": f"{trained.mean().min():.1f} to {trained.mean().max():.1f}%",
        "gained": f"{(full['gain'][ARMS] > 0).sum(axis=None)} of {trained.size}",
        "lowest": f"{trained.min(axis=None):.1f}%",
        "others p": f"{max(adjusted[f'{arm} gain'] for arm in others):.4f}",
        "Clip p": f"{adjusted['Clip gain']:.2f}",
        "afterwards": f"{afterwards.min():.1f} to {afterwards.max():.1f}%",
        "reach": f"{min(lows):.1f} to {max(highs):+.1f}",
        "luck": f"{apart['PSPO'].abs().max():.0f}",
        "pairs": f"{pairs.max():.3f}",
        "epochs": text(apart["epochs"], 1, "+"),
        "one epoch": f"{trained[ONE_EPOCH].min():.1f} to {trained[ONE_EPOCH].max():.1f}%",
        "capitals": f"{-capitals.mean().max():.1f} to {-capitals.mean().min():.1f}",
        "capitals fell": f"{(capitals < 0).sum(axis=None)} of {trained.size}",
        "untrained capitals": f"{runs['untrained_capitals_gold_anywhere'].max():.1f}%",
        **answer_texts(folder),
    }


def answer_texts(folder: Path) -> Texts:
    """How the untrained model and the 35 runs answer."""
    answers = read_study(folder, "asdiv.parquet").query("arm != @AFTERWARDS")
    answers["kind"] = answers["category"].replace({"Sum": "Addition", "Difference": "Subtraction"})
    answers["operator"] = answers["completion"].str.extract(r"\d *([-+*/])", expand=False)
    answers["chosen"] = answers["operator"] == answers["kind"].map({"Addition": "+", "Subtraction": "-"})
    trained = answers["arm"].notna()
    shares = 100 * answers.groupby(["kind", trained])["chosen"].mean().unstack()
    texts = {f"operator {kind}": f"{before:.0f} to {after:.0f}%" for kind, (before, after) in shares.iterrows()}

    untrained = answers[~trained].set_index("problem")
    gains = 100 * (answers[trained].groupby("problem")["reward"].mean() - untrained["reward"])
    long = untrained["completion"].str.count(r"\d+(\.\d+)?") > 2
    texts["long"] = f"{gains[long & (untrained['reward'] == 0)].sum() / len(gains):.1f} of {gains.mean():.1f}"

    subtractions = answers[answers["kind"] == "Subtraction"].groupby(["arm", "seed"])
    adds = 100 * subtractions["operator"].agg(lambda operators: (operators == "+").mean())
    worst = 100 * answers.groupby(["arm", "seed"])["reward"].mean().nsmallest(3)
    texts["worst"] = f"{worst.min():.1f} to {worst.max():.1f}%"
    texts["worst add"] = f"{adds[worst.index].min():.0f} to {adds[worst.index].max():.0f}%"
    texts["others add"] = f"{adds.drop(worst.index).mean():.0f}%"
    return texts


def draw_study(folder: Path) -> None:
    runs = read_study(folder)
    accuracy = full_runs(runs)["asdiv_reward"]
    untrained = runs["untrained_asdiv_reward"].max()
    search = runs.query("experiment == 'smollm2-search'").groupby(["arm", "lr"])["validation"].mean()
    with picture(folder / "accuracy.svg", 7.6, 2.6, "") as figure:
        left, right = figure.subplots(1, 2)
        draw_rows(left, {arm: accuracy[arm] for arm in [*ARMS, AFTERWARDS]}, untrained)
        left.text(untrained, 0.5, " untrained", va="center")
        left.set(title="full runs, five seeds", xlabel="greedy, right of 291 held-out problems (%)")
        lines = {"PSPO": "--", ONE_EPOCH: ":"}  # PSPO's may lie on NoClip's
        for arm in ARMS:
            colour = COLOURS[arm.partition(",")[0]]
            right.plot(search[arm], lines.get(arm, "-"), marker="o", color=colour, markersize=3)
        rates = [1e-4, 3e-4, 1e-3, 2e-3]
        right.set_xscale("log")
        right.set_xticks(rates, map(scientific, rates))
        right.set_xticks([], minor=True)
        right.set(title="search, two seeds; dotted: one epoch", xlabel="learning rate", ylabel="validation reward")


def candidates_table(folder: Path) -> str:
    """Candidates for the task, untrained."""
    rows = []
    for row in pd.read_csv(folder / "candidates.csv").itertuples():
        greedy = [f"{row.problems:.0f}", f"{row.right:.1%}", f"{row.cut:.1%}"] if row.problems > 0 else ["", "", ""]
        drawn = [f"{row.mixed:.0f} of {row.groups:.0f}", f"{row.sampled:.1%}"] if row.groups > 0 else ["", ""]
        rows.append([row.candidate, row.prompt, *greedy, *drawn])
    return table(["candidate", "prompt", "problems", "right", "cut", "mixed groups", "drawn, right"], rows)


# Stale rollouts

LAGS = [0, 1, 2, 4, 8]


def read_grid_seeds(folder: Path) -> pd.DataFrame:
    """Final reward by seed, and by model, method, epochs, rate and lag."""
    runs = pd.read_csv(folder / "runs.csv")
    is_luspo = (runs["method"] == "GSPO") & (runs["aggregation"] == "dr_grpo")
    runs["method"] = runs["method"].mask(is_luspo, "LUSPO")
    return runs.pivot(index="seed", columns=["name_or_path", "method", "epochs", "lr", "lag"], values="validation")


def read_grid(folder: Path) -> pd.Series:
    """As `read_grid_seeds`, the mean over seeds."""
    return read_grid_seeds(folder).mean()


def lag_costs(grid: pd.Series, model: str) -> tuple[float, pd.DataFrame]:
    """What training gains at lag 0, mean over methods; each method's cost of a lag, the setting chosen anew."""
    best = grid[model].unstack("lag").groupby("method").max()
    gain = best[0].mean() - UNTRAINED[model]
    return gain, -best.sub(best[0], axis=0)


def mean_and_range(costs: pd.Series) -> str:
    """Mean over methods, and in brackets the lowest and the highest."""
    return f"{costs.mean():.3f} ({costs.min():.3f} to {costs.max():.3f})"


def lag_texts(folder: Path) -> Texts:
    grid = read_grid(folder)
    costs = {model: lag_costs(grid, model) for model in MODELS}
    too_high = grid["tiny-base"].xs((4, 1e-4), level=("epochs", "lr")).unstack("lag")
    dear = too_high[0] - too_high[8]
    dearest = costs["tiny-base"][1][8].idxmax()
    return {
        "short lags": ", ".join(mean_and_range(costs["tiny-base"][1][lag]) for lag in (1, 2, 4)),
        "cost": f"{costs['tiny-base'][1][8].mean():.3f} of the {costs['tiny-base'][0]:.3f}",
        "dearest": f"{dearest} {costs['tiny-base'][1].loc[dearest, 8]:.3f}",
        "math": f"{mean_and_range(costs['tiny-math'][1][8])} of {costs['tiny-math'][0]:.3f}",
        "lag-2-4": ", ".join(
            f"{method} {costs['tiny-base'][1].loc[method, 2]:.3f} and {costs['tiny-base'][1].loc[method, 4]:.3f}"
            for method in ("Clip", "NoClip")
        ),
        "dear": f"{dear.min():.3f} ({dear.idxmin()}) to {dear.max():.3f} ({dear.idxmax()})",
    }


RATES = [1e-5, 3e-5, 1e-4, 4e-4]


def read_rates(folder: Path) -> pd.DataFrame:
    """Four epochs with ratios to the drawing policy: (method, lag, rate; seed), Clip's other ranges as "Clip 0.4"."""
    runs = pd.read_csv(folder / "controls.csv")
    runs = runs[runs["experiment"].isin(["rates", "ranges", "low-rates"])]
    is_range = (runs["experiment"] == "ranges") & (runs["method"] == "Clip")
    runs = runs[is_range | (runs["experiment"] != "ranges")]
    runs.loc[is_range, "method"] = "Clip " + runs["epsilon"].astype(str)
    return runs.pivot(index=["method", "lag", "lr"], columns="seed", values="validation")


def read_one_epoch(folder: Path) -> pd.DataFrame:
    """As `read_rates`, with one epoch."""
    runs = pd.read_csv(folder / "controls.csv").query("experiment == 'one-epoch'")
    return runs.pivot(index=["method", "lag", "lr"], columns="seed", values="validation")


def chosen(rates: pd.DataFrame, *methods: str) -> pd.Series:
    """By seed, the reward at lag 8 of the setting whose mean over the other seeds is best."""
    settings = pd.concat([rates.loc[(method, 8)] for method in methods], keys=methods)
    return pd.Series({seed: settings.loc[settings.drop(columns=seed).mean(axis=1).idxmax(), seed] for seed in settings})


def same_setting(folder: Path) -> pd.Series:
    """By seed, Clip (range 0.2) minus NoClip at lag 8 on tiny-base, both with four epochs at 1e-4."""
    runs = pd.read_csv(folder / "runs.csv")
    runs = runs[
        (runs["name_or_path"] == "tiny-base") & (runs["epochs"] == 4) & (runs["lr"] == 1e-4) & (runs["lag"] == 8)
    ]
    rewards = runs[runs["method"].isin(["Clip", "NoClip"])].pivot(index="seed", columns="method", values="validation")
    return rewards["Clip"] - rewards["NoClip"]


def advice_table(folder: Path) -> str:
    """What to change from lag 0's best setting, and what that gained on tiny-base with the seeds that chose it."""
    rates = read_rates(folder)
    grid = read_grid_seeds(folder)["tiny-base"]
    sequence_level = []
    for method in ("GSPO", "LUSPO"):
        for lag in (1, 2, 4):
            sequence_level.append(grid[method, 4, 1e-4, lag] - grid[method, 4, 3e-5, lag])
    higher_rate = pd.concat(sequence_level, axis=1).mean(axis=1)

    def lower_rate(method: str) -> pd.Series:
        return rates.loc[(method, 8, 1e-5)] - rates.loc[(method, 8, 3e-5)]

    _, decoupled, _ = read_decoupled(folder)
    wider = rates.loc[("Clip 0.4", 8, 3e-5)] - rates.loc[("Clip", 8, 3e-5)]
    rows = [
        ["1, 2, 4", "GSPO, LUSPO", "learning rate 1e-4; undecided", text(higher_rate, 3, "+")],
        ["1, 2, 4", "others", "nothing (REINFORCE at 4: undecided)", ""],
        ["8", "NoClip, PSPO", "learning rate 1e-5", text(lower_rate("NoClip"), 3, "+")],
        ["8", "P3O", "learning rate 1e-5; undecided", text(lower_rate("P3O"), 3, "+")],
        ["8", "Clip", "range 0.4, not 0.2", text(wider, 3, "+")],
        ["8", "SAPO, TOPR", "nothing", ""],
        ["8 (96 rollouts)", "Clip", "decoupled ratios", text(decoupled[DECOUPLED] - decoupled["Clip 0.2"], 3, "+")],
    ]
    return table(["lag", "method", "what to change", "change of final reward"], rows)


def read_forks(folder: Path, model: str, stages: Sequence[str]) -> pd.DataFrame:
    forks = pd.read_csv(folder / "forks.csv")
    return forks[(forks["model"] == model) & forks["stage"].isin(stages)]


def by_lag(folder: Path, rollouts: int = 9) -> pd.DataFrame:
    """(run; lag, surrogate): change of the share of correct answers at a KL of 0.004, after so many rollouts."""
    forks = read_forks(folder, "tiny-base", ["first", "dose"])
    forks = forks[(forks["aim"] == 0.004) & (forks["rollouts"] == rollouts)]
    return forks.pivot(index="run", columns=["lag", "surrogate"], values="correct")


def gradient_cosines(folder: Path) -> pd.Series:
    """By surrogate, the cosine of its gradient with the true one at lag 8 on tiny-base, in Adam's metric."""
    gradients = pd.read_csv(folder / "gradients.csv").query("model == 'tiny-base' and lag == 8 and metric == 'adam'")
    cosines = gradients["dot"] / (gradients["target2"] * gradients["norm2"]) ** 0.5
    return cosines.groupby(gradients["surrogate"]).mean()


def evidence_rows(folder: Path) -> dict[str, pd.Series]:
    """Clip minus NoClip at lag 8: a difference per seed or run of each comparison."""
    rates = read_rates(folder)
    noclip = chosen(rates, "NoClip")
    one_epoch = read_one_epoch(folder)
    early, late = by_lag(folder)[8], by_lag(folder, 16)[8]
    math = read_forks(folder, "tiny-math", ["first"]).query("lag == 8 and matched")
    math = math.pivot(index=["run", "rollouts"], columns="surrogate", values="correct")
    small = read_forks(folder, "SmolLM2-135M", ["small"]).pivot(index="run", columns="surrogate", values="correct")
    return {
        "4 epochs, best rates": chosen(rates, "Clip") - noclip,
        "4 epochs, best rates, range 0.4": chosen(rates, "Clip", "Clip 0.1", "Clip 0.4") - noclip,
        "1 epoch, best rates": chosen(one_epoch, "Clip") - chosen(one_epoch, "NoClip"),
        "4 epochs at 1e-4": same_setting(folder),
        "one rollout, the 10th, share right": early["Clip"] - early["NoClip"],
        "one rollout, the 17th": late["Clip"] - late["NoClip"],
        "one rollout, tiny-math": (math["Clip"] - math["NoClip"]).groupby("run").mean(),
        "one rollout, SmolLM2": small["Clip"] - small["NoClip"],
    }


def stale_texts(folder: Path) -> Texts:
    rows = [[name, text(values, 3, "+")] for name, values in evidence_rows(folder).items()]
    forks = by_lag(folder)[1]
    cosines = gradient_cosines(folder)
    rates = read_rates(folder)
    fresh = rates.loc[("NoClip", 0, 3e-5)]
    stale = rates.loc[("NoClip", 8, 3e-5)]
    grid = read_grid(folder)
    return {
        "evidence": table(["at lag 8", "Clip minus NoClip"], rows),
        "advice": advice_table(folder),
        "lead": f"{(forks['Clip'] - forks['NoClip']).mean():.3f}",
        "cosines": f"{cosines['Clip']:.2f}, NoClip's {cosines['NoClip']:.2f}",
        "seeds": f"{grid['tiny-base', 'NoClip', 4, 3e-5, 8]:.3f} in the grid, {stale.mean():.3f} with other seeds",
        "noclip": f"{text(fresh - stale)} at 3e-5, {text(fresh - rates.loc[('NoClip', 8, 1e-5)])} at 1e-5",
        **lag_texts(folder),
        **decoupled_texts(folder),
        **pretrained_texts(folder),
    }


def draw_stale(folder: Path) -> None:
    draw_decoupled(folder)
    rates = read_rates(folder).mean(axis=1)
    with picture(folder / "rates.svg", 7.6, 3.0, "learning rate of AdamW, four epochs on each rollout") as figure:
        for axes, lag in zip(figure.subplots(1, 2, sharey=True), (0, 8), strict=True):
            axes.set(title=f"lag {lag}, five seeds", xscale="log", xlim=(8e-6, 1.1e-3), ylim=(0.05, 0.85))
            axes.set_xticks(RATES, map(scientific, RATES))
            axes.minorticks_off()
            axes.axhline(UNTRAINED["tiny-base"], color=GREY, ls=":", linewidth=1)
            axes.text(9e-6, UNTRAINED["tiny-base"] + 0.01, "untrained")
            ends = {}
            for method in ("NoClip", "Clip", "P3O", "SAPO", "TOPR"):
                curve = rates.loc[(method, lag)].loc[1e-5:]
                axes.plot(curve.index, curve, "o-", color=COLOURS[method], markersize=3)
                ends[method.replace("NoClip", "NoClip, PSPO")] = (curve.index[-1], curve.iloc[-1])
            axes.plot(rates.loc[("PSPO", lag)], "--", color=COLOURS["PSPO"], linewidth=1)
            if lag == 8:
                wide = rates.loc[("Clip 0.4", 8)]
                axes.plot(wide.index, wide, "D--", color=COLOURS["Clip"], markersize=4)
                axes.annotate("Clip, range 0.4", (1e-4, wide[1e-4]), (6, 6), textcoords="offset points")
            label_ends(axes, ends, 0.045)
        figure.axes[0].set_ylabel("final reward (256 problems)")

    forks = by_lag(folder)
    with picture(folder / "lags.svg", 4.6, 2.4, "lag: rollouts between drawing and training") as figure:
        axes = figure.subplots()
        ends = [interval(100 * (forks[lag]["Clip"] - forks[lag]["NoClip"])) for lag in LAGS]
        means, lows, highs = zip(*ends, strict=True)
        axes.axhline(0, color=GREY, ls=":", linewidth=1)
        axes.text(8, 0.3, "NoClip", ha="right", va="bottom")
        axes.vlines(LAGS, lows, highs, color=COLOURS["Clip"], linewidth=2)
        axes.plot(LAGS, means, "o-", color=COLOURS["Clip"], markersize=4)
        axes.text(4.3, means[3] + 0.6, "Clip, range 0.2", va="bottom")
        axes.set(xticks=LAGS, ylabel="Clip minus NoClip (points)")


# Decoupled ratios at a lag of eight

DECOUPLED = "Clip 0.2, decoupled"
ON_TIME = "Clip 0.2, on time"


def read_decoupled(folder: Path) -> tuple[dict[str, float], pd.DataFrame, pd.DataFrame]:
    """By name the rate that the search chose; at it, (seed; name) final rewards of the full runs and of the search."""
    runs = pd.read_csv(folder / "decoupled.csv")
    name = runs["method"].mask(runs["method"] == "Clip", "Clip " + runs["epsilon"].astype(str))
    name = name.mask(runs["ratio_to"] == "proximal", name + ", decoupled")
    runs["name"] = name.mask(runs["lag"] == 0, name + ", on time")
    runs["is_search"] = runs["experiment"].str.endswith("-search")
    searched = runs[runs["is_search"]].groupby(["name", "lr"])["validation"].agg(["mean", "count"])
    of_three = searched["mean"][searched["count"] == 3]
    rates = dict(list(of_three.groupby("name").idxmax()))
    runs = runs[runs["lr"] == runs["name"].map(rates)]
    rewards = runs.pivot(index=["is_search", "seed"], columns="name", values="validation")
    full = rewards.loc[False]
    return rates, full[full.mean().sort_values(ascending=False).index], rewards.loc[True]


def decoupled_texts(folder: Path) -> Texts:
    """Decoupled Clip against each of the others; coupled Clip is the one of two ranges with the better search."""
    rates, rewards, search = read_decoupled(folder)
    coupled = search[["Clip 0.2", "Clip 0.4"]].mean().idxmax()
    primary = {name: rewards[DECOUPLED] - rewards[name] for name in (coupled, "NoClip", "TOPR")}
    adjusted = holm_p_values(primary)
    rows = []
    for name, values in rewards.items():
        star = "*" if adjusted.get(name, 1) < 0.05 else ""
        apart = "" if name == DECOUPLED else text(rewards[DECOUPLED] - values, 3, "+") + star
        cost = "" if name.endswith("on time") else text(rewards[ON_TIME] - values, 3, "+")
        rows.append([name, scientific(rates[name]), f"{values.mean():.3f}", apart, cost])
    header = ["96 rollouts", "rate", "final reward", "decoupled Clip minus it", "Clip on time minus it"]
    with_search = pd.concat([rewards, search])
    return {
        "decoupled": table(header, rows),
        "coupled": text(primary[coupled]),
        "NoClip": text(primary["NoClip"]),
        "TOPR": text(primary["TOPR"]),
        "primary p": f"{max(adjusted):.3f}",
        "from on time": text(rewards[DECOUPLED] - rewards[ON_TIME], 3, "+"),
        "NoClip decoupled": text(rewards["NoClip, decoupled"] - rewards["NoClip"], 3, "+"),
        "TOPR with search": text(with_search[DECOUPLED] - with_search["TOPR"], 3, "+"),
    }


def pretrained_texts(folder: Path) -> Texts:
    """On SmolLM2 at a lag of 2: decoupled minus coupled Clip, their mean rewards, and the KL that makes the lag."""
    runs = pd.read_csv(folder / "decoupled-smollm2.csv")
    rewards = runs.pivot(index="seed", columns="ratio_to", values="validation")
    tiny = pd.read_csv(folder / "decoupled.csv")
    chosen = "experiment == 'lag-8' and method == 'Clip' and ratio_to == 'proximal'"
    return {
        "SmolLM2": text(rewards["proximal"] - rewards["behaviour"], 3, "+"),
        "SmolLM2 rewards": f"{rewards['proximal'].mean():.3f} and {rewards['behaviour'].mean():.3f}",
        "SmolLM2 lag": f"{runs['kl_sampler_old'].mean():.3f}",
        "tiny-base lag": f"{tiny.query(chosen)['kl_sampler_old'].mean():.3f}",
    }


def draw_decoupled(folder: Path) -> None:
    _, rewards, _ = read_decoupled(folder)
    x_label = "final reward (1,024 problems), ten seeds; dotted: Clip on time"
    with picture(folder / "decoupled.svg", 7.6, 2.2, x_label) as figure:
        draw_rows(figure.subplots(), dict(rewards.items()), rewards[ON_TIME].mean())


PAGES = {
    "tiny-protocol": (protocol_texts, draw_protocol),
    "tiny-control": (control_texts, draw_control),
    "smollm2": (study_texts, draw_study),
    "stale-rollouts": (stale_texts, draw_stale),
}


def fill(page: Path, texts: Texts) -> None:
    """Write each text between its markers."""

    def write_table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{texts[match[2]]}\n\n<!-- /table -->"

    def write_number(match: re.Match[str]) -> str:
        return f"{match[1]}{texts[match[2]]}<!-- /n -->"

    content = page.read_text(encoding="utf-8")
    content = re.sub(r"(<!-- table: ([^>]+) -->\n).*?<!-- /table -->", write_table, content, flags=re.DOTALL)
    content = re.sub(r"(<!-- n: ([^>]+) -->)[^<]*<!-- /n -->", write_number, content)
    write_text(page, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="folder of README.md and results/")
    root = parser.parse_args().root
    texts = {}  # of the README, by page and name
    for name, (page_texts, draw) in PAGES.items():
        folder = root / "results" / name
        draw(folder)
        of_page = page_texts(folder)
        fill(folder / "README.md", of_page)
        texts |= {f"{name} {key}": value for key, value in of_page.items()}
    smollm2 = root / "results/smollm2"
    fill(smollm2 / "selection.md", {"candidates": candidates_table(smollm2)})
    fill(root / "README.md", texts)


if __name__ == "__main__":
    main()
