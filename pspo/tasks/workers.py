"""Worker processes with limits on time and memory.

They are written by hand, because neither `multiprocessing.Pool` nor `concurrent.futures` kills the one process whose
call hangs, limits its memory, or starts processes without the trainer's memory and ``__main__``.
"""

import contextlib
import importlib
import inspect
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from pspo.errors import UserCodeError, user_traceback
from pspo.signals import end_with_parent, replace_handlers


def start_python(module: str, *arguments: int, **variables: str) -> tuple[subprocess.Popen, Connection]:
    """Start a process that calls ``serve(connection, *arguments)`` of a module; returns process and connection."""
    parent_end, child_end = Pipe()
    call = f"run_process({module!r}, {child_end.fileno()}, {arguments})"
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", f"from pspo.tasks.workers import run_process; {call}"],
        pass_fds=[child_end.fileno()],
        env=os.environ | {"PYTHONPATH": python_path} | variables,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is the trainer's
    )
    child_end.close()
    return process, parent_end


def run_process(module: str, descriptor: int, arguments: tuple[int, ...]) -> None:
    """Serve until the parent ends; signals that a scheduler sends to a whole job are left to the trainer."""
    replace_handlers(lambda number: None)  # not SIG_IGN, which programs that a reward starts would inherit
    end_with_parent()
    importlib.import_module(module).serve(Connection(descriptor), *arguments)


class WorkerPool:
    """Python processes of up to ``memory`` bytes (0: no limit), each with a thread that waits for its results."""

    def __init__(self, number: int, memory: int = 0) -> None:
        self.memory = memory
        self.threads = ThreadPoolExecutor(number)  # a process ends with its thread
        self.by_thread: dict[int, tuple[subprocess.Popen, Connection]] = {}

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Return in order each call's result, UserCodeError, or TimeoutError after ``timeout`` seconds (0: never)."""
        try:
            return list(self.threads.map(lambda call: self.call(function, call, timeout), calls))
        except BaseException:  # the threads would wait for their calls
            for process, _ in self.by_thread.values():
                process.kill()
            raise

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        process, connection = self.by_thread.get(threading.get_ident(), (None, None))
        if process is None or process.poll() is not None:
            process, connection = self.by_thread[threading.get_ident()] = start_python(__name__, self.memory)
        try:
            connection.send((function, arguments))
            error = connection.recv()  # None once the function is imported: its time begins
            if error is not None:
                return error
            if connection.poll(timeout or None):
                return connection.recv()
        except (EOFError, OSError):
            return UserCodeError(f"the worker process died (exit code {process.wait()})")
        process.kill()
        process.wait()
        return TimeoutError(f"took longer than {timeout:g} seconds")


worker_pool = cache(WorkerPool)  # one pool for each number and memory


def serve(connection: Connection, memory: int) -> None:
    """Answer calls until the other end is closed."""
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(OSError):  # `send` raises once the trainer is gone
        while True:
            try:
                function, arguments = connection.recv()  # imports the function's module
                connection.send(None)
                result = function(*arguments)
            except Exception as error:  # a user's code may raise anything
                result = UserCodeError(user_traceback(error))
            connection.send(result)


def check_importable(function: Callable[..., Any]) -> None:
    """Raise ValueError unless another process can import the function, or the class of the object."""
    target = function if inspect.isfunction(function) else type(function)
    if target.__module__ == "__main__" or "<" in target.__qualname__:
        what = "--reward.workers and --reward.timeout need functions that other processes can import"
        raise ValueError(f"{what}: put {target.__qualname__} at the top level of a module other than __main__")
