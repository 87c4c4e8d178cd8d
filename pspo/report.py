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
import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pspo.figures import Panel, draw_curves, draw_surrogates
from pspo.metrics import write_text
from pspo.runs import (
    DIAGNOSTICS,
    SURROGATE,
    Estimate,
    Measured,
    Run,
    Setting,
    accuracies,
    accuracies_before,
    diagnostics,
    estimate,
    key_without,
    learning,
    method_of,
    read_runs,
    settings_of,
    smoothed_curve,
    warn,
)

BASELINES = ("Clip", "NoClip")  # of the paired differences
COMPARED = ("final reward", "peak reward", "area under the curve", "best validation reward")
WHOLE = ("steps to peak", "rollouts to peak")

Row = tuple[str, list[Estimate | None]]


@dataclass(frozen=True)
class Table:
    """Rows of a label and a cell for each title; None where there is nothing to say."""

    title: str
    note: str
    titles: list[str]
    rows: list[Row]

    def cells(self) -> list[list[str]]:
        """All rows as text, the header first."""
        shown = [["", "seeds", *self.titles]]
        for label, estimates in self.rows:
            seeds = max((e.n for e in estimates if e), default=0)
            texts = [as_text(e, title, seeds) for e, title in zip(estimates, self.titles, strict=True)]
            shown.append([label, str(seeds or "–"), *texts])
        return shown


def as_text(e: Estimate | None, title: str, seeds: int) -> str:
    """ "86.8 [86.0, 87.5]", its own number of seeds behind it where it is not the row's."""
    if e is None:
        return "–"
    digits = 0 if title in WHOLE else 1 if title.endswith("(%)") else 3
    mean, *interval = (
        f"{round(scale(title) * value, digits) + 0.0:.{digits}f}" for value in (e.mean, *(e.interval or ()))
    )
    return mean + (f" [{', '.join(interval)}]" if interval else "") + (f" (n = {e.n})" if e.n != seeds else "")


def scale(title: str) -> int:
    return 100 if title.endswith("(%)") else 1


def make_table(title: str, note: str, seeds_of: dict[str, list[dict[str, float]]]) -> Table:
    """One row a label from the numbers of its seeds by title."""
    titles = list(dict.fromkeys(title for seeds in seeds_of.values() for seed in seeds for title in seed))
    rows: list[Row] = [
        (label, [estimate([seed[t] for seed in seeds if t in seed]) for t in titles])
        for label, seeds in seeds_of.items()
    ]
    return Table(title, note, titles, rows)


def accuracy_table(before: dict[str, dict[str, Measured]], after: dict[str, list[dict[str, Measured]]]) -> Table:
    """The paper's main table: accuracies of untrained models by name, and of settings by label, one for each seed."""
    every = [*before.values(), *(seed for seeds in after.values() for seed in seeds)]
    titles = sorted(dict.fromkeys(t for seed in every for t in seed), key=lambda title: "true accuracy" not in title)
    rows: list[Row] = [
        (model, [Estimate(*measured[t], n=0) if t in measured else None for t in titles])
        for model, measured in before.items()
    ]
    for label, seeds in after.items():
        columns = [[seed[t] for seed in seeds if t in seed] for t in titles]
        one = [Estimate(*column[0], n=1) if len(column) == 1 else None for column in columns]
        means = [estimate([value for value, _ in column]) for column in columns]
        rows.append((label, [single or mean for single, mean in zip(one, means, strict=True)]))
    note = (
        "Greedy decoding, of the model that each run returned. True accuracy, the paper's: the gold value is "
        "anywhere in the response; accuracy: it is the response's answer. Mean over seeds with its 95% t-interval "
        "from three seeds on; for one seed the interval over problems."
    )
    return Table("Accuracy", note, titles, rows)


def learning_table(settings: Iterable[Setting]) -> Table:
    note = (
        "Training reward: peak and final reward are means over a tenth of the run's rollouts, the area is the mean "
        "over all of them. A seed has collapsed when its final reward is below half of its peak."
    )
    return make_table("Learning", note, {s.label: [learning(run) for run in s.finished.values()] for s in settings})


def diagnostics_table(settings: Iterable[Setting]) -> Table:
    note = (
        "Means over rollouts, of the last and most off-policy step of each, over tokens with an advantage: 1st and "
        "99th percentile of the ratio r, effective sample size, share of tokens of no weight, total variation between "
        "old and new policy and what the surrogate leaves of it, KL(old || new) in nats, gradient norm, "
        "share of these gradients that were clipped by their norm."
    )
    seeds_of = {s.label: [diagnostics(run) for run in s.finished.values()] for s in settings}
    return make_table("Off-policy diagnostics", note, seeds_of)


def compared(run: Run) -> dict[str, float]:
    """The numbers in which settings are compared: accuracies and rewards."""
    accuracy = {title: value for title, (value, _) in accuracies(run).items()}
    return accuracy | {title: value for title, value in learning(run).items() if title in COMPARED}


def paired_table(settings: Sequence[Setting]) -> Table:
    seeds_of: dict[str, list[dict[str, float]]] = {}
    baselines = [setting for setting in settings if method_of(setting.config) in BASELINES]
    for baseline in baselines:
        for setting in settings:
            alike = key_without(setting.config, [SURROGATE]) == key_without(baseline.config, [SURROGATE])
            seeds = setting.finished.keys() & baseline.finished.keys()
            known = f"{baseline.label} - {setting.label}" in seeds_of
            if setting is not baseline and alike and seeds and not known:
                pairs = [(compared(setting.finished[s]), compared(baseline.finished[s])) for s in sorted(seeds)]
                differences = [{title: a[title] - b[title] for title in a if title in b} for a, b in pairs]
                seeds_of[f"{setting.label} - {baseline.label}"] = differences
    note = (
        "Setting minus baseline of the same seed, where everything but the surrogate is equal: mean, and from three "
        "seeds on the 95% t-interval of the paired differences. Accuracies in percentage points."
    )
    return make_table("Paired differences", note, seeds_of)


