"""Our runs beside the paper's numbers: ``pspo report RUNS --against paper``.

`paper.csv` has them: the accuracies (gold anywhere, greedy, %) of its main table, and those that its text gives of
7B models. Of 7B it does not say the training data; gsm8k+math is our reading.
"""

from pathlib import Path

import pandas as pd

from pspo_lab.runs import Runs
from pspo_lab.settings import DATA, MODEL, SURROGATE, labels, methods
from pspo_lab.tables import escape_markdown, markdown_table, mean_over_seeds, mean_text

METHOD = ["model", "data", "method"]
SETS = ["gsm8k", "asdiv", "svamp", "math"]
NOTE = (
    "Accuracy (%): the gold value anywhere in the response, greedy. Ours: mean over seeds with its 95% interval (of one"
    " seed the interval over problems), and in parentheses the difference from the paper, which gives no intervals."
)


def against_paper(runs: Runs) -> str:
    """A table as Markdown: the paper's rows with ours below each, then those of ours that it has not."""
    paper = pd.read_csv(Path(__file__).with_name("paper.csv"), keep_default_na=False)
    paper = paper[paper["table"] != "alpha"]
    ours = our_accuracies(runs)
    columns = SETS + sorted(set(ours["column"]) - set(SETS))
    paper_rows = dict(list(paper.groupby(METHOD, sort=False)))
    our_rows = dict(list(ours.groupby(METHOD, sort=False)))
    rows = []
    for name in dict.fromkeys([*paper_rows, *our_rows]):
        values = paper_rows[name].set_index("measure")["value"] if name in paper_rows else {}
        if name in paper_rows:
            texts = [f"{values[column]:.1f}" if column in values else "–" for column in columns]
            rows.append([*name, "paper", *texts, ""])
        for setting, cells in our_rows.get(name, ours[:0]).groupby("setting", sort=False):
            texts = dict.fromkeys(columns, "–")
            for cell in cells.itertuples():
                texts[cell.column] = mean_text(cell, 100, 1)
                if cell.column in values:
                    texts[cell.column] += f" ({100 * cell.mean - values[cell.column]:+.1f})"
            seeds = cells["seeds"].max()
            source = "ours"
            if name[1]:  # trained
                source = "ours, 1 seed" if seeds == 1 else f"ours, {seeds} seeds"
            rows.append([*name, source, *texts.values(), setting.removeprefix(name[2]).strip(" ()")])
    table = pd.DataFrame(rows, columns=["model", "trained on", "method", "source", *columns, "setting"])
    note = NOTE
    if others := sorted(set(ours["model"]) - set(paper["model"])):
        note += " " + escape_markdown(f"The paper has no runs of {', '.join(others)}: nothing is compared there.")
    parts = ["# Against the paper", markdown_table(table.set_index("model")), note]
    return "\n\n".join(parts) + "\n"


def our_accuracies(runs: Runs) -> pd.DataFrame:
    """Rows of model, data ("" untrained), method, setting, column (a test set), seeds, mean, low and high.

    An evaluation of a mixture counts for each of its sets. Of several evaluations the one of most problems counts.
    """
    numbers = runs.numbers[(runs.numbers["measure"] == "gold_anywhere") & (runs.numbers["temperature"] == "0")]
    numbers = numbers[(numbers["split"] == "test") & numbers["stage"].isin(["before", "after"])]
    whole = numbers["group"].isna() & ~numbers["data"].astype(str).str.contains("+", regex=False)
    numbers = numbers[whole | (numbers["part"] == "source")]
    trained = numbers["stage"] == "after"
    configs = runs.configs
    label = {}
    for _, alike in configs.groupby([MODEL, DATA, SURROGATE]):
        label |= labels(alike).to_dict()
    numbers["model"] = numbers["model"].map(lambda name: Path(name).name)
    numbers = numbers.assign(
        source=numbers["run"].where(trained, numbers["model"]),
        data=numbers["run"].map(configs[DATA]).where(trained, ""),
        method=numbers["run"].map(methods_with_epochs(configs)).where(trained, "untrained"),
        setting=numbers["run"].map(label).where(trained, "untrained"),
        column=numbers["group"].where(numbers["group"].notna(), numbers["data"]),
    )
    numbers = numbers.sort_values("n", kind="stable").drop_duplicates(["source", "column"], keep="last")
    numbers = numbers.sort_values(METHOD)
    row = [*METHOD, "setting"]
    cells = mean_over_seeds(numbers.assign(row=pd.MultiIndex.from_frame(numbers[row]).to_flat_index()))
    return cells.join(pd.DataFrame(cells["row"].tolist(), cells.index, columns=row))


def methods_with_epochs(configs: pd.DataFrame) -> pd.Series:
    """Each run's method, with its epochs where they are not the paper's: one for NoClip, two for the others."""
    method = methods(configs)
    epochs = configs.reindex(columns=["algorithm.epochs"]).squeeze("columns")
    paper_epochs = pd.Series(2, configs.index).where(method != "NoClip", 1)
    return method.where(epochs.isna() | (epochs == paper_epochs), method + ", epochs " + epochs.astype(str))
