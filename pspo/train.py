"""The loop of ``python -m pspo.train`` and `pspo.train(...)`.

    problems -> rollout -> rewards -> advantages -> (old log-probs) -> minibatch epochs
             -> surrogate -> aggregate -> backward -> optimizer step -> metrics / validation / saved model

`train` follows this diagram from top to bottom; `pspo.update.step` takes the optimizer steps of one rollout.
`pspo.run` has the records, checkpoints and resuming.

pspo leaves out new weights within a rollout (--rollout.lag makes rollouts as old, exactly), training on parts of a
rollout, and a replay buffer.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pspo.distributed import run_main
from pspo.rollout import Experience
from pspo.run.run import Run, train_command, train_from_python
from pspo.update import update


def train(run: Run) -> dict[str, Any]:
    """Train until the run ends; returns the summary, as written to ``summary.json``.

    Raises Stopped when a signal ends the run, RunFailed when the run cannot continue; `pspo.errors` lists all endings.
    """
    run.start()
    while run.begin_rollout():
        experience = run.source.next()  # (B, T) completions, (B,) rewards, (B,) or (B, T) advantages
        with run.phase("train"):
            steps = update(run.learner, experience.rollout, experience.advantages, run.config)  # epochs x minibatches
        run.conclude_rollout(experience, steps)  # record, validate, save
    return run.finish()


# --- the command, and the call from Python


def main(args: Sequence[str] | None = None) -> None:
    """Train with a command's switches; exits with 1 if the run fails, 2 for a user's error, 75 or 130 if stopped."""
    train_command(train, args)


class TrainModule(ModuleType):
    """Class of this module, which makes the module callable: `pspo.train(...)`."""

    def __call__(
        self,
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

        An argument is a section of the configuration: a dict of switches, or the value of the section's main switch.
        ``--rollout.top_p 0.9`` is ``rollout={"top_p": 0.9}``. A call with the same ``run={"output_dir": ...}`` resumes.

        Args:
            model: embedded model ("tiny-base" unless given), local folder or hub id.
            data: a data set's name ("arithmetic" unless given); or problems: dicts with ``prompt``, ``answer`` and
                fields of your own, `Problem`, or a `datasets.Dataset`; or {"train": problems, "validation": ...,
                "test": ...}. If only training problems are given, 50 or more, a fifth of them is held out for tests.
            reward: a reward function, a `Reward` or a name, or a list of them.
            algorithm: a surrogate, by name or as an instance.
            config: a YAML file or a method ("grpo", "ppo", "dr-grpo", "dapo", "rloo", "decoupled"),
                which all other arguments override.
            on_rollout: called after each rollout with its `Experience` and its optimizer steps' metrics, to read them.

        Raises ValueError for a wrong setting, RunFailed for a run that cannot continue, Stopped after Ctrl-C.
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
        given = {name: section for name, section in sections.items() if section is not None}
        return train_from_python(train, config, given, on_rollout)


sys.modules[__name__].__class__ = TrainModule

if __name__ == "__main__":
    run_main(main)
