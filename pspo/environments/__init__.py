"""Text environments: episodes of several turns. `pspo.tasks.problem` defines the protocol of an environment."""

from pspo.environments.episodes import EnvironmentSampler, transcripts
from pspo.environments.tools import CallReader, check_calls
