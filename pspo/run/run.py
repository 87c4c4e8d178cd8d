"""Run: the parts of a run together, and what happens at its ends."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pspo import distributed as dist
from pspo.cli.parse import Settings
from pspo.config import TrainConfig
from pspo.endings import fail_together
from pspo.errors import Stopped
from pspo.files import write_errors, write_json, write_text
from pspo.inputs import Inputs, load_inputs
from pspo.model.device import choose_threads, peak_memory_gb
from pspo.rollout import Experience, How, PolicySampler, PromptStream, Sampler, make_sampling
from pspo.rollout.drawing import Generators, random_numbers
from pspo.rollout.engine import Engine, find_engine, start_engine
from pspo.rollout.sampler import check_decoding
from pspo.rollout.source import find_source
from pspo.run.checkpointer import Checkpointer
from pspo.run.messages import model_card
from pspo.run.recorder import Recorder
from pspo.run.validator import Validator
from pspo.signals import StopSignals
from pspo.update import drawn_logprobs
from pspo.update.learner import check_reference, make_learner


class Run:
    """The parts of a run; ``resources`` are closed with it: the folder's lock, the engine."""

    on_rollout: Callable[[Experience, list[dict[str, float]]], None] | None = None  # a rollout, its steps' metrics

    def __init__(self, config: TrainConfig, settings: Settings, output: Path, resources: contextlib.ExitStack) -> None:
        """Load data and model, and make the parts; what can be refused without the model is refused before it."""
        self.config = config
        self.settings = settings
        self.output = output
        self.resources = resources
        self.signals = StopSignals()
        engine = None if config.rollout.engine is None else find_engine(config.rollout.engine)
        inputs = load_inputs(config, config.rollout, config.split_limits)
        tokenizer = inputs.tokenizer
        check_reference(config, tokenizer)
        prompts = inputs.prompts
        device = dist.local_device()
        self.generators = Generators(device, config.run.seed)
        with random_numbers(self.generators):
            self.learner = make_learner(config, device)
        policy = self.learner.policy
        choose_threads(policy)
        sampling = make_sampling(policy, tokenizer, config.rollout, config.algorithm)
        check_decoding(policy, tokenizer, sampling, prompts["train"], config.model.autocast)
        self.how = How(sampling, policy if engine is None else None, self.generators)
        sampler = self.make_sampler(engine, inputs)
        self.recorder = Recorder(config, self.learner, tokenizer, prompts["train"], output)
        self.validator = Validator(config, sampler, self.how, self.recorder, prompts)
        self.source = find_source(config)(
            config=config,
            stream=PromptStream(prompts["train"], config),
            sampler=sampler,
            how=self.how,
            learner=self.learner,
            phase=self.phase,
            logprobs=partial(drawn_logprobs, self.learner, config=config),
            failures=self.recorder.failures,
        )
        self.checkpointer = Checkpointer(config, self.parts(), output)

    def make_sampler(self, engine: Engine | None, inputs: Inputs) -> Sampler:
        """What draws: the policy, an engine, an environment around either."""
        sampler = by_model = PolicySampler(inputs.tokenizer, self.config.model.autocast, self.signals, self.generators)
        if engine is not None:
            self.resources.callback(engine.close)
            sampler = start_engine(engine, self.config, self.learner, by_model, inputs.prompts, self.how)
        return inputs.in_episodes(sampler, self.learner.policy)

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds the states of, by name."""
        parts = {
            "stream": self.source.stream,
            "learner": self.learner,
            "validator": self.validator,
            "recorder": self.recorder,
            "delay": self.source,
            "generators": self.generators,
            "algorithm.surrogate": self.config.algorithm.surrogate,
        }
        return parts | {f"algorithm.terms.{i}": term for i, term in enumerate(self.config.loss_terms)}

    def start(self) -> None:
        """Start tracker and progress bar; test and validate the model, unless that is done."""
        self.resources.enter_context(self.recorder.start(self.settings))  # the bar: closed before an error is printed
        with self.phase("test"):
            self.validator.start()
        del self.recorder.rollout.seconds["test"]  # no part of a rollout
        self.recorder.bar.restart_clock()
        if self.recorder.rollout.steps:  # the validation of the last rollout was stopped, or a reward raised in it
            self.close_rollout()

    def begin_rollout(self) -> bool:
        """Take a snapshot of the parts; False at the end of the run. Raises Stopped if any rank was asked to stop."""
        self.take_snapshot()
        if dist.max_over_ranks(self.signals.error is not None):
            raise Stopped
        return not self.recorder.limit_reached

    def take_snapshot(self) -> None:
        """Keep the parts' states; this waits for a rollout that is drawn ahead."""
        with self.phase("generate"):
            self.source.settle()
            self.checkpointer.take_snapshot()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase. Outside an update, a stop or an exception on one rank is raised on all of them."""
        self.recorder.bar.set_description_str(f"step, {name}")
        began = time.perf_counter()
        with contextlib.nullcontext() if name == "train" else fail_together():
            yield
        seconds = self.recorder.rollout.seconds
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    def conclude_rollout(self, experience: Experience, steps: list[dict[str, float]]) -> None:
        """Record a rollout that was trained on, by ``steps`` with these metrics; validate and save if due."""
        self.recorder.record(experience, steps)
        self.close_rollout()
        if self.on_rollout is not None:
            state = self.generators.state_dict()
            self.on_rollout(experience, steps)
            self.generators.load_state_dict(state)  # the run is bit for bit the same without it

    def close_rollout(self) -> None:
        """Validate if due, write the rollout's line, save if due."""
        every = self.config.run.validate_every
        if every and self.recorder.is_due(every):
            self.take_snapshot()
            with self.phase("validate"):
                self.recorder.rollout.line |= self.validator.validate()
        is_save_due = self.recorder.is_due(self.config.run.save_every)
        self.recorder.write()
        if is_save_due:
            self.take_snapshot()
            self.checkpointer.save_snapshot()

    def finish(self) -> dict[str, Any]:
        """Save the final model, test it and the best one by validation (step 0's included), and return the summary."""
        self.recorder.bar.close()
        self.checkpointer.snapshot = {}  # this step is saved; for its test the best model takes the policy's place
        summary = self.validator.finish() | {
            "output_dir": str(self.output),
            "tokens": self.recorder.tokens,
            "optimizer_steps": self.learner.steps,
            "seconds": round(self.recorder.elapsed, 2),
            "peak_memory_gb": round(peak_memory_gb(self.learner.policy.device), 3),
        }
        if dist.is_main():
            self.recorder.finish()
            with write_errors(self.output / "summary.json"):
                models = {str(self.output / "final"): self.learner.steps, summary["best_model"]: summary["best_step"]}
                for model, step in models.items():
                    write_text(Path(model) / "README.md", model_card(self.config, self.settings, step, summary))
                write_json(self.output / "summary.json", summary)
        return summary
