"""Read runs: folders of `pspo train` and `pspo evaluate`, as data frames.

Folder names mean nothing, the configuration everything: runs that differ only in their seed and output folder are the
seeds of one setting. What cannot be read is named on stderr and left out.
"""

import functools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pspo.cli.files import DAMAGE, flat, named_damage, read_config, read_json, read_jsonl
from pspo.evaluate.statistics import at_k, measures
from pspo.tasks.files import local_path
from pspo.terminal import one_line
from pspo_lab.settings import (
    DATA,
    MODEL,
    SEED,
    SURROGATE,
    defaults,
    labels,
    not_compared,
    plain_switches,
    setting_numbers,
)

NUMBERS = ["run", "stage", "model", "evaluation", "data", "split", "n", "limit", "temperature", "measure",
           "value", "low", "high", "file"]  # fmt: skip
OF_A_SEED = r"(?<=seed-)\d+|\d{8}-\d{6}(-\d+)?"  # in the names of sweeps' runs, and of runs without a name

Row = dict[str, Any]


@dataclass(frozen=True)
class LabRun:
    """Contents of a run's folder; of another trainer's run, what there is.

    Attributes:
        switches: the configuration, by switch; lists and mappings as JSON. Another trainer's run has its name as
            `trainer`.
        metrics: step and the metrics, one row per rollout; NaN where one is missing or not finite.
        summary: ``summary.json``, empty while the run is not finished.
    """

    folder: Path
    switches: Row
    metrics: pd.DataFrame
    summary: Row


@dataclass(frozen=True)
class Runs:
    """Tables, joined by `run`, its folder.

    Attributes:
        configs: indexed by run; every switch, and the experiment folders of this run and of its duplicates.
        numbers: one row per number of a summary or an evaluation: run (missing: of a model that no run trained), stage
            ("before" training, "after" it: of the returned model, "final": of the last one), model (that the run began
            with), evaluation ("summary", or its folder), data, split, n, limit (tokens of a completion), temperature
            ("0": greedy), measure, value, low and high (95% over problems), file (of its completions).
        folders: by run.
    """

    configs: pd.DataFrame
    numbers: pd.DataFrame
    folders: dict[str, LabRun]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Run, step and the metrics, one row per rollout."""
        parts = [self.folders[run].metrics.assign(run=run) for run in self.configs.index]
        return pd.concat(parts or [pd.DataFrame(columns=["run", "step"])], ignore_index=True)

    def take(self, runs: Sequence[str]) -> "Runs":
        """These runs, in this order, and the evaluations of models that no run trained."""
        place = {run: i for i, run in enumerate(runs)}
        numbers = self.numbers[self.numbers["run"].isin(runs) | self.numbers["run"].isna()]
        numbers = numbers.sort_values("run", key=lambda run: run.map(place), kind="stable")
        return replace(self, configs=self.configs.loc[runs], numbers=numbers)

    def finished(self) -> list[str]:
        """The runs that have a summary."""
        return [run for run in self.configs.index if self.folders[run].summary]

    def with_untrained(self) -> pd.DataFrame:
        """The metrics with their time in seconds, and at step 0 the validation before training of finished runs."""
        seconds = self.metrics.filter(like="seconds/").sum(axis=1, min_count=1)
        metrics = self.metrics.assign(time=seconds.groupby(self.metrics["run"]).cumsum())
        rows = []
        for run in self.configs.index:
            validation = self.folders[run].summary.get("validation") or {}
            if untrained := validation.get("untrained"):
                rows.append(untrained | {"run": run, "time": 0.0})
        return pd.concat([pd.DataFrame(rows), metrics], ignore_index=True).astype({"step": int})


def warn(line: str) -> None:
    print(f"pspo_lab: {one_line(line)}", file=sys.stderr)


@contextmanager
def skip_unreadable(folder: Path) -> Iterator[None]:
    """Name a folder that cannot be read, and continue."""
    try:
        yield
    except (OSError, ValueError) as error:
        warn(f"{folder}: {error}; left out")
    except DAMAGE as error:
        warn(f"{folder}: damaged ({type(error).__name__}: {error}); left out")


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Local paths of the folders; files, such as a sweep's between its runs' folders, are left out."""
    return [path for path in map(local_path, paths) if not path.is_file()]


