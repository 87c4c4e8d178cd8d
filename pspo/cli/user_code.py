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
    raise_together(failure)


def raise_together(failure: Exception | None) -> None:
    """If any rank's code has failed, raise on all of them: Stopped, or UserCodeFailed with the first traceback."""
    if failure is None or isinstance(failure, Stopped):
        reason = failure and Stopped
    elif isinstance(failure, UserCodeFailed):
        reason = str(failure)
    else:
        reason = user_traceback(failure)
    reasons = dist.gather_objects(reason)
    if Stopped in reasons:
        raise Stopped from failure
    for text in reasons:
        if text is not None:
            raise UserCodeFailed(text) from failure
