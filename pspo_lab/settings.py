"""Settings of runs: the switches that make one, read from a folder's configuration."""

import functools
import importlib
import inspect
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from pspo.cli.settings import flat, read_config
from pspo.tasks.files import local_path

MODEL = "model.name_or_path"
DATA = "data.name"
SEED = "run.seed"
RATE = "optimizer.lr"  # whose default depends on the model, and so is always said
SURROGATE = "algorithm.surrogate.class_path"
ARGUMENT = "algorithm.surrogate.init_args."
REWARDS = "reward.functions"
WEIGHTS = "reward.weights"
OF_A_SEED = r"(?<=seed-)\d+|\d{8}-\d{6}(-\d+)?"  # in the names of sweeps' runs, and of runs without a name


def not_compared() -> list[str]:
    """Columns of `Runs.configs` that are no part of a setting."""
    from pspo.config import switches_with  # slow to import: torch

    return ["experiments", *sorted(switches_with("no setting"))]


def read_switches(folder: Path) -> dict[str, Any]:
    """The switches of a run or an evaluation, lists and mappings as JSON; where ours lack one, its default."""
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


def plain_switches(switches: dict[str, Any]) -> dict[str, Any]:
    """Switches with lists and mappings as JSON, so that tables can group by them; rewards with their weights."""
    functions = switches.get(REWARDS)
    weights = switches.get(WEIGHTS)
    if isinstance(functions, list) and isinstance(weights, list) and len(functions) == len(weights):
        weighted = [{"weight": weight, "reward": function} for function, weight in zip(functions, weights, strict=True)]
        switches = switches | {REWARDS: weighted, WEIGHTS: None}
    return {
        name: json.dumps(value, default=str) if isinstance(value, list | set | dict) else value
        for name, value in switches.items()
    }


@functools.cache
def defaults(class_path: str = "") -> dict[str, Any]:
    """The default of every switch, as `Runs.configs` has it, with the arguments of a surrogate of `pspo.losses`."""
    from pspo.cli.parse import make_config  # slow to import: torch
    from pspo.config import TrainConfig

    switches = plain_switches(flat(make_config(TrainConfig, "pspo", [], {})[1]))
    arguments = {ARGUMENT + name: value for name, value in default_arguments(class_path).items()}
    return {name: value for name, value in switches.items() if not name.startswith(ARGUMENT)} | arguments


def default_arguments(class_path: str) -> dict[str, Any]:
    """Defaults of a class's arguments, of our own rewards and losses: nothing else that a file names is imported."""
    module, _, name = str(class_path).rpartition(".")
    if module not in ("pspo.tasks", "pspo.losses"):
        return {}
    cls = getattr(importlib.import_module(module), name, None)
    parameters = {} if cls is None else inspect.signature(cls).parameters  # None: of another version
    return {name: parameter.default for name, parameter in parameters.items()}


def setting_numbers(configs: pd.DataFrame, ignore: Sequence[str] = ()) -> pd.Series:
    """Number of each run's setting; settings that differ in the ignored switches alone have one number."""
    switches = configs.drop(columns=[*not_compared(), *ignore], errors="ignore")
    return switches.groupby([*switches], dropna=False, sort=False).ngroup()


def methods(configs: pd.DataFrame) -> pd.Series:
    """Name of each run's surrogate, with its module where two have one name."""
    paths = configs[SURROGATE].astype(str)
    names = paths.str.split(".").str[-1]
    return names.where(paths.groupby(names).transform("nunique") == 1, paths)
