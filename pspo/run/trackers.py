"""Trackers, imported only on request: they get the lines of ``metrics.jsonl``."""

import importlib
import secrets
from pathlib import Path
from typing import Any

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class TensorBoard:
    """A writer of tensorboard's, with the methods of the other trackers."""

    def __init__(self, writer: Any):
        self.writer = writer
        self.finish = writer.close

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


def start_tracker(name: str, folder: Path, config: dict[str, Any], step: int) -> Any:
    """What has `log(metrics, step)` and `finish()`: of wandb and trackio the module, with a run named as its folder.

    A resumed run continues its curves after its ``step``: wandb knows it by the id in its folder, trackio by its name.
    """
    module = importlib.import_module(MODULES[name])
    if name == "tensorboard":
        return TensorBoard(module.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1))
    if name == "wandb":
        file = folder / "wandb-id"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        arguments = {"resume": "allow", "id": file.read_text(), "dir": str(folder)}
    else:
        arguments = {"resume": "allow" if step else "never"}
    module.init(project="pspo", name=folder.resolve().name, config=config, **arguments)
    return module


def check_tracker(name: str) -> None:
    """Raise ValueError, with the fix, if the tracker's package cannot be imported."""
    try:
        if name != "none":
            importlib.import_module(MODULES[name])
    except ImportError as error:
        raise ValueError(f"--run.tracker {name}: {error}; pip install 'pspo[{name}]'") from error
