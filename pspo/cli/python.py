"""A configuration from Python: ``pspo.train("tiny-base", data=problems, reward=my_reward)`` is the command."""

import inspect
import re
import sys
import time
from collections.abc import Mapping
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

from pspo.cli.files import Settings, as_setting, to_jsonl, write_text
from pspo.cli.parse import read_config
from pspo.config import TrainConfig
from pspo.tasks import Problem
from pspo.tasks.datasets import SPLITS
from pspo.tasks.files import check_characters

SHORT = {"model": "name_or_path", "data": "name", "reward": "functions", "algorithm": "surrogate"}
ENOUGH = 50  # problems to hold some out


def config_from_python(file: str | Path | None = None, **sections: Any) -> tuple[TrainConfig, Settings]:
    """The configuration of `pspo.train`'s arguments, and its settings, as `pspo.cli.parse.parse` returns them.

    The arguments override the YAML file. Problems among them are written into the run's folder.
    """
    settings = {} if file is None else {"config": file}
    for name, value in sections.items():
        value = {SHORT[name]: value} if name in SHORT and not isinstance(value, Mapping) else value
        settings[name] = dict(value) if isinstance(value, Mapping) else value
    data = settings.get("data", {})
    if not isinstance(data.get("name", ""), str):
        data["train"] = data.pop("name")
    problems = {split: list(map(_record, data.pop(split))) for split in SPLITS if split in data}
    if problems:
        for split, rows in problems.items():
            for number, row in enumerate(rows, 1):
                check_characters(row, f"data: {split} record {number}")
        data["name"] = "file"
        if problems.keys() == {"train"} and len(problems["train"]) >= ENOUGH:
            data.setdefault("holdout", 0.2)
        run = settings.setdefault("run", {})
        run.setdefault("test_limit", 500 if "test" in problems or data.get("holdout") else 0)
        config, _ = _resolve(settings | {"data": {"path": "data", **data}})
        run.setdefault("output_dir", default_output(config))
        folder = Path(run["output_dir"]) / "data"
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in problems.items():
            write_text(folder / f"{split}.jsonl", to_jsonl(rows))
        data["path"] = str(folder)
    return _resolve(settings)


def default_output(config: TrainConfig) -> str:
    method, stamp = type(config.algorithm.surrogate).__name__.lower(), time.strftime("%Y%m%d-%H%M%S")
    data = config.data.name.replace("/", "-")  # of a hub id
    folder = f"runs/{Path(config.model.name_or_path).name}-{data}-{method}-{stamp}"
    if config.run.name is not None:
        folder = "runs/" + re.sub(r"[^\w.+-]+", "-", config.run.name)
    free = next(name for n in count(1) if not Path(name := folder if n == 1 else f"{folder}-{n}").exists())
    if config.run.name is not None and free != folder:
        print(f"{folder} is there already, and --run.output_dir {folder} resumes it; this is {free}", file=sys.stderr)
    return free


def _resolve(settings: dict[str, Any]) -> tuple[TrainConfig, Settings]:
    """Read settings as the command reads a YAML file."""
    return read_config(TrainConfig, "pspo.train", _plain(settings))


def _plain(value: Any) -> Any:
    """A setting as YAML writes it: objects become import paths and the values of their fields."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if callable(value):  # a function, a class, a surrogate or a reward
        if "<" in getattr(value, "__qualname__", type(value).__qualname__):
            raise ValueError(f"{value!r} has no name that config.yaml could hold: define it at the top of a module")
        if not hasattr(value, "__qualname__"):  # an object, which the run makes again from config.yaml
            parameters = inspect.signature(type(value)).parameters.values()
            if lost := [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and not hasattr(value, p.name)]:
                raise ValueError(f"{type(value).__name__} does not keep its argument {lost[0]}: make it a dataclass")
        return _plain(as_setting(value))
    return str(value) if isinstance(value, Path) else value


def _record(problem: Problem | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(problem, Mapping):
        return dict(problem)
    if not isinstance(problem, Problem):
        raise ValueError(f"data: problems are dicts with prompt and answer, or Problem, not {problem!r}")
    answer = str(problem.answer) if isinstance(problem.answer, Fraction) else problem.answer
    record = {"prompt": problem.prompt, "answer": answer, "category": problem.category, "level": problem.level}
    return problem.fields | record  # which may hold an "answer" of another form, as GSM8K's do
