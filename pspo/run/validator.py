"""Validator: validates and tests a run's models, and keeps the best."""

import math
import operator
from dataclasses import dataclass, field, replace

from pspo import distributed as dist
from pspo.config import TrainConfig
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.statistics import Record, summarise
from pspo.files import find_damage, read_json, to_jsonl, write_errors, write_text
from pspo.rollout import How, Prompts, Sampler
from pspo.run.checkpointer import check_finite, load_weights, save_model
from pspo.run.recorder import Recorder
from pspo.tasks.files import plain
from pspo.terminal import print_timed

KINDS = ("untrained", "best", "best_trained", "final")  # step 0's, the best (in best/), the best after step 0, the last


@dataclass
class Validator:
    """Validates the policy, keeps the best model in ``best/``, and tests the first, best and final models."""

    config: TrainConfig
    sampler: Sampler
    how: How
    recorder: Recorder
    prompts: dict[str, Prompts]  # by split
    before: Record | None = None  # test of the initial model; {} without a test, None before the test
    validations: dict[str, Record] = field(default_factory=lambda: {kind: {} for kind in KINDS})  # {}: none yet

    def __post_init__(self) -> None:
        self.how = replace(self.how, generators=None)
        self.learner = self.recorder.learner
        self.output = self.recorder.output
        self.fingerprint = {split: prompts.fingerprint() for split, prompts in self.prompts.items() if split != "train"}

    def start(self) -> None:
        """Test and validate the model that the run starts with, unless it is tested already."""
        if self.before is None:
            self.before = self.test("before")
            if self.config.run.validate_every:
                self.validate()

    def measure(self) -> dict[str, float]:
        """Mean reward under the training's sampling, and greedy accuracy (or greedy reward, without gold answers)."""
        greedy_how = How(self.how.sampling.greedy(), self.learner.policy)
        completions = [self.evaluate("validation", how, "validate") for how in (self.how, greedy_how)]
        sampled, greedy = dist.run_on_main(lambda: [summarise(each, intervals=False) for each in completions])
        validation = {"validation_reward": sampled.get("mean_reward", -math.inf)}
        if "accuracy" in greedy:
            return validation | {"validation_accuracy": greedy["accuracy"]}
        return validation | {"validation_greedy_reward": greedy.get("mean_reward", -math.inf)}

    def validate(self) -> dict[str, float]:
        """`measure` the policy, and save it if it is the best so far."""
        step = self.learner.steps
        check_finite(self.learner.policy, step)
        validation = self.measure()
        record = {"step": step, "tokens": self.recorder.tokens} | validation
        self.validations["final"] = record
        is_better = operator.gt if self.config.reward.functions else operator.ge  # a distillation's newest is the best
        for name in ("best", "best_trained" if step > 0 else "untrained"):
            best = self.validations[name]
            if not best or is_better(record["validation_reward"], best["validation_reward"]):
                self.validations[name] = record
        if self.validations["best"] is record:
            save_model(self.learner.policy, self.recorder.tokenizer, self.output / "best", record)
        if dist.is_main():
            measures = "  ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in validation.items())
            print_timed(f"step {step}  {measures}  best at {self.validations['best']['step']}", self.config.run.quiet)
        return validation

    def test(self, when: str) -> Record:
        """Evaluate greedily on the held-out problems, and keep the completions; {} for --run.test_limit 0."""
        if not self.config.run.test_limit:
            return {}
        how = How(self.how.sampling.greedy(), self.learner.policy)  # without an engine
        completions = self.evaluate("test", how, f"test {when}")

        def write() -> Record:
            path = self.output / f"test-{when}.jsonl"
            with write_errors(path):
                write_text(path, to_jsonl(completions))
            return summarise(completions)

        return dist.run_on_main(write)

    def evaluate(self, split: str, how: How, bar: str) -> list[Record] | None:
        """Draw one completion of each prompt, evenly shared among ranks; rank 0 alone gets their records."""
        prompts = self.prompts[split]
        return evaluate(
            self.sampler,
            how,
            prompts,
            self.config.reward,
            step=self.learner.steps,
            max_rows=math.ceil(len(prompts) / dist.world_size()),
            bar="" if self.config.run.quiet else bar,
            shown_failures=self.recorder.failures,
        )

    def finish(self) -> Record:
        """Save the final model, test the final and the best model; returns the results of all tests and validations."""
        save_model(self.learner.policy, self.recorder.tokenizer, self.output / "final")
        best_step = self.validations["best"].get("step", self.learner.steps)
        if best_step == self.learner.steps:
            final = after = self.test("after")
        else:
            final = self.test("final")
            load_weights(self.learner.policy, self.config.model, self.output / "best")
            after = self.test("after")
        return {
            "before": self.before,
            "after": after,
            "final": final,
            "validation": self.validations,
            "best_model": str(self.output / ("best" if self.validations["best"] else "final")),
            "best_step": best_step,
        }

    def state_dict(self) -> Record:
        return {"fingerprint": self.fingerprint, "before": self.before, "validations": dict(self.validations)}

    def load_state_dict(self, state: Record) -> None:
        self.before = state["before"]
        self.validations = state["validations"]
        if self.validations["best"]:
            damage = find_damage(self.output / "best")
            if damage is not None:
                fix = f"restore it, or start anew from this run with --run.fork_from {self.output}"
                raise ValueError(f"{damage}: {fix}")
            if read_json(self.output / "best" / "validation.json") != plain(self.validations["best"]):
                self.validations["best"] = {}  # best/ is of a later step, and a resumed run on a GPU may not reach it
