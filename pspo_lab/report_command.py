"""Tables of trainings: ``pspo report RUNS... --output_dir report``; ``pspo view RUNS...`` draws their curves.

RUNS are run folders, or folders above them. Each model with its training data is a task, with tables of its own. Writes
``report.txt`` (everything), and the tables as ``table.csv`` (a line per cell, shares from 0 to 1). Runs without a
``summary.json`` are not finished, and the tables leave them out. If a model was evaluated several times on the same
problems, the last by folder name counts.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

import pandas as pd

from pspo.endings import user_errors
from pspo.files import write_text
from pspo.terminal import one_line
from pspo_lab.identities import algorithms, describe_identities
from pspo_lab.runs import Runs, grouped, read_runs, run_folders
from pspo_lab.settings import DATA, MODEL
from pspo_lab.tables import DIFFERENCES, NOTES, Cell, Value, main_values, make_cells, noise_floor, table_texts, tables

CELLS = ["task", "table", "row", "column", "seeds", "mean", "low", "high", "p", "holm", "detects", "needs"]
HOLM = "With * it is not 0 by the t-tests at 5% for all {n} of these tables together (Holm 1979)."


def split_tasks(runs: Runs) -> dict[str, Runs]:
    """Return by title the runs of each model on the same data; the evaluations of all other models come last."""
    parts = grouped(runs.labels, lambda run: (run.switches[MODEL], run.switches[DATA]))
    tasks = {f"{model} on {data}": runs.compared(parts[model, data], {model}) for model, data in sorted(parts)}
    if others := {test.model for test in runs.untrained} - {model for model, _ in parts}:
        tasks["Other evaluations"] = runs.compared([], others)
    return tasks


def write_report(runs: Runs, output: Path) -> tuple[list[str], list[Path]]:
    """Write the tables of every task; return sentences on who won, and the files."""
    tasks = split_tasks(runs)
    verdicts = []
    paragraphs = []
    records = []
    for task, task_runs in tasks.items():
        task_tables = tables(task_runs.finished)
        if verdict := " ".join(describe_result(task_runs.finished, task_tables)):
            verdicts.append(f"Result{f' of {task}' if len(tasks) > 1 else ''}: {verdict}")
        paragraphs += [f"# {one_line(task)}", *map(paragraph, describe_runs(task_runs))]
        for title, cells in task_tables.items():
            paragraphs += table_section(title, cells)
            records += [{"task": one_line(task), "table": title} | cell.record() for cell in cells]
    write_text(output / "report.txt", "\n\n".join([*map(paragraph, verdicts), *paragraphs]) + "\n")
    pd.DataFrame(records, columns=CELLS).to_csv(output / "table.csv", index=False)
    return verdicts, [output / "report.txt", output / "table.csv"]


def paragraph(text: str) -> str:
    """Break a text of printable letters into lines of 100 letters."""
    return fill(one_line(text), 100)


def table_section(title: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the paragraphs of a table."""
    yield f"## {title}"
    for heading, text in table_texts(title, cells).items():
        if heading:
            yield f"On {one_line(heading)}:"
        yield text
    n = sum(cell.holm is not None for cell in cells)
    yield paragraph(f"{NOTES[title]} {HOLM.format(n=n)}" if n else NOTES[title])


def describe_result(runs: Runs, tables: dict[str, list[Cell]]) -> Iterator[str]:
    """Sentences: which setting won, by how much, whether that can be told from luck, the noise floor, identities."""
    values = main_values(runs)
    if not values:
        return
    winner, *others = sorted(make_cells(values), key=lambda cell: -cell.mean)
    column = winner.column
    best = column.text(winner.mean)
    untrained = [cell for cell in tables.get("Accuracy", []) if cell.column == column and not cell.seeds]
    if len(untrained) == 1:  # several if prompts differ
        best += f" (untrained {column.text(untrained[0].mean)})"
    best += f" {column.measure} on {column.test}" if column.test else f" {column.measure}"
    if others:
        by = column.difference_text(winner.mean - others[0].mean)
        yield f"{winner.row} came first with {best}, {by} above {others[0].row}."
        second = others[0].row
        found = {(value.row, value.run.seed): value for value in values}
        seeds = [seed for row, seed in found if row == winner.row and (second, seed) in found]
        yield describe_luck([found[winner.row, seed] - found[second, seed] for seed in seeds])
    else:
        yield f"{winner.row} reached {best}; there is no second setting."
    algorithm = algorithms(runs)
    sd, df = noise_floor(values, algorithm)
    if df:
        floor = f"{column.difference_text(sd)} (standard deviation, {df} degrees of freedom)"
        yield f"Noise floor: two runs of one algorithm differ by {floor}."
    tested = [cell.holm for cell in tables.get(DIFFERENCES, []) if cell.holm is not None]
    if tested:
        yield f"Of the {len(tested)} differences below, {sum(holm < 0.05 for holm in tested)} are more than luck."
    yield from describe_identities(runs, algorithm)


def describe_luck(differences: Sequence[Value]) -> str:
    """Say whether the first of two settings is better by more than luck, from their differences by seed."""
    seeds = len(differences)
    cell = next(iter(make_cells(differences)), None)
    if cell is None or cell.estimate is None:
        return f"That cannot be told from luck: it takes 3 seeds that both settings have, and there are {seeds}."
    text = cell.column.difference_text(cell.mean, cell.interval)
    if cell.estimate.p() < 0.05:
        problems = " and their problems" if cell.estimate.n_problems > 1 else ""
        verdict = "That is more than luck" if cell.mean > 0 else "On the seeds that both have it is behind"
        return f"{verdict}: {text} over {seeds} seeds{problems}."
    if cell.estimate.detects() > 0:
        text += f"; {seeds} seeds would detect {cell.column.difference_text(cell.estimate.detects())}"
    return f"That cannot be told from luck: {text}."


def describe_runs(runs: Runs) -> Iterator[str]:
    """Sentences: how settings are named, and which runs are not finished."""
    if runs.labels:
        yield "A switch that a name leaves out has its default, or one value in all runs (see any run's config.yaml)."
    for run in sorted(runs.labels, key=lambda run: run.name):
        if not run.summary:
            yield f"Not finished, in no table: {runs.labels[run]}, seed {run.seed} ({run.name})"


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders above them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="the report's folder (default: report)")
    options = parser.parse_args(args)
    with user_errors("pspo report"):
        runs = read_runs(run_folders(options.runs))
        output = options.output_dir.expanduser()
        output.mkdir(parents=True, exist_ok=True)
        verdicts, files = write_report(runs, output)
    print(*map(paragraph, verdicts), sep="\n\n")
    print(*(one_line(str(file)) for file in files), sep="\n")
