"""Many runs from one file: ``python -m pspo.sweep --config configs/sweep/tiny.yaml --workers 2``.

A sweep file names an output folder and experiments. A *setting* is a set of switches of `pspo.train`. Each experiment
has `shared` switches and, by method, a grid of settings: a mapping, in which a list of values stands for each of them
(the product of all), or a list of such mappings (their union). What follows depends on `search`:

* without it, a comparison: every setting of every method is run in full with each of `seeds`;
* with it, the paper's protocol (appendix A.1): every setting with `search.seeds`, under `search.switches`; each
  method's best `search.keep` again with `search.confirm_seeds`; the setting with the highest mean validation reward
  over all these seeds is run in full with each of `seeds`. The reward that counts is a run's last, as in the paper's
  ablation (of its search the paper does not say); selection.json holds the last and the best of every run.

Then every full run's model is evaluated, once for each entry of `evaluate` (a folder's name: switches of
`pspo.evaluate`). configs/sweep/paper.yaml and configs/sweep/tiny.yaml are examples with comments.

    <output>/<experiment>/<method>-<setting>/seed-<n>/           a full run, its evaluations as <name>/results.json
    <output>/<experiment>/<method>-<setting>/seed-<n>.yaml .log  its complete configuration, and what it printed
    <output>/<experiment>/<method>-<setting>/seed-<n>.failed     why it failed, where it did
    <output>/<experiment>/selection.json                         what was selected, and the numbers that decided
    <output>/<experiment>-search/...                             the runs of the search, in the same way

What finished on disk is the only state. Started again, a sweep goes on: finished runs are skipped, failed ones named
(run again with --retry_failed), and a run that was cut off goes on from its last checkpoint. Runs on machines with
fcntl (Linux, macOS).
"""

import itertools
import json
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from pspo.config import EvaluateConfig, TrainConfig
from pspo.run.cli import parse, user_errors
from pspo.run.records import check_output, lock, write_json
from pspo.sweep.workers import Run, Workers, changed, gpus

Switches = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """How one setting of a method is selected.

    Args:
        seeds: each setting runs with these.
        keep: so many settings, the best, run again.
        confirm_seeds: with these.
        switches: what is different from a full run, its length above all.
    """

    seeds: list[int]
    keep: int
    confirm_seeds: list[int]
    switches: Switches = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """Settings that are compared with each other.

    Args:
        methods: by name, a grid of settings: {switch: value or list of values}, or a list of such grids.
        seeds: of the full runs.
        shared: switches of every run.
        search: how to select a setting of each method; unset, all of them run in full.
        evaluate: by the name of a folder in the run's, switches of pspo.evaluate.
    """

    methods: dict[str, Any]
    seeds: list[int]
    shared: Switches = field(default_factory=dict)
    search: Search | None = None
    evaluate: dict[str, Switches] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepConfig:
    """A sweep: what runs, where to, and how many at a time.

    Args:
        experiments: by name; see the head of pspo/sweep.py.
        output: the sweep's folder; what it holds already is not run again.
        only: names of the experiments to run; unset, all.
        workers: runs at a time; unset, one for each GPU (or `processes` GPUs), or one.
        processes: of each run, started by torchrun on as many GPUs; above 1, `shared` needs a distributed.strategy.
        launcher: a command that runs another and waits for it; {command} in it is replaced by the command as one word:
            "sbatch --wait --gpus 1 --wrap {command}", "srun sh -c {command}", with `processes` GPUs each. Unset, a run
            is a process started here.
        retry_failed: run failed runs again; the switch alone will do, without "true".
        dry_run: print the plan and what it costs, and run nothing; the switch alone will do.
    """

    experiments: dict[str, Experiment]
    output: str
    only: list[str] | None = None
    workers: int | None = None
    processes: int = 1
    launcher: str | None = None
    retry_failed: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Setting:
    """One point of a method's grid, and all the runs that it may have, by seed; `search` is empty without a search."""

    slug: str
    switches: Switches
    search: dict[int, Run]
    full: dict[int, Run]


