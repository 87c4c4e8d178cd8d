"""Read runs: folders of `pspo train` and `pspo evaluate`, as data frames.

A folder's name tells only whether a search made the run. Runs that differ only in their seed and output folder are the
seeds of one setting. A folder that cannot be read is named on stderr and left out.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from pspo.evaluate.statistics import Number, at_k, measures, read_numbers
from pspo.files import DAMAGE, named_damage, read_json, read_jsonl
from pspo.terminal import one_line
from pspo_lab.settings import DATA, MODEL, SEED, Configs, Setting, Switches, make_labels, make_setting, read_switches

Item = TypeVar("Item")
STAGES = ("before", "after", "final")  # a run's model before training, the returned and the last model


@dataclass(frozen=True, eq=False)
class LabRun:
    """Contents of a run's folder; a run of another trainer may lack some."""

    folder: Path
    switches: Switches
    metrics: pd.DataFrame  # step and the metrics, one row per rollout; NaN where a metric is missing or not finite
    summary: dict[str, Any]  # empty while the run is not finished
    experiments: list[str]  # folders of the experiments of the run and its duplicates
    tests: list["TestResult"]

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def seed(self) -> int:
        return self.switches[SEED]

    @cached_property
    def setting(self) -> Setting:
        return make_setting(self.switches)

    def rollouts(self) -> pd.DataFrame:
        """Return the metrics with their time in seconds; a finished run's begin with the validation at step 0."""
        seconds = self.metrics.filter(like="seconds/").sum(axis=1, min_count=1)
        untrained = (self.summary.get("validation") or {}).get("untrained")
        first = [untrained | {"time": 0.0}] if untrained else []
        return pd.concat([pd.DataFrame(first), self.metrics.assign(time=seconds.cumsum())]).astype({"step": int})


@dataclass(frozen=True)
class TestResult:
    """How well a model did on some problems."""

    run: LabRun | None  # None for a model that no run trained
    stage: str  # one of `STAGES`
    model: str  # the model that the run began with
    evaluation: str  # "summary", or the name of the evaluation's folder
    problems: str  # such as "gsm8k test, n = 1,319"
    limit: int | None  # most tokens of a completion
    temperature: str  # "0" is greedy
    file: Path  # of the completions
    numbers: dict[str, Number]  # by measure


@dataclass(frozen=True)
class Runs:
    """Runs, and the tests of models that no run trained."""

    labels: dict[LabRun, str]  # names of settings by run; they tell these runs apart
    untrained: list[TestResult]

    def compared(self, runs: Iterable[LabRun], models: Container[str]) -> "Runs":
        """Return these runs, named by what tells them apart, and the tests of these models."""
        untrained = [test for test in self.untrained if test.model in models]
        return Runs(make_labels({run: run.switches for run in runs}), untrained)

    @property
    def tests(self) -> list[TestResult]:
        return [test for run in self.labels for test in run.tests] + self.untrained

    @property
    def configs(self) -> Configs:
        return {run: run.switches for run in self.labels}

    @cached_property
    def finished(self) -> "Runs":
        """The runs that have a summary."""
        return Runs({run: label for run, label in self.labels.items() if run.summary}, self.untrained)

    def rollouts(self) -> pd.DataFrame:
        """Return `LabRun.rollouts` of all runs, with a column ``run`` of their names."""
        return pd.concat([run.rollouts().assign(run=run.name) for run in self.labels])


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return the items by key; keys and items keep their order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def warn(line: str) -> None:
    print(f"pspo_lab: {one_line(line)}", file=sys.stderr)


@contextmanager
def skip_unreadable(folder: Path) -> Iterator[None]:
    """Warn of a folder that cannot be read, and continue."""
    try:
        yield
    except (OSError, *DAMAGE) as error:
        fault = error if isinstance(error, OSError | ValueError) else f"damaged ({type(error).__name__}: {error})"
        warn(f"{folder}: {fault}; left out")


def run_folders(paths: Sequence[str | Path]) -> list[Path]:
    """Return local paths of the folders, without files, such as those that a sweep writes next to its runs."""
    return [path for path in (Path(path).expanduser() for path in paths) if not path.is_file()]


def folders_with(file: str, roots: Sequence[Path]) -> list[Path]:
    """Return the folders, at or below these roots, that hold a file of this name."""
    return sorted({path.parent.resolve() for root in roots for path in root.rglob(file)})


def read_runs(roots: Sequence[Path]) -> Runs:
    """Read all runs at or below the roots, in order of settings and seeds; ValueError if there is nothing to read."""
    for root in roots:
        if not any(root.rglob("metrics.jsonl")) and not any(root.rglob("results.json")):
            warn(f"{root}: {'no run and no evaluation in it' if root.exists() else 'there is no such folder'}")
    runs: dict[Path, LabRun] = {}
    untrained: list[TestResult] = []
    for folder in folders_with("metrics.jsonl", roots):
        with skip_unreadable(folder):
            summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else {}
            run = LabRun(folder, read_switches(folder), read_metrics(folder), summary, [str(folder.parent.parent)], [])
            run.tests.extend(summary_tests(run))
            runs[folder] = run
    for folder in folders_with("results.json", roots):
        with skip_unreadable(folder):
            for test in evaluation_tests(folder, runs):
                (untrained if test.run is None else test.run.tests).append(test)
    if not runs and not untrained:
        raise ValueError("no run and no evaluation in " + ", ".join(map(str, roots)))
    return sort_runs(list(runs.values()), untrained)


