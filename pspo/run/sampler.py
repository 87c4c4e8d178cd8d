"""Sampler: what draws a run's rollouts and evaluations."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from pspo import distributed as dist
from pspo.cli.signals import interruptible
from pspo.config import TrainConfig
from pspo.environments import EnvironmentSampler
from pspo.rollout import Prompts, Rollout, RolloutSampler, TransformersSampler, check_decoder, make_sampling
from pspo.rollout.engine import EngineError, EngineSampler, check_engine, find_engine
from pspo.rollout.generators import Generators
from pspo.run.folders import RunFailed
from pspo.run.learner import Learner
from pspo.tasks.environment import MakeEnvironment


class StoppableSampler(TransformersSampler):
    """The policy's own decoding; a signal interrupts it between two passes, unless all ranks must take part in them."""

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        with interruptible(self.policy, between_passes=not self.sampling.synced):
            return super().draw(prompts, group_size)


class Sampler:
    """Draws by the policy's own decoding, or by an engine; in an environment, if the run has one."""

    def __init__(
        self,
        config: TrainConfig,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        generators: Generators,
        make_environment: MakeEnvironment | None,
        output: Path,
    ) -> None:
        self.config, self.learner, self.tokenizer, self.generators = config, learner, tokenizer, generators
        self.make_environment, self.output = make_environment, output
        check_decoder(learner.policy, config.rollout.decoder)
        asked = {"logprobs": config.algorithm.correction != "none" or config.ratios_to_engine}
        asked |= {"nucleus": config.algorithm.nucleus == "replay", "synced": config.distributed.rollout == "synced"}
        self.sampling = make_sampling(learner.policy, tokenizer, config.rollout, **asked)
        self.decoder = StoppableSampler(learner.policy, tokenizer, self.sampling, config.model.autocast)
        self.engine: EngineSampler | None = None

    def start_engine(self, prompts: dict[str, Prompts], resources: contextlib.ExitStack) -> None:
        """Start the engine of --rollout.engine, and check that it draws by the policy."""
        config, device = self.config, self.learner.policy.device
        room = max(len(ids) for split in prompts.values() for ids in split.ids) + config.rollout.max_completion_tokens
        if device.type == "cpu" and config.draws_ahead:  # it draws during the update: more threads than cores stall
            resources.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        engine = find_engine(config.rollout)(config, room, device)
        resources.callback(engine.close)
        self.engine = EngineSampler(engine, self.learner, self.tokenizer, self.sampling, self.generators)
        mean, largest = check_engine(self.engine, prompts["train"].take(range(min(8, len(prompts["train"])))))
        if not config.run.quiet:
            print(f"engine  {config.rollout.engine}: log-probs are the policy's within {mean:.1g} nats on average, "
                  f"{largest:.1g} at most")  # fmt: skip

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        """Draw ``group_size`` completions of each prompt."""
        with self.engine_errors():
            drawer = replace(self.engine or self.decoder, generators=self.generators)
            return self._in_environment(drawer).draw(prompts, group_size)

    def seeded(self) -> Sampler:
        """The same, drawing by torch's global generators, which an evaluation seeds."""
        sampler = copy.copy(self)
        sampler.generators = contextlib.nullcontext()
        return sampler

    def greedy(self, policy: transformers.PreTrainedModel) -> RolloutSampler:
        """Greedy decoding of a policy, never by an engine."""
        return self._in_environment(replace(self.decoder, policy=policy, sampling=self.sampling.greedy()))

    def _in_environment(self, sampler: RolloutSampler) -> RolloutSampler:
        if self.make_environment is None:
            return sampler
        return EnvironmentSampler(sampler, self.make_environment)

    @contextlib.contextmanager
    def engine_errors(self) -> Iterator[None]:
        """Raise RunFailed on all ranks if an engine fails on one."""
        failure = None
        try:
            yield
        except EngineError as error:
            failure = error
        errors = list(filter(None, dist.gather_objects(failure and str(failure)))) if self.engine else []
        if errors:
            again = f"the same command with --run.output_dir {self.output} resumes from the last checkpoint"
            raise RunFailed(f"the engine failed: {errors[0]}; {again}") from failure
