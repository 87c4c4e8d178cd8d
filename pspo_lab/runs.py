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
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

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

STAGES = ("before", "after", "final")  # of a run: its model before training, the returned and the last one
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

    @property
    def name(self) -> str:
        return str(local_path(self.folder))


class Number(NamedTuple):
    """A measure of a test, with its 95% interval over problems where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Test:
    """How well a model did on some problems.

    Attributes:
        run: unset for an evaluation of a model that no run trained.
        stage: one of `STAGES`.
        model: that the run began with.
        evaluation: "summary", or the name of the evaluation's folder.
        limit: tokens of a completion.
        temperature: "0" is greedy.
        file: of the completions.
    """

    run: str | None
    stage: str
    model: str
    evaluation: str
    data: str
    split: str
    n: int
    limit: int | None
    temperature: str
    file: Path
    numbers: dict[str, Number]  # by measure

    def shown_measures(self) -> list[str]:
        """The measures of a report: accuracies, of samples also pass@k and maj@k; without gold answers the reward."""
        shown = r"accuracy|gold_anywhere" if self.temperature == "0" else r"accuracy|gold_anywhere|(pass|maj)@.*"
        if "accuracy" not in self.numbers:
            shown += "|mean_reward"
        return [measure for measure in self.numbers if re.fullmatch(shown, measure)]


@dataclass(frozen=True)
class Runs:
    """Runs by name, which is their folder, and the tests of their models.

    Attributes:
        configs: indexed by run; every switch, and the experiment folders of this run and of its duplicates.
    """

    configs: pd.DataFrame
    folders: dict[str, LabRun]
    tests: list[Test]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Run, step and the metrics, one row per rollout."""
        parts = [self.folders[run].metrics.assign(run=run) for run in self.configs.index]
        return pd.concat(parts or [pd.DataFrame(columns=["run", "step"])], ignore_index=True)

    def take(self, runs: Iterable[str], models: Container[str] | None = None) -> "Runs":
        """These runs, in this order, with their tests and those of (unset, all) models that no run trained."""
        place: dict[str | None, int] = {run: i for i, run in enumerate(runs)}
        configs = self.configs.loc[list(place)]
        place[None] = len(place)
        tests = [test for test in self.tests if test.run in place and (models is None or test.model in models)]
        return replace(self, configs=configs, tests=sorted(tests, key=lambda test: place[test.run]))

    @cached_property
    def finished(self) -> "Runs":
        """The runs that have a summary."""
        return self.take([run for run in self.configs.index if self.folders[run].summary])

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


def folders_with(file: str, roots: Sequence[Path]) -> list[Path]:
    """The folders that hold such a file, below these roots."""
    return sorted({path.parent.resolve() for root in roots for path in root.rglob(file)})


def read_runs(roots: Sequence[Path]) -> Runs:
    """Read what the folders hold, however deep, in order of settings and seeds; raises ValueError if it is nothing."""
    for root in roots:
        if not any(root.rglob("metrics.jsonl")) and not any(root.rglob("results.json")):
            warn(f"{root}: {'no run and no evaluation in it' if root.exists() else 'there is no such folder'}")
    runs: dict[str, LabRun] = {}
    tests: list[Test] = []
    for folder in folders_with("metrics.jsonl", roots):
        with skip_unreadable(folder):
            run = read_run(folder)
            tests += summary_tests(run)
            runs[run.name] = run
    for folder in folders_with("results.json", roots):
        with skip_unreadable(folder):
            tests += evaluation_tests(folder, runs)
    if not runs and not tests:
        raise ValueError("no run and no evaluation in " + ", ".join(map(str, roots)))
    rows = [run.switches | {"experiments": (str(run.folder.parent.parent),)} for run in runs.values()]
    table = pd.DataFrame(rows, index=list(runs), dtype=object)
    table = table.reindex(columns=sorted({MODEL, DATA, SURROGATE, *not_compared(), *table}))
    return sort_runs(Runs(table.where(table.notna(), None), runs, tests))