def read_runs(roots: Sequence[Path]) -> Runs:
    """Read what the folders hold, however deep, in order of settings and seeds; raises ValueError if it is nothing."""
    run_folders: set[Path] = set()
    evaluation_folders: set[Path] = set()
    for root in roots:
        runs_here = {path.parent.resolve() for path in root.rglob("metrics.jsonl")}
        evaluations_here = {path.parent.resolve() for path in root.rglob("results.json")}
        if not runs_here | evaluations_here:
            warn(f"{root}: {'no run and no evaluation in it' if root.exists() else 'there is no such folder'}")
        run_folders |= runs_here
        evaluation_folders |= evaluations_here

    runs: dict[str, LabRun] = {}
    configs: dict[str, Row] = {}
    numbers: list[Row] = []
    for folder in sorted(run_folders):
        with skip_unreadable(folder):
            name = str(local_path(folder))
            run = read_run(folder)
            numbers += [{"run": name, **row} for row in summary_rows(run)]
            runs[name] = run
            experiment = folder.parent.parent
            configs[name] = run.switches | {"experiments": (str(experiment),)}
            full = experiment.name.removesuffix("-search")
            if full != experiment.name and (experiment.parent / full / "selection.json").exists():
                configs[name]["search"] = True  # its runs choose, and confirm nothing
    for folder in sorted(evaluation_folders):
        with skip_unreadable(folder):
            numbers += list(evaluation_rows(folder, runs))
    if not runs and not numbers:
        raise ValueError("no run and no evaluation in " + ", ".join(map(str, roots)))

    table = pd.DataFrame(list(configs.values()), index=list(configs), dtype=object)
    table = table.reindex(columns=sorted({MODEL, DATA, SURROGATE, *not_compared(), *table}))
    return sort_runs(Runs(table.where(table.notna(), None), pd.DataFrame(numbers, columns=NUMBERS), runs))


def sort_runs(runs: Runs) -> Runs:
    """Sort by setting and seed, each once: of two runs the finished one."""
    configs = runs.configs
    keys = pd.DataFrame({"label": labels(configs), "setting": setting_numbers(configs), "seed": configs[SEED]})
    keys["unfinished"] = ~keys.index.isin(runs.finished())
    keys = keys.sort_values(["label", "setting", "seed", "unfinished"], kind="stable")
    first = keys.groupby(["setting", "seed"])["label"].transform(lambda seed_runs: seed_runs.index[0])
    for run, other in first[first != first.index].items():
        warn(f"{run}: the same setting and seed as {other}, whatever code it ran; left out")
        configs.at[other, "experiments"] += configs.at[run, "experiments"]
    return runs.take(list(first.unique()))


def read_run(folder: Path) -> LabRun:
    """Read a run's folder; raises ValueError if it is damaged."""
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
    return LabRun(folder, read_switches(folder), read_metrics(folder), summary)


def read_switches(folder: Path) -> Row:
    """Switches as `LabRun` has them, with the defaults of those that a configuration of ours lacks."""
    switches = flat(read_config(folder / "config.yaml"))
    " ".join(map(str, [*switches, *switches.values()])).encode()  # raises where half a surrogate pair is: no text
    if switches.get(DATA) == "file":  # of which there are many
        path = switches.get("data.path")
        switches[DATA] = problems_fingerprint(folder, Path(str(path))) or path
    if switches.get("run.fork_from"):
        switches["forked"] = re.sub(OF_A_SEED, "*", str(switches["run.fork_from"]))
    named = {
        MODEL: str(switches.get(MODEL) or "unknown"),
        DATA: str(switches.get(DATA) or local_path(folder)),
        SEED: int(str(switches.get(SEED) or 0)),
        SURROGATE: str(switches.get(SURROGATE) or switches.get("trainer") or "unknown"),
    }
    known = {} if "trainer" in switches else defaults(named[SURROGATE])
    return known | plain_switches(switches) | named


def problems_fingerprint(folder: Path, path: Path) -> str | None:
    """A name by content for the problems that `pspo.train` wrote into each run's folder; None for other files."""
    for run in (folder, *folder.parents):  # an evaluation's is above it
        files = sorted((run / "data").glob("*.jsonl"))
        if path.name == "data" and (run / "data/.of_a_run").exists():  # wherever the run is now
            content = b"".join(file.name.encode() + file.read_bytes() for file in files)
            return f"problems {zlib.crc32(content):08x}"
    return None


