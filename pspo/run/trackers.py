"""Trackers, imported only on request. They get the lines of ``metrics.jsonl``, and the groups of ``samples.jsonl``."""

import importlib
import json
import math
import secrets
from pathlib import Path
from typing import Any

COLUMNS = ["problem", "sample", "prompt", "gold", "completion", "reward", "advantage", "tokens", "truncated"]
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoard:
    """Writes into the run's folder; a resumed run hides the points after its ``step``."""

    def __init__(self, folder: Path, step: int):
        writer = importlib.import_module(MODULES["tensorboard"]).SummaryWriter
        self.writer = writer(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, metrics: dict[str, float], step: int, rows: list[list[Any]]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        texts = [json.dumps(dict(zip(COLUMNS, row, strict=True))) for row in rows]
        self.writer.add_text("completions", "\n".join(f"    {text}" for text in texts), step)  # indented: as code
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


class Service:
    """wandb, or trackio, which has wandb's functions: a run named as its folder, in project "pspo".

    A resumed run continues its curves: wandb knows it by the id in its folder, trackio by its name.
    """

    def __init__(self, name: str, folder: Path, config: dict[str, Any], step: int):
        self.module = importlib.import_module(MODULES[name])
        arguments = {"resume": "allow" if step else "never"}
        if name == "wandb":
            file = folder / "wandb-id"
            if not file.exists():
                file.write_text(secrets.token_hex(8))
            arguments = {"resume": "allow", "id": file.read_text(), "dir": str(folder)}
        self.module.init(project="pspo", name=folder.resolve().name, config=config, **arguments)

    def log(self, metrics: dict[str, float], step: int, rows: list[list[Any]]) -> None:
        self.module.log(metrics | {"completions": self.module.Table(columns=COLUMNS, data=rows)}, step=step)

    def finish(self) -> None:
        self.module.finish()


def check_tracker(name: str) -> None:
    """Raise ValueError, with the fix, if the tracker's package cannot be imported."""
    try:
        if name != "none":
            importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ValueError(f"--run.tracker {name}: {error}; pip install 'pspo[{name}]'") from error


def log_rollout(tracker: TensorBoard | Service, line: dict[str, float], samples: list[dict[str, Any]]) -> None:
    """Log the finite values of a line of ``metrics.jsonl``, and its samples; chats as JSON."""
    metrics = {name: value for name, value in line.items() if name != "step" and math.isfinite(value)}
    rows = [[sample[name] for name in COLUMNS] for sample in samples]
    rows = [[json.dumps(value) if isinstance(value, list) else value for value in row] for row in rows]
    tracker.log(metrics, line["step"], rows)
