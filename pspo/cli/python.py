"""Configurations from Python: turn the arguments of `pspo.train` into the settings that a YAML file would hold."""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo import files
from pspo.cli.parse import Settings, make_config
from pspo.cli.values import yaml_value
from pspo.config import TrainConfig, switches_with
from pspo.tasks import Problem
from pspo.tasks.datasets import SPLITS
from pspo.tasks.files import table_records


def config_from_python(file: str | Path | None = None, **sections: Any) -> tuple[TrainConfig, Settings]:
    """The configuration of `pspo.train`'s arguments over a YAML file; problems are written into the run's folder."""
    words = [] if file is None else ["--config", str(file)]
    settings = {name: section_settings(name, section) for name, section in sections.items()}
    data = settings.get("data", {})
    if "name" in data and not isinstance(data["name"], str | None):
        data["train"] = data.pop("name")
    problems = {}
    for split in SPLITS:
        if split in data:
            rows = data.pop(split)
            if hasattr(rows, "num_rows"):  # a datasets.Dataset, whose images stay bytes
                rows = table_records(rows.with_format("arrow")[:])
            problems[split] = files.to_jsonl(map(problem_record, rows))
    if problems:
        data |= {"name": "file", "path": data.get("path", "<problems>")}  # until the problems are written
        config, _ = make_config(TrainConfig, "pspo.train", words, yaml_value(settings))
        dist.init(config.distributed.strategy)
        run = settings.setdefault("run", {})
        run["output_dir"] = dist.run_on_main(lambda: config.run.output_dir or default_output(config))
        data["path"] = dist.run_on_main(lambda: write_problems(Path(run["output_dir"]), problems))
    return make_config(TrainConfig, "pspo.train", words, yaml_value(settings))


def section_settings(name: str, section: Any) -> Settings:
    """A section's settings by name; the value of its main switch may stand alone."""
    if isinstance(section, Mapping):
        return dict(section)
    for switch in switches_with("main"):
        if switch.startswith(f"{name}."):
            return {switch.removeprefix(f"{name}."): section}
    raise ValueError(f"{name} must be a dict of its switches, got {section!r}")


def problem_record(problem: Problem | Mapping[str, Any]) -> dict[str, Any]:
    """A problem as a line of a JSON lines file."""
    if isinstance(problem, Problem):  # whose fields may have an answer, too
        record = {"source": problem.source, "solution": problem.solution} | problem.fields
        return record | {name: getattr(problem, name) for name in ("prompt", "answer", "category", "level")}
    if isinstance(problem, Mapping):
        answer = problem.get("answer")
        return dict(problem) | ({"answer": str(answer)} if isinstance(answer, Decimal) else {})  # with all its digits
    raise ValueError(f"data: problems are dicts with prompt and answer, or Problem, not {problem!r}")


def write_problems(output: Path, problems: dict[str, str]) -> str:
    """Write problems by split into a run's folder ``data``; ValueError if other problems are there."""
    files.check_new_folder(output)
    folder = output / "data"
    owner_file = folder / ".of_a_run"
    present = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("[!.]*")}
    if present == problems:
        return str(folder)
    if files.is_run(output) or (present and not owner_file.exists()):
        raise ValueError(f"--run.output_dir {output} has other problems: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock_folder(output):  # a run that is starting holds the lock
        owner_file.touch()
        for split in SPLITS:  # replaces files of a call that failed before its run began
            (folder / f"{split}.jsonl").unlink(missing_ok=True)
            if split in problems:
                files.write_text(folder / f"{split}.jsonl", problems[split])
    return str(folder)


def default_output(config: TrainConfig) -> str:
    """The folder of a run without --run.output_dir, such as runs/tiny-base-arithmetic-pspo-20260131-120000-123456."""
    model = Path(config.model.name_or_path).name
    data = config.data.name.replace("/", "-")  # a hub id has a slash
    method = type(config.algorithm.surrogate).__name__.lower()
    return f"runs/{model}-{data}-{method}-{datetime.now():%Y%m%d-%H%M%S-%f}"
