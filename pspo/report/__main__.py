"""Tables and pictures of trainings: ``python -m pspo.report RUNS... --output_dir report``.

RUNS are run folders or folders that hold some, however deep. Settings of another model or other training data are
another task, with tables and pictures of its own. Writes ``report.md`` (everything), ``table.md``, ``table.tex`` and
``table.csv`` (the tables; in the last one line a cell, shares not in percent), and the pictures as PNG and SVG.
Without RUNS: the paper's Figure 1 alone.

The reward that the numbers of learning come from is the training reward of each rollout: every run has it, from the
untrained policy on. Peak and final reward are means over a window of a tenth of the run's rollouts. A seed has
*collapsed* when its final reward is below half of its peak. Runs without a ``summary.json`` are not finished: their
curves are drawn, and the tables leave them out.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pspo.report.figures import Curve, Panel, draw_curves, draw_surrogates
from pspo.report.runs import (
    DIAGNOSTICS,
    SURROGATE,
    Run,
    Setting,
    accuracies,
    accuracies_before,
    method_of,
    read_runs,
    settings_of,
    smoothed_curve,
    warn,
)
from pspo.report.tables import (
    Table,
    accuracy_table,
    as_csv,
    as_latex,
    as_markdown,
    compared,
    diagnostics_table,
    learning_table,
    paired_table,
    scale,
)
from pspo.run.records import write_text

# Pictures


def draw_task(settings: Sequence[Setting], files: str) -> list[Path]:
    """Curves, diagnostics, and every ablation that there is; the pictures' paths begin with `files`."""

    def curves(of_run: Callable[[Run], Curve]) -> dict[str, list[Curve]]:
        return {setting.label: [of_run(run) for run in setting.runs.values()] for setting in settings}

    panels = [Panel("training reward, mean over a tenth of the run", curves(partial(smoothed_curve, key="reward")))]
    validation = curves(partial(Run.curve, key="validation_reward"))
    if any(steps for seeds in validation.values() for steps, _ in seeds):
        panels.append(Panel("validation reward", validation))
    pictures = draw_curves(panels, "optimizer step", 2, f"{files}curves")
    panels = [Panel(key, curves(partial(smoothed_curve, key=key)), same_y=key == "tv_smoothed") for key in DIAGNOSTICS]
    pictures += draw_curves(panels, "step, mean over a tenth of the run", 4, f"{files}diagnostics")
    for (method, parameter), lines in ablations(settings).items():
        if panels := ablation_panels(lines):  # some are finished
            pictures += draw_curves(panels, parameter, 3, f"{files}{method}-{parameter}", marker="o")
    return pictures


Ablation = dict[str, dict[float, Setting]]  # the settings on each line by the parameter's value


def ablations(settings: Iterable[Setting]) -> dict[tuple[str, str], Ablation]:
    """By (method, parameter of its surrogate): settings that differ in that number alone, two of them at least."""
    lines: dict[tuple[str, str], Ablation] = {}
    for setting in settings:
        for key, value in setting.config.items():
            parameter = key.removeprefix(f"{SURROGATE}init_args.")
            if parameter != key and isinstance(value, int | float):
                line = setting.label.replace(f"{parameter}={value}", parameter)  # one label for all that is else equal
                found = lines.setdefault((method_of(setting.config), parameter), {})
                found.setdefault(line, {})[value] = setting
    kept = {key: {name: line for name, line in found.items() if len(line) > 1} for key, found in lines.items()}
    return {key: found for key, found in kept.items() if found}


def ablation_panels(lines: Ablation) -> list[Panel]:
    """One panel a number, against the parameter's value; a curve a seed."""
    points: dict[str, dict[str, dict[int, list[tuple[float, float]]]]] = {}  # by title, line and seed
    for line, setting_at in lines.items():
        for x, setting in sorted(setting_at.items()):
            for seed, run in setting.finished.items():
                for title, y in compared(run).items():
                    points.setdefault(title, {}).setdefault(line, {}).setdefault(seed, []).append((x, scale(title) * y))
    return [
        Panel(
            title,
            {line: [tuple(zip(*curve, strict=True)) for curve in seeds.values()] for line, seeds in by_line.items()},
        )
        for title, by_line in points.items()
    ]


# Writing


