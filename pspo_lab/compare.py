"""Compare two evaluations, or two settings over their seeds, on the same problems: ``pspo compare A B``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from pspo.endings import user_errors
from pspo.evaluate.statistics import MEANS, measure_name, table
from pspo.terminal import one_line
from pspo_lab.power import MOST_SEEDS, estimate
from pspo_lab.runs import read_problems
from pspo_lab.settings import SEED, make_setting, read_switches
from pspo_lab.tables import Column

NOTE = f"""\
[95%] and p: t-test of the differences over problems and, where there are several, seeds, both taken as samples; of one
seed whose problems all count 0 or 1, p is McNemar's exact test of the problems that only A : only B has. detects: the
smallest difference that so many seeds and problems find at 80% power; of one seed it is of these two models, and other
seeds may differ by more. Then the seeds that would find 1, 2, 5 points (of a reward 0.01, 0.02, 0.05) on so many
problems, "-" if no {MOST_SEEDS:,} would: take more problems.
An evaluation beside several seeds is taken as it is: the chance of its own seed is not counted."""

Files = dict[int | None, Path]  # of completions, by seed; None for an evaluation


def main(args: Sequence[str] | None = None) -> None:
    """Print the differences B - A, paired by problem, and by seed where there are several."""
    parser = argparse.ArgumentParser("pspo compare", description=__doc__)
    what = "two, each an evaluation, a finished run (its test after training), or a folder of runs that differ only in "
    what += "seed; or one run or such a folder: tests before and after training"
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=what)
    paths = parser.parse_args(args).paths
    with user_errors("pspo compare"):
        names = [one_line(str(path)) for path in paths]
        sides = [completions_files(path.expanduser()) for path in paths]
        if len(sides) == 1 and None not in sides[0]:
            names = [f"{names[0]} before training", f"{names[0]} after it"]
            sides.insert(0, {seed: file.with_name("test-before.jsonl") for seed, file in sides[0].items()})
        if len(sides) != 2:
            raise ValueError(f"pspo compare takes two evaluations, or one run; got {len(sides)}")
        text = comparison(names, *sides)
    print(text)


def completions_files(path: Path) -> Files:
    """Return files of completions by seed: of a finished evaluation, or of the tests after finished runs."""
    if (path / "results.json").exists():
        return {None: path / "completions.jsonl"}
    files = {}
    settings = set()
    for summary in [path / "summary.json"] if (path / "summary.json").exists() else path.rglob("summary.json"):
        switches = read_switches(summary.parent)
        settings.add(make_setting(switches))
        if switches[SEED] in files or len(settings) > 1:
            raise ValueError(f"{path} has runs that differ in more than the seed: name the folder of one setting")
        files[switches[SEED]] = summary.with_name("test-after.jsonl")
    if not files:
        raise ValueError(f"{path} is no folder of a finished evaluation (with results.json) or run (summary.json)")
    return files


def comparison(names: Sequence[str], a: Files, b: Files) -> str:
    """Return as text the differences at each temperature that both sides have; ValueError if their problems differ."""
    pair = " and ".join(names)
    if len(a) + len(b) > 2 and None not in a | b:  # runs are paired by seed; an evaluation is compared with each seed
        seeds = sorted(a.keys() & b.keys())
        if not seeds:
            raise ValueError(f"{pair} have no seed in common")
        a, b = ({seed: side[seed] for seed in seeds} for side in (a, b))
    evaluations = [read_problems(file) for file in (*a.values(), *b.values())]
    temperatures = [name for name in evaluations[0] if all(name in one for one in evaluations)]
    if not temperatures:
        raise ValueError(f"{pair} have no temperature in common")
    n_seeds = max(len(a), len(b))
    parts = [f"A  {names[0]}\nB  {names[1]}"]
    for temperature in temperatures:
        frames = [one[temperature] for one in evaluations]
        n_problems = [len(frame) for frame in frames if not frame.index.equals(frames[0].index)]
        if n_problems:
            counts = f"({len(frames[0]):,} and {n_problems[0]:,}, in order)"
            raise ValueError(f"{pair} are not of the same problems {counts}")
        title = f"T = {temperature}, {len(frames[0]):,} problems" + (f", {n_seeds} seeds" if n_seeds > 1 else "")
        rows = measure_rows(frames[: len(a)], frames[len(a) :])
        parts.append(table(title, pd.DataFrame.from_dict(rows, orient="index").dropna(axis="columns", how="all")))
    return "\n\n".join([*parts, NOTE])


def measure_rows(a: Sequence[pd.DataFrame], b: Sequence[pd.DataFrame]) -> dict[str, dict[str, str | None]]:
    """Return the rows of a table by measure; a and b hold a frame of the same problems for each seed."""
    rows = {}
    for name in a[0]:
        if name in MEANS or name.endswith("@1") or not all(name in frame for frame in (*a, *b)):  # @1: accuracy
            continue
        values = np.stack([frame[name] for frame in (*a, *b)])  # (seeds of A and of B, problems)
        values = values[:, ~np.isnan(values).any(axis=0)]
        if values.size:
            rows[measure_name(name)] = row(name, values[: len(a)], values[len(a) :])
    return rows


def row(name: str, a: np.ndarray, b: np.ndarray) -> dict[str, str | None]:
    """Return a measure's row by column, None where a column does not apply; a and b are (seeds, n problems)."""
    difference = b - a
    found = estimate(difference)
    p = found.p()
    is_one_seed = len(difference) == 1
    only = "-" if is_one_seed else None
    if is_one_seed and np.isin([a, b], (0, 1)).all() and difference.any():
        worse = int((difference < 0).sum())
        better = int((difference > 0).sum())
        only = f"{worse} : {better}"
        p = binomtest(better, worse + better).pvalue
    column = Column("", name)
    return {
        "A": column.text(a.mean()),
        "B": column.text(b.mean()),
        "B - A [95%]": column.difference_text(found.mean, found.interval()),
        "p": f"{p:.2g}",
        "only A : only B": only,
        "detects": column.difference_text(found.detects()),
        "seeds for 1, 2, 5 points": None if is_one_seed else found.seeds_text(),
    }
