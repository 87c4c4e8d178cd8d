"""Compare two evaluations of the same problems: ``pspo compare A B``."""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest, permutation_test

from pspo.cli.files import named_damage, read_jsonl
from pspo.cli.parse import user_errors
from pspo.cli.terminal import clip, one_line, tolerate_output
from pspo.evaluate.results import (
    ESTIMATES,
    MEANS,
    Record,
    as_text,
    at_k,
    by_problem,
    cluster_bootstrap,
    label,
    measures,
    table,
)
from pspo.tasks.files import local_path
from pspo.tasks.problem import content_text

COLUMNS = {"problem", "sample", "temperature", "prompt", "completion", "gold", "rewards",
           *ESTIMATES.values(), *MEANS.values()}  # fmt: skip
MOST_CHANGES = 6  # problems that came out differently
NOTE = """\
[95%]: bootstrap over the problems of the paired differences. p: where every problem counts 0 or 1, McNemar's exact test
of the problems that only A : only B has; otherwise a permutation test, 10,000 flips of the differences' signs."""


def main(args: Sequence[str] | None = None) -> None:
    """Print the differences B - A, paired by problem."""
    parser = argparse.ArgumentParser("pspo compare", description=__doc__)
    what = "two finished evaluations or runs (their tests after training): folders or .jsonl files; or one run: its "
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=f"{what}tests before and after")
    paths = parser.parse_args(args).paths
    tolerate_output()
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


def by_temperature(file: Path) -> dict[float, list[Record]]:
    """The completions in the order of the problems."""
    records = read_jsonl(file)
    if not records or not all(record.keys() >= COLUMNS for record in records):
        raise ValueError(f"{file} holds no completions of an evaluation")
    temperatures: dict[float, list[Record]] = {}
    with named_damage(file):
        for record in sorted(records, key=lambda record: (record["problem"], record["sample"])):
            temperatures.setdefault(record["temperature"], []).append(record)
    return temperatures


def comparison(first: Path, second: Path) -> str:
    """The differences at each temperature that both have, as text; ValueError if the problems are not the same."""
    a_records, b_records = by_temperature(first), by_temperature(second)
    parts = [f"A  {one_line(str(first))}\nB  {one_line(str(second))}"]
    for temperature in [temperature for temperature in a_records if temperature in b_records]:
        pair = a_records[temperature], b_records[temperature]
        problems = []
        for file, records in zip((first, second), pair, strict=True):
            counts = Counter(record["problem"] for record in records)
            samples = len(records) // len(counts)
            if [record["sample"] for record in records] != [*range(samples)] * len(counts):
                raise ValueError(f"{file} lacks completions: not every problem has as many; run the evaluation again")
            problems.append([(record["prompt"], record["gold"]) for record in records[::samples]])
        n = len(problems[0])
        if problems[0] != problems[1]:
            sizes = f"{n:,} and {len(problems[1]):,}"
            raise ValueError(f"{first} and {second} are not of the same problems ({sizes}, in order)")
        a, b = (measures(records, len(records) // n) | at_k(records, len(records) // n) for records in pair)
        rows = {}
        for name in [name for name in a if name in b and name not in MEANS and not name.endswith("@1")]:  # accuracy
            both = ~(np.isnan(a[name]).all(axis=1) | np.isnan(b[name]).all(axis=1))
            if both.any():
                rows[label(name)] = row(name, by_problem(a[name][both]), by_problem(b[name][both]))
        parts.append(table(f"T = {temperature:g}, {n:,} problems", pd.DataFrame.from_dict(rows, orient="index")))
        if len(pair[0]) == len(pair[1]) == n:
            parts.append(describe_changes(*pair))
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


def describe_changes(before: Sequence[Record], after: Sequence[Record]) -> str:
    """Numbers of problems that came out better and worse, one completion each, and the first of either in turn."""
    better, worse = changed_pairs(before, after)
    parts = [f"{len(better)} with more reward, {len(worse)} with less, of {len(before):,} problems"]
    in_turn = [pair for two in zip_longest(better, worse) for pair in two if pair]
    for pair in in_turn[:MOST_CHANGES]:
        prompt = pair[0]["prompt"]
        lines = {"problem": prompt if isinstance(prompt, str) else content_text(prompt[-1]), "gold": pair[0]["gold"]}
        for name, record in zip("AB", pair, strict=True):
            lines[name] = f"{record['reward']:.3f}: {record['completion']}"
        parts.append("\n".join(f"  {name:<8} {clip(text)}" for name, text in lines.items() if text is not None))
    return "\n\n".join(parts)


def changed_pairs(
    before: Sequence[Record], after: Sequence[Record]
) -> tuple[list[tuple[Record, Record]], list[tuple[Record, Record]]]:
    """The pairs with more and with less reward, most first, of records of the same problems, one completion each."""
    pairs = [(old, new) for old, new in zip(before, after, strict=False) if None not in (old["reward"], new["reward"])]
    pairs.sort(key=lambda pair: pair[0]["reward"] - pair[1]["reward"])
    better = [(old, new) for old, new in pairs if new["reward"] > old["reward"]]
    worse = [(old, new) for old, new in reversed(pairs) if new["reward"] < old["reward"]]
    return better, worse
