"""Early ends of a run: by a signal, or by a failure of a user's own code, on all ranks together."""

import contextlib
from collections.abc import Iterator

from pspo import distributed as dist
from pspo.model import is_out_of_memory
from pspo.rollout.engine import EngineError
from pspo.signals import Stopped
from pspo.tasks.failures import user_traceback

EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal; the same command resumes
EXIT_INTERRUPTED = 130  # stopped at once


class RunFailed(RuntimeError):
    """A run that cannot continue; everything saved is still there."""


class UserCodeFailed(RunFailed):
    """A failure while drawing, scoring or validating; the text is the traceback, of the user's frames if any."""


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """`end_together` if the block raises on any rank."""
    failure = None
    try:
        yield
    except (Exception, SystemExit, Stopped) as error:  # a user's code may raise anything
        failure = error
    end_together(failure)


def end_together(failure: BaseException | None) -> None:
    """Raise Stopped, EngineError or UserCodeFailed (the first traceback) on all ranks, unless none has a failure."""
    if isinstance(failure, RunFailed):  # raised on all ranks
        raise failure
    if failure is not None and is_out_of_memory(failure):  # no user's code
        raise failure
    reason = failure
    if failure is not None and not isinstance(failure, Stopped | EngineError):
        reason = user_traceback(failure)
    reasons = [reason for reason in dist.gather_objects(reason) if reason is not None]
    if any(isinstance(reason, Stopped) for reason in reasons):
        raise Stopped from failure
    if reasons and isinstance(reasons[0], EngineError):
        raise EngineError(str(reasons[0])) from failure
    if reasons:
        raise UserCodeFailed(reasons[0]) from failure
