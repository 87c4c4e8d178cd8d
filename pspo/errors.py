"""What may end a run; `pspo.endings` has the table of what is saved and said."""


class Stopped(BaseException):
    """A signal has stopped the run.

    Not an Exception: raised in the middle of a forward pass, no handler of a library may take it for a failure.
    """


class RunFailed(RuntimeError):
    """A run that cannot continue; everything saved is still there."""


class UserCodeFailed(RunFailed):
    """A user's reward, environment, loss or data has failed; the text is the traceback, of the user's frames if any."""


class EngineError(RuntimeError):
    """Failure of an engine, in one line."""


class UserCodeError(ValueError):
    """A user's function cannot be called as it asks to be, or returned something unfit; the text says all."""


class RewardError(UserCodeError):
    """Of a reward or an environment."""


class SurrogateError(UserCodeError):
    """Of a surrogate, or of another function that returns a value of every token."""


class WorkerError(Exception):
    """An error in a worker process; its text is the traceback there."""
