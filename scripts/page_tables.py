"""Tables of the results pages that have no study script: python scripts/page_tables.py results/tiny-control

FOLDER is tiny-protocol, tiny-control, tiny-comparisons or smollm2, with its packed runs. Writes what stands between
<!-- table: NAME --> and <!-- /table --> in FOLDER's README.md. Intervals over seeds are Student's at 95%.
"""

import argparse
import operator
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pandas as pd
from scipy.stats import t

from pspo.cli.files import write_text

METHODS = ["NoClip", "Clip", "PSPO", "P3O", "SAPO", "TOPR"]
SELECTED = {  # by the search of configs/sweep/tiny.yaml, on tiny-base and on tiny-math
    "NoClip": ("lr 1e-4", "lr 3e-5"),
    "Clip": ("epsilon 0.4, lr 3e-5", "epsilon 0.4, lr 3e-5"),
    "PSPO": ("alpha 0.1, lr 3e-5", "alpha 0.1, lr 3e-5"),
    "P3O": ("tau 4, lr 3e-5", "tau 4, lr 3e-5"),
    "SAPO": ("tau 1 and 3, lr 1e-4", "tau 1 and 1, lr 3e-5"),
    "TOPR": ("b+ 10, lr 1e-4", "b+ 10, lr 3e-5"),
}
NUMBER = r"(\d[\d,]*(?:\.\d+)?)"
EQUATION = re.compile(rf"{NUMBER} *([-+*/]) *\$? *{NUMBER} *= *\$? *(-?{NUMBER[1:]}")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
ROW_NAMES = {"NoClip": "NoClip, 1 epoch", "SAPO": "SAPO, by sequence", "TOPR": "TOPR, by sequence"}
CONTROL = ["PSPO 0.1", "PSPO 0.4", "NoClip 2 epochs", "Clip", "NoClip 1 epoch"]
MEASURES = ["area", "validation", "accuracy"]


def fill(page: Path, tables: dict[str, str]) -> None:
    """Write each table between its markers on the page, <!-- table: NAME --> and <!-- /table -->."""
    text = page.read_text(encoding="utf-8")
    for name, cells in tables.items():
        before, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- /table -->")
        if not end:
            raise SystemExit(f"{page}: no place for the table {name}")
        text = f"{before}{begin}\n{cells}\n\n{end}{after}"
    write_text(page, text)


