"""Run folders for `pspo.report`: reading them, grouping them into settings, and the numbers of each run.

Names mean nothing, the configuration everything: runs that differ only in ``run.seed`` and ``run.output_dir`` are the
seeds of one setting. What cannot be read is named on stderr and left out.
"""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pspo.run.records import flat, wilson

DIAGNOSTICS = ("ratio_p1", "ratio_p99", "ess", "zero_weight_share", "tv", "tv_smoothed", "kl_old_new", "grad_norm")
OF_A_SEED = ("run.seed", "run.output_dir")
SURROGATE = "algorithm.surrogate."
SEEDS_FOR_AN_INTERVAL = 3
ACCURACIES = {"true_accuracy": "true_accuracy_ci95", "accuracy": "ci95"}  # and their intervals in a summary

Config = dict[str, Any]  # flat: {"algorithm.epochs": 2}; lists as their text
Measured = tuple[float, tuple[float, float]]  # a share and its 95% interval over problems


@dataclass(frozen=True)
class Run:
    """One run, or one evaluation outside of any run (no metrics then).

    Attributes:
        metrics: one record a rollout, in order of steps.
        summary: empty while the run is not finished.
        evaluations: the contents of results.json files.
    """

    folder: Path
    config: Config
    metrics: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def experiment(self) -> Path:
        """Where its setting's folder lies, among those that it is to be compared with."""
        return self.folder.parent.parent

    def curve(self, key: str) -> tuple[list[float], list[float]]:
        """Optimizer steps and the finite values of one metric."""
        points = [(record["step"], record[key]) for record in self.metrics if _is_number(record.get(key))]
        return [step for step, _ in points], [value for _, value in points]


@dataclass(frozen=True)
class Setting:
    """The runs of one configuration by seed; `config` is without what tells seeds apart."""

    label: str
    config: Config
    runs: dict[int, Run]

    @property
    def finished(self) -> dict[int, Run]:
        return {seed: run for seed, run in self.runs.items() if run.summary}


@dataclass(frozen=True)
class Estimate:
    """Mean over n seeds (0: of the untrained model), and its 95% interval.

    The interval is over seeds, from three on; an accuracy of one seed or none has its interval over problems.
    """

    mean: float
    interval: tuple[float, float] | None
    n: int


# Reading


def read_runs(roots: Sequence[Path]) -> list[Run]:
    """All runs and evaluations in the folders, however deep, each once."""
    found: set[Path] = set()
    for root in roots:
        below = {path.parent.resolve() for name in ("config.yaml", "results.json") for path in root.rglob(name)}
        if not below:
            warn(f"{root}: {'no run and no evaluation in it' if root.exists() else 'there is no such folder'}")
        found |= below
    runs: dict[Path, Run] = {}
    for folder in sorted(found):  # a run comes before what is inside it, its checkpoints for one
        inside = any(parent in runs for parent in folder.parents)
        has_metrics, has_results = ((folder / name).exists() for name in ("metrics.jsonl", "results.json"))
        if (has_metrics or not (inside or has_results)) and (config := _read_config(folder)):
            if metrics := _read_metrics(folder / "metrics.jsonl"):
                runs[folder] = Run(folder, config, metrics, _read_json(folder / "summary.json"))
            else:
                warn(f"{folder}: neither metrics nor results; left out")
        elif inside and not has_results and (folder / "completions.jsonl").exists():
            warn(f"{folder}: an evaluation that is not finished; left out")
    trained = dict(runs)
    for folder in sorted(found):
        if results := _read_results(folder / "results.json"):
            model = Path(results["model"])
            around = next((trained[parent] for parent in (folder, *folder.parents) if parent in trained), None)
            run = trained.get(model.resolve().parent, around)  # it may lie elsewhere and name RUN/best
            if run is not None and results["model"] == run.config["model.name_or_path"]:
                run = None  # of the model that the run began with
            if run is None and (config := _read_config(folder)):
                runs[folder] = Run(folder, config, evaluations=[results])
            elif run is not None and model.name == Path(run.summary.get("best_model", "best")).name:
                run.evaluations.append(results)
            elif run is not None:
                warn(f"{folder}: evaluates {model}, not the model that the run returned; left out")
    return list(runs.values())