def sort_runs(runs: Runs) -> Runs:
    """Sort by setting and seed, each once: of two runs the finished one."""
    configs = runs.configs
    keys = pd.DataFrame({"label": labels(configs), "setting": setting_numbers(configs), "seed": configs[SEED]})
    keys["unfinished"] = [not runs.folders[run].summary for run in keys.index]
    keys = keys.sort_values(["label", "setting", "seed", "unfinished"], kind="stable")
    first = keys.groupby(["setting", "seed"])["label"].transform(lambda seed_runs: seed_runs.index[0])
    for run, other in first[first != first.index].items():
        warn(f"{run}: the same setting and seed as {other}, whatever code it ran; left out")
        configs.at[other, "experiments"] += configs.at[run, "experiments"]
    return runs.take(first.unique())


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
    experiment = folder.parent.parent
    full = experiment.with_name(experiment.name.removesuffix("-search"))
    if full != experiment and (full / "selection.json").exists():
        switches["search"] = True  # its runs choose, and confirm nothing
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


def summary_tests(run: LabRun) -> Iterator[Test]:
    """The tests in a run's summary, none while it is not finished."""
    config = run.switches
    limit = config.get("rollout.max_completion_tokens")
    for stage in STAGES:
        result = run.summary.get(stage)  # {} with --run.test_limit 0
        if not result or (stage == "before" and config.get("run.fork_from")):  # which began as its parent did
            continue
        files = [run.folder / f"test-{name}.jsonl" for name in (stage, "after")]  # one test if the best is the last
        file = next((file for file in files if file.exists()), files[0])
        about = (run.name, stage, config[MODEL], "summary", config[DATA], "test")
        yield Test(*about, result["n"], limit, "0", file, read_numbers(result))


def evaluation_tests(folder: Path, runs: dict[str, LabRun]) -> Iterator[Test]:
    """The tests in an evaluation's folder, of the run whose model it evaluates if that is known."""
    results = read_json(folder / "results.json")
    model = Path(results["model"])
    candidates = map(str, (model.resolve().parent, folder, *folder.parents))  # of RUN/best, or somewhere in RUN
    run = next((runs[candidate] for candidate in candidates if candidate in runs), None)
    began_with = results["model"] if run is None else run.switches[MODEL]
    stage = "before"
    if os.path.abspath(results["model"]) != os.path.abspath(began_with):
        stage = trained_stage(results, run)
    data = read_switches(folder)[DATA] if results["data"] == "file" else results["data"]
    limit = results.get("max_completion_tokens")
    about = (None if stage == "before" else run.name, stage, began_with, folder.name, data, results["split"])
    file = folder / "completions.jsonl"
    for temperature, result in results["temperatures"].items():
        yield Test(*about, results["n"], limit, temperature, file, read_numbers(result))


def trained_stage(results: Row, run: LabRun) -> str:
    """Whether an evaluation is of the model that the run returned or of its final one; ValueError if it is neither."""
    model = Path(results["model"])
    best = Path(run.summary.get("best_model", "best")).name
    stages = {"final": "final", best: "after"}
    if model.name not in stages:
        raise ValueError(f"evaluates {model}, neither the model that the run returned nor its final one")
    stage = stages[model.name]
    evaluated = results.get("step")
    step = run.summary.get("optimizer_steps" if stage == "final" else "best_step", evaluated)
    if evaluated not in (None, step):
        raise ValueError(f"evaluates step {evaluated}, and this model of the run is step {step}'s by now")
    return stage


def read_numbers(result: Row) -> dict[str, Number]:
    """Numbers by measure, of an evaluation ({"value", "ci95"}) or a summary, which has each interval beside them."""
    numbers = {}
    for name, value in result.items():
        interval = result.get(f"{name}_ci95".removeprefix("accuracy_"))
        if isinstance(value, dict) and "value" in value and "ci95" in value:
            value, interval = value["value"], value["ci95"]
        if isinstance(value, int | float):
            numbers[name] = Number(value, *(interval or ()))  # of one problem there is none
    return numbers


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
