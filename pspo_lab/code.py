"""CodeReward: completions run as programs, against the problems' tests."""

import ast
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pspo.tasks.answers import after_thoughts
from pspo.tasks.failures import RewardError
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward

SANDBOX = Path(__file__).with_name("sandbox.py")
START_SECONDS = 60  # for Python to start, on a busy machine
MAX_REPORT = 4096  # bytes
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


def extract_code(completion: str) -> str:
    """Return the last ```python block, or the last ``` block; without any, all of it; after thoughts."""
    completion = after_thoughts(completion)
    blocks = [block.partition("\n") for block in completion.split("```")[1::2]]
    python = [code for language, _, code in blocks if language.strip().lower() in ("python", "python3", "py")]
    return (python or [code for _, _, code in blocks] or [completion])[-1]


def checks_nothing(test: str) -> bool:
    """True for definitions that nothing calls, and for data, such as JSON: they pass whatever the program does."""
    try:
        statements = ast.parse(test.strip()).body
    except (ValueError, SyntaxError, RecursionError):
        return False
    return all(isinstance(statement, DEFINITIONS) or is_data(statement) for statement in statements)


def is_data(statement: ast.stmt) -> bool:
    """True for constants, and for assignments of constants."""
    if not isinstance(statement, ast.Expr | ast.Assign):
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class CodeReward(Reward):
    """Share of a problem's tests that the completion's program passes; Linux on x86_64 or aarch64.

    The program is `extract_code`'s. A test is Python code that raises if the program is wrong (`assert add(1, 2) == 3`)
    and runs after it, in its namespace. A problem without tests has no value (None).

    Every completion runs in a Python process of its own (`pspo_lab.sandbox`), in a folder that is the root, without
    environment variables, with limits on wall and CPU time and on memory, and under a seccomp filter set before the
    program begins: no sockets, no other process, no signals to others, no file opened for writing or made or removed.
    It is killed when its time is up, and what it prints is dropped. If the kernel refuses the filter, nothing is run
    and the reward raises.

    It does not protect against: a program that reads files (all that you can read; it cannot send them anywhere);
    faults in the kernel or the processor; competition for CPU and memory bandwidth; and cheating, because program and
    tests share an interpreter: a program can replace `assert`'s operands, or search the interpreter for the secret
    that marks a report. Printing cannot forge one. Programs that need sockets, subprocesses, written files or asyncio
    fail.

    Attributes:
        column: column of the data with the tests: Python text, one test, or a list of texts, one test each.
        all_or_nothing: 1 if all tests pass, else 0.
        seconds: wall time of a program with all its tests.
        memory_mb: address space of a process.
        processes: programs that run at a time.
    """

    column: str = "tests"
    all_or_nothing: bool = False
    seconds: float = 10.0
    memory_mb: int = 1024
    processes: int = 4

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise ValueError(f"CodeReward runs on Linux only (its sandbox is seccomp), not on {sys.platform}")
        if min(self.seconds, self.memory_mb, self.processes) <= 0:
            raise ValueError(f"seconds, memory_mb and processes must be above 0, not {self}")

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if self.column not in problem.fields:
                columns = ", ".join(problem.fields)
                raise RewardError(f"CodeReward: there is no column {self.column!r} (columns: {columns}); set column")
            for test in self.tests(problem):
                if not isinstance(test, str) or checks_nothing(test):
                    tests = "a test or a list of tests, Python that raises, and calls the functions that it defines"
                    raise RewardError(f"CodeReward: {self.column} must hold {tests}, not {test!r:.60}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        self.check_problems(problems)
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(self.value, completions, map(self.tests, problems)))

    def tests(self, problem: Problem) -> list[str]:
        """Return a problem's tests."""
        tests = problem.fields[self.column]
        if isinstance(tests, list | tuple):
            return list(tests)
        return [] if tests in (None, "") else [tests]

    def value(self, completion: str, tests: list[str]) -> float | None:
        """Return one completion's reward."""
        if not tests:
            return None
        share = self.run_tests(extract_code(completion), tests) / len(tests)
        return float(share == 1) if self.all_or_nothing else share

    def run_tests(self, code: str, tests: list[str]) -> int:
        """Return how many tests the program passes; 0 if it does not end in time."""
        secret = secrets.token_hex(16)
        limits = {"seconds": int(self.seconds) + 1, "memory": self.memory_mb * 2**20}
        with tempfile.TemporaryFile("w+") as specification:
            json.dump({"code": code, "tests": tests, "secret": secret, **limits}, specification)
            specification.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(SANDBOX)],
                stdin=specification,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
                start_new_session=True,
            )
            try:
                lines = reports(process.stdout.fileno(), secret, self.seconds)
                started = next(lines, {})
                if "ready" not in started:
                    reason = started.get("refused", "Python did not start in it")
                    raise RewardError(f"CodeReward: the sandbox cannot be set up here: {reason}; no program was run")
                return next(lines, {}).get("passed", 0)
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()


def reports(descriptor: int, secret: str, seconds: float) -> Iterator[dict]:
    """Yield the sandbox's reports until SECONDS after the first; lines without the secret are ignored."""
    deadline = time.monotonic() + START_SECONDS
    size = 0
    rest = b""
    while size < MAX_REPORT and select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
        if not (data := os.read(descriptor, MAX_REPORT)):
            return
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if secret.encode() in line:
                deadline = time.monotonic() + seconds
                yield json.loads(line)
