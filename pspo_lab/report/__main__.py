"""Tables and pictures of trainings: ``pspo report RUNS... --output_dir report``.

RUNS are run folders, packed folders, or folders that hold some, however deep. Settings of another model or other
training data are another task, with tables and pictures of its own. Writes ``report.md`` (everything), ``table.md``,
``table.tex`` and ``table.csv`` (the tables; in the last one line a cell, shares not in percent), and pictures as SVG.
Runs without a ``summary.json`` are not finished: their curves are drawn, and the tables leave them out. Of several
evaluations of a model on the same problems the last one, by folder, counts.

``--pack FOLDER`` writes the runs as two tables and a file of their settings, which are reported as the runs are.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pspo.cli.escape import in_cell, in_file_name, in_markdown, one_line, tolerate_output
from pspo.cli.files import write_text
from pspo_lab.report.figures import draw_task
from pspo_lab.report.paper import against_paper
from pspo_lab.report.runs import DATA, MODEL, SEED, Runs, in_sentences, keyed, labels, pack, read_runs, warn
from pspo_lab.report.tables import NOTES, accuracies, as_latex, by_test, for_report, for_terminal, in_words, tables

CELLS = ["task", "table", "row", "column", "seeds", "mean", "low", "high", "p", "holm"]


def report(runs: Runs, output: Path) -> list[Path]:
    """Write the tables and pictures of every task; returns the files."""
    groups = runs.configs.groupby([MODEL, DATA]).groups
    tasks = {f"{model} on {data}": ([model], list(names)) for (model, data), names in groups.items()}
    if len(tasks) > 1:
        warn(f"runs of {len(tasks)} tasks, each in tables of its own: {', '.join(tasks)}")
    if others := set(runs.numbers["model"]) - set(runs.configs[MODEL]):
        tasks["Other evaluations"] = (sorted(others), [])

    markdown, latex, cells, pictures = ["# Report"], [], [], []
    for title, (models, names) in tasks.items():
        of_task = runs.take(names)
        finished, (label, key) = of_task.take(of_task.finished()), keyed(labels(of_task.configs))
        tested = set(accuracies(finished, "after")["run"])
        markdown.append(f"## {in_markdown(title)}")
        markdown += map(in_markdown, in_sentences(of_task.configs) if names else ())
        if key:
            markdown.append("\n".join("* " + in_markdown(f"{number} is {text}") for number, text in key.items()))
        for run in names:
            if run not in finished.configs.index:
                warn(f"{run}: not finished (no summary.json); its curves are drawn, the tables leave it out")
                said = f"Not finished, in the curves alone: {label[run]}, seed {runs.configs.loc[run, SEED]}"
                markdown.append(in_markdown(said))
            elif run not in tested:
                warn(f"{run}: no accuracy, neither in summary.json nor by an evaluation")
        for name, table in tables(finished, label, models).items():
            differences = table["p"].count() if "p" in table else 0
            markdown.append(f"### {name}\n\n{for_report(table)}\n\n{NOTES[name].format(n=differences)}")
            if name == "Accuracy":
                print(f"{one_line(title)}, of the models that the runs returned\n{for_terminal(table)}\n")
            if name == "Paired differences" and (words := in_words(table)):
                print("\n".join(words) + "\n")
                markdown.append("\n".join([f"{words[0]}\n", *(f"* {in_markdown(line)}" for line in words[1:])]))
            for test, text in by_test(table):
                latex.append(f"% {one_line(f'{title}: {name}, {test}').removesuffix(', ')}\n{as_latex(text)}")
            cells.append(table.assign(task=title, table=name))
        prefix = f"{in_file_name(title)}-" if len(tasks) > 1 else ""
        drawn = draw_task(of_task, finished, label, f"{output}/{prefix}") if names else []
        markdown += [f"![{path.stem}]({path.name})" for path in drawn]
        pictures += drawn

    written = {"report.md": markdown, "table.md": [part for part in markdown if part.startswith("##")],
               "table.tex": latex}  # fmt: skip
    for name, parts in written.items():
        write_text(output / name, "\n\n".join(parts) + "\n")
    table = pd.concat([pd.DataFrame(columns=CELLS), *cells])
    table["column"] = table["column"].str.removesuffix(" (%)")  # shares are written as shares
    table[["task", "row", "column"]] = table[["task", "row", "column"]].map(lambda text: in_cell(one_line(text)))
    table.to_csv(output / "table.csv", columns=CELLS, index=False)
    return [*(output / name for name in (*written, "table.csv")), *pictures]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="run folders, packed folders, or above them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="of the report (default: report)")
    against = "also the paper's numbers beside these runs' (against-paper.md)"
    parser.add_argument("--against", choices=["paper"], help=against)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write the runs' tables and settings there instead")
    options = parser.parse_args(args)
    tolerate_output()
    output = options.pack or options.output_dir
    try:
        output.mkdir(parents=True, exist_ok=True)
        runs = read_runs(options.runs)
        files = (pack if options.pack else report)(runs, output)
        if options.against:
            write_text(output / "against-paper.md", text := against_paper(runs))
            print(text)
            files.append(output / "against-paper.md")
    except (OSError, ValueError) as error:
        warn(f"error: {error}")
        raise SystemExit(2) from None
    print("\n".join(one_line(str(file)) for file in files))


if __name__ == "__main__":
    main()
