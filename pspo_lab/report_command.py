"""Tables and pictures of trainings: ``pspo report RUNS... --output_dir report``.

RUNS are run folders, or folders that hold some, however deep. Each model with its training data is a task, with tables
and pictures of its own. Writes ``report.md`` (everything), the tables as ``table.csv`` (a line per cell, shares from 0
to 1), and pictures as SVG. Runs without a ``summary.json`` are not finished: their curves are drawn, and the tables
leave them out. Of several evaluations of a model on the same problems, the one in the folder that sorts last counts.
"""

import argparse
import html
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, indent

import pandas as pd

from pspo.cli.files import write_text
from pspo.endings import user_errors
from pspo.tasks.files import local_path
from pspo.terminal import one_line
from pspo_lab.figures import draw_curves
from pspo_lab.identities import describe_identities
from pspo_lab.runs import Runs, read_runs, run_folders
from pspo_lab.settings import DATA, MODEL, SEED, labels, shared_sentence
from pspo_lab.tables import (
    NOTES,
    SEEDS_FOR_AN_INTERVAL,
    interval_text,
    main_values,
    make_cells,
    noise_floor,
    number_text,
    subtract,
    table_texts,
    tables,
)

CELLS = ["task", "table", "row", "column", "seeds", "mean", "low", "high", "p", "holm", "detects", "needs"]
HOLM = "With * it is not 0 by the t-tests at 5% for all {n} of these tables together (Holm 1979)."
MARKDOWN = re.compile(
    r"[\\`|~$]|\*(?=\S)|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])"  # code, cells, mathematics, emphasis, links; no word_s
    r"|^[#*=\[]|^[-+](?=[\s-]|$)|^\d+[.)](?=\s|$)"  # at the start headings, lines, lists; no -1.5
)


def write_report(runs: Runs, output: Path) -> tuple[list[str], list[Path]]:
    """Write the tables and pictures of every task; returns who won, in sentences, and the files."""
    tasks = group_tasks(runs)
    verdicts = []
    markdown = []
    cells = [pd.DataFrame(columns=CELLS)]
    pictures = []
    for number, (title, (models, names)) in enumerate(tasks.items(), start=1):
        task_runs = runs.take(names)
        finished = task_runs.take(task_runs.finished())
        label = labels(task_runs.configs)
        markdown += [f"## {escape_markdown(title)}", *describe_runs(task_runs, finished, label)]
        task_tables = tables(finished, label, models)
        verdict = " ".join([*describe_winner(finished, label, task_tables), *describe_identities(finished, label)])
        if verdict:
            verdicts.append(f"Result{f' of {title}' if len(tasks) > 1 else ''}: {verdict}")
        for name, table in task_tables.items():
            markdown.append(f"### {name}")
            for heading, text in table_texts(table).items():
                if heading:
                    markdown.append(escape_markdown(f"On {heading}:"))
                markdown.append(indent(text, "    "))  # as code: no text in it is Markdown
            note = NOTES[name]
            if "p" in table and (n := table["p"].count()):
                note += f" {HOLM.format(n=n)}"
            markdown.append(note)
            cells.append(table.assign(task=title, table=name))
        if names:
            pictures.append(output / (f"{number}-curves.svg" if len(tasks) > 1 else "curves.svg"))
            draw_curves(task_runs, label, pictures[-1])
            markdown.append(f"![{pictures[-1].stem}]({pictures[-1].name})")

    write_text(output / "report.md", "\n\n".join(["# Report", *map(escape_markdown, verdicts), *markdown]) + "\n")
    table = pd.concat(cells)
    table["column"] = table["column"].str.removesuffix(" (%)")  # shares are written as shares
    names = ["task", "row", "column"]
    table[names] = table[names].map(one_line)
    table.to_csv(output / "table.csv", columns=CELLS, index=False)
    return verdicts, [output / "report.md", output / "table.csv", *pictures]


def escape_markdown(text: str) -> str:
    """Untrusted text, such as names and switches of runs, as a line of Markdown shows it."""
    text = html.escape(one_line(text), quote=False)
    return MARKDOWN.sub(lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text)