def read_pack(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Metrics of all rollouts in order, and the numbers of summaries and evaluations."""
    rows = pd.read_parquet(folder / "runs.parquet")
    is_rollout = rows["measure"].isna()
    return rows[is_rollout].sort_values("step"), rows[~is_rollout]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---" for _ in header], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summarise(values: pd.Series) -> tuple[float, float, float]:
    """Mean over seeds, and the ends of its 95% interval."""
    half = t.ppf(0.975, len(values) - 1) * values.sem()
    return values.mean(), values.mean() - half, values.mean() + half


def as_text(values: pd.Series, measure: str = "") -> str:
    """The mean and its interval; accuracies in percent."""
    factor, digits = (100, 1) if "accuracy" in measure else (1, 3)
    mean, low, high = (f"{round(factor * number, digits) + 0.0:.{digits}f}" for number in summarise(values))
    return f"{mean} [{low}, {high}]"


def read_runs(folder: Path) -> pd.DataFrame:
    """One row per run: experiment, setting, method, seed, the setting's arguments and MEASURES.

    area: mean training reward; validation: the last validation reward; accuracy and "best accuracy": greedy, of the
    final and of the returned model.
    """
    key = ["experiment", "setting", "seed"]
    rollouts, values = read_pack(folder)
    rollouts = rollouts.groupby(key)
    runs = pd.DataFrame({"area": rollouts["reward"].mean(), "validation": rollouts["validation_reward"].last()})

    values = values[values["group"].isna() & values["evaluation"].eq("summary")]
    for name, stage, measure in (
        ("accuracy", "final", "accuracy"),
        ("best accuracy", "after", "accuracy"),
        ("best step", "run", "best_step"),
    ):
        chosen = values[(values["stage"] == stage) & (values["measure"] == measure)]
        runs[name] = chosen.set_index(key)["value"]

    runs = runs.reset_index()
    arguments = pd.DataFrame([dict(re.findall(r"([\w.]+)=([^,)]+)", setting)) for setting in runs["setting"]])
    return runs.join(arguments).assign(method=runs["setting"].str.partition(" ")[0])


def protocol_tables(folder: Path) -> dict[str, str]:
    runs = read_runs(folder).set_index(["method", "experiment"]).sort_index()
    rows = []
    for method in METHODS:
        cells = [ROW_NAMES.get(method, method)]
        for model, selected in zip(("tiny-base", "tiny-math"), SELECTED[method], strict=True):
            of_model = runs.loc[(method, model)]
            cells += [as_text(of_model[name], name) for name in ("best accuracy", "accuracy")]
            cells.append(selected)
        rows.append(cells)
    header = ["method", "tiny-base, best", "final", "selected", "tiny-math, best", "final", "selected"]
    return {"accuracy": table(header, rows)}


def overview_table(folder: Path) -> dict[str, str]:
    """The README's table of results."""
    runs = read_runs(folder).set_index(["method", "experiment"]).sort_index()
    rows = []
    for model in ("tiny-base", "tiny-math"):
        cells = [model]
        for method in METHODS:
            mean, low, high = summarise(100 * runs.loc[(method, model), "best accuracy"])
            cells.append(f"{mean:.1f} ± {(high - low) / 2:.1f}")
        rows.append(cells)
    return {"results": table(["", "NoClip, 1 epoch", *METHODS[1:]], rows)}


def control_name(run: pd.Series) -> str:
    if run["method"] == "PSPO":
        return f"PSPO {run['alpha']}"
    if run["method"] == "NoClip":
        one_epoch = run["epochs"] == "1" or run["experiment"] == "path"
        return "NoClip 1 epoch" if one_epoch else "NoClip 2 epochs"
    return run["method"]


def merge_equal_rows(rows: list[tuple[str, list[str]]]) -> list[list[str]]:
    """Neighbouring rows of the same numbers, as one."""
    merged: list[tuple[str, list[str]]] = []
    for name, cells in rows:
        if merged and merged[-1][1] == cells:
            merged[-1] = (f"{merged[-1][0]}, {name}", cells)
        else:
            merged.append((name, cells))
    return [[name, *cells] for name, cells in merged]


def control_tables(folder: Path) -> dict[str, str]:
    """Means, differences from NoClip with two epochs, one epoch at twice the rate, and the curve of alpha."""
    runs = read_runs(folder)
    runs["name"] = runs.apply(control_name, axis=1)
    values = runs.set_index(["experiment", "name", "max_grad_norm", "seed"])[MEASURES].sort_index()
    base = "NoClip 2 epochs"

    means = []
    differences = []
    adjusted = holm_stars(values, base)
    for clip in ("0.0", "0.1"):
        for name in CONTROL:
            cells = [clip_text(clip)]
            apart = [clip_text(clip)]
            for experiment in ("tokens", "steps"):
                for measure in MEASURES:
                    of_setting = values.loc[(experiment, name, clip), measure]
                    of_base = values.loc[(experiment, base, clip), measure]
                    cells.append(as_text(of_setting, measure))
                    star = "*" if (experiment, name, clip, measure) in adjusted else ""
                    apart.append(as_text(of_setting - of_base, measure) + star)
            means.append((name, cells))
            if name != base:
                differences.append((name, apart))
    header = ["", "gradient norm clipped at", *(2 * ["area", "validation", "accuracy (%)"])]

    path = []
    for clip in ("0.0", "0.1"):
        twice = values.loc[("path", "NoClip 1 epoch", clip)]
        two_epochs = values.loc[("tokens", base, clip)]
        for name, rows in (("NoClip 1 epoch at 6e-5", twice), ("minus two epochs at 3e-5", twice - two_epochs)):
            path.append([name, clip_text(clip), *(as_text(rows[measure], measure) for measure in MEASURES)])
    path_header = ["equal rate x steps", "gradient norm clipped at", "area", "validation", "accuracy (%)"]
    return {
        "means": table(header, merge_equal_rows(means)),
        "differences": table(header, merge_equal_rows(differences)),
        "path": table(path_header, path),
        "alpha": alpha_table(runs[runs["experiment"] == "alpha"]),
    }


def clip_text(clip: str) -> str:
    return "none" if clip == "0.0" else clip


def holm_stars(values: pd.DataFrame, base: str) -> set[tuple[str, str, str, str]]:
    """Which differences from ``base`` are not 0 by paired t-tests at 5% for all of them together (Holm 1979)."""
    p_values = {}
    for experiment, name, clip in values.index.droplevel("seed").unique():
        if experiment in ("tokens", "steps") and name != base:
            for measure in MEASURES:
                apart = values.loc[(experiment, name, clip), measure] - values.loc[(experiment, base, clip), measure]
                size = abs(apart.mean()) / apart.sem() if apart.any() else 0.0
                p_values[experiment, name, clip, measure] = 2 * t.sf(size, len(apart) - 1)
    found = set()
    largest = 0.0
    for rank, cell in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[cell])
        if largest < 0.05:
            found.add(cell)
    return found