def read_metrics(folder: Path) -> pd.DataFrame:
    """The rollouts in order of steps, the last record of each; NaN where a value was not finite."""
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise ValueError("metrics.jsonl holds no rollout")
    metrics = pd.DataFrame(records)
    metrics = metrics.drop_duplicates("step", keep="last").sort_values("step")
    return metrics.apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).astype({"step": int})


def summary_rows(run: LabRun) -> Iterator[Row]:
    """The numbers of a run's summary, none while it is not finished."""
    config = run.switches
    about = {"stage": "run", "model": config[MODEL], "evaluation": "summary"}
    yield from result_rows(run.summary, about)
    stages = ("after", "final") if config.get("run.fork_from") else ("before", "after", "final")  # before: its parent's
    for stage in stages:
        if result := run.summary.get(stage):  # {} with --run.test_limit 0
            intervals = {name: result.get(f"{name}_ci95".removeprefix("accuracy_")) for name in result}
            estimates = {name: {"value": result[name], "ci95": ci95} for name, ci95 in intervals.items() if ci95}
            test = {"stage": stage, "data": config[DATA], "split": "test", "temperature": "0"}
            test["limit"] = config.get("rollout.max_completion_tokens")
            files = [run.folder / f"test-{name}.jsonl" for name in (stage, "after")]  # one test if the best is the last
            test["file"] = next((str(file) for file in files if file.exists()), None)
            yield from result_rows(result | estimates, about | test)


def evaluation_rows(folder: Path, runs: dict[str, LabRun]) -> Iterator[Row]:
    """The numbers of an evaluation's folder, of the run whose model it evaluates if that is known."""
    results = read_json(folder / "results.json")
    model = Path(results["model"])
    candidates = map(str, (model.resolve().parent, folder, *folder.parents))  # of RUN/best, or somewhere in RUN
    name = next((candidate for candidate in candidates if candidate in runs), None)
    if name is None or os.path.abspath(results["model"]) == os.path.abspath(runs[name].switches[MODEL]):
        about = {"stage": "before", "model": results["model"] if name is None else runs[name].switches[MODEL]}
    else:
        best = Path(runs[name].summary.get("best_model", "best")).name
        stage = {"final": "final", best: "after"}.get(model.name)
        about = {"run": name, "stage": stage, "model": runs[name].switches[MODEL]}
    if about["stage"] is None:
        raise ValueError(f"evaluates {model}, neither the model that the run returned nor its final one")
    if about["stage"] != "before" and results.get("step") is not None:
        step = runs[name].summary.get("optimizer_steps" if about["stage"] == "final" else "best_step", results["step"])
        if step != results["step"]:
            raise ValueError(f"evaluates step {results['step']}, and this model of the run is step {step}'s by now")
    about |= {"evaluation": folder.name, "file": str(folder / "completions.jsonl")}
    about["data"] = read_switches(folder)[DATA] if results["data"] == "file" else results["data"]
    about |= {"split": results["split"], "n": results["n"], "limit": results.get("max_completion_tokens")}
    for temperature, result in results["temperatures"].items():
        yield from result_rows(result, about | {"temperature": temperature})


def result_rows(result: Row, about: Row) -> Iterator[Row]:
    """One row per number of a result."""
    about = about | {"n": result.get("n", about.get("n"))}
    for name, value in result.items():
        if isinstance(value, dict) and "ci95" in value and "value" in value:
            low, high = value["ci95"] or (None, None)  # of one problem
            yield about | {"measure": name, "value": value["value"], "low": low, "high": high}
        elif isinstance(value, int | float) and name != "n":
            yield about | {"measure": name, "value": value}


@functools.cache
def read_problems(file: Path) -> dict[str, pd.DataFrame]:
    """Means over a problem's completions by temperature ("0": greedy), with a column for each measure.

    A row is a problem in the order of its test, indexed by prompt and gold answer. NaN where nothing is known.
    """
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
            problems = [(json.dumps(record["prompt"]), json.dumps(record["gold"])) for record in completions[::samples]]
            values = measures(completions, samples) | at_k(completions, samples)
            means = {name: pd.DataFrame(value).mean(axis=1).to_numpy() for name, value in values.items()}
            by_temperature[f"{temperature:g}"] = pd.DataFrame(means, pd.MultiIndex.from_tuples(problems))
    return by_temperature
