"""Sampler: what draws a run's rollouts and evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import transformers

from pspo import distributed as dist
from pspo.engines import EngineError, EngineSampler
from pspo.environments import EnvironmentSampler
from pspo.records.folders import RunFailed
from pspo.rollout import Prompts, Rollout, TransformersSampler
from pspo.rollout import Sampler as AnySampler
from pspo.tasks.environment import MakeEnvironment


class Sampler:
    """Draws by the policy's own decoding, or by an engine; in an environment, if the run has one."""

    def __init__(
        self,
        decoder: TransformersSampler,
        engine: EngineSampler | None,
        make_environment: MakeEnvironment | None,
        output: Path,
    ) -> None:
        self.decoder, self.engine, self.make_environment, self.output = decoder, engine, make_environment, output
        self.sampling, self.tokenizer = decoder.sampling, decoder.tokenizer
        self.training = self._in_environment(engine or decoder)

    def _in_environment(self, sampler: AnySampler) -> AnySampler:
        return EnvironmentSampler(sampler, self.make_environment) if self.make_environment else sampler

    def draw(self, prompts: Prompts, group_size: int) -> Rollout:
        """Draw ``group_size`` completions of each prompt."""
        with self.engine_errors():
            return self.training.draw(prompts, group_size)

    def greedy(self, policy: transformers.PreTrainedModel) -> AnySampler:
        """Greedy decoding of a policy, never by an engine."""
        sampling = self.sampling.greedy()
        return self._in_environment(
            replace(self.decoder, policy=policy, sampling=sampling, generators=contextlib.nullcontext())
        )

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
