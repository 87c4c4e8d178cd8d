"""Text environments: episodes of several turns, played around a sampler; `pspo.tasks.environment` has the protocol."""

from pspo.environments.episodes import EnvironmentSampler, transcripts