def group_tasks(runs: Runs) -> dict[str, tuple[list[str], list[str]]]:
    """The models before training and the runs of each task: one model on the same training data."""
    tasks = {}
    for (model, data), names in runs.configs.groupby([MODEL, DATA]).groups.items():
        tasks[f"{model} on {data}"] = ([model], list(names))
    if others := set(runs.numbers["model"]) - set(runs.configs[MODEL]):
        tasks["Other evaluations"] = (sorted(others), [])
    return tasks


def describe_winner(runs: Runs, label: pd.Series, tables: dict[str, pd.DataFrame]) -> list[str]:
    """Sentences: which setting won, by how much, whether that can be told from luck, and the noise floor."""
    values = main_values(runs, label)
    if values.empty:
        return []
    column = values["column"].iloc[0]
    means = values.groupby("row")["value"].mean().sort_values(ascending=False, kind="stable")
    test, _, measure = column.removesuffix(" (%)").rpartition(": ")
    unit = " points" if column.endswith("(%)") else ""
    best = number_text(column, means.iloc[0]) + ("%" if unit else "")
    for cell in tables.get("Accuracy", pd.DataFrame(columns=["column", "seeds"])).itertuples():
        if cell.column == column and not cell.seeds:
            best += f" (untrained {number_text(column, cell.mean)})"
    what = f"{measure} on {test}" if test else measure
    if len(means) == 1:
        sentences = [f"{means.index[0]} reached {best} {what}; there is no second setting."]
    else:
        by = number_text(column, means.iloc[0] - means.iloc[1])
        pairs = [values[values["row"] == name] for name in means.index[:2]]
        sentences = [
            f"{means.index[0]} came first with {best} {what}, {by}{unit} above {means.index[1]}.",
            describe_luck(subtract(pairs[0].merge(pairs[1], on="seed")), column, unit),
        ]
    sd, df = noise_floor(values)
    if df:
        sentences.append(
            f"Noise floor: two runs of one setting with different seeds differ by {number_text(column, sd)}{unit} "
            f"(standard deviation, {df} degrees of freedom)."
        )
    differences = tables.get("Paired differences")
    if differences is not None and (n := differences["p"].count()):
        sentences.append(f"Of the {n} differences below, {(differences['holm'] < 0.05).sum()} are more than luck.")
    return sentences


def describe_luck(differences: pd.DataFrame, column: str, unit: str) -> str:
    """Whether the first of two settings is better by more than luck, from their differences by seed."""
    seeds = len(differences)
    if seeds < SEEDS_FOR_AN_INTERVAL:
        return f"That cannot be told from luck: seeds that both have: {seeds}, and it takes {SEEDS_FOR_AN_INTERVAL}."
    cell = next(make_cells(differences.assign(row="", column=column), differences=True).itertuples())
    interval = interval_text(cell)
    if cell.p < 0.05:
        return f"That is more than luck: {interval}{unit} over {seeds} seeds and their problems."
    text = f"That cannot be told from luck: {interval}{unit}"
    if cell.detects > 0:
        text += f"; {seeds} seeds would detect {number_text(column, cell.detects)}{unit}"
    return f"{text}."


def describe_runs(runs: Runs, finished: Runs, label: pd.Series) -> list[str]:
    """Paragraphs of Markdown: what the runs share, and what is not finished."""
    sentences = []
    if len(runs.configs):
        sentences.append(f"{shared_sentence(runs.configs)} A switch that a name leaves out has its default.".strip())
    for run in runs.configs.index.difference(finished.configs.index):
        sentences.append(f"Not finished, in the curves alone: {label[run]}, seed {runs.configs.loc[run, SEED]} ({run})")
    return list(map(escape_markdown, sentences))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders above them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="of the report (default: report)")
    options = parser.parse_args(args)
    with user_errors("pspo report"):
        output = local_path(options.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        verdicts, files = write_report(read_runs(run_folders(options.runs)), output)
    print(*(fill(one_line(verdict), 100) for verdict in verdicts), sep="\n\n")
    print(*(one_line(str(file)) for file in files), sep="\n")
