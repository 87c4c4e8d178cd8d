"""Validator: what a run's models are worth, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import transformers

from pspo import distributed as dist
from pspo.cli.files import describe_changes, to_jsonl, write_text
from pspo.cli.progress import say
from pspo.config import TrainConfig
from pspo.evaluate.evaluation import evaluate
from pspo.evaluate.results import Evaluation
from pspo.model import fill_adapters, has_adapters, load_policy
from pspo.rollout import Prompts, RolloutSampler
from pspo.run.card import model_card
from pspo.run.folders import writing
from pspo.run.metrics import validation_status
from pspo.run.recorder import Recorder
from pspo.run.sampler import Sampler
from pspo.run.save import save_model

T = TypeVar("T")
STATE = ("before", "untrained", "validated", "best", "best_trained")


class Validator:
    """Validates the policy when due, keeps the best model in ``best/``, and tests the first and the last one.

    Validations are {"step", "tokens", "validation_reward", ...}, {} where there is none.

    Attributes:
        before: `Evaluation.record` of the untrained model; {} if not tested, None until it is.
        untrained, validated: validations of step 0, and the last one.
        best: the best of all, whose model is in ``best/``.
        best_trained: the best, excluding step 0.
    """

    def __init__(self, config: TrainConfig, sampler: Sampler, recorder: Recorder, prompts: dict[str, Prompts]) -> None:
        self.config, self.sampler, self.recorder, self.prompts = config, sampler, recorder, prompts
        self.learner, self.output = recorder.learner, recorder.output
        self.fingerprints = {split: its.fingerprint() for split, its in prompts.items() if split != "train"}
        self.before: dict[str, Any] | None = None
        self.untrained, self.validated, self.best, self.best_trained = ({} for _ in range(4))

    def start(self) -> None:
        """Test and validate the untrained model, unless that is done."""
        if self.before is None:
            self.before = self.test(self.learner.policy, "before")
            if self.config.run.validate_every:
                self.validate()

    def is_due(self) -> bool:
        every = self.config.run.validate_every
        return every > 0 and self.recorder.is_due(every)

    def measure(self) -> dict[str, float]:
        """Mean reward under the training's sampling, and greedy accuracy (greedy reward without gold answers)."""
        unknown = {"mean_reward": -math.inf}
        sampled, greedy = (
            unknown | self.evaluate("validation", sampler, "validate", Evaluation.means)
            for sampler in (self.sampler.seeded(), self.sampler.greedy(self.learner.policy))
        )
        name, measure = ("greedy_reward", "mean_reward") if "accuracy" not in greedy else ("accuracy", "accuracy")
        return {"validation_reward": sampled["mean_reward"], f"validation_{name}": greedy[measure]}

    def validate(self) -> dict[str, float]:
        """`measure` the policy, and save it if it is the best so far."""
        step, validation = self.learner.steps, self.measure()

        def is_better(best: dict[str, Any]) -> bool:
            return not best or validation["validation_reward"] > best["validation_reward"]

        self.validated = {"step": step, "tokens": self.recorder.tokens} | validation
        if step == 0:
            self.untrained = self.validated
        elif is_better(self.best_trained):
            self.best_trained = self.validated
        if is_better(self.best):
            self.best = self.validated
            save_model(self.learner.policy, self.sampler.tokenizer, self.output / "best", self.card(), self.best)
        status = validation_status(self.validated, self.best)
        say(f"step {step}/{self.config.run.max_steps}  {status}", self.config.run.quiet or not dist.is_main())
        return validation

    def test(self, policy: transformers.PreTrainedModel, when: str) -> dict[str, Any]:
        """Evaluate greedily on the held-out problems, and keep the completions; {} for --run.test_limit 0."""
        if not self.config.run.test_limit:
            return {}

        def keep(evaluation: Evaluation) -> dict[str, Any]:
            with writing(f"cannot write into {self.output}", self.output):
                write_text(self.output / f"test-{when}.jsonl", to_jsonl(evaluation.completions))
            return evaluation.record()

        return self.evaluate("test", self.sampler.greedy(policy), f"test {when}", keep)

    def evaluate(self, split: str, sampler: RolloutSampler, bar: str, use: Callable[[Evaluation], T]) -> T:
        """Draw one completion of each prompt; ``use`` makes of rank 0's evaluation what all ranks get.

        The ranks share the prompts evenly, unless they must decode in step.
        """
        prompts, bar = self.prompts[split], "" if self.config.run.quiet else bar
        rows = math.inf if sampler.sampling.synced else math.ceil(len(prompts) / dist.world_size())
        evaluation = evaluate(sampler, prompts, self.config.reward, step=self.learner.steps, max_rows=rows, bar=bar)
        return dist.run_on_main(lambda: use(evaluation))

    def best_policy(self) -> transformers.PreTrainedModel:
        """The best model by validation, in the policy's place if that has adapters."""
        policy, best = self.learner.policy, replace(self.config.model, name_or_path=str(self.output / "best"))
        if not has_adapters(policy):
            return load_policy(best, policy.device, self.config.distributed)
        fill_adapters(policy, best.name_or_path)
        return policy

    @property
    def best_step(self) -> int:
        """The step of the model that the run returns: without validation the final one's."""
        return self.best.get("step", self.learner.steps)

    def validations(self) -> dict[str, dict[str, Any]]:
        """Those of a run that has ended, {} where there is none."""
        final = self.validated if self.validated.get("step") == self.learner.steps else {}
        return {"untrained": self.untrained, "best": self.best, "best_trained": self.best_trained, "final": final}

    def card(self, model: dict[str, Any] | None = None, tests: dict[str, Any] | None = None) -> str:
        """The model card of the policy as it is now; or of another ``model`` {"step", "tokens"}, once it is tested."""
        model = model or {"step": self.learner.steps, "tokens": self.recorder.tokens}
        return model_card(
            self.config,
            problems=len(self.prompts["train"]),
            step=model["step"],
            tokens=model["tokens"],
            tests={"base model": self.before or {}} if tests is None else tests,
            validations=[self.validated] if tests is None else self.validations().values(),
            changes=describe_changes(self.output),
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("fingerprints", *STATE)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the validations; ``fingerprints`` of a split that this start does not load are kept."""
        self.fingerprints = state["fingerprints"] | self.fingerprints
        for name in STATE:
            setattr(self, name, state[name])
