"""Functions called in processes of their own: in parallel, and killed if they take too long."""

import ctypes
import inspect
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

from pspo.tasks.failures import WorkerError, user_traceback


def start_python(module: str, *arguments: int, **variables: str) -> tuple[subprocess.Popen, Connection]:
    """A process that calls ``serve(connection, *arguments)`` of a module, and our end of the connection.

    It is no fork: it starts with none of this process's memory, and without its ``__main__``. ``variables`` are of the
    environment.
    """
    ours, theirs = Pipe()
    call = ", ".join(map(str, (f"Connection({theirs.fileno()})", *arguments)))
    tie = "from pspo.tasks.workers import Connection, tie_to_parent; tie_to_parent()"  # before imports that take long
    process = subprocess.Popen(
        [sys.executable, "-c", f"{tie}; from {module} import serve; serve({call})"],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} | variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the trainer's
    )
    theirs.close()
    return process, ours


def tie_to_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux only), and no scheduler before."""
    for number in (signal.SIGTERM, signal.SIGINT):  # which it may send to all; the trainer saves first
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Worker:
    """A Python process that waits for calls."""

    def __init__(self, memory: int) -> None:
        self.process, self.connection = start_python(__name__, memory)
        self.deadline = float("inf")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def receive(self, timeout: float, too_late: TimeoutError) -> tuple[bool, Any]:
        """Read the next message: whether the call has ended, and its result; a worker that is late is killed."""
        try:
            if not self.connection.poll():
                self.kill()
                return True, too_late
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.kill()
            return True, WorkerError(f"the worker process died (exit code {self.process.returncode})")
        self.deadline = time.monotonic() + timeout if timeout and kind == "began" else float("inf")
        return kind != "began", WorkerError(value) if kind == "failed" else value


class Workers:
    """Up to ``number`` worker processes, kept between calls; ``memory`` limits each one's address space, in bytes."""

    def __init__(self, number: int, memory: int) -> None:
        self.number, self.memory, self.idle = number, memory, []

    def map(
        self, function: Callable[..., Any], calls: Sequence[dict[str, Any]], timeout: float, too_late: TimeoutError
    ) -> list[Any]:
        """Results of ``function(**call)``, in order; in place of one that failed, its WorkerError or ``too_late``.

        A call that takes longer than ``timeout`` seconds (0: no limit) is killed with its process.
        """
        results: list[Any] = [None] * len(calls)
        waiting, busy = list(enumerate(calls)), {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.number:
                    self.idle = [worker for worker in self.idle if worker.process.poll() is None]
                    worker = self.idle.pop() if self.idle else Worker(self.memory)
                    index, call = waiting.pop(0)
                    busy[worker.connection] = worker, index
                    worker.connection.send((function, call))
                nearest = min(worker.deadline for worker, _ in busy.values())
                wait(list(busy), min(max(nearest - time.monotonic(), 0.0), 60.0))
                for worker, index in list(busy.values()):
                    if worker.connection.poll() or time.monotonic() >= worker.deadline:
                        done, results[index] = worker.receive(timeout, too_late)
                        if done:
                            del busy[worker.connection]
                            self.idle += [] if worker.connection.closed else [worker]
        finally:
            for worker, _ in busy.values():
                worker.kill()
        return results


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
            result = "returned", function(**call)
        except Exception as error:  # a user's code may raise anything
            result = "failed", user_traceback(error)
        try:
            connection.send(result)
        except OSError:  # the trainer is gone
            return


def check_importable(function: Callable[..., Any]) -> None:
    """Raise ValueError unless another process can import the function, or the class of the object."""
    target = function if inspect.isfunction(function) else type(function)
    if target.__module__ == "__main__" or "<" in target.__qualname__:
        raise ValueError(
            f"--reward.workers needs functions that other processes can import: put {target.__qualname__} at the top "
            "level of a module (a .py file), not in __main__, a notebook or another function"
        )