# Pictures


def draw_task(settings: Sequence[Setting], files: str, output: Path) -> list[Path]:
    """Curves, diagnostics, and every ablation that there is; the names of the pictures begin with `files`."""

    def panel(title: str, key: str, same_y: bool = False) -> Panel:
        return Panel(title, {s.label: [run.curve(key) for run in s.runs.values()] for s in settings}, same_y)

    reward = {s.label: [smoothed_curve(run) for run in s.runs.values()] for s in settings}
    panels = [Panel("training reward, mean over a tenth of the run", reward)]
    if any(run.curve("validation_reward")[0] for s in settings for run in s.runs.values()):
        panels.append(panel("validation reward", "validation_reward"))
    pictures = draw_curves(panels, "optimizer step", 2, output / f"{files}curves")
    panels = [panel(key, key, same_y=key == "tv_smoothed") for key in DIAGNOSTICS]
    pictures += draw_curves(panels, "optimizer step", 4, output / f"{files}diagnostics")
    for (method, parameter), lines in ablations(settings).items():
        panels = ablation_panels(lines)
        pictures += draw_curves(panels, parameter, 3, output / f"{files}{method}-{parameter}", marker="o")
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


def as_markdown(table: Table) -> str:
    header, *rows = table.cells()
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def as_latex(table: Table) -> str:
    """A booktabs table."""
    signs = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "|": r"\textbar{}", "–": "--"}

    def line(cells: Iterable[str]) -> str:
        return " & ".join("".join(signs.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    header, *rows = table.cells()
    columns = "l" + "r" * (len(header) - 1)
    top = [rf"% {table.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(header), r"\midrule"]
    return "\n".join([*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"])


def as_csv(tables: dict[str, list[Table]]) -> str:
    """One line a cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "table", "row", "column", "seeds", "mean", "low", "high"])
    for task, of_task in tables.items():
        for table in of_task:
            for label, estimates in table.rows:
                for title, e in zip(table.titles, estimates, strict=True):
                    if e:
                        name = title.removesuffix(" (%)")  # shares are written as shares
                        writer.writerow([task, table.title, label, name, e.n, e.mean, *(e.interval or ("", ""))])
    return text.getvalue()


def report(runs: Sequence[Run], output: Path) -> list[Path]:
    """Write everything about the runs; returns the files."""
    tasks: dict[tuple[str, str], list[Run]] = {}
    others = {run.config["model.name_or_path"]: [] for run in runs if not run.metrics}  # evaluations of no run
    for run in runs:
        model = run.config["model.name_or_path"]
        if run.metrics:
            tasks.setdefault((model, run.config["data.name"]), []).append(run)
        else:
            others[model].append(run)
    if len(tasks) > 1:
        warn(f"runs of {len(tasks)} tasks, each in tables of its own: {', '.join(map(' on '.join, tasks))}")

    tables: dict[str, list[Table]] = {}
    pictures: dict[str, list[Path]] = {}
    unfinished: dict[str, list[Path]] = {}
    for (model, data), of_task in tasks.items():
        name = f"{model} on {data}"
        settings = settings_of(of_task)
        before = {model: accuracies_before([*of_task, *others.get(model, [])])}
        after = {s.label: [accuracies(run) for run in s.finished.values()] for s in settings}
        found = [accuracy_table(before, after), learning_table(settings), paired_table(settings)]
        tables[name] = [table for table in [*found, diagnostics_table(settings)] if table.titles]
        files = re.sub(r"[^\w.+]+", "-", f"{Path(model).name}-{data}-") if len(tasks) > 1 else ""
        pictures[name] = draw_task(settings, files, output)
        unfinished[name] = [run.folder for s in settings for run in s.runs.values() if not run.summary]
        for folder in unfinished[name]:
            warn(f"{folder}: not finished (no summary.json); its curves are drawn, the tables leave it out")
    alone = {model: accuracies_before(found) for model, found in others.items() if model not in {m for m, _ in tasks}}
    if alone:
        tables["Other evaluations"] = [accuracy_table(alone, {})]

    markdown, report_lines = [], ["# Report"]
    for task, of_task in tables.items():
        texts = [f"### {table.title}\n\n{as_markdown(table)}\n\n{table.note}" for table in of_task]
        markdown += [f"## {task}", *texts]
        images = [f"![{path.stem}]({path.name})" for path in pictures.get(task, []) if path.suffix == ".png"]
        left_out = [f"Not finished, in the curves alone: {folder}" for folder in unfinished.get(task, [])]
        report_lines += [f"## {task}", *left_out, *texts, *images]
    written = {
        "report.md": "\n\n".join(report_lines),
        "table.md": "\n\n".join(markdown),
        "table.tex": "\n\n".join(as_latex(table) for of_task in tables.values() for table in of_task),
        "table.csv": as_csv(tables).rstrip(),
    }
    for name, text in written.items():
        write_text(output / name, text + "\n")
    for task, (accuracy, *_) in tables.items():
        print(f"{task}\n{as_markdown(accuracy)}\n")
    return [*(output / name for name in written), *(path for of_task in pictures.values() for path in of_task)]


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
        files = report(runs, options.output_dir) if runs else draw_surrogates(options.output_dir / "surrogates")
    except (OSError, ValueError) as error:
        print(f"pspo.report: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