@dataclass(frozen=True)
class Section:
    """What is reported of one task; `unfinished` are folders of runs."""

    title: str
    tables: list[Table]
    pictures: list[Path]
    unfinished: list[Path]

    def markdown(self, whole: bool) -> str:
        """The tables, with everything else if whole."""
        parts = [f"### {table.title}\n\n{as_markdown(table)}\n\n{table.note}" for table in self.tables]
        if whole:
            left_out = [f"Not finished, in the curves alone: {folder}" for folder in self.unfinished]
            images = [f"![{path.stem}]({path.name})" for path in self.pictures if path.suffix == ".png"]
            parts = [*left_out, *parts, *images]
        return "\n\n".join([f"## {self.title}", *parts])


def report(runs: Sequence[Run], output: Path) -> list[Path]:
    """Draw the pictures and write everything about the runs; returns the files."""
    tasks: dict[tuple[str, str], list[Run]] = {}
    untrained: dict[str, list[Run]] = {}  # evaluations of no run, by model
    for run in runs:
        model, data = run.config["model.name_or_path"], run.config["data.name"]
        (tasks.setdefault((model, data), []) if run.metrics else untrained.setdefault(model, [])).append(run)
    if len(tasks) > 1:
        warn(f"runs of {len(tasks)} tasks, each in tables of its own: {', '.join(map(' on '.join, tasks))}")

    sections = []
    short = [(Path(model).name, data) for model, data in tasks]
    for (model, data), of_task in tasks.items():
        name = model if short.count((Path(model).name, data)) > 1 else Path(model).name
        files = re.sub(r"[^\w.+]+", "-", f"{name}-{data}-").lstrip("-") if len(tasks) > 1 else ""
        sections.append(report_task(model, data, of_task, untrained.get(model, []), f"{output}/{files}"))
    others = {model: of_model for model, of_model in untrained.items() if not any(m == model for m, _ in tasks)}
    if others:
        sections.append(Section("Other evaluations", accuracy_tables(others, []), [], []))

    written = {
        "report.md": "\n\n".join(["# Report", *(section.markdown(whole=True) for section in sections)]),
        "table.md": "\n\n".join(section.markdown(whole=False) for section in sections),
        "table.tex": "\n\n".join(as_latex(table) for section in sections for table in section.tables),
        "table.csv": as_csv({section.title: section.tables for section in sections}).rstrip(),
    }
    for name, text in written.items():
        write_text(output / name, text + "\n")
    for section in sections:
        for table in section.tables[:1]:  # the accuracies
            print(f"{section.title}\n{as_markdown(table)}\n")
    return [*(output / name for name in written), *(path for section in sections for path in section.pictures)]


def report_task(model: str, data: str, runs: list[Run], untrained: list[Run], files: str) -> Section:
    """The section of one model trained on one kind of data."""
    settings = settings_of(runs)
    unfinished = [run.folder for setting in settings for run in setting.runs.values() if not run.summary]
    for folder in unfinished:
        warn(f"{folder}: not finished (no whole summary.json); its curves are drawn, the tables leave it out")
    for setting in settings:
        for run in setting.finished.values():
            if not accuracies(run):
                warn(f"{run.folder}: no accuracy, neither in summary.json nor by an evaluation")
    tables = [
        *accuracy_tables({model: [*runs, *untrained]}, settings),
        learning_table(settings),
        paired_table(settings),
        diagnostics_table(settings),
    ]
    pictures = draw_task(settings, files)
    return Section(f"{model} on {data}", [table for table in tables if table.titles], pictures, unfinished)


def accuracy_tables(untrained: dict[str, list[Run]], settings: Sequence[Setting]) -> list[Table]:
    """Greedy and sampled; `untrained` are the runs that say what a model could do before."""
    tables = []
    for title, greedy in (("Accuracy", True), ("Accuracy of samples", False)):
        before = {model: accuracies_before(runs, greedy) for model, runs in untrained.items()}
        after = {s.label: [accuracies(run, greedy) for run in s.finished.values()] for s in settings}
        rows = {label: seeds for label, seeds in after.items() if greedy or any(seeds)}
        tables.append(accuracy_table(title, before, rows))
    return [table for table in tables if table.titles]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="run folders, or folders that hold some")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="folder to write to (default: report)")
    options = parser.parse_args(args)
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        runs = read_runs(options.runs)
        if options.runs and not runs:
            raise ValueError("nothing to report in " + ", ".join(map(str, options.runs)))
        files = report(runs, options.output_dir) if runs else draw_surrogates(f"{options.output_dir}/surrogates")
    except (OSError, ValueError) as error:
        print(f"pspo.report: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