def alpha_table(runs: pd.DataFrame) -> str:
    """Mean validation reward by variant and alpha, the spread of the means, and the deviation of single seeds."""
    cells = runs.groupby(["advantage_scale", "max_grad_norm", "dtype", "alpha"])["validation"].agg(["mean", "std"])
    rows = []
    for (scale, clip, dtype), variant in cells.groupby(level=["advantage_scale", "max_grad_norm", "dtype"]):
        spread = variant["mean"].max() - variant["mean"].min()
        deviation = (variant["std"] ** 2).mean() ** 0.5
        numbers = [f"{number:.3f}" for number in (*variant["mean"], spread, deviation)]
        rows.append([scale, clip_text(clip), dtype, *numbers])
    alphas = [f"alpha {float(alpha):g}" for alpha in cells.index.unique("alpha")]
    header = ["advantages divided by", "gradient norm clipped at", "weights", *alphas, "spread", "deviation of seeds"]
    return table(header, rows)


def reuse_table(folder: Path) -> dict[str, str]:
    """The runs from tiny-math that take 16 steps on each rollout."""
    runs = read_runs(folder)
    rows = []
    for setting, of_setting in runs[runs["experiment"] == "off-policy"].groupby("setting"):
        untrained = (of_setting["best step"] == 0).sum()
        cells = [as_text(of_setting[name], name) for name in ("accuracy", "validation", "best accuracy")]
        rows.append([setting, *cells, f"{untrained} of {len(of_setting)}"])
    measures = ["final model's accuracy (%)", "its validation reward", "returned model's accuracy (%)"]
    return {"reuse": table(["from tiny-math, 81.0%", *measures, "returned untrained"], rows)}


def percent(row: pd.Series, interval: bool = True) -> str:
    mean = f"{100 * row['value']:.1f}%"
    return f"{mean} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" if interval else mean


def smollm2_tables(folder: Path) -> dict[str, str]:
    """Evaluations before and after training, by name; those of the runs with bf16 and float32 weights."""
    rollouts, values = read_pack(folder)
    values = values[values["group"].isna()].copy()
    values["measure"] = values["measure"].replace("true_accuracy", "gold_anywhere")  # its name in older files
    named = values.drop_duplicates(["evaluation", "measure"]).set_index(["evaluation", "measure"])

    rows = []
    for name, words, gsm8k in (
        ("before", "before-word-problems", "before-gsm8k"),
        ("seed 0, after stage 1", "seed-0-stage-1-word-problems", "seed-0-stage-1-gsm8k"),
        ("seed 0, after stage 2", "seed-0-word-problems", "seed-0-gsm8k"),
        ("seed 1, after stage 1", "seed-1-stage-1-word-problems", None),
        ("seed 1, after stage 2", "seed-1-word-problems", "seed-1-gsm8k"),
    ):
        rows.append([name, *answer_cells(named.loc[words]), *gsm8k_cells(named, gsm8k)])
    header = ["", "ASDiv + SVAMP, 976 held-out problems", "gold value anywhere", "mean tokens per answer"]
    header += ["cut off at 128", "GSM8K, 500 test problems", "gold anywhere", "cut off"]

    sampled = []
    for name, evaluation in (("before", "before-sampled-300"), ("after stage 2", "seed-0-sampled-300")):
        sampled.append([name, *(percent(named.loc[(evaluation, f"pass@{k}")]) for k in (1, 2, 4))])

    return {
        "evaluations": table(header, rows),
        "learnt": learnt_table(pd.read_parquet(folder / "answers.parquet")),
        "sampled": table(["", "pass@1", "pass@2", "pass@4"], sampled),
        "weights": weights_table(values[values["experiment"] == "bf16"], rollouts),
    }


