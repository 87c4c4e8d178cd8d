"""Functions called in processes of their own: in parallel, with limits on memory and time.

By hand, because neither `multiprocessing.Pool` nor `concurrent.futures` kills the one process whose call hangs, limits
its memory, or starts processes without the trainer's memory and ``__main__`` (its "spawn" imports that again).
"""

import ctypes
import inspect
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from pspo.tasks.failures import WorkerError, end_forks, user_traceback

START = """\
from pspo.tasks.workers import Connection, end_with_parent, ignore_signals
ignore_signals()
end_with_parent()
from {module} import serve
serve(Connection({descriptor}), *{arguments})
"""  # the module may take long to import, so signals come first


def start_python(module: str, *arguments: int, **variables: str) -> tuple[subprocess.Popen, Connection]:
    """A process that calls ``serve(connection, *arguments)`` of a module, and the connection's end in this process."""
    parent_end, child_end = Pipe()
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", START.format(module=module, descriptor=child_end.fileno(), arguments=arguments)],
        pass_fds=[child_end.fileno()],
        env=os.environ | {"PYTHONPATH": python_path} | variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the trainer's
    )
    child_end.close()
    return process, parent_end


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def ignore_signals() -> None:
    """Ignore what a scheduler may send to all processes of a job: the trainer saves first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Worker:
    """A Python process that answers calls, and the call that it is busy with."""

    def __init__(self, memory: int) -> None:
        self.process, self.connection = start_python(__name__, memory)
        self.index = 0
        self.deadline = math.inf

    def receive(self, late: TimeoutError) -> tuple[str, Any]:
        """Return "ended" with the call's result, "began", or "busy"; kill a worker that is late."""
        if self.connection.poll():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                return "ended", WorkerError(f"the worker process died (exit code {self.process.wait()})")
        if time.monotonic() < self.deadline:
            return "busy", None
        self.kill()
        return "ended", late

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Workers:
    """Up to ``number`` worker processes, kept between calls; ``memory`` limits each one's address space, in bytes."""

    def __init__(self, number: int, memory: int) -> None:
        self.number = number
        self.memory = memory
        self.idle: list[Worker] = []

    def map(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout: float, late: TimeoutError
    ) -> list[Any]:
        """Results of ``function(*call)``, in order; in place of one that failed, its WorkerError or ``late``.

        A call that takes longer than ``timeout`` seconds (0: no limit) is killed with its process.
        """
        results: list[Any] = [None] * len(calls)
        waiting = list(enumerate(calls))
        busy: list[Worker] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self.number:
                    worker = self.take()
                    busy.append(worker)
                    worker.index, call = waiting.pop(0)
                    worker.deadline = math.inf
                    worker.connection.send((function, call))
                nearest = min(worker.deadline for worker in busy)
                wait([worker.connection for worker in busy], min(max(nearest - time.monotonic(), 0.0), 60.0))
                for worker in list(busy):
                    state, value = worker.receive(late)
                    if state == "began" and timeout:
                        worker.deadline = time.monotonic() + timeout
                    elif state == "ended":
                        results[worker.index] = value
                        busy.remove(worker)
                        self.idle.append(worker)
        finally:
            for worker in busy:
                worker.kill()
        return results

    def take(self) -> Worker:
        """A worker that waits, or a new one; those that have died are dropped."""
        self.idle = [worker for worker in self.idle if worker.process.poll() is None]
        return self.idle.pop() if self.idle else Worker(self.memory)


@cache
def worker_pool(number: int, memory: int = 0) -> Workers:
    return Workers(number, memory)


def serve(connection: Connection, memory: int) -> None:
    """Answer calls until the other end is closed."""
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while wait([connection]):
        try:
            function, call = connection.recv()  # imports the function's module
            connection.send(("began", None))
            with end_forks():
                result = function(*call)
        except Exception as error:  # a user's code may raise anything
            result = WorkerError(user_traceback(error))
        try:
            connection.send(("ended", result))
        except OSError:  # the trainer is gone
            return


def check_importable(function: Callable[..., Any]) -> None:
    """Raise ValueError unless another process can import the function, or the class of the object."""
    target = function if inspect.isfunction(function) else type(function)
    if target.__module__ == "__main__" or "<" in target.__qualname__:
        raise ValueError(
            "--reward.workers and --reward.timeout need functions that other processes can import: put "
            f"{target.__qualname__} at the top level of a module, not in __main__, a notebook or another function"
        )