@dataclass(frozen=True)
class Method:
    """One method of one experiment, and what is to be run of it, as far as the disk says by now."""

    experiment: str
    name: str
    search: Search | None
    settings: list[Setting]

    def stages(self) -> Iterator[tuple[str, int, list[Run]]]:
        """What each stage is called, how many runs it has, and those that it may have."""
        search, settings = self.search, self.settings
        if search:
            yield "grid", len(settings) * len(search.seeds), self.grid_runs()
            possible = [setting.search[seed] for setting in settings for seed in search.confirm_seeds]
            yield "confirm", min(search.keep, len(settings)) * len(search.confirm_seeds), possible
        possible = [run for setting in settings for run in setting.full.values()]
        yield "full", len(possible) // (len(settings) if search else 1), possible

    def grid_runs(self) -> list[Run]:
        seeds = self.search.seeds if self.search else []
        return [setting.search[seed] for seed in seeds for setting in self.settings]

    def confirm_runs(self) -> list[Run]:
        kept, seeds = (self.kept(), self.search.confirm_seeds) if self.search else ([], [])
        return [setting.search[seed] for seed in seeds for setting in kept]

    def full_runs(self) -> list[Run]:
        settings = self.selected() if self.search else self.settings
        return [run for runs in zip(*(setting.full.values() for setting in settings), strict=True) for run in runs]

    def kept(self) -> list[Setting]:
        return best(self.settings, self.search.seeds, self.search.keep)

    def selected(self) -> list[Setting]:
        return best(self.kept(), self.search.seeds + self.search.confirm_seeds, 1)

    def selection(self) -> dict[str, Any]:
        """What was selected, and every number that it was selected from."""
        kept, selected, settings = self.kept(), self.selected(), []
        for setting in self.settings:
            rewards = {seed: run.validation_rewards for seed, run in setting.search.items() if run.trained}
            settings.append({
                "setting": setting.slug, "switches": setting.switches, "kept": setting in kept,
                "mean_last": mean_last_reward(setting, list(rewards)) if rewards else None,
                "last_validation_reward": {seed: values[-1] for seed, values in rewards.items()},
                "best_validation_reward": {seed: max(values) for seed, values in rewards.items()},
            })  # fmt: skip
        return {"selected": selected[0].slug if selected else None, "settings": settings}


def mean_last_reward(setting: Setting, seeds: list[int]) -> float:
    return sum(setting.search[seed].validation_rewards[-1] for seed in seeds) / len(seeds)


def best(settings: list[Setting], seeds: list[int], n: int) -> list[Setting]:
    """The n with the highest mean, the first of equals; none while a run is missing, for it might be the best."""
    if not all(setting.search[seed].trained for setting in settings for seed in seeds):
        return []
    return sorted(settings, key=lambda setting: -mean_last_reward(setting, seeds))[:n]


def grid_points(grid: Switches | list[Switches]) -> Iterator[Switches]:
    """The settings of a grid: the product of the lists in a mapping, the union over a list of mappings."""
    for part in grid if isinstance(grid, list) else [grid]:
        choices = [value if isinstance(value, list) else [value] for value in part.values()]
        for values in itertools.product(*choices):
            yield dict(zip(part, values, strict=True))


def as_args(switches: Switches) -> list[str]:
    """As a command takes them: later ones override, so a file comes first, and a class before its parameters."""
    names = sorted(switches, key=lambda name: (name != "config", name.count(".")))
    return [f"--{name}={as_text(switches[name])}" for name in names]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def make_plan(sweep: SweepConfig) -> list[Method]:
    """Every run that the sweep may come to, its configuration checked; ValueError where one cannot be carried out."""
    if sweep.workers is not None and sweep.workers < 1:
        raise ValueError(f"--workers must be above 0, got {sweep.workers}")
    if sweep.processes < 1 or (not sweep.launcher and 0 < len(gpus()) < sweep.processes):
        raise ValueError(f"--processes must be from 1 to the number of GPUs ({len(gpus())}), got {sweep.processes}")
    if sweep.launcher and "{command}" not in sweep.launcher:
        raise ValueError(f"--launcher must hold {{command}}, got {sweep.launcher!r}")
    if sweep.launcher and shutil.which(shlex.split(sweep.launcher)[0]) is None:
        raise ValueError(f"--launcher: there is no command {shlex.split(sweep.launcher)[0]!r} here")
    for name in set(sweep.only or []) - set(sweep.experiments):
        raise ValueError(f"--only {name}: the sweep has no such experiment, only {', '.join(sweep.experiments)}")
    plan = []
    for name, experiment in sweep.experiments.items():
        if sweep.only is None or name in sweep.only:
            check_experiment(name, experiment)
            for folder, switches in experiment.evaluate.items():
                parse(EvaluateConfig, f"pspo.sweep: {name}, evaluate {folder}", as_args(switches))
            for method, grid in experiment.methods.items():
                points = tqdm(list(grid_points(grid)), f"check {name}/{method}", leave=False, disable=None)
                settings = [make_setting(sweep, name, method, point) for point in points]
                plan.append(Method(name, method, experiment.search, settings))
    runs = [run for method in plan for setting in method.settings for run in every_run(setting)]
    if len({run.folder for run in runs}) < len(runs):
        twice = next(run for i, run in enumerate(runs) if run.folder in {other.folder for other in runs[:i]})
        raise ValueError(f"two settings are called {twice.folder.parent}: a method's grid holds one point twice")
    for run in runs:
        refuse_changes(run)
    return plan


