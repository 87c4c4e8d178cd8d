"""Read runs: folders of `pspo train` and `pspo evaluate`, as data frames.

Folder names mean nothing, the configuration everything: runs that differ only in their seed and output folder are the
seeds of one setting. What cannot be read is named on stderr and left out.
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
from pspo.tasks.files import local_path
from pspo.terminal import one_line
from pspo_lab.settings import DATA, MODEL, SEED, Configs, Setting, Switches, make_labels, make_setting, read_switches

Item = TypeVar("Item")
STAGES = ("before", "after", "final")  # of a run: its model before training, the returned and the last one


@dataclass(frozen=True, eq=False)
class LabRun:
    """Contents of a run's folder; of another trainer's run, what there is."""

    folder: Path
    switches: Switches
    metrics: pd.DataFrame  # step and the metrics, one row per rollout; NaN where one is missing or not finite
    summary: dict[str, Any]  # empty while the run is not finished
    experiments: list[str]  # folders of the experiments that it and its duplicates belong to
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
        """The metrics with their time in seconds, and of a finished run at step 0 the validation before training."""
        seconds = self.metrics.filter(like="seconds/").sum(axis=1, min_count=1)
        untrained = (self.summary.get("validation") or {}).get("untrained")
        first = [untrained | {"time": 0.0}] if untrained else []
        return pd.concat([pd.DataFrame(first), self.metrics.assign(time=seconds.cumsum())]).astype({"step": int})


@dataclass(frozen=True)
class TestResult:
    """How well a model did on some problems."""

    run: LabRun | None  # None for a model that no run trained
    stage: str  # one of `STAGES`
    model: str  # that the run began with
    evaluation: str  # "summary", or the name of the evaluation's folder
    problems: str  # such as "gsm8k test, n = 1,319"
    limit: int | None  # tokens of a completion
    temperature: str  # "0" is greedy
    file: Path  # of the completions
    numbers: dict[str, Number]  # by measure


@dataclass(frozen=True)
class Runs:
    """Runs, and the tests of models that no run trained."""

    labels: dict[LabRun, str]  # by run the name of its setting, among those it is compared with
    untrained: list[TestResult]

    def compared(self, runs: Iterable[LabRun], models: Container[str]) -> "Runs":
        """These runs, named by what tells them apart, and the tests of these models."""
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
        """`LabRun.rollouts` of all runs, with their name as run."""
        return pd.concat([run.rollouts().assign(run=run.name) for run in self.labels])


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """The items by their key, in order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


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


def folders_with(file: str, roots: Sequence[Path]) -> list[Path]:
    """The folders that hold such a file, below these roots."""
    return sorted({path.parent.resolve() for root in roots for path in root.rglob(file)})


def read_runs(roots: Sequence[Path]) -> Runs:
    """Read what the folders hold, however deep, in order of settings and seeds; raises ValueError if it is nothing."""
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
    """Sort by setting and seed, each once: of two runs the finished one."""
    labels = make_labels({run: run.switches for run in runs})
    number = {setting: i for i, setting in enumerate(dict.fromkeys(run.setting for run in runs))}
    first: dict[tuple[Setting, int], LabRun] = {}
    for run in sorted(runs, key=lambda run: (labels[run], number[run.setting], run.seed, not run.summary)):
        other = first.setdefault((run.setting, run.seed), run)
        if other is not run:
            warn(f"{run.name}: the same setting and seed as {other.name}, whatever code it ran; left out")
            other.experiments.extend(run.experiments)
    return Runs({run: labels[run] for run in first.values()}, untrained)


def read_metrics(folder: Path) -> pd.DataFrame:
    """The rollouts in order of steps, the last record of each; NaN where a value was not finite."""
    records = read_jsonl(folder / "metrics.jsonl")
    if not records:
        raise ValueError("metrics.jsonl holds no rollout")
    metrics = pd.DataFrame(records)
    metrics = metrics.drop_duplicates("step", keep="last").sort_values("step")
    return metrics.apply(pd.to_numeric, errors="coerce").replace([np.inf, -np.inf], np.nan).astype({"step": int})


def summary_tests(run: LabRun) -> Iterator[TestResult]:
    """The tests in a run's summary, none while it is not finished."""
    config = run.switches
    limit = config.get("rollout.max_completion_tokens")
    for stage in STAGES:
        result = run.summary.get(stage)  # {} with --run.test_limit 0
        if not result or (stage == "before" and config.get("run.fork_from")):  # which began as its parent did
            continue
        files = [run.folder / f"test-{name}.jsonl" for name in (stage, "after")]  # one test if the best is the last
        file = next((file for file in files if file.exists()), files[0])
        problems = f"{config[DATA]} test, n = {result['n']:,}"
        numbers = read_numbers(result)
        yield TestResult(run, stage, config[MODEL], "summary", problems, limit, "0", file, numbers)


def evaluation_tests(folder: Path, runs: dict[Path, LabRun]) -> Iterator[TestResult]:
    """The tests in an evaluation's folder, of the run whose model it evaluates if that is known."""
    results = read_json(folder / "results.json")
    model = Path(results["model"])
    candidates = (model.resolve().parent, folder, *folder.parents)  # of RUN/best, or somewhere in RUN
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
    """The stage of an evaluation's model; ValueError for one that its run did not return or has since replaced."""
    stages = {"final": "final", Path(run.summary.get("best_model", "best")).name: "after"}
    if model.name not in stages:
        raise ValueError(f"evaluates {model}, neither the model that the run returned nor its final one")
    stage = stages[model.name]
    newest = run.summary.get("optimizer_steps" if stage == "final" else "best_step", step)
    if step not in (None, newest):
        raise ValueError(f"evaluates step {step}, and this model of the run is step {newest}'s by now")
    return stage


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
        for temperature, completions in grouped(records, lambda record: record["temperature"]).items():
            n = len({record["problem"] for record in completions})
            samples = len(completions) // n
            if [record["sample"] for record in completions] != [*range(samples)] * n:
                raise ValueError("not every problem has as many completions; run the evaluation again")
            problems = [(json.dumps(record["prompt"]), json.dumps(record["gold"])) for record in completions[::samples]]
            values = measures(completions, samples) | at_k(completions, samples)
            means = {name: pd.DataFrame(value).mean(axis=1).to_numpy() for name, value in values.items()}
            by_temperature[f"{temperature:g}"] = pd.DataFrame(means, pd.MultiIndex.from_tuples(problems))
    return by_temperature
