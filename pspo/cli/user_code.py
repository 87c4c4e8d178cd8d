"""Errors of a user's own code, and stops, on all ranks together."""

import contextlib
from collections.abc import Iterator

from pspo import distributed as dist
from pspo.cli.signals import Stopped
from pspo.model import is_out_of_memory
from pspo.rollout.engine import EngineError
from pspo.tasks.failures import end_forks, user_traceback


class RunFailed(RuntimeError):
    """A run that cannot continue; everything saved is still there."""


class UserCodeFailed(RunFailed):
    """A reward that raised; the text is the traceback of the user's own frames."""


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """If the block raises on any rank, raise on all of them, see `raise_together`."""
    failure = None
    try:
        with end_forks():
            yield
    except (Exception, Stopped) as error:  # a user's code may raise anything
        if isinstance(error, RunFailed) or is_out_of_memory(error):  # not the user's, or on all ranks
            raise
        failure = error
    raise_together(failure)


def raise_together(failure: BaseException | None) -> None:
    """If any rank has failed, raise Stopped, EngineError, or UserCodeFailed with the first traceback on all of them."""
    if failure is None or isinstance(failure, Stopped | EngineError):
        reason = failure
    elif isinstance(failure, UserCodeFailed):
        reason = str(failure)
    else:
        reason = user_traceback(failure)
    reasons = [reason for reason in dist.gather_objects(reason) if reason is not None]
    if any(isinstance(reason, Stopped) for reason in reasons):
        raise Stopped from failure
    for reason in reasons:
        if isinstance(reason, EngineError):
            raise EngineError(str(reason)) from failure
        raise UserCodeFailed(reason) from failure