def every_run(setting: Setting) -> list[Run]:
    return [*setting.search.values(), *setting.full.values()]


def check_experiment(name: str, experiment: Experiment) -> None:
    search = experiment.search
    seeds = {"seeds": experiment.seeds} | ({"search.seeds": search.seeds + search.confirm_seeds} if search else {})
    for field_name, values in seeds.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"experiments.{name}.{field_name} must be one or more different seeds, got {values}")
    if search and (search.keep < 1 or not search.seeds):
        raise ValueError(f"experiments.{name}.search needs one or more seeds and keep of at least 1, got {search}")
    if not experiment.methods:
        raise ValueError(f"experiments.{name}.methods must name at least one method")
    for method, grid in experiment.methods.items():
        parts = grid if isinstance(grid, list) else [grid]
        switches = [part for part in parts if isinstance(part, dict) and all(isinstance(name, str) for name in part)]
        if not parts or switches != parts or any([] in part.values() for part in switches):
            raise ValueError(f"experiments.{name}.methods.{method} must map switches to values, got {grid!r:.60}")
    for folder in (name, *experiment.methods, *experiment.evaluate):
        if not re.fullmatch(r"[\w+.-]*\w[\w+.-]*", folder):
            raise ValueError(f"experiments.{name}: {folder!r} names a folder: letters, digits and _ + - . only")


def make_setting(sweep: SweepConfig, name: str, method: str, switches: Switches) -> Setting:
    experiment = sweep.experiments[name]
    named = {switch: value for switch, value in switches.items() if switch not in ("config", "algorithm.surrogate")}
    parts = [f"{switch.rpartition('.')[2]}={as_text(value)}" for switch, value in named.items()]
    slug = re.sub(r"[^\w.=+-]", "_", "-".join([method, *parts]))

    def runs(stage: str, seeds: list[int], switches: Switches) -> dict[int, Run]:
        if taken := {"run.seed", "run.output_dir"} & switches.keys():
            raise ValueError(f"experiments.{name} must not set {taken.pop()}: it comes from seeds, names and output")
        resolved, text = parse(
            TrainConfig, f"pspo.sweep: {name}/{slug}", [*as_args(switches), f"--run.seed={min(seeds)}"]
        )
        config, evaluate, made = yaml.safe_load(text), {}, {}
        if ((strategy := resolved.distributed.strategy) == "none") != (sweep.processes == 1):
            raise ValueError(f"experiments.{name}: distributed.strategy {strategy} with --processes {sweep.processes}: "
                             "set ddp or fsdp2 for several processes, and none for one")  # fmt: skip
        try:
            resolved.check_ranks(sweep.processes)
        except ValueError as error:
            raise ValueError(f"experiments.{name}: {error}") from None
        if not stage:
            evaluate = {folder: as_args(switches) for folder, switches in experiment.evaluate.items()}
        for seed in seeds:
            folder = Path(sweep.output, name + stage, slug, f"seed-{seed}")
            run = config["run"] | {"seed": seed, "output_dir": str(folder)}
            made[seed] = Run(folder, config | {"run": run}, evaluate, keep_models=not stage)
        return made

    full, search, searched = experiment.shared | switches, experiment.search, {}
    if search:
        searched = runs("-search", search.seeds + search.confirm_seeds, full | search.switches)
        if next(iter(searched.values())).config["run"]["validate_every"] == 0:
            raise ValueError(f"experiments.{name}.search selects by validation: set run.validate_every above 0")
    return Setting(slug, switches, searched, runs("", experiment.seeds, full))


