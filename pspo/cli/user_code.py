"""Errors of a user's own code, and stops, on all ranks together."""

import contextlib
from collections.abc import Iterator

from pspo import distributed as dist
from pspo.cli.signals import Stopped
from pspo.model import is_out_of_memory
from pspo.rollout.engine import EngineError
from pspo.run.folders import RunFailed
from pspo.tasks.failures import end_forks, user_traceback


class UserCodeFailed(RunFailed):
    """A reward that raised; the text is the traceback of the user's own frames."""


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """If the block raises on any rank, raise on all of them: Stopped, or UserCodeFailed with the first traceback."""
    failure = None
    try:
        with end_forks():
            yield
    except Exception as error:  # a user's code may raise anything
        if isinstance(error, RunFailed | EngineError) or is_out_of_memory(error):  # not the user's, or on all ranks
            raise
        failure = error
    failures = dist.gather_objects(failure and (Stopped if type(failure) is Stopped else user_traceback(failure)))
    if Stopped in failures:
        raise Stopped from failure
    if text := next(filter(None, failures), None):
        raise UserCodeFailed(text) from failure
