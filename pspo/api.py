"""The trainer as a function: ``pspo.train("tiny-base", data=problems, reward=my_reward)`` is `python -m pspo.train`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pspo.train
from pspo.cli.failures import RunFailed, Stopped
from pspo.cli.python import config_from_python
from pspo.rollout import Experience
from pspo.run.command import print_if_finished, run_training
from pspo.run.prepare import prepare

training_loop = pspo.train.train


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
    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None,
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
        config: a YAML file or a method ("grpo", "ppo", "dr-grpo", "dapo", "rloo"), which the others override.
        on_rollout: called after each rollout with its `Experience` and the metrics of its optimizer steps; only reads.

    Raises ValueError for a wrong setting, RunFailed for a run that cannot continue, Stopped for one that Ctrl-C ended.
    """
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
    sections = {name: section for name, section in sections.items() if section is not None}
    try:
        train_config, settings = config_from_python(config, **sections)
        summary = print_if_finished(train_config, settings)
        if summary:
            return summary
        prepared = prepare(train_config, settings)
        prepared.on_rollout = on_rollout
        return run_training(training_loop, prepared)
    except (ValueError, OSError, Stopped, RunFailed) as error:
        raise error.with_traceback(None) from None  # frames of this package say nothing, and fill a notebook
