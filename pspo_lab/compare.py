"""Compare two evaluations, or two settings over their seeds, on the same problems: ``pspo compare A B``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest, permutation_test

from pspo.cli.files import flat, read_config
from pspo.cli.terminal import one_line
from pspo.evaluate.statistics import MEANS, as_text, cluster_bootstrap, measure_name, table
from pspo.run.endings import user_errors
from pspo.tasks.files import local_path
from pspo_lab.power import MOST_SEEDS, estimate, seeds_text
from pspo_lab.runs import read_problems
from pspo_lab.settings import SEED

ONE_SEED = """\
[95%]: bootstrap over the problems of the paired differences. p: where every problem counts 0 or 1, McNemar's exact test
of the problems that only A : only B has; otherwise a permutation test, 10,000 flips of the differences' signs. detects:
the smallest difference that so many problems find at 80% power, of these two models: other seeds may differ by more."""
SEVERAL = """\
[95%] and p: t-test of the differences over seeds and problems, both taken as samples. detects: the smallest difference
that so many seeds and problems find at 80% power; then the seeds that would find 1, 2, 5 points (of a reward
0.01, 0.02, 0.05) on so many problems, "-" if no {most:,} would: take more problems."""


def main(args: Sequence[str] | None = None) -> None:
    """Print the differences B - A, paired by problem, and by seed where there are several."""
    parser = argparse.ArgumentParser("pspo compare", description=__doc__)
    what = "two of: a finished evaluation or run (its test after training), or a folder of runs that differ in their "
    what += "seed alone; a folder or .jsonl file. Or one run, or folder of such runs: their tests before and after"
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=what)
    paths = parser.parse_args(args).paths
    with user_errors("pspo compare"):
        sides = [completions_files(local_path(path)) for path in paths]
        if len(sides) == 1 and None not in sides[0]:
            sides.insert(0, {seed: file.with_name("test-before.jsonl") for seed, file in sides[0].items()})
        if len(sides) != 2:
            raise ValueError(f"pspo compare takes two evaluations, or one run; got {len(sides)}")
        text = comparison(paths, *sides)
    print(text)


def completions_files(path: Path) -> dict[int | None, Path]:
    """By seed the completions of a finished evaluation, or of the tests after finished runs."""
    folder = path.parent if path.name == "results.json" else path
    if (folder / "results.json").exists():
        return {None: folder / "completions.jsonl"}
    if path.suffix == ".jsonl":
        return {None: path}
    files = {}
    for summary in [folder / "summary.json"] if (folder / "summary.json").exists() else folder.rglob("summary.json"):
        seed = flat(read_config(summary.with_name("config.yaml"))).get(SEED)
        if seed in files:
            raise ValueError(f"{path} has two runs of seed {seed}; name the folder of one setting")
        files[seed] = summary.with_name("test-after.jsonl")
    if not files:
        raise ValueError(f"{path}: no finished evaluation (results.json) nor run (summary.json) is there")
    return files


def comparison(paths: Sequence[Path], first: dict[int | None, Path], second: dict[int | None, Path]) -> str:
    """The differences at each temperature that both have, as text; ValueError if the problems are not the same."""
    if len(first) > 1 and len(second) > 1:
        first, second = (
            {seed: side[seed] for seed in sorted(first.keys() & second.keys())} for side in (first, second)
        )
        if not first:
            raise ValueError(f"{paths[0]} and {paths[-1]} have no seed in common")
    a_seeds, b_seeds = ([read_problems(file) for file in side.values()] for side in (first, second))
    n_seeds = max(len(a_seeds), len(b_seeds))
    names = [one_line(str(path)) for path in paths]
    if len(names) == 1:
        names = [f"{names[0]} before training", f"{names[0]} after it"]
    parts = [f"A  {names[0]}\nB  {names[1]}"]
    for temperature in [name for name in a_seeds[0] if all(name in one for one in a_seeds + b_seeds)]:
        frames = [one[temperature] for one in a_seeds + b_seeds]
        problems = frames[0].index
        for frame in frames:
            if not frame.index.equals(problems):
                counts = f"({len(problems):,} and {len(frame):,}, in order)"
                raise ValueError(f"{paths[0]} and {paths[-1]} are not of the same problems {counts}")
        rows = {}
        for name in frames[0]:
            if name in MEANS or name.endswith("@1") or not all(name in frame for frame in frames):  # @1: accuracy
                continue
            values = np.stack([frame[name] for frame in frames])  # (seeds of A and of B, problems)
            values = values[:, ~np.isnan(values).any(axis=0)]
            if values.size:
                rows[measure_name(name)] = row(name, values[: len(a_seeds)], values[len(a_seeds) :])
        title = f"T = {temperature}, {len(problems):,} problems"
        if n_seeds > 1:
            title += f", {n_seeds} seeds"
        parts.append(table(title, pd.DataFrame.from_dict(rows, orient="index")))
    if len(parts) == 1:
        raise ValueError(f"{paths[0]} and {paths[-1]} have no temperature in common")
    return "\n\n".join([*parts, SEVERAL.format(most=MOST_SEEDS) if n_seeds > 1 else ONE_SEED])


def row(name: str, a: np.ndarray, b: np.ndarray) -> dict[str, str]:
    """The line of a measure, by column, with values (seeds, n) of each problem; one seed stands beside any number."""
    difference = b - a
    found = estimate(difference)
    detects = as_text(name, float(found.detects()))
    texts = {"A": as_text(name, float(a.mean())), "B": as_text(name, float(b.mean()))}
    if len(difference) == 1:
        interval = cluster_bootstrap(difference[0])
        p, counts = exact_test(a[0], b[0])
        further = {"only A : only B": counts, "detects": detects}
    else:
        interval = (found.mean - found.half_width(), found.mean + found.half_width())
        p = found.p()
        further = {"detects": detects, "seeds for 1, 2, 5 points": seeds_text(found)}
    texts["B - A [95%]"] = as_text(name, {"value": float(found.mean), "ci95": interval})
    return texts | {"p": f"{p:.2g}"} | further


def exact_test(a: np.ndarray, b: np.ndarray) -> tuple[float, str]:
    """p of paired values (n,), and the problems that only a and only b solves, "-" if some count neither 0 nor 1."""
    difference = b - a
    if np.isin([a, b], (0, 1)).all():
        worse = int((difference < 0).sum())
        better = int((difference > 0).sum())
        p = binomtest(better, worse + better).pvalue if worse + better else 1.0
        return p, f"{worse} : {better}"
    if len(difference) < 2:
        return 1.0, "-"
    rng = np.random.default_rng(0)
    flips = permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=9_999, batch=100, rng=rng)
    return flips.pvalue, "-"