def warn(line: str) -> None:
    print(f"pspo.report: {line}", file=sys.stderr)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        warn(f"{path}: not a JSON object; left out")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warn(f"{path}: cut off or not JSON ({error}); left out")
    return {}


def _read_results(path: Path) -> dict[str, Any]:
    results = _read_json(path)
    complete = {"model", "data", "split", "n", "temperatures"} <= results.keys()
    if results and not (complete and isinstance(results["temperatures"], dict) and isinstance(results["model"], str)):
        warn(f"{path}: not the results of an evaluation; left out")
        return {}
    return results


def _read_config(folder: Path) -> Config | None:
    path, needed = folder / "config.yaml", {"model.name_or_path", "data.name", "run.seed"}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        values = flat(content) if isinstance(content, dict) else {}
        config = {name: str(value) if isinstance(value, list) else value for name, value in values.items()
                  if value is not None}  # null is the same as no such field  # fmt: skip
        if needed <= config.keys():
            return config
        warn(f"{folder}: config.yaml says nothing of {', '.join(sorted(needed - config.keys()))}; left out")
    except (OSError, ValueError, yaml.YAMLError) as error:
        warn(f"{folder}: no readable config.yaml ({' '.join(str(error).split())}); left out")
    return None


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records that are whole, the last one of each step."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[int(record["step"])] = record
        except (ValueError, TypeError, KeyError, OverflowError):
            warn(f"{path}: line {number} is cut off or no record; left out")
    nulls = sum(value is None for record in records.values() for value in record.values())
    if nulls:
        warn(f"{path}: {nulls} values that were not finite; left out")
    return [records[step] for step in sorted(records)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# Grouping


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """Group runs of one task; a label is the surrogate's name and the parameters in which the settings differ."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key_without(run.config, OF_A_SEED), []).append(run)
    configs = [_without(group[0].config, OF_A_SEED) for group in groups.values()]
    settings = []
    for config, group in zip(configs, groups.values(), strict=True):
        label, by_seed = _label(config, configs), {}
        for run in sorted(group, key=lambda run: not run.summary):  # finished ones first
            first = by_seed.setdefault(run.config["run.seed"], run)
            if first is not run:
                warn(f"{run.folder}: the same setting and seed as {first.folder}; left out")
        settings.append(Setting(label, config, dict(sorted(by_seed.items()))))
    return sorted(settings, key=lambda setting: setting.label)


def _without(config: Config, prefixes: Sequence[str]) -> Config:
    return {key: value for key, value in config.items() if not key.startswith(tuple(prefixes))}


def key_without(config: Config, prefixes: Sequence[str]) -> str:
    """Equal for configurations that are equal but for fields that begin so."""
    return json.dumps(_without(config, prefixes), sort_keys=True, default=str)


def method_of(config: Config) -> str:
    """The name of the surrogate's class."""
    return str(config.get(f"{SURROGATE}class_path")).rpartition(".")[2]


def _label(config: Config, configs: Sequence[Config]) -> str:
    same_method = [other for other in configs if method_of(other) == method_of(config)]
    classes = {other.get(f"{SURROGATE}class_path") for other in same_method}
    name = str(config.get(f"{SURROGATE}class_path")) if len(classes) > 1 else method_of(config)
    shown = []
    for key, value in sorted(config.items(), key=lambda item: not item[0].startswith(SURROGATE)):  # its own first
        others = same_method if key.startswith(SURROGATE) else configs
        if key != f"{SURROGATE}class_path" and any(other.get(key) != value for other in others):
            shown.append(f"{key.rpartition('.')[2]}={' '.join(str(value).split())}")
    return f"{name} ({', '.join(shown)})" if shown else name


# Numbers


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean over seeds; None for no seeds. The interval is Student's, for truth values Wilson's of their share."""
    n = len(values)
    if n == 0:
        return None
    interval = wilson(sum(values), n) if isinstance(values[0], bool) else t_interval(values) if n > 1 else None
    return Estimate(float(np.mean(values)), interval if n >= SEEDS_FOR_AN_INTERVAL else None, n)


def smoothed(values: Sequence[float]) -> np.ndarray:
    """(N - w + 1,) means over the windows of w = ceil(N / 10) consecutive values."""
    width = math.ceil(len(values) / 10)
    return np.lib.stride_tricks.sliding_window_view(values, width).mean(axis=1) if width else np.empty(0)


def smoothed_curve(run: Run, key: str) -> tuple[list[float], list[float]]:
    """One metric, each window of `smoothed` at its last step."""
    steps, values = run.curve(key)
    windows = smoothed(values)
    return steps[len(steps) - len(windows) :], windows.tolist()


def learning(run: Run) -> dict[str, float]:
    """What the training reward did, by the titles of the table; empty without rewards. `pspo.report` defines them."""
    steps, rewards = run.curve("reward")
    if not rewards:
        return {}
    windows = smoothed(rewards)
    peak_at = int(windows.argmax()) + len(rewards) - len(windows)  # the last rollout of the best window
    found = {
        "final reward": float(windows[-1]),
        "peak reward": float(windows.max()),
        "area under the curve": float(np.mean(rewards)),
        "steps to peak": steps[peak_at],
        "rollouts to peak": peak_at + 1,
    }
    if windows.max() > 0:  # half of a negative peak is above it
        found["collapsed (%)"] = bool(windows[-1] < windows.max() / 2)
    validation = run.curve("validation_reward")[1]
    return found | ({"best validation reward": max(validation)} if validation else {})


def diagnostics(run: Run) -> dict[str, float]:
    """Means over the run's rollouts, and the share of them whose last gradient was clipped by its norm."""
    found = {key: run.curve(key)[1] for key in DIAGNOSTICS}
    limit = run.config.get("optimizer.max_grad_norm") or math.inf
    found["gradients clipped (%)"] = [float(norm > limit) for norm in found["grad_norm"]]
    return {key: float(np.mean(values)) for key, values in found.items() if values}


def accuracies(run: Run, greedy: bool = True) -> dict[str, Measured]:
    """Accuracies of the returned model, by title; pass@k, too, where it is sampled and not greedy.

    An evaluation comes before the summary where both know the same.
    """
    found, seen = _in_summary(run, "after") if greedy else {}, set()
    for results in run.evaluations:
        for temperature, result in results["temperatures"].items():
            if greedy == (temperature == "0"):
                where = f"{results['data']} {results['split']}, n = {results['n']:,}"
                where += "" if greedy else f", T = {temperature}"
                if where in seen:
                    warn(f"{run.folder}: several evaluations on {where}; the last one counts")
                seen.add(where)
                found |= {
                    _title(where, name): (part["value"], tuple(part["ci95"]))
                    for name, part in result.items()
                    if name in ACCURACIES or (name.startswith("pass@") and not greedy)
                }
    return found


def accuracies_before(runs: Iterable[Run], greedy: bool = True) -> dict[str, Measured]:
    """The same of the untrained model, from evaluations of it or else from the summaries of runs."""
    found: dict[str, Measured] = {}
    for run in runs:
        in_summary = _in_summary(run, "before") if greedy else {}
        found = in_summary | found | ({} if run.metrics else accuracies(run, greedy))
    return found


def _in_summary(run: Run, name: str) -> dict[str, Measured]:
    result = run.summary.get(name)
    if not result:
        return {}  # --run.test_limit 0
    where = f"{run.config['data.name']} test, n = {result['n']:,}"
    return {_title(where, name): (result[name], tuple(result[interval])) for name, interval in ACCURACIES.items()}


def _title(where: str, name: str) -> str:
    return f"{where}: {name.replace('_', ' ')} (%)"


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of n independent values, by Student's t with n - 1 degrees of freedom.

    Raises ValueError for fewer than 2 values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 values, got {n}")
    half = t_quantile(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def t_quantile(degrees: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = level for Student's t, by bisection.

    The probability is a finite sum in theta = atan(t / sqrt(degrees)) (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4).
    """

    def probability(theta: float) -> float:
        odd = degrees % 2
        term, total = (math.cos(theta) if odd else 1.0), 0.0
        for k in range(1 + odd, degrees, 2):
            total += term
            term *= k / (k + 1) * math.cos(theta) ** 2
        return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.sqrt(degrees) * math.tan(low)
