"""Run: the parts of a run together, and what happens at its ends."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pspo import distributed as dist
from pspo.cli.files import read_config, read_jsonl, write_json, write_text
from pspo.cli.signals import Stopped, StopSignals
from pspo.cli.user_code import RunFailed, UserCodeFailed, raise_together
from pspo.config import TrainConfig
from pspo.model import is_out_of_memory
from pspo.model.device import peak_memory_gb
from pspo.rollout import Experience, PromptStream, RolloutSampler
from pspo.rollout.delay import Delay
from pspo.rollout.engine import EngineError
from pspo.rollout.sampler import Generators
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import newest_checkpoint, write_errors
from pspo.run.learner import Learner
from pspo.run.recorder import Recorder
from pspo.run.save import save_model
from pspo.run.trackers import start_tracker
from pspo.run.validator import Validator
from pspo.tasks.failures import FIRST_FAILURES, RewardError, end_forks

USER_CODE = {  # that runs in each phase, for messages
    "test": "a reward",
    "generate": "an environment",
    "reward": "a reward or --algorithm.advantages",
    "validate": "a reward",
}


@dataclass
class Run:
    """The parts of a run, as `pspo.run.prepare.prepare` makes them, new or resumed.

    Attributes:
        delay: None without --rollout.lag.
        resources: the folder's lock and the engine, closed with the run.
        on_rollout: called with each rollout and the metrics of its optimizer steps.
        signals: ask the run to stop.
        stopped: a signal has asked this rank or another one.
    """

    config: TrainConfig
    stream: PromptStream
    sampler: RolloutSampler
    delay: Delay | None
    learner: Learner
    validator: Validator
    recorder: Recorder
    generators: Generators
    checkpointer: Checkpointer
    output: Path
    resources: contextlib.ExitStack
    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    stopped: bool = False

    def start(self) -> None:
        """Start tracker and progress bar; test and validate the model, unless that is done."""
        FIRST_FAILURES.clear()  # of an earlier run in this process
        name = self.config.run.tracker if dist.is_main() else "none"
        tracker = start_tracker(name, self.output, read_config(self.output / "config.yaml"), self.learner.steps)
        self.resources.enter_context(self.recorder.start(tracker))  # the bar: closed before an error is printed
        with self.phase("test"):
            self.validator.start()
        del self.recorder.seconds["test"]  # no part of a rollout
        if self.recorder.line:  # the validation of the last rollout was stopped, or a reward raised in it
            self.write_rollout()

    def ended(self) -> bool:
        """Take a snapshot of the parts; True if a limit is reached, or any rank was asked to stop."""
        self.checkpointer.take_snapshot()
        self.stopped = bool(dist.max_over_ranks(self.signals.error is not None))
        return self.stopped or self.recorder.limit_reached

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the rollout; if it is stopped, or a user's code raises in it, on any rank, end the run."""
        self.recorder.bar.set_description_str(f"step, {name}")
        began = time.perf_counter()
        process = os.getpid()
        failure = None
        try:
            yield
        except (Exception, Stopped) as error:  # a user's code may raise anything
            failure = error
        finally:
            if os.getpid() != process:  # the user's code has forked: two trainers would write one folder
                os._exit(1)
        if failure is not None or (dist.world_size() > 1 and name != "train"):
            self.end_if_failed(name, failure)
        self.recorder.seconds[name] = self.recorder.seconds.get(name, 0.0) + time.perf_counter() - began

    def end_if_failed(self, name: str, failure: BaseException | None) -> None:
        """If a phase has failed on any rank, save the run as of the last snapshot, and raise on all of them.

        Raises Stopped; UserCodeFailed, with the user's own frames; RunFailed if an engine has failed; or ``failure``
        itself if it is none of these, or of an update, whose ranks wait for each other's gradients.
        """
        if failure is not None:
            is_ours = isinstance(failure, RunFailed) and not isinstance(failure, UserCodeFailed)
            if name == "train" or is_ours or is_out_of_memory(failure):
                raise failure
        try:
            raise_together(failure)
        except Stopped:
            if self.learner.steps:
                self.checkpointer.save(self.checkpointer.snapshot)
            raise
        except EngineError as error:
            again = f"the same command with --run.output_dir {self.output} resumes from the last checkpoint"
            raise RunFailed(f"the engine failed: {error}; {again}") from error
        except UserCodeFailed as error:
            saved = "not saved before its first step: the same command starts anew"
            if self.learner.steps:
                self.checkpointer.save(self.checkpointer.snapshot)
                resume = f"the same command with --run.output_dir {self.output} resumes"
                saved = f"saved at step {self.learner.steps}: {resume}"
            text = f"{USER_CODE[name]} failed\n\n{error}\n\nThe run is {saved}"
            raise UserCodeFailed(text) from error.__cause__

    def require_some_reward(self, rewards: Tensor) -> None:
        """End the run, saved, if no completion of any rank has a reward (B,), because functions have failed."""
        is_unknown = all(dist.gather_objects(bool(rewards.isnan().all())))
        failures = self.describe_failures()
        with self.phase("reward"):
            if is_unknown and failures:
                raise RewardError(f"every completion of this rollout is without a reward: {failures}")

    def describe_failures(self) -> str:
        """The first failure of each reward on any rank, in one line; "" without any."""
        first = {}
        for rank_failures in dist.gather_objects(FIRST_FAILURES):
            first |= rank_failures
        return "; ".join(f"{name} ({error})" for name, error in first.items())

    def conclude_rollout(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Record a rollout that was trained on, by ``steps`` with these metrics; validate and save if due."""
        self.recorder.record(experience, steps)
        self.write_rollout()
        if self.on_rollout is not None:
            self.call_on_rollout(experience, steps)

    def write_rollout(self) -> None:
        """Validate if due, write the rollout's line, save if due."""
        if self.validator.is_due():
            self.checkpointer.take_snapshot()
            with self.phase("validate"):
                self.recorder.line |= self.validator.validate()
        self.recorder.write(self.validator.best)
        self.checkpointer.save_if_due()

    def call_on_rollout(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Call ``on_rollout``; the run is bit for bit the same without it."""
        generators = self.generators.state_dict()
        with end_forks():
            self.on_rollout(experience, steps)
        self.generators.load_state_dict(generators)

    def warn(self) -> bool:
        """Warn if completions had no reward, or no step moved the model; True if no completion ever had a reward."""
        failures = self.describe_failures()
        lines = read_jsonl(self.output / "metrics.jsonl") if dist.is_main() else []
        if not lines:
            return False
        total = len(lines) * self.config.rollout.prompts * self.config.rollout.group_size
        unknown = round(sum(line["reward_unknown_share"] for line in lines) * total / len(lines))
        if unknown or failures:
            reason = failures or "every function returned None"
            print(f"WARNING: {unknown:,} of {total:,} completions had no reward: {reason}", file=sys.stderr)
        if unknown < total and all(line["zero_advantage_share"] == 1 for line in lines):
            print("WARNING: no step had a gradient: all rewards of every group were equal", file=sys.stderr)
        if sum(line["steps_skipped"] for line in lines) == self.learner.steps:
            print("WARNING: every step was skipped: loss, gradient or log-probs were not finite", file=sys.stderr)
        return unknown == total

    def finish(self) -> dict[str, Any]:
        """Save the final model, test it and the returned one, and return the summary.

        The returned model is the best by validation, step 0's included; without validation it is the final one.
        Raises Stopped, saved, if a signal ended the run; RunFailed if no completion ever had a reward.
        """
        self.recorder.bar.close()
        unrewarded = dist.max_over_ranks(self.warn())
        if self.stopped:
            self.checkpointer.save()
            raise Stopped
        if unrewarded:
            saved = f"last checkpoint: {newest_checkpoint(self.output)}"
            raise RunFailed(f"no completion ever had a reward, so there is nothing that was learned; {saved}")
        validator, policy, steps = self.validator, self.learner.policy, self.learner.steps
        save_model(policy, self.sampler.tokenizer, self.output / "final", validator.card())
        if validator.best_step == steps:
            after = final = validator.test(policy, "after")
        else:
            final = validator.test(policy, "final")
            after = validator.test(validator.best_policy(), "after")
        summary = {
            "before": validator.before,
            "after": after,
            "final": final,
            "validation": validator.validations(),
            "tokens": self.recorder.tokens,
            "optimizer_steps": steps,
            "seconds": round(self.recorder.elapsed, 2),
            "peak_memory_gb": round(peak_memory_gb(policy.device), 3),
            "best_model": str(self.output / ("best" if validator.best else "final")),
            "best_step": validator.best_step,
        }
        if dist.is_main():
            with write_errors(f"cannot write into {self.output}", self.output):
                self.write_cards(after, final)
                write_json(self.output / "summary.json", summary)
            self.recorder.tracker.finish()
        return summary

    def write_cards(self, after: dict[str, Any], final: dict[str, Any]) -> None:
        """Write the cards of the final model and the best one again, with the tests of all."""
        validator, steps = self.validator, self.learner.steps
        tests = {"before training": validator.before, f"final model, step {steps:,}": final}
        if validator.best_step != steps:
            tests[f"best model, step {validator.best_step:,}"] = after
        card = validator.card(steps, self.recorder.tokens, tests)
        write_text(self.output / "final" / "README.md", card)
        if validator.best:
            card = validator.card(validator.best["step"], validator.best["tokens"], tests)
            write_text(self.output / "best" / "README.md", card)
