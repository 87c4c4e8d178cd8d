"""Text environments: episodes of several turns. Their protocol is in `pspo.tasks.problem`."""

from pspo.environments.episodes import EnvironmentSampler, transcripts
from pspo.environments.tools import CallReader, check_calls
