"""Tables and pictures of trainings: ``python -m pspo.report RUNS... --output_dir report``.

RUNS are run folders, packed folders, or folders that hold some, however deep. Settings of another model or other
training data are another task, with tables and pictures of its own. Writes ``report.md`` (everything), ``table.md``,
``table.tex`` and ``table.csv`` (the tables; in the last one line a cell, shares not in percent), and pictures as SVG.
Runs without a ``summary.json`` are not finished: their curves are drawn, and the tables leave them out. Of several
evaluations of a model on the same problems the last one, by folder, counts.

``--pack FOLDER`` writes the runs as two tables and a file of their settings, which are reported as the runs are.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from pspo.records.files import write_text
from pspo.report.figures import draw_curves
from pspo.report.paper import against_paper
from pspo.report.runs import (
    ARGUMENT,
    DATA,
    MODEL,
    SEED,
    Runs,
    keyed,
    labels,
    methods,
    pack,
    read_runs,
    settings,
    untrained,
    usual_in_words,
    warn,
)
from pspo.report.tables import (
    DIAGNOSTICS,
    NOTES,
    accuracies,
    as_latex,
    as_markdown,
    as_text,
    compared,
    for_terminal,
    in_words,
    scale,
    smoothed,
    tables,
)

CELLS = ["task", "table", "row", "column", "seeds", "mean", "low", "high", "p", "holm"]


def report(runs: Runs, output: Path) -> list[Path]:
    """Write the tables and pictures of every task; returns the files."""
    tasks = {f"{model} on {data}": ([model], list(runs_of))
             for (model, data), runs_of in runs.configs.groupby([MODEL, DATA]).groups.items()}  # fmt: skip
    if len(tasks) > 1:
        warn(f"runs of {len(tasks)} tasks, each in tables of its own: {', '.join(tasks)}")
    if others := set(runs.numbers["model"]) - set(runs.configs[MODEL]):
        tasks["Other evaluations"] = (sorted(others), [])

    markdown, latex, cells, pictures = ["# Report"], [], [], []
    for title, (models, names) in tasks.items():
        of_task = runs.take(names)
        finished, (label, key) = of_task.take(of_task.finished()), keyed(labels(of_task.configs))
        tested = set(accuracies(finished, "after")["run"])
        markdown.append(f"## {title}")
        if said := usual_in_words(of_task.configs):
            markdown.append(f"Unless its name says otherwise, a setting has {said}.")
        if key:
            markdown.append("\n".join(f"* {number} is {text}" for number, text in key.items()))
        for run in names:
            if run not in finished.configs.index:
                warn(f"{run}: not finished (no summary.json); its curves are drawn, the tables leave it out")
                markdown.append(f"Not finished, in the curves alone: {label[run]}, seed {runs.configs.loc[run, SEED]}")
            elif run not in tested:
                warn(f"{run}: no accuracy, neither in summary.json nor by an evaluation")
        for name, table in tables(finished, label, models).items():
            text = as_text(table)
            differences = table["p"].count() if "p" in table else 0
            markdown.append(f"### {name}\n\n{as_markdown(text)}\n\n{NOTES[name].format(n=differences)}")
            if name == "Accuracy":
                print(f"{title}, of the models that the runs returned\n{for_terminal(text)}\n")
            if name == "Paired differences" and (words := in_words(table)):
                print("\n".join(words) + "\n")
                markdown.append("\n".join([f"{words[0]}\n", *(f"* {line}" for line in words[1:])]))
            latex.append(f"% {title}: {name}\n{as_latex(text)}")
            cells.append(table.assign(task=title, table=name))
        prefix = re.sub(r"[^\w.+]+", "-", f"{title}-") if len(tasks) > 1 else ""
        drawn = draw_task(of_task, finished, label, f"{output}/{prefix}") if names else []
        markdown += [f"![{path.stem}]({path.name})" for path in drawn]
        pictures += drawn

    short = [part for part in markdown if part.startswith("##")]
    written = {"report.md": markdown, "table.md": short, "table.tex": latex}
    for name, parts in written.items():
        write_text(output / name, "\n\n".join(parts) + "\n")
    table = pd.concat([pd.DataFrame(columns=CELLS), *cells])
    table["column"] = table["column"].str.removesuffix(" (%)")  # shares are written as shares
    table.to_csv(output / "table.csv", columns=CELLS, index=False)
    return [*(output / name for name in (*written, "table.csv")), *pictures]


def draw_task(runs: Runs, finished: Runs, label: pd.Series, prefix: str) -> list[Path]:
    """Draw the curves, the diagnostics, and the ablation of every argument of a surrogate."""
    seed, method = runs.configs[SEED], methods(runs.configs)
    begin = untrained(runs).set_index("run")

    def curves(metrics: dict[str, str]) -> pd.DataFrame:  # by panel
        parts = [pd.DataFrame(columns=["panel", "row", "method"])]
        for panel, metric in metrics.items():
            values = runs.metrics.reindex(columns=["run", "step", metric]).dropna()
            for run, of_run in values.groupby("run", sort=False):
                y = smoothed(of_run[metric])
                points = dict(zip(of_run["step"].iloc[len(of_run) - len(y) :], y, strict=True))
                if run in begin.index and metric in begin:
                    points = {0: begin.loc[run, metric]} | points
                row = {"panel": panel, "row": label[run], "method": method[run], "seed": seed[run]}
                parts.append(pd.DataFrame(row | {"x": points.keys(), "y": points.values()}))
        return pd.concat(parts)

    x_label = "optimizer step; means over a tenth of the run"
    rewards = {"training reward": "reward", "validation reward": "validation_reward"}
    pictures = draw_curves(curves(rewards), x_label, Path(f"{prefix}curves.svg"))
    pictures += draw_curves(curves({name: name for name in DIAGNOSTICS}), x_label, Path(f"{prefix}diagnostics.svg"))

    numbers, configs = compared(finished), finished.configs
    for switch in [name for name in configs if name.startswith(ARGUMENT)]:
        name = switch.removeprefix(ARGUMENT)
        values = pd.to_numeric(configs[switch], errors="coerce").dropna()
        values = values[values.groupby(settings(configs, besides=[switch])).transform("nunique") > 1]
        for method_name, x in values.groupby(methods(configs)):
            points = numbers[numbers["run"].isin(x.index)]
            line = {run: label[run].replace(f"{name}={configs.loc[run, switch]}", name) for run in x.index}
            y = points["value"] * points["column"].map(scale)
            points = {"panel": points["column"], "row": points["run"].map(line), "method": method_name,
                      "seed": points["run"].map(seed), "x": points["run"].map(x), "y": y}  # fmt: skip
            pictures += draw_curves(
                pd.DataFrame(points).sort_values("x"), name, Path(f"{prefix}{method_name}-{name}.svg"), marker="o"
            )
    return pictures


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="run folders, packed folders, or above them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="of the report (default: report)")
    against = "also the paper's numbers beside these runs' (against-paper.md)"
    parser.add_argument("--against", choices=["paper"], help=against)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write the runs' tables and settings there instead")
    options = parser.parse_args(args)
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
        print(f"pspo.report: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
