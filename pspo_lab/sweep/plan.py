"""From experiments to jobs: grids of settings, the stages of the paper's search, and what it selects."""

import functools
import math
import re
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from jsonargparse.typing import PositiveInt

from pspo.cli.files import as_argument, differences, read_config, read_jsonl
from pspo.cli.parse import parse, user_errors
from pspo.cli.progress import Bar
from pspo.config import EvaluateConfig, TrainConfig, require
from pspo.run.switches import STEERED

Switches = dict[str, Any]
parse_once = functools.cache(parse)  # a search has two stages with the same switches


@dataclass(frozen=True)
class Search:
    """The paper's selection (appendix A.1): all settings run with ``seeds`` (grid), the best ``keep`` of a method with
    ``confirm_seeds`` (confirm), and the one with the highest mean last validation reward in full.
    """

    seeds: list[int]
    keep: PositiveInt
    confirm_seeds: list[int]
    switches: Switches = field(default_factory=dict)  # differences from a full run, its length above all


@dataclass(frozen=True)
class Experiment:
    """Settings that are compared with each other.

    Args:
        methods: grid of settings by name: {switch: value or list of values}, or a list of such grids.
        seeds: of the full runs.
        shared: switches of every run; those of a method override them.
        search: how to select a setting of each method; unset, all of them run in full.
        evaluate: switches of pspo.evaluate by the name of a folder in the run's; of the untrained model, too.
    """

    methods: dict[str, Switches | list[Switches]]
    seeds: list[int]
    shared: Switches = field(default_factory=dict)
    search: Search | None = None
    evaluate: dict[str, Switches] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepConfig:
    """Train and evaluate many settings.

    Args:
        experiments: by name; pspo_lab/sweep/plan.py documents their fields.
        output: the sweep's folder; runs that are finished there are skipped.
        only: names of the experiments to run; unset, all.
        workers: runs at a time; unset, one per GPU (or per `processes` GPUs), or one.
        processes: of each run, started by torchrun, a GPU each; above 1, `shared` needs distributed.strategy.
        launcher: command that runs {command}, one word, and waits, as "srun sh -c {command}"; unset, runs start here.
        retry_failed: run failed runs again.
        dry_run: print settings, runs and tokens, and run nothing.
    """

    experiments: dict[str, Experiment]
    output: str
    only: list[str] | None = None
    workers: PositiveInt | None = None
    processes: PositiveInt = 1
    launcher: str | None = None
    retry_failed: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Job:
    """A training run of at most ``tokens`` tokens, and the evaluations of its best model by folder.

    In the stage "untrained" there are the evaluations alone, of the model that the runs begin with.
    """

    folder: Path  # its .yaml, .log and .failed lie beside it
    stage: str
    setting: str
    seed: int
    config: dict[str, Any]
    tokens: int
    evaluate: dict[str, Switches]

    @property
    def trained(self) -> bool:
        return self.stage == "untrained" or (self.folder / "summary.json").exists()

    @property
    def finished(self) -> bool:
        return self.trained and all((self.folder / name / "results.json").exists() for name in self.evaluate)

    @property
    def validation_rewards(self) -> list[float]:
        records = read_jsonl(self.folder / "metrics.jsonl")
        return [record["validation_reward"] for record in records if "validation_reward" in record]


@dataclass(frozen=True)
class Method:
    """One method of an experiment: its settings' switches, how many run in each stage, and all possible jobs."""

    experiment: str
    name: str
    settings: dict[str, Switches]
    stages: dict[str, int | None]
    possible: list[Job]

    def jobs(self, stages: list[str], settings: list[str]) -> list[Job]:
        jobs = [job for job in self.possible if job.stage in stages and job.setting in settings]
        return sorted(jobs, key=lambda job: job.seed)

    def chosen(self, stage: str) -> list[str]:
        """Settings of a stage: highest mean last reward before it, the first of equals; none if a run is missing."""
        before = list(self.stages)[: list(self.stages).index(stage)]
        settings = self.chosen(before[-1]) if before else list(self.settings)
        jobs = self.jobs(before, settings)
        if not all(job.trained for job in jobs):
            return []
        sums = {name: math.fsum(job.validation_rewards[-1] for job in jobs if job.setting == name) for name in settings}
        return sorted(sums, key=sums.get, reverse=True)[: self.stages[stage]]

    def selection(self) -> dict[str, Any]:
        """The selected setting, and every number that decided."""
        kept, selected, records = self.chosen("confirm"), self.chosen("full"), []
        for name, switches in self.settings.items():
            jobs = self.jobs(["grid", "confirm"], [name])
            rewards = {job.seed: job.validation_rewards for job in jobs if job.trained}
            last = {seed: values[-1] for seed, values in rewards.items()}
            records.append({
                "setting": name, "switches": switches, "kept": name in kept,
                "mean_last": fmean(last.values()) if last else None,
                "last_validation_reward": last,
                "best_validation_reward": {seed: max(values) for seed, values in rewards.items()},
            })  # fmt: skip
        return {"selected": selected[0] if selected else None, "settings": records}