def answer_cells(values: pd.DataFrame) -> list[str]:
    """Accuracy, gold value anywhere, tokens of a completion, share cut off, of an evaluation's rows by measure."""
    tokens, cut_off = (values.loc[name, "value"] for name in ("completion_tokens", "truncated_share"))
    accuracies = [percent(values.loc[name]) for name in ("accuracy", "gold_anywhere")]
    return [*accuracies, f"{tokens:.0f}", f"{100 * cut_off:.0f}%"]


def gsm8k_cells(named: pd.DataFrame, evaluation: str | None) -> list[str]:
    if evaluation is None:
        return ["", "", ""]
    accuracy, anywhere, _, cut_off = answer_cells(named.loc[evaluation])
    return [accuracy, anywhere, cut_off]


def learnt_table(answers: pd.DataFrame) -> str:
    """Right answers of every model, those that changed, and of the first equations how many are right, and how."""
    answers = answers.set_index(["model", "problem"])
    before = answers.loc["before", "correct"]
    rows = []
    for model in ("before", "lora-0", "bfloat16-0", "bfloat16-1", "float32-0", "float32-1"):
        name, _, seed = model.replace("lora", "LoRA").partition("-")
        of_model = answers.loc[model]
        right = of_model["correct"]
        changed = ["", ""] if model == "before" else [str((right & ~before).sum()), str((before & ~right).sum())]
        marks = []
        for equation, gold in of_model.dropna(subset="equation")[["equation", "gold"]].itertuples(index=False):
            match = EQUATION.fullmatch(equation)
            a, b, c = (Fraction(match[i].replace(",", "")) for i in (1, 3, 4))
            meant = None if match[2] == "/" and b == 0 else OPERATIONS[match[2]](a, b)
            is_gold = meant == Fraction(gold)
            marks.append({"computed": meant == c, "gold": is_gold, "both": meant == c and is_gold})
        counts = [len(marks), *pd.DataFrame(marks).sum()]
        title = f"{name}, seed {seed}" if seed else name
        rows.append([title, str(right.sum()), *changed, *(str(count) for count in counts)])
    header = ["run", "right", "newly right", "no longer", "with an equation", "c is right"]
    return table([*header, "a op b is the gold value", "both"], rows)


def weights_table(values: pd.DataFrame, rollouts: pd.DataFrame) -> str:
    """The first stage with float32 and with bf16 weights."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        setting = f"PSPO (dtype={dtype})"
        for seed in (0, 1):
            of_run = values[(values["setting"] == setting) & (values["seed"] == seed)]
            test = of_run[(of_run["evaluation"] == "evaluation") & (of_run["stage"] == "after")].set_index("measure")
            summary = of_run[of_run["stage"] == "run"].set_index("measure")["value"]
            of_rollouts = rollouts[rollouts["experiment"].eq("bf16") & rollouts["setting"].eq(setting)]
            rewards = of_rollouts.loc[of_rollouts["seed"] == seed, "reward"]
            accuracy, _, tokens, cut_off = answer_cells(test)
            anywhere = percent(test.loc["gold_anywhere"], interval=False)
            memory = f"{summary['peak_memory_gb']:.1f} GB"
            seen = f"{summary['tokens']:,.0f}"
            reward = f"{rewards.tail(5).mean():.3f}"
            rows.append([dtype, str(seed), accuracy, anywhere, tokens, cut_off, reward, memory, seen])
    header = ["weights", "seed", "accuracy", "gold anywhere", "tokens", "cut off at 128"]
    header += ["training reward, last 5 rollouts", "memory of the process", "tokens seen"]
    return table(header, rows)


TABLES = {
    "tiny-protocol": protocol_tables,
    "tiny-control": control_tables,
    "tiny-comparisons": reuse_table,
    "smollm2": smollm2_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with runs.parquet and README.md")
    parser.add_argument("--readme", type=Path, help="tiny-protocol: the project's README, whose table is written too")
    args = parser.parse_args()
    fill(args.folder / "README.md", TABLES[args.folder.name](args.folder))
    if args.readme:
        fill(args.readme, overview_table(args.folder))


if __name__ == "__main__":
    main()