def sort_runs(runs: list[LabRun], untrained: list[TestResult]) -> Runs:
    """Sort runs by setting and seed; of two with the same setting and seed, keep the finished run."""
    labels = make_labels({run: run.switches for run in runs})
    number = {setting: i for i, setting in enumerate(dict.fromkeys(run.setting for run in runs))}
    first: dict[tuple[Setting, int], LabRun] = {}
    for run in sorted(runs, key=lambda run: (labels[run], number[run.setting], run.seed, not run.summary)):
        other = first.setdefault((run.setting, run.seed), run)
        if other is not run:
            warn(f"{run.name}: the same setting and seed as {other.name} (code is not compared); left out")
            other.experiments.extend(run.experiments)
    return Runs({run: labels[run] for run in first.values()}, untrained)


def read_metrics(folder: Path) -> pd.DataFrame:
    """Return the rollouts in order of steps, each by its last record; NaN where a value was not finite."""
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise ValueError("metrics.jsonl holds no rollout")
    metrics = pd.DataFrame(records)
    metrics = metrics.drop_duplicates("step", keep="last").sort_values("step")
    return metrics.apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).astype({"step": int})


def summary_tests(run: LabRun) -> Iterator[TestResult]:
    """Yield the tests in a run's summary; an unfinished run has none."""
    config = run.switches
    limit = config.get("rollout.max_completion_tokens")
    for stage in STAGES:
        result = run.summary.get(stage)  # {} with --run.test_limit 0
        if not result or (stage == "before" and config.get("run.fork_from")):  # a fork began as its parent did
            continue
        files = [run.folder / f"test-{name}.jsonl" for name in (stage, "after")]  # one test if the best is the last
        file = next((file for file in files if file.exists()), files[0])
        problems = f"{config[DATA]} test, n = {result['n']:,}"
        numbers = read_numbers(result)
        yield TestResult(run, stage, config[MODEL], "summary", problems, limit, "0", file, numbers)


def evaluation_tests(folder: Path, runs: dict[Path, LabRun]) -> Iterator[TestResult]:
    """Yield the tests in an evaluation's folder, with the run that trained the model, if it is among ``runs``."""
    results = read_json(folder / "results.json")
    model = Path(results["model"])
    candidates = (model.resolve().parent, folder, *folder.parents)  # for RUN/best, or a folder in RUN
    run = next((runs[candidate] for candidate in candidates if candidate in runs), None)
    began_with = results["model"] if run is None else run.switches[MODEL]
    stage = "before"
    if os.path.abspath(results["model"]) != os.path.abspath(began_with):
        stage = trained_stage(model, results.get("step"), run)
    trained = None if stage == "before" else run
    data = read_switches(folder)[DATA] if results["data"] == "file" else results["data"]
    problems = f"{data} {results['split']}, n = {results['n']:,}"
    about = (trained, stage, began_with, folder.name, problems, results.get("max_completion_tokens"))
    for temperature, result in results["temperatures"].items():
        yield TestResult(*about, temperature, folder / "completions.jsonl", read_numbers(result))


def trained_stage(model: Path, step: int | None, run: LabRun) -> str:
    """Return an evaluated model's stage; ValueError for a model that the run did not return or has since replaced."""
    stages = {"final": "final", Path(run.summary.get("best_model", "best")).name: "after"}
    if model.name not in stages:
        raise ValueError(f"evaluates {model}, neither the model that the run returned nor its final one")
    stage = stages[model.name]
    newest = run.summary.get("optimizer_steps" if stage == "final" else "best_step", step)
    if step not in (None, newest):
        raise ValueError(f"evaluates step {step}, but the run has replaced this model by that of step {newest}")
    return stage


@functools.cache
def read_problems(file: Path) -> dict[str, pd.DataFrame]:
    """Return by temperature ("0": greedy) a frame with a row per problem and a column per measure.

    A value is the mean over the problem's completions, NaN if unknown. The index is prompt and gold answer.
    """
    records = read_jsonl(file)
    if not records or "temperature" not in records[0]:
        raise ValueError(f"{file} holds no completions of an evaluation")
    by_temperature = {}
    with named_damage(file):
        records.sort(key=lambda record: (record["temperature"], record["problem"], record["sample"]))
        for temperature, completions in grouped(records, lambda record: record["temperature"]).items():
            n = len({record["problem"] for record in completions})
            samples = len(completions) // n
            if [record["sample"] for record in completions] != [*range(samples)] * n:
                raise ValueError("its problems have different numbers of completions; run the evaluation again")
            problems = [(json.dumps(record["prompt"]), json.dumps(record["gold"])) for record in completions[::samples]]
            values = measures(completions, samples) | at_k(completions, samples)
            means = {name: pd.DataFrame(value).mean(axis=1).to_numpy() for name, value in values.items()}
            by_temperature[f"{temperature:g}"] = pd.DataFrame(means, pd.MultiIndex.from_tuples(problems))
    return by_temperature
