"""The tables of `pspo.report`: what is in them, and how they look as Markdown, LaTeX and CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pspo.report.runs import (
    Estimate,
    Measured,
    Run,
    Setting,
    accuracies,
    diagnostics,
    estimate,
    key_without,
    learning,
    method_of,
)

BASELINES = ("Clip", "NoClip")  # of the paired differences
TREATMENT = ("algorithm.", "optimizer.")  # what a pair may differ in
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
    """What a number is multiplied by to be shown under a title."""
    return 100 if title.endswith("(%)") else 1


def make_table(title: str, note: str, seeds_of: dict[str, list[dict[str, float]]]) -> Table:
    """One row a label from the numbers of its seeds by title."""
    titles = list(dict.fromkeys(title for seeds in seeds_of.values() for seed in seeds for title in seed))
    rows: list[Row] = [
        (label, [estimate([seed[t] for seed in seeds if t in seed]) for t in titles])
        for label, seeds in seeds_of.items()
    ]
    return Table(title, note, titles, rows)


def accuracy_table(
    title: str, before: dict[str, dict[str, Measured]], after: dict[str, list[dict[str, Measured]]]
) -> Table:
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
        "Of the model that each run returned. True accuracy, the paper's: the gold value is anywhere in the response; "
        "accuracy: it is the response's answer. Greedy decoding unless a temperature T is named. Mean over seeds with "
        "its 95% t-interval from three seeds on; for one seed the interval over problems."
    )
    return Table(title, note, titles, rows)


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
    """Every setting against every baseline of its experiment; two baselines once."""
    seeds_of: dict[str, list[dict[str, float]]] = {}
    baselines = [setting for setting in settings if method_of(setting.config) in BASELINES]
    for baseline in baselines:
        for setting in settings:
            alike = key_without(setting.config, TREATMENT) == key_without(baseline.config, TREATMENT)
            pairs = [
                (setting.finished[seed], baseline.finished[seed])
                for seed in sorted(setting.finished.keys() & baseline.finished.keys())
                if setting.finished[seed].experiment == baseline.finished[seed].experiment
            ]
            known = f"{baseline.label} - {setting.label}" in seeds_of
            if setting is not baseline and alike and pairs and not known:
                numbers = [(compared(run), compared(other)) for run, other in pairs]
                differences = [{title: a[title] - b[title] for title in a if title in b} for a, b in numbers]
                seeds_of[f"{setting.label} - {baseline.label}"] = differences
    note = (
        "Setting minus baseline of the same seed and experiment, which saw the same prompts in the same order; the "
        "labels say in what they differ. Mean, and from three seeds on the 95% t-interval of the paired differences. "
        "Accuracies in percentage points."
    )
    return make_table("Paired differences", note, seeds_of)


# Rendering


def as_markdown(table: Table) -> str:
    header, *rows = ([cell.replace("|", r"\|") for cell in row] for row in table.cells())
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def as_latex(table: Table) -> str:
    """A booktabs table."""
    signs = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "|": r"\textbar{}", "–": "--",
             "$": r"\$", "{": r"\{", "}": r"\}", "^": r"\^{}", "~": r"\~{}", "\\": r"\textbackslash{}"}  # fmt: skip

    def line(cells: Iterable[str]) -> str:
        return " & ".join("".join(signs.get(sign, sign) for sign in cell) for cell in cells) + r" \\"

    header, *rows = table.cells()
    columns = "l" + "r" * (len(header) - 1)
    top = [rf"% {table.title}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(header), r"\midrule"]
    return "\n".join([*top, *map(line, rows), r"\bottomrule", r"\end{tabular}"])


def as_csv(tables: dict[str, list[Table]]) -> str:
    """One line a cell, of the tables of each task."""
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
