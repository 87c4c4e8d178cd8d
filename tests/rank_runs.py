"""Small runs of several ranks, in forks or by torchrun, and what can happen to one rank."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import at_call, before, one_layer, ranks, send

import pspo.train

STRATEGIES = ("ddp", "fsdp2")
SMALL = (
    f"--model.name_or_path={one_layer()}",
    "--rollout.prompts=2", "--rollout.max_completion_tokens=8", "--run.max_steps=6", "--run.validate_every=4",
    "--run.validation_limit=4", "--run.test_limit=3", "--run.save_every=2", "--data.limit=9", "--run.keep=9",
    "--optimizer.lr=1e-4", "--rollout.temperature=1",
    "--reward.functions=[SoftOverlong]", "--reward.functions.buffer=8",  # any model's lengths differ
)  # fmt: skip


def train(output: Path, strategy: str, *args: str, number: int = 2, fault: Callable[[], None] = lambda: None):
    """Exit codes of a run's ranks, each of which first prepares its fault."""
    switches = [*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}", *args]

    def rank() -> None:
        fault()
        pspo.train.main(switches)

    return ranks(rank, number)


def torchrun(output: Path, strategy: str, *options: str) -> dict[str, Any]:
    """How `subprocess` starts such a run by torchrun."""
    switches = [*SMALL, f"--distributed.strategy={strategy}", f"--run.output_dir={output}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "pspo.train", *switches]
    path = str(Path(__file__).parents[1])
    return {"args": command, "env": os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}


def die_in_second(function: str, rank: int, number: signal.Signals) -> Callable[[], None]:
    def fault() -> None:
        if os.environ["RANK"] == str(rank):
            before(function, at_call(2, lambda: send(number)))

    return fault
