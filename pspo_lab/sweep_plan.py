"""From experiments to jobs: grids of settings, the stages of the paper's search, and what it selects."""

import math
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pspo.cli.parse import DERIVED, Settings, argument_text, make_config, require_same
from pspo.config import EvaluateConfig, Section, TrainConfig, find_switches, require, switch
from pspo.endings import user_errors
from pspo.files import read_jsonl

WEIGHTS = ("best", "final", "checkpoints")  # folders of a run
MODEL = ("name_or_path", "revision", "trust_remote_code")  # switches that evaluations take from their run
Switches = dict[str, Any]
Evaluations = dict[str, Settings]  # by folder inside a run's
C = TypeVar("C")


@dataclass(frozen=True)
class Search(Section, name="search"):
    """The paper's selection (appendix A.1). All settings run with ``seeds`` (grid), the best ``keep`` of each method
    run with ``confirm_seeds`` (confirm), and the setting with the highest mean last validation reward runs in full.
    """

    seeds: list[int]
    keep: int = switch(MISSING, "best settings of a method that are confirmed", above=0)
    confirm_seeds: list[int]
    switches: Switches = field(default_factory=dict)  # differences from a full run, such as its length


@dataclass(frozen=True)
class Experiment:
    """Settings that are compared with each other.

    Args:
        methods: by name a grid of settings, {switch: value or list of values}, or a list of such grids.
        seeds: seeds of the full runs.
        shared: switches of every run; those of a method override them.
        search: how to select a setting of each method; unset, all of them run in full.
        evaluate: switches of pspo.evaluate by name of a folder inside a run's; the untrained model is evaluated, too.
    """

    methods: dict[str, Switches | list[Switches]]
    seeds: list[int]
    shared: Switches = field(default_factory=dict)
    search: Search | None = None
    evaluate: dict[str, Switches] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepConfig(Section):
    """Train and evaluate many settings."""

    experiments: dict[str, Experiment] = switch(
        MISSING, "experiments by name; pspo_lab/sweep_plan.py says what they hold"
    )
    output: str = switch(MISSING, "the sweep's folder; runs that are finished there are skipped")
    only: list[str] | None = switch(None, "names of the experiments to run; unset, all")
    workers: int | None = switch(None, "runs at a time; unset, as many as the GPUs allow", above=0)
    processes: int = switch(1, "processes of a run, each with a GPU; above 1, set distributed.strategy", above=0)
    launcher: str | None = switch(None, 'shell command that starts a run and waits for it: "srun sh -c {command}"')
    dry_run: bool = switch(False, "print settings and runs, what the seeds can detect, and the hours; run nothing")
    pilot: str | None = switch(None, "for a dry run: folder of runs that give the noise floor and the time of a step")
    sd: float | None = switch(None, "without a pilot: SD of the difference of two seeds in points", above=0)


@dataclass(frozen=True)
class Job:
    """A training run, and the evaluations of its best model by folder.

    In the stage "untrained" a job has evaluations alone, of the model that the runs begin with.
    """

    folder: Path  # its .yaml and .log lie next to it
    stage: str
    setting: str
    seed: int
    config: Settings
    evaluate: Evaluations

    @property
    def trained(self) -> bool:
        return self.stage == "untrained" or (self.folder / "summary.json").exists()

    @property
    def finished(self) -> bool:
        return self.trained and all((self.folder / name / "results.json").exists() for name in self.evaluate)

    @property
    def last_validation_reward(self) -> float:
        records = read_jsonl(self.folder / "metrics.jsonl")
        reward = [record["validation_reward"] for record in records if "validation_reward" in record][-1]
        return -math.inf if reward is None else reward


@dataclass(frozen=True)
class Method:
    """One method of an experiment."""

    experiment: str
    name: str
    settings: dict[str, Switches]  # by name
    stages: dict[str, int | None]  # in order, how many settings take part in a stage; None: all
    possible: list[Job]  # jobs of all settings in all stages

    def jobs(self, stages: list[str], settings: list[str]) -> list[Job]:
        jobs = [job for job in self.possible if job.stage in stages and job.setting in settings]
        return sorted(jobs, key=lambda job: job.seed)

    def planned(self) -> list[Job]:
        """Return the jobs of all stages; until a search has chosen settings, the first ones stand for them."""
        chosen = {stage: self.chosen(stage) or list(self.settings)[:n] for stage, n in self.stages.items()}
        return [job for stage in self.stages for job in self.jobs([stage], chosen[stage])]

    def chosen(self, stage: str) -> list[str]:
        """Return a stage's settings, best mean last validation reward first; [] until earlier stages are finished."""
        before = list(self.stages)[: list(self.stages).index(stage)]
        settings = self.chosen(before[-1]) if before else list(self.settings)
        jobs = self.jobs(before, settings)
        if not all(job.trained for job in jobs):
            return []
        sums = {name: math.fsum(job.last_validation_reward for job in jobs if job.setting == name) for name in settings}
        return sorted(sums, key=sums.get, reverse=True)[: self.stages[stage]]

    def selection(self) -> dict[str, Any]:
        """The selected setting, those that were confirmed, and the last validation rewards by seed that decided."""
        selected = self.chosen("full")
        rewards = {}
        for name in self.settings:
            jobs = [job for job in self.jobs(["grid", "confirm"], [name]) if job.trained]
            rewards[name] = {job.seed: job.last_validation_reward for job in jobs}
        return {"selected": selected[0] if selected else None, "confirmed": self.chosen("confirm"), "rewards": rewards}


