"""Run: the parts of a run together, and what happens at its ends."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pspo import distributed as dist
from pspo.cli.files import read_config, read_jsonl, write_json, write_text
from pspo.cli.signals import Stopped, StopSignals
from pspo.config import TrainConfig
from pspo.model.device import peak_memory_gb
from pspo.rollout import Experience
from pspo.rollout.delay import Delay
from pspo.rollout.generators import Generators
from pspo.run.checkpointer import Checkpointer
from pspo.run.folders import RunFailed, newest_checkpoint, writing
from pspo.run.learner import Learner
from pspo.run.prompt_stream import PromptStream
from pspo.run.recorder import Recorder
from pspo.run.sampler import Sampler
from pspo.run.save import save_model
from pspo.run.trackers import start_tracker
from pspo.run.validator import Validator
from pspo.tasks.failures import FIRST_FAILURES, RewardError, end_forks


@dataclass
class Run:
    """The parts of a run, as `pspo.run.prepare.prepare` makes them, new or resumed."""

    config: TrainConfig
    stream: PromptStream
    sampler: Sampler
    delay: Delay
    learner: Learner
    validator: Validator
    recorder: Recorder
    generators: Generators
    checkpointer: Checkpointer
    output: Path
    resources: contextlib.ExitStack  # the folder's lock and the engine, closed with the run
    stopped: bool = False
    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None
    signals: StopSignals = field(default_factory=StopSignals)  # ask the run to stop

    def start(self) -> None:
        """Test and validate the untrained model, unless that is done; start tracker and progress bar."""
        FIRST_FAILURES.clear()  # of an earlier run in this process
        with self.checkpointer.save_if_interrupted():
            self.validator.start()
        name, settings = self.config.run.tracker if dist.is_main() else "none", read_config(self.output / "config.yaml")
        tracker = start_tracker(name, self.output, settings, self.learner.steps)
        self.resources.enter_context(self.recorder.start(tracker))  # the bar: closed before an error is printed
        if self.recorder.line:  # the validation of the last rollout was stopped, or a reward raised in it
            self.conclude_rollout()

    def ended(self) -> bool:
        """Collect what was prefetched, and mark; True if a limit is reached, or any rank was asked to stop."""
        self.delay.collect_prefetched()
        self.checkpointer.mark()
        self.stopped = bool(dist.max_over_ranks(self.signals.received is not None))
        return self.stopped or self.recorder.limit_reached

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; if it is stopped, or a reward or an environment raises in it, end the run, saved as marked."""
        drawer = "an environment" if self.config.rollout.environment else "decoding"
        estimator = " or --algorithm.advantages" if callable(self.config.algorithm.advantages) else ""
        who = {"generate": drawer, "reward": f"a reward{estimator}", "validate": "a reward"}
        guard = self.checkpointer.save_if_interrupted(who[name]) if name in who else end_forks()
        with guard, self.recorder.phase(name):
            yield

    def require_some_reward(self, rewards: Tensor) -> None:
        """End the run, saved, if no completion of any rank has a reward (B,), and functions have failed.

        Where none has failed, say so in the first rollout; the run fails at its end if there never is a reward.
        """
        unknown, failures = all(dist.gather_objects(bool(rewards.isnan().all()))), self.failures()
        with self.phase("reward"):
            if unknown and failures:
                raise RewardError(f"every completion of this rollout is without a reward: {failures}")
        if unknown and self.recorder.tokens == 0 and dist.is_main():
            self.recorder.bar.write("WARNING: every reward of the first rollout is None", file=sys.stderr)

    def failures(self) -> str:
        """The first failure of each reward on any rank, in one line; "" without any."""
        first = {name: error for by_name in dist.gather_objects(FIRST_FAILURES) for name, error in by_name.items()}
        return "; ".join(f"{name} ({error})" for name, error in first.items())

    def conclude_rollout(self) -> None:
        """Validate if due, write the rollout's line, save if due."""
        if self.validator.is_due():
            self.checkpointer.mark()
            with self.phase("validate"):
                self.recorder.line |= self.validator.validate()
        self.recorder.write(self.validator.best)
        self.checkpointer.save_if_due()

    def tell(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Call ``on_rollout`` with a rollout and its steps' metrics; the run is bit for bit the same without it."""
        if self.on_rollout is not None:
            generators = self.generators.state_dict()
            with end_forks():
                self.on_rollout(experience, steps)
            self.generators.load_state_dict(generators)

    def warn(self) -> bool:
        """Say on stderr that completions had no reward, and why; or that no step has moved the model.

        Returns True on rank 0 if no completion ever had a reward.
        """
        failures = self.failures()
        lines = read_jsonl(self.output / "metrics.jsonl") if dist.is_main() else []
        if not lines:
            return False
        rows = self.config.rollout.prompts * self.config.rollout.group_size
        unknown, total = round(sum(line["reward_unknown_share"] for line in lines) * rows), len(lines) * rows
        if unknown or failures:
            why = failures or "every function returned None"
            print(f"WARNING: {unknown:,} of {total:,} completions had no reward: {why}", file=sys.stderr)
        if unknown < total and all(line["zero_advantage_share"] == 1 for line in lines):
            print("WARNING: no step had a gradient: all rewards of every group were equal", file=sys.stderr)
        if sum(line["steps_skipped"] for line in lines) == self.learner.steps:
            print("WARNING: every step was skipped: loss, gradient or log-probs were not finite", file=sys.stderr)
        return unknown == total

    def finish(self) -> dict[str, Any]:
        """Save the final model, test it and the returned one, and return the summary.

        Raises Stopped, saved, if a signal ended the run; RunFailed if no completion ever had a reward.

        The returned model is the best by validation, step 0's included; without validation it is the final one.
        """
        self.recorder.bar.close()
        unrewarded = dist.max_over_ranks(self.warn())
        if self.stopped:
            self.checkpointer.save()
            raise Stopped
        if unrewarded:
            saved = f"last checkpoint: {newest_checkpoint(self.output)}"
            raise RunFailed(f"no completion ever had a reward, so there is nothing that was learned; {saved}")
        validator, recorder, policy, steps = self.validator, self.recorder, self.learner.policy, self.learner.steps
        save_model(policy, self.sampler.tokenizer, self.output / "final", validator.card())
        after = final = validator.test(policy, "after" if validator.best_step == steps else "final")
        if validator.best_step != steps:
            after = validator.test(validator.best_policy(), "after")
        summary = {
            "before": validator.before,
            "after": after,
            "final": final,
            "validation": validator.validations(),
            "tokens": recorder.tokens,
            "optimizer_steps": steps,
            "seconds": round(recorder.elapsed, 2),
            "peak_memory_gb": round(peak_memory_gb(policy.device), 3),
            "best_model": str(self.output / ("best" if validator.best else "final")),
            "best_step": validator.best_step,
        }
        if dist.is_main():
            models = {"final": ({"step": steps, "tokens": recorder.tokens}, final)}
            models |= {"best": (validator.best, after)} if validator.best else {}
            with writing(f"cannot write into {self.output}", self.output):
                for name, (model, test) in models.items():
                    tests = {"base model": validator.before, "this model": test}
                    for other, (its, its_test) in models.items():
                        if its["step"] != model["step"]:
                            tests[f"the {other} model, of step {its['step']:,}"] = its_test
                    write_text(self.output / name / "README.md", validator.card(model, tests))
                write_json(self.output / "summary.json", summary)
            recorder.tracker.finish()
        return summary
