"""Worker processes with limits on time and memory, and the handling of SIGTERM and Ctrl-C.

The pool is written by hand: neither `multiprocessing.Pool` nor `concurrent.futures` kills the one process whose call
hangs, limits its memory, or starts processes without the trainer's memory and ``__main__`` ("spawn" imports it again).
"""

import contextlib
import ctypes
import importlib
import inspect
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection, Pipe
from types import FrameType
from typing import Any

from pspo.tasks.failures import WorkerError, user_traceback

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PREVIOUS_HANDLERS: list[dict[int, Any]] = []  # that were replaced in this process, the outermost first
_fork = threading.local()  # of this thread's fork: the mask of signals before it
START = "from pspo.tasks.workers import run_process; run_process({module!r}, {descriptor}, {arguments})"


def start_python(module: str, *arguments: int, **variables: str) -> tuple[subprocess.Popen, Connection]:
    """Start a process that calls ``serve(connection, *arguments)`` of a module; returns it and our connection to it."""
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


def run_process(module: str, descriptor: int, arguments: tuple[int, ...]) -> None:
    """Serve until the parent ends; signals that a scheduler sends to a whole job are left to the trainer."""
    replace_handlers(lambda *_: None)  # not SIG_IGN, which programs that a reward starts would inherit
    end_with_parent()
    importlib.import_module(module).serve(Connection(descriptor), *arguments)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Stopped(BaseException):
    """A run that a signal stopped; saved, unless in its first test or validation.

    Not an Exception: raised in the middle of a forward pass, no handler of a library may take it for a failure.
    """


def replace_handlers(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGTERM and SIGINT in this process, but not in its forks; nothing in a thread, where Python forbids it."""
    if threading.current_thread() is threading.main_thread():
        PREVIOUS_HANDLERS.append({number: signal.signal(number, handler) for number in SIGNALS})


class StopSignals:
    """SIGTERM and SIGINT in a `with` block: the first asks the run to stop, the second raises KeyboardInterrupt.

    Attributes:
        error: Stopped, once a signal has asked the run to stop.
        is_drawing: True where ranks do not communicate and nothing is left half done: the first signal then raises.
    """

    def __init__(self) -> None:
        self.error: Stopped | None = None
        self.is_drawing = False

    def __enter__(self) -> None:
        replace_handlers(self.receive)

    def __exit__(self, *_: object) -> None:
        self.error = None
        if threading.current_thread() is threading.main_thread():
            for number, handler in PREVIOUS_HANDLERS.pop().items():
                signal.signal(number, handler)

    def receive(self, number: int, _: FrameType | None) -> None:
        self.error = Stopped()
        for other in SIGNALS:
            signal.signal(other, signal.default_int_handler)
        name = signal.Signals(number).name
        line = f"\n{name}: stopping after this pass or update; a second one stops at once\n"
        os.write(2, line.encode())  # the signal may have interrupted a print
        if self.is_drawing:
            raise self.error


def before_fork() -> None:
    """Block the signals, so that one sent to a child waits until the child has its own handlers."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _fork.in_main_thread = threading.current_thread() is threading.main_thread()


def unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def restore_in_child() -> None:
    """Make the fork of a process with `replace_handlers` an ordinary child, as of a `multiprocessing.Pool`.

    It ends with its parent, and leaves the first Ctrl-C, which a terminal sends to all, to it.
    """
    if PREVIOUS_HANDLERS:
        previous = PREVIOUS_HANDLERS[0]
        PREVIOUS_HANDLERS.clear()
        signal.signal(signal.SIGTERM, previous[signal.SIGTERM])
        signal.signal(signal.SIGINT, lambda number, _: signal.signal(number, previous[number]))
        if _fork.in_main_thread:  # others may end before the process
            end_with_parent()
    unblock_signals()


os.register_at_fork(before=before_fork, after_in_parent=unblock_signals, after_in_child=restore_in_child)


class WorkerPool:
    """Python processes that answer one call at a time, kept between calls, each with a thread that waits for it.

    ``memory`` limits each process's address space, in bytes; 0 is no limit.
    """

    def __init__(self, number: int, memory: int) -> None:
        self.memory = memory
        self.threads = ThreadPoolExecutor(number)  # a process ends with its thread
        self.by_thread: dict[int, tuple[subprocess.Popen, Connection]] = {}

    def map(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Results of ``function(*call)``, in order; in place of one that failed, its WorkerError or TimeoutError.

        A call that takes longer than ``timeout`` seconds (0: no limit) is killed with its process.
        """
        try:
            return list(self.threads.map(lambda call: self.call(function, call, timeout), calls))
        except BaseException:  # the threads would wait for their calls
            for process, _ in self.by_thread.values():
                process.kill()
            raise

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        """One of the results, by this thread's process."""
        thread = threading.get_ident()
        if thread not in self.by_thread or self.by_thread[thread][0].poll() is not None:
            self.by_thread[thread] = start_python(__name__, self.memory)
        process, connection = self.by_thread[thread]
        try:
            connection.send((function, arguments))
            error = connection.recv()  # None once the function is imported: its time begins
            if error is not None:
                return error
            if connection.poll(timeout or None):
                return connection.recv()
        except (EOFError, OSError):
            return WorkerError(f"the worker process died (exit code {process.wait()})")
        process.kill()
        process.wait()
        return TimeoutError(f"took longer than {timeout:g} seconds")


@cache
def worker_pool(number: int, memory: int = 0) -> WorkerPool:
    return WorkerPool(number, memory)


def serve(connection: Connection, memory: int) -> None:
    """Answer calls until the other end is closed."""
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with contextlib.suppress(OSError):  # of `send`: the trainer is gone
        while True:
            try:
                function, arguments = connection.recv()  # imports the function's module
                connection.send(None)
                result = function(*arguments)
            except Exception as error:  # a user's code may raise anything
                result = WorkerError(user_traceback(error))
            connection.send(result)


def check_importable(function: Callable[..., Any]) -> None:
    """Raise ValueError unless another process can import the function, or the class of the object."""
    target = function if inspect.isfunction(function) else type(function)
    if target.__module__ == "__main__" or "<" in target.__qualname__:
        raise ValueError(
            "--reward.workers and --reward.timeout need functions that other processes can import: put "
            f"{target.__qualname__} at the top level of a module, not in __main__, a notebook or another function"
        )