def make_plan(sweep: SweepConfig) -> list[Method]:
    """Check every configuration of the sweep, and return its methods."""
    plan: list[Method] = []
    for name in dict.fromkeys(sweep.only or sweep.experiments):
        require(name in sweep.experiments, "only", f"must name experiments ({', '.join(sweep.experiments)})", name)
        experiment = sweep.experiments[name]
        evaluate = {
            folder: parse_switches(EvaluateConfig, f"pspo sweep: {name}, evaluate {folder}", switches)[1]
            for folder, switches in experiment.evaluate.items()
        }
        methods = [make_method(sweep, name, method, grid, evaluate) for method, grid in experiment.methods.items()]
        if evaluate:
            jobs = [job for method in methods for job in method.possible]
            methods.append(untrained_evaluations(sweep, name, jobs, evaluate))
        for job in (job for method in methods for job in method.possible):
            for folder, values in job.evaluate.items():
                ignored = [*(f"model.{name}" for name in MODEL), "run.output_dir", "run.quiet"]
                require_same_switches(job.folder / folder, values, ignored)
        plan += methods
    return plan


def require_same_switches(folder: Path, values: Switches, ignored: Sequence[str]) -> None:
    """Raise ValueError if a run or an evaluation has begun in this folder with different switches."""
    if (folder / "metrics.jsonl").exists() or (folder / "completions.jsonl").exists():
        require_same(folder, values, lambda name, *_: name in ignored, "move it away")


def make_method(
    sweep: SweepConfig, name: str, method: str, grid: Switches | list[Switches], evaluate: Evaluations
) -> Method:
    """A method of an experiment; ValueError if two of its settings or seeds are the same."""
    experiment = sweep.experiments[name]
    search = experiment.search
    stages: dict[str, int | None] = {"full": 1 if search else None}
    rounds = [({"full": experiment.seeds}, {}, evaluate)]
    if search:
        stages = {"grid": None, "confirm": search.keep, "full": 1}
        rounds.append(({"grid": search.seeds, "confirm": search.confirm_seeds}, search.switches, {}))
    settings = {}
    jobs = []
    for seeds, further_switches, evaluations in rounds:
        for point in grid_points(grid):
            setting = setting_name(method, point)
            settings[setting] = point
            switches = experiment.shared | point | further_switches
            jobs += setting_jobs(sweep, name, setting, seeds, switches, evaluations)
    unique = 0 < len(jobs) == len({job.folder for job in jobs})
    require(unique, f"experiments.{name}.methods.{method}", "must have settings and seeds that differ", grid)
    return Method(name, method, settings, stages, jobs)


def untrained_evaluations(sweep: SweepConfig, name: str, jobs: list[Job], evaluate: Evaluations) -> Method:
    """Return a method with a job, evaluations alone, for each model that these jobs begin with."""
    possible = {}
    for job in jobs:
        model = job.config["model"]
        setting = folder_name("-".join(filter(None, [model["name_or_path"], model["revision"]])))
        folder = Path(sweep.output, name, "untrained", setting)
        possible[setting] = replace(job, folder=folder, stage="untrained", setting=setting, evaluate=evaluate)
    settings = {setting: {} for setting in possible}
    return Method(name, "untrained", settings, {"untrained": None}, list(possible.values()))


def setting_jobs(
    sweep: SweepConfig, name: str, setting: str, seeds: dict[str, list[int]], switches: Switches, evaluate: Evaluations
) -> list[Job]:
    """Jobs of a setting, whose seeds are by stage; ValueError if one cannot run or was run with other switches."""
    prog = f"pspo sweep: {name}/{setting}"
    searching = "full" not in seeds
    config, switch_values = parse_switches(TrainConfig, prog, switches)
    jobs = []
    with user_errors(prog):
        fits = (config.distributed.strategy == "none") == (sweep.processes == 1)
        require(fits, "processes", "above 1 needs --distributed.strategy ddp or fsdp2, 1 needs none", sweep.processes)
        config.check_ranks(sweep.processes)
        require(config.run.validate_every or not searching, "run.validate_every", "must be above 0 in a search", 0)
        for stage, seed in ((stage, seed) for stage, of_stage in seeds.items() for seed in of_stage):
            folder = Path(sweep.output, f"{name}-search" if searching else name, setting, f"seed-{seed}")
            values = switch_values | {"run": switch_values["run"] | {"seed": seed, "output_dir": str(folder)}}
            require_same_switches(folder, values, ["run.output_dir"])
            jobs.append(Job(folder, stage, setting, seed, values, evaluate))
    return jobs


def grid_points(grid: Switches | list[Switches]) -> list[Switches]:
    """Settings of a grid: the product of the lists in a mapping, the union over a list of mappings."""
    points = []
    for part in grid if isinstance(grid, list) else [grid]:
        choices = [value if isinstance(value, list) else [value] for value in part.values()]
        points += [dict(zip(part, values, strict=True)) for values in product(*choices)]
    return points


def setting_name(method: str, switches: Switches) -> str:
    """Folder name of a setting, such as clip-epsilon=0.2-lr=1e-06."""
    told = {name: value for name, value in switches.items() if name not in ("config", "algorithm.surrogate")}
    parts = [method, *(f"{name.rpartition('.')[2]}={argument_text(value)}" for name, value in told.items())]
    return folder_name("-".join(parts))


def folder_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]", "_", text)


def parse_switches(config_class: type[C], prog: str, switches: Switches) -> tuple[C, Settings]:
    """Return the configuration of these switches, and the same as in YAML; null leaves a switch open."""
    left_open = [name for name, value in switches.items() if value is None and name in find_switches(config_class)]
    # Later words override: a file comes first, and a class before its parameters.
    names = sorted(switches.keys() - left_open, key=lambda name: (name != "config", name.count(".")))
    words = [f"--{name}={argument_text(switches[name])}" for name in names]
    with user_errors(prog):
        return make_config(config_class, prog, words, {DERIVED: left_open})
