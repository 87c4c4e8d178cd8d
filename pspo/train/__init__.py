"""Train a model: `train` from Python, `main` as a command. Start reading in `pspo.train.loop`.

`pspo` imports this module at once and puts the function `train` in its place, so that ``import pspo.train`` leaves it
there, too. The functions import what they run: torch takes seconds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pspo.rollout import Experience


def train(
    model: str | dict[str, Any] | None = None,
    data: Any = None,
    reward: Any = None,
    algorithm: Any = None,
    rollout: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    distributed: dict[str, Any] | None = None,
    config: str | Path | None = None,
    on_rollout: Callable[["Experience", list[dict[str, float]]], None] | None = None,
) -> dict[str, Any]:
    """Train as ``python -m pspo.train`` does; returns the summary, as in ``summary.json``.

    An argument is a section of the configuration: a dict of its switches, or its main one alone. ``--rollout.top_p
    0.9`` is ``rollout={"top_p": 0.9}``. The same call with the same ``run={"output_dir": ...}`` resumes.

    Args:
        model: embedded model ("tiny-base" unless given), local folder or hub id.
        data: a data set's name ("arithmetic" unless given); or problems: dicts with ``prompt``, ``answer`` and fields
            of your own, `Problem`, or a `datasets.Dataset`; or {"train": problems, "validation", "test", ...}. Of 50
            training problems or more without the other splits a fifth is held out, and tested before and after.
        reward: a reward function, a `Reward` or a name, or a list of them.
        algorithm: a surrogate, by name or as an instance.
        rollout: {"prompts", "group_size", "max_completion_tokens", "temperature", "top_p", ...}.
        optimizer: {"lr", "schedule", "max_grad_norm", "microbatch_tokens", ...}.
        run: {"max_steps", "seed", "output_dir", "validate_every", "test_limit", "tracker", ...}.
        distributed: {"strategy"}, under torchrun.
        config: a YAML file or a method ("grpo", "ppo", "dr-grpo", "dapo", "rloo", "decoupled"), below all the others.
        on_rollout: called after each rollout with its `Experience` and the metrics of its optimizer steps; only reads.

    Raises ValueError for a wrong setting, RunFailed for a run that cannot continue, Stopped for one that Ctrl-C ended.
    """
    from pspo.run.command import train_from_python
    from pspo.train import loop

    sections = {
        "model": model,
        "data": data,
        "reward": reward,
        "algorithm": algorithm,
        "rollout": rollout,
        "optimizer": optimizer,
        "run": run,
        "distributed": distributed,
    }
    given = {name: section for name, section in sections.items() if section is not None}
    return train_from_python(loop.train, config, given, on_rollout)


def main(args: Sequence[str] | None = None) -> None:
    """Train by a command's switches; exits with 1 if a run fails, 2 for errors of the user, 75 or 130 if stopped."""
    from pspo.run.command import train_command
    from pspo.train import loop

    train_command(loop.train, args)
