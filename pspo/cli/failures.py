"""How a run ends early: by a signal, or by a failure of a user's own code, on all ranks together."""

import contextlib
from collections.abc import Iterator

from pspo import distributed as dist
from pspo.model import is_out_of_memory
from pspo.rollout.engine import EngineError
from pspo.tasks.failures import user_traceback
from pspo.tasks.workers import Stopped

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes
EXIT_INTERRUPTED = 130  # stopped at once


class RunFailed(RuntimeError):
    """A run that cannot continue; everything saved is still there."""


class UserCodeFailed(RunFailed):
    """What was raised while drawing, scoring or validating; the text is the traceback, of the user's frames if any."""


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """If the block raises on any rank, raise on all of them, see `raise_together`."""
    failure = None
    try:
        yield
    except (Exception, Stopped) as error:  # a user's code may raise anything
        if isinstance(error, RunFailed) or is_out_of_memory(error):  # not the user's, or on all ranks
            raise
        failure = error
    if failure is not None or dist.world_size() > 1:
        raise_together(failure)


def raise_together(failure: BaseException | None) -> None:
    """If any rank has failed, raise Stopped, EngineError, or UserCodeFailed with the first traceback on all of them."""
    reason = failure
    if failure is not None and not isinstance(failure, Stopped | EngineError):
        reason = user_traceback(failure)
    reasons = [reason for reason in dist.gather_objects(reason) if reason is not None]
    if any(isinstance(reason, Stopped) for reason in reasons):
        raise Stopped from failure
    for reason in reasons:
        if isinstance(reason, EngineError):
            raise EngineError(str(reason)) from failure
        raise UserCodeFailed(reason) from failure
