"""Run: the parts of a run together, and what happens at its ends."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.failures import end_together
from pspo.cli.files import Settings, write_json, write_text
from pspo.config import TrainConfig
from pspo.model.device import peak_memory_gb
from pspo.rollout import Experience, How, PromptStream, Sampler
from pspo.rollout.experience import Delay
from pspo.rollout.generators import Generators
from pspo.run.card import model_card
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import write_errors
from pspo.run.recorder import Recorder
from pspo.run.validator import Validator
from pspo.signals import Stopped, StopSignals
from pspo.tasks.failures import undo_changes
from pspo.update.learner import Learner


@dataclass
class Run:
    """The parts of a run, as `pspo.run.prepare.prepare` makes them, new or resumed.

    Attributes:
        settings: the configuration as ``config.yaml`` has it.
        how: rollouts are drawn, with ``gathered_weights()``, of a sharded policy, around each draw.
        resources: the folder's lock and the engine, closed with the run.
        on_rollout: called with each rollout and the metrics of its optimizer steps.
    """

    config: TrainConfig
    settings: Settings
    output: Path
    stream: PromptStream
    sampler: Sampler
    how: How
    gathered_weights: Callable[
        [], contextlib.AbstractContextManager[None]
    ]  # of a sharded policy that draws, around each draw
    delay: Delay | None  # with --rollout.lag
    learner: Learner
    validator: Validator
    recorder: Recorder
    generators: Generators
    signals: StopSignals
    resources: contextlib.ExitStack
    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None

    def __post_init__(self) -> None:
        names = ("stream", "learner", "validator", "recorder", "delay", "generators")  # a delay's state ends a drawing
        parts = {name: getattr(self, name) for name in names}
        parts["algorithm.surrogate"] = self.config.algorithm.surrogate
        parts |= {f"algorithm.terms.{i}": term for i, term in enumerate(self.config.algorithm.loss_terms)}
        self.checkpointer = Checkpointer(self.config, parts, self.output)

    def start(self) -> None:
        """Start tracker and progress bar; test and validate the model, unless that is done."""
        self.resources.enter_context(self.recorder.start(self.settings))  # the bar: closed before an error is printed
        with self.phase("test"):
            self.validator.start()
        del self.recorder.seconds["test"]  # no part of a rollout
        if self.recorder.line:  # the validation of the last rollout was stopped, or a reward raised in it
            self.close_rollout()

    def begin_rollout(self) -> bool:
        """Take a snapshot of the parts; False at the end of the run. Raises Stopped if any rank was asked to stop."""
        self.take_snapshot()
        if dist.max_over_ranks(self.signals.error is not None):
            raise Stopped
        return not self.recorder.limit_reached

    def take_snapshot(self) -> None:
        """Keep the parts' states; it waits for a rollout that is drawn ahead, which is a part of them."""
        with self.phase("generate"):
            self.checkpointer.take_snapshot()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; what stops a rank, or a user's code raises there, ends all of them, except in an update."""
        self.recorder.bar.set_description_str(f"step, {name}")
        began = time.perf_counter()
        failure = None
        try:
            yield
        except (Exception, SystemExit, Stopped) as error:  # a user's code may raise anything
            if name == "train":
                raise
            failure = error
        if failure is not None or (self.learner.n_ranks > 1 and name != "train"):
            end_together(failure)
        self.recorder.seconds[name] = self.recorder.seconds.get(name, 0.0) + time.perf_counter() - began

    def conclude_rollout(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Record a rollout that was trained on, by ``steps`` with these metrics; validate and save if due."""
        self.recorder.record(experience, steps)
        self.close_rollout()
        if self.on_rollout is not None:
            state = self.generators.state_dict()
            with undo_changes():
                self.on_rollout(experience, steps)
            self.generators.load_state_dict(state)  # the run is bit for bit the same without it

    def close_rollout(self) -> None:
        """Validate if due, write the rollout's line, save if due."""
        if self.validator.is_due():
            self.take_snapshot()
            with self.phase("validate"):
                self.recorder.line |= self.validator.validate()
        self.recorder.write(self.validator.best)
        if self.recorder.is_due(self.config.run.save_every):
            self.take_snapshot()
            self.checkpointer.save_snapshot()

    def finish(self) -> dict[str, Any]:
        """Save the final model, test it and the best one by validation (step 0's included), and return the summary."""
        self.recorder.bar.close()
        self.checkpointer.snapshot = {}  # this step is saved, and the best model's test may change the policy
        steps = self.learner.steps
        summary = self.validator.finish() | {
            "output_dir": str(self.output),
            "tokens": self.recorder.tokens,
            "optimizer_steps": steps,
            "seconds": round(self.recorder.elapsed, 2),
            "peak_memory_gb": round(peak_memory_gb(self.learner.policy.device), 3),
        }
        if dist.is_main():
            self.recorder.finish()
            with write_errors(self.output / "summary.json"):
                for model, step in ((self.output / "final", steps), (summary["best_model"], summary["best_step"])):
                    card = model_card(self.config, self.settings, step, summary)
                    write_text(Path(model) / "README.md", card)
                write_json(self.output / "summary.json", summary)
        return summary
