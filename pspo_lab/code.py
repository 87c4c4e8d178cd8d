"""CodeReward runs completions as programs and scores them by the problems' tests."""

import json
import os
import re
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
from textwrap import dedent

from pspo.errors import UserCodeError
from pspo.tasks.answers import after_thoughts
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import Reward

SANDBOX = Path(__file__).with_name("sandbox.py")
START_SECONDS = 60  # for Python to start, on a busy machine
MAX_REPORT = 4096  # bytes
FENCED = re.compile(r"^[ \t]*```([^`\n]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)  # language, code
DEFINES = re.compile(r"^(async +)?(def|class) ", re.MULTILINE)
CHECKS = re.compile(r"assert|raise|fail", re.IGNORECASE)  # a test that can fail has one of these words
N_CHECKED = 32  # problems whose tests are run before the training


def extract_code(completion: str) -> str:
    """Return the program in an answer, without its thoughts: the last ```python block that defines a function or class.

    If none defines one, the last ```python block; without ```python, blocks of any language count; without blocks, the
    whole answer is the program. A block stands between two lines that begin with ```, indented or not.
    """
    completion = after_thoughts(completion)
    blocks = [(info.lower().strip().partition(" ")[0], dedent(code)) for info, code in FENCED.findall(completion)]
    python = [code for language, code in blocks if language in ("python", "python3", "py")]
    candidates = python or [code for _, code in blocks] or [completion]
    defining = [code for code in candidates if DEFINES.search(code)]
    return (defining or candidates)[-1]


@dataclass(frozen=True)
class CodeReward(Reward):
    """Share of a problem's tests that the completion's program passes; Linux on x86_64 or aarch64.

    `extract_code` finds the program. A test is Python code that raises if the program is wrong, such as
    `assert add(1, 2) == 3`. It runs after the program, in its namespace, as `__main__`. Test cases of unittest end in
    `assert unittest.main(exit=False).result.wasSuccessful()`, as `unittest.main()` always raises. Tests that assert
    nothing, or pass without a program (32 are tried), are refused before training. Without tests the reward is None.

    Every completion runs in a Python process of its own (`pspo_lab.sandbox`), which is killed when its time is up. If
    the kernel refuses to confine this process, nothing is run and the reward raises. docs/guide/rewards.md says what
    the sandbox protects against, and what it does not.

    Attributes:
        column: column of the data that holds the tests: a text, which is one test, or a list of texts.
        all_or_nothing: the reward is 1 if all tests pass, else 0.
        seconds: limit of the wall time of a program with all its tests.
        memory_mb: limit of the address space of a process, in MiB.
        processes: number of programs that run at a time.
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
        rule = f"CodeReward: {self.column} must hold a test or a list of tests, Python that asserts something"
        for problem in problems:
            for test in self.tests(problem):
                if not isinstance(test, str) or not CHECKS.search(test):
                    raise UserCodeError(f"{rule}, not {test!r:.60}")
                if "unittest.main()" in test:
                    raise UserCodeError(f"{rule} and does not exit, as unittest.main() does: see `CodeReward`")
        tests = [self.tests(problem) for problem in problems[:N_CHECKED]]
        with ThreadPoolExecutor(self.processes) as threads:
            passed = list(threads.map(self.run_tests, [""] * len(tests), tests))
        if any(passed):
            test = tests[[n > 0 for n in passed].index(True)]
            raise UserCodeError(f"{rule} of the program; without a program, this test passes: {test!r:.60}")

    def __call__(self, completions: list[str], problems: list[Problem]) -> list[float | None]:
        with ThreadPoolExecutor(self.processes) as threads:
            return list(threads.map(self.value, completions, map(self.tests, problems)))

    def tests(self, problem: Problem) -> list[str]:
        if self.column not in problem.fields:
            columns = ", ".join(problem.fields)
            raise UserCodeError(f"CodeReward: there is no column {self.column!r} (columns: {columns}); set column")
        tests = problem.fields[self.column]
        if isinstance(tests, list | tuple):
            return list(tests)
        return [] if tests in (None, "") else [tests]

    def value(self, completion: str, tests: list[str]) -> float | None:
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
                started = json.loads(next(lines, b"{}"))
                if "ready" not in started:
                    reason = started.get("refused", "Python did not start in it")
                    raise UserCodeError(f"CodeReward: the sandbox cannot be set up here: {reason}; no program was run")
                report = re.search(rb'"passed": (\d{1,9})\}$', next(lines, b""))  # which the program may have written
                passed = int(report[1]) if report else 0
                return passed if passed <= len(tests) else 0
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                process.stdout.close()


def reports(descriptor: int, secret: str, seconds: float) -> Iterator[bytes]:
    """Yield the sandbox's reports, which are lines with the secret, until SECONDS after the last report."""
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
                yield line