def refuse_changes(run: Run) -> None:
    """ValueError where the run is there already, but with another configuration than the one planned."""
    if run.trained:
        for switch, change in changed(run, run.folder.with_suffix(".yaml")).items():
            raise ValueError(f"{run.folder} was run with {switch} {change}: choose another --output, or move it away")
    elif any(run.folder.glob("summary-step-*.json")):
        raise ValueError(f"{run.folder} was finished and is being made longer: finish that, or move it away")


def show_plan(plan: list[Method]) -> None:
    """Print runs and training tokens by experiment and stage, and what finished runs took."""
    counts: dict[tuple[str, str], list[int]] = {}  # runs, finished, tokens by experiment and stage
    finished: list[Run] = []
    for method in plan:
        for stage, n, possible in method.stages():
            done = [run for run in possible if run.finished]
            tokens = n * max((run.max_tokens for run in possible), default=0)
            finished += done
            for key in ((method.experiment, stage), ("all", "")):
                old = counts.setdefault(key, [0, 0, 0])
                counts[key] = [a + b for a, b in zip(old, (n, len(done), tokens), strict=True)]
    width = max(len(experiment) for experiment, _ in counts)
    print(f"{'experiment':{width}}  stage       runs  finished   tokens, at most")
    counts["all", ""] = counts.pop(("all", ""))  # last
    for (experiment, stage), (n, done, tokens) in counts.items():
        print(f"{experiment:{width}}  {stage:7}  {n:>7,}  {done:>8,}  {tokens:>16,}")
    print(
        "tokens: of training, were every prompt and completion as long as its limit; validation and evaluation add some"
    )
    if finished:
        seconds, tokens = (sum(run.summary[key] for run in finished) / len(finished) for key in ("seconds", "tokens"))
        print(f"finished so far: {seconds:,.1f} s and {tokens:,.0f} tokens a run, start-up and evaluation not counted")


def main(args: Sequence[str] | None = None) -> None:
    args = sys.argv[1:] if args is None else list(args)
    flags = ("--dry_run", "--retry_failed")  # jsonargparse wants a value after them
    sweep, _ = parse(SweepConfig, "pspo.sweep", [f"{arg}=true" if arg in flags else arg for arg in args])
    with user_errors("pspo.sweep"):
        plan = make_plan(sweep)
        output = Path(sweep.output)
        check_output(output)
        if sweep.dry_run:
            show_plan(plan)
            return
        output.mkdir(parents=True, exist_ok=True)
        lock_file = (output / ".lock").open("a")
        if not lock(lock_file):
            raise ValueError(f"--output {output} is in use by another sweep: wait for it, or choose another")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs = sum(n for method in plan for _, n, _ in method.stages())
    workers = Workers(runs, sweep.workers, sweep.processes, sweep.launcher, sweep.retry_failed)
    try:
        workers.execute(run for method in plan for run in method.grid_runs())
        workers.execute(run for method in plan for run in method.confirm_runs())
        for name in {method.experiment for method in plan if method.search}:
            (output / name).mkdir(exist_ok=True)
            selection = {method.name: method.selection() for method in plan if method.experiment == name}
            write_json(output / name / "selection.json", selection)
        workers.execute(run for method in plan for run in method.full_runs())
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the runs that are finished", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        workers.bar.close()
    for folder, reason in workers.failed.items():
        print(f"failed: {folder}: {reason} (see {folder.with_suffix('.log')})", file=sys.stderr)
    for method in plan:
        if method.search and not method.selected():
            print(f"not selected: {method.experiment}/{method.name}, for runs of its search failed", file=sys.stderr)
    if workers.failed:
        print("--retry_failed runs them again; a setting that cannot work has to leave the grid", file=sys.stderr)
        raise SystemExit(1)
    print(f"all {workers.bar.total} runs are finished: {output}")


if __name__ == "__main__":
    main()