def make_plan(sweep: SweepConfig) -> list[Method]:
    """Methods of the sweep, every configuration checked."""
    plan = []
    for name in sweep.only or sweep.experiments:
        require(name in sweep.experiments, "only", f"must name experiments ({', '.join(sweep.experiments)})", name)
        experiment, search = sweep.experiments[name], sweep.experiments[name].search
        for folder, switches in experiment.evaluate.items():
            parse(EvaluateConfig, f"pspo sweep: {name}, evaluate {folder}", as_args(switches))
        stages = {"full": (1 if search else None, experiment.seeds, {})}  # settings, seeds, own switches
        if search:
            confirm = {"confirm": (search.keep, search.confirm_seeds, search.switches)}
            stages = {"grid": (None, search.seeds, search.switches)} | confirm | stages
        for method, grid in Bar(experiment.methods.items(), desc=f"check {name}", leave=False):
            settings, jobs = {}, []
            for (stage, (_, seeds, own)), point in product(stages.items(), grid_points(grid)):
                settings[setting := setting_name(method, point)] = point
                jobs += jobs_of(sweep, name, setting, stage, seeds, experiment.shared | point | own)
            unique = 0 < len(jobs) == len({job.folder for job in jobs})
            require(unique, f"experiments.{name}.methods.{method}", "must have settings and seeds that differ", grid)
            plan.append(Method(name, method, settings, {stage: n for stage, (n, _, _) in stages.items()}, jobs))
        if experiment.evaluate:
            jobs = [job for method in plan if method.experiment == name for job in method.possible]
            plan.append(evaluations_of_untrained(sweep, name, jobs))
    return plan


def evaluations_of_untrained(sweep: SweepConfig, name: str, jobs: list[Job]) -> Method:
    """A job for each model that these jobs begin with."""
    models = {(job.config["model"]["name_or_path"], job.config["model"]["revision"]): job for job in jobs}
    possible = []
    for (model, revision), job in models.items():
        setting = re.sub(r"[^\w.=+-]", "_", "-".join(filter(None, [Path(model).name, revision])))
        folder, evaluate = Path(sweep.output, name, "untrained", setting), sweep.experiments[name].evaluate
        possible.append(replace(job, folder=folder, stage="untrained", setting=setting, tokens=0, evaluate=evaluate))
    return Method(name, "untrained", {job.setting: {} for job in possible}, {"untrained": None}, possible)


def jobs_of(sweep: SweepConfig, name: str, setting: str, stage: str, seeds: list[int], switches: Switches) -> list[Job]:
    """Jobs of a setting in a stage; ValueError if one cannot run or was run with other switches."""
    prog, searching, jobs = f"pspo sweep: {name}/{setting}", stage != "full", []
    parsed, complete = parse_once(TrainConfig, prog, tuple(as_args(switches)))
    data, rollout, algorithm, run = parsed.data, parsed.rollout, parsed.algorithm, parsed.run
    tokens = rollout.prompts * rollout.group_size * (data.max_prompt_tokens + rollout.max_completion_tokens)
    rollouts = math.ceil(run.max_steps / (algorithm.epochs * algorithm.minibatches))
    tokens = min(rollouts * tokens, (run.max_tokens or math.inf) + tokens)
    with user_errors(prog):
        fits = (parsed.distributed.strategy == "none") == (sweep.processes == 1)
        require(fits, "processes", "above 1 needs --distributed.strategy ddp or fsdp2, 1 needs none", sweep.processes)
        parsed.check_ranks(sweep.processes)
        require(run.validate_every or not searching, "run.validate_every", "must be above 0 in a search", 0)
        for seed in seeds:
            folder = Path(sweep.output, f"{name}-search" if searching else name, setting, f"seed-{seed}")
            config = complete | {"run": complete["run"] | {"seed": seed, "output_dir": str(folder)}}
            evaluate = {} if searching else sweep.experiments[name].evaluate
            jobs.append(Job(folder, stage, setting, seed, config, tokens, evaluate))
            begun = (folder / "metrics.jsonl").exists()
            changed = differences(read_config(folder / "config.yaml"), config) if begun else {}
            changed.pop("run.output_dir", None)
            if not jobs[-1].trained:  # pspo.train resumes or refuses it, but must not steer it
                changed = {name: pair for name, pair in changed.items() if name in STEERED}
            require(not changed, "output", f"must not hold {folder} with other switches: move it away", changed)
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
    named = {name: value for name, value in switches.items() if name not in ("config", "algorithm.surrogate")}
    parts = [f"{name.rpartition('.')[2]}={as_argument(value)}" for name, value in named.items()]
    return re.sub(r"[^\w.=+-]", "_", "-".join([method, *parts]))


def as_args(switches: Switches) -> list[str]:
    """Arguments of a command: later ones override, so a file comes first, and a class before its parameters."""
    names = sorted(switches, key=lambda name: (name != "config", name.count(".")))
    return [f"--{name}={as_argument(switches[name])}" for name in names]
