"""Errors of a user's own code, on all ranks together."""

import contextlib
from collections.abc import Iterator

from pspo import distributed as dist
from pspo.engines import EngineError
from pspo.model import is_out_of_memory
from pspo.records.folders import RunFailed
from pspo.tasks.failures import user_traceback


class UserCodeFailed(RunFailed):
    """A reward that raised; the text is the traceback of the user's own frames."""


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """If the block raises on any rank, raise UserCodeFailed on every rank, with the first one's traceback."""
    failure = None
    try:
        yield
    except (RunFailed, EngineError):  # no fault of the user's code, or on all ranks already
        raise
    except Exception as error:  # a user's code may raise anything
        if is_out_of_memory(error):
            raise
        failure = error
    texts = filter(None, dist.gather_objects(failure and user_traceback(failure)))
    if text := next(texts, None):
        raise UserCodeFailed(text) from failure
