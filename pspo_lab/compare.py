"""Compare two evaluations of the same problems: ``pspo compare A B``."""

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest, permutation_test

from pspo.cli.files import named_damage, read_jsonl
from pspo.cli.terminal import one_line
from pspo.evaluate.statistics import (
    MEANS,
    as_text,
    at_k,
    by_problem,
    cluster_bootstrap,
    measure_name,
    measures,
    table,
)
from pspo.run.endings import user_errors
from pspo.tasks.files import local_path

NOTE = """\
[95%]: bootstrap over the problems of the paired differences. p: where every problem counts 0 or 1, McNemar's exact test
of the problems that only A : only B has; otherwise a permutation test, 10,000 flips of the differences' signs."""


def main(args: Sequence[str] | None = None) -> None:
    """Print the differences B - A, paired by problem."""
    parser = argparse.ArgumentParser("pspo compare", description=__doc__)
    what = "two finished evaluations or runs (their tests after training): folders or .jsonl files; or one run: its "
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=f"{what}tests before and after")
    paths = parser.parse_args(args).paths
    with user_errors("pspo compare"):
        files = [completions_file(local_path(path)) for path in paths]
        if len(files) == 1 and files[0].name == "test-after.jsonl":
            files.insert(0, files[0].with_name("test-before.jsonl"))
        if len(files) != 2:
            raise ValueError(f"pspo compare takes two evaluations, or one run; got {len(files)}")
        text = comparison(*files)
    print(text)


def completions_file(path: Path) -> Path:
    """The completions of a finished evaluation, or of the test after a finished run."""
    folder = path.parent if path.name == "results.json" else path
    for mark, name in (("results.json", "completions.jsonl"), ("summary.json", "test-after.jsonl")):
        if (folder / mark).exists():
            return folder / name
    if path.suffix != ".jsonl":
        raise ValueError(f"{path}: no finished evaluation (results.json) nor run (summary.json) is there")
    return path


def read_completions(file: Path) -> dict[float, tuple[list[tuple], dict[str, np.ndarray]]]:
    """By temperature, prompt and gold answer of the n problems, and the values (n, samples) of every measure."""
    records = read_jsonl(file)
    if not records or "temperature" not in records[0]:
        raise ValueError(f"{file} holds no completions of an evaluation")
    by_temperature = {}
    with named_damage(file):
        records.sort(key=lambda record: (record["temperature"], record["problem"], record["sample"]))
        for temperature, group in groupby(records, key=lambda record: record["temperature"]):
            completions = list(group)
            n = len({record["problem"] for record in completions})
            samples = len(completions) // n
            if [record["sample"] for record in completions] != [*range(samples)] * n:
                raise ValueError("not every problem has as many completions; run the evaluation again")
            problems = [(record["prompt"], record["gold"]) for record in completions[::samples]]
            by_temperature[temperature] = problems, measures(completions, samples) | at_k(completions, samples)
    return by_temperature


def comparison(first: Path, second: Path) -> str:
    """The differences at each temperature that both have, as text; ValueError if the problems are not the same."""
    a_values = read_completions(first)
    b_values = read_completions(second)
    parts = [f"A  {one_line(str(first))}\nB  {one_line(str(second))}"]
    for temperature in [temperature for temperature in a_values if temperature in b_values]:
        problems, a = a_values[temperature]
        others, b = b_values[temperature]
        n = len(problems)
        if problems != others:
            raise ValueError(f"{first} and {second} are not of the same problems ({n:,} and {len(others):,}, in order)")
        rows = {}
        for name in [name for name in a if name in b and name not in MEANS and not name.endswith("@1")]:  # accuracy
            both = ~(np.isnan(a[name]).all(axis=1) | np.isnan(b[name]).all(axis=1))
            if both.any():
                rows[measure_name(name)] = row(name, by_problem(a[name][both]), by_problem(b[name][both]))
        parts.append(table(f"T = {temperature:g}, {n:,} problems", pd.DataFrame.from_dict(rows, orient="index")))
    if len(parts) == 1:
        raise ValueError(f"{first} and {second} have no temperature in common")
    return "\n\n".join([*parts, NOTE])


def row(name: str, a: np.ndarray, b: np.ndarray) -> dict[str, str]:
    """The line of a measure with values (n,) of each problem, by column."""
    difference = b - a
    counts = "-"
    p = 1.0
    if np.isin([a, b], (0, 1)).all():
        worse = int((difference < 0).sum())
        better = int((difference > 0).sum())
        counts = f"{worse} : {better}"
        if worse + better:
            p = binomtest(better, worse + better).pvalue
    elif len(difference) > 1:
        rng = np.random.default_rng(0)
        flips = permutation_test(
            (difference,), np.mean, permutation_type="samples", n_resamples=9_999, batch=100, rng=rng
        )
        p = flips.pvalue
    return {
        "A": as_text(name, float(a.mean())),
        "B": as_text(name, float(b.mean())),
        "B - A [95%]": as_text(name, {"value": float(difference.mean()), "ci95": cluster_bootstrap(difference)}),
        "p": f"{p:.2g}",
        "only A : only B": counts,
    }
