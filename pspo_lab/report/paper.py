"""Our runs beside the paper's numbers: ``pspo report RUNS --against paper``.

`paper.csv` has them: the accuracies (gold anywhere, greedy, %) of its main table, those that its text gives of 7B
models, and the validation rewards of its ablation of alpha. Of 7B it does not say the training data; gsm8k+math is our
reading.
"""

from pathlib import Path

import pandas as pd

from pspo.cli.escape import in_markdown
from pspo_lab.report.runs import ARGUMENT, DATA, MODEL, SURROGATE, Runs, labels, methods, settings
from pspo_lab.report.tables import as_markdown, learning, over_seeds, with_interval

METHOD = ["model", "data", "method"]
SETS = ["gsm8k", "asdiv", "svamp", "math"]
NOTE = (
    "Accuracy (%): the gold value anywhere in the response, greedy. Ours: mean over seeds with its 95% interval (of one"
    " seed the interval over problems), and in parentheses the difference from the paper, which gives no intervals."
)
ALPHA = (
    "Mean validation reward at the end, over seeds with its 95% interval. The paper does not say how many seeds it has."
)


def against_paper(runs: Runs) -> str:
    """Both tables as Markdown: the paper's rows with ours below each, then those of ours that it has not."""
    paper = pd.read_csv(Path(__file__).with_name("paper.csv"), keep_default_na=False)
    ours, rows = our_accuracies(runs), []
    columns = SETS + sorted(set(ours["column"]) - set(SETS))
    of_paper = dict(list(paper[paper["table"] != "alpha"].groupby(METHOD, sort=False)))
    of_ours = dict(list(ours.groupby(METHOD, sort=False)))
    for name in dict.fromkeys([*of_paper, *of_ours]):
        values = of_paper[name].set_index("measure")["value"] if name in of_paper else {}
        if name in of_paper:
            texts = [f"{values[column]:.1f}" if column in values else "–" for column in columns]
            rows.append([*name, "paper", *texts, ""])
        for setting, cells in of_ours.get(name, ours[:0]).groupby("setting", sort=False):
            texts, n = dict.fromkeys(columns, "–"), cells["seeds"].max()
            for cell in cells.itertuples():
                gap = f" ({100 * cell.mean - values[cell.column]:+.1f})" if cell.column in values else ""
                texts[cell.column] = with_interval(cell, 100, 1) + gap
            source = f"ours, {n} seed{'' if n == 1 else 's'}" if name[1] else "ours"
            rows.append([*name, source, *texts.values(), setting.removeprefix(name[2]).strip(" ()")])
    others = sorted(set(ours["model"]) - set(paper["model"]))
    said = [in_markdown(f"The paper has no runs of {', '.join(others)}: nothing is compared there.")] if others else []
    table = pd.DataFrame(rows, columns=["model", "trained on", "method", "source", *columns, "setting"])
    text = as_markdown(table.set_index("model"))
    return "\n\n".join(["# Against the paper", text, " ".join([NOTE, *said]), *alpha_table(runs, paper)]) + "\n"


def our_accuracies(runs: Runs) -> pd.DataFrame:
    """Rows of model, data ("" untrained), method, setting, column (a test set), seeds, mean, low and high.

    An evaluation of a mixture counts for each of its sets. Of several evaluations the one of most problems counts.
    """
    numbers = runs.numbers[(runs.numbers["measure"] == "gold_anywhere") & (runs.numbers["temperature"] == "0")]
    numbers = numbers[(numbers["split"] == "test") & numbers["stage"].isin(["before", "after"])]
    whole = numbers["group"].isna() & ~numbers["data"].astype(str).str.contains("+", regex=False)
    numbers = numbers[whole | (numbers["part"] == "source")]
    trained, configs = numbers["stage"] == "after", runs.configs
    label = {run: name for _, of in configs.groupby([MODEL, DATA, SURROGATE]) for run, name in labels(of).items()}
    numbers["model"] = numbers["model"].map(lambda name: Path(name).name)
    numbers = numbers.assign(
        one=numbers["run"].where(trained, numbers["model"]),
        data=numbers["run"].map(configs[DATA]).where(trained, ""),
        method=numbers["run"].map(named_by_epochs(configs)).where(trained, "untrained"),
        setting=numbers["run"].map(label).where(trained, "untrained"),
        column=numbers["group"].where(numbers["group"].notna(), numbers["data"]),
    )
    numbers = numbers.sort_values("n", kind="stable").drop_duplicates(["one", "column"], keep="last")
    row, numbers = [*METHOD, "setting"], numbers.sort_values(METHOD)
    cells = over_seeds(numbers.assign(row=pd.MultiIndex.from_frame(numbers[row]).to_flat_index()))
    return cells.join(pd.DataFrame(cells["row"].tolist(), cells.index, columns=row))


def named_by_epochs(configs: pd.DataFrame) -> pd.Series:
    """Each run's method, with its epochs where they are not the paper's: one for NoClip, two for the others."""
    method, epochs = methods(configs), configs.get("algorithm.epochs")
    papers = pd.Series(2, configs.index).where(method != "NoClip", 1)
    return method.where(epochs == papers, method + ", epochs " + epochs.astype(str))


def alpha_table(runs: Runs, paper: pd.DataFrame) -> list[str]:
    """The ablation: the last validation reward by alpha, the paper's and ours where settings differ in alpha alone."""
    switch = f"{ARGUMENT}alpha"
    if switch not in runs.configs:
        return []
    alpha = pd.to_numeric(runs.configs[switch], errors="coerce")
    configs = runs.configs.assign(**{switch: alpha}).dropna(subset=switch)
    group = settings(configs, besides=[switch])
    group = group[configs.groupby(group)[switch].transform("nunique") > 1]
    row = configs[MODEL].map(lambda name: Path(name).name) + ", " + configs[DATA] + ", " + (group + 1).astype(str)
    values = learning(runs).query("column == 'final validation reward' and run in @group.index")
    values = values.assign(row=values["run"].map(row), column=values["run"].map(alpha))
    of_paper = {float(row.alpha): f"{row.value:.3f}" for row in paper[paper["table"] == "alpha"].itertuples()}
    table = {"paper, Qwen2-Math-1.5B": of_paper}
    for cell in over_seeds(values).itertuples():
        table.setdefault(cell.row, {})[cell.column] = with_interval(cell, 1, 3)
    table = pd.DataFrame(table).T.sort_index(axis=1).fillna("–").rename(columns="alpha {:g}".format)
    return ["## Alpha", as_markdown(table), ALPHA] if len(table) > 1 else []
