"""Trackers, imported only on request. They get the lines of ``metrics.jsonl``, and the groups of ``samples.jsonl``."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

COLUMNS = ["problem", "sample", "prompt", "gold", "completion", "reward", "advantage", "tokens", "truncated"]
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker:
    """Tracks nothing: ``--run.tracker none``, and the base of the others."""

    def log(self, line: dict[str, float], samples: str) -> None:
        """Log one line of ``metrics.jsonl``, without values that are not finite, and its rollout's samples."""

    def finish(self) -> None:
        """Send the rest of a finished run; wandb marks a failed one by itself."""


class TensorBoard(Tracker):
    """Writes into the run's folder; a resumed run hides the points after its ``step``."""

    def __init__(self, folder: Path, step: int):
        writer = importlib.import_module(MODULES["tensorboard"]).SummaryWriter
        self.writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, line: dict[str, float], samples: str) -> None:
        for name, value in _finite(line).items():
            self.writer.add_scalar(name, value, line["step"])
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in _rows(samples)]
        text = "\n".join(f"    {json.dumps(row)}" for row in rows)  # indented it is code, and not Markdown
        self.writer.add_text("completions", text, line["step"])
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Service(Tracker):
    """wandb, or trackio, which has wandb's functions; every start is a run named as its folder, in project "pspo"."""

    def __init__(self, name: str, folder: Path, config: dict[str, Any]):
        self.module = importlib.import_module(MODULES[name])
        where = {"dir": str(folder)} if name == "wandb" else {}  # trackio has one folder for all runs
        self.module.init(project="pspo", name=folder.resolve().name, config=config, **where)

    def log(self, line: dict[str, float], samples: str) -> None:
        table = self.module.Table(columns=COLUMNS, data=_rows(samples))
        self.module.log(_finite(line) | {"completions": table}, step=line["step"])

    def finish(self) -> None:
        self.module.finish()


def check_tracker(name: str) -> None:
    """Raise ValueError, with the fix, if the tracker's package cannot be imported."""
    try:
        if name != "none":
            importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ValueError(f"--run.tracker {name}: {error}; pip install 'pspo[{name}]'") from error


def start_tracker(name: str, folder: Path, config: dict[str, Any], step: int = 0) -> Tracker:
    if name == "none":
        return Tracker()
    return TensorBoard(folder, step) if name == "tensorboard" else Service(name, folder, config)


def _rows(samples: str) -> list[list[Any]]:
    """The values of `COLUMNS` in each line of ``samples.jsonl``; chats as JSON."""
    records = [json.loads(line) for line in samples.split("\n")[:-1]]
    values = ([record[name] for name in COLUMNS] for record in records)
    return [[json.dumps(value) if isinstance(value, list) else value for value in row] for row in values]


def _finite(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step" and math.isfinite(value)}
