"""CodeReward: what passes, and hostile programs, which end in bounded time, gain nothing and leave nothing behind."""

import json
import os
import subprocess
import sys
import threading

import pytest

from pspo.config import RewardConfig
from pspo.errors import UserCodeError
from pspo.tasks import Problem, check_rewards
from pspo_lab.code import SANDBOX, CodeReward, extract_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is seccomp")
LONG_LANGUAGE = "```" + "a" * 10**6 + "`"
SQUARE = "\ndef square(x): return x * x\n"
HUMAN_EVAL = "METADATA = {'author': 'jt'}\n\ndef check(candidate):\n    assert candidate(2) == 4\n\n"
UNITTEST = """
import unittest
class Test(unittest.TestCase):
    def test_square(self): self.assertEqual(square(3), 9)
if __name__ == '__main__': assert unittest.main(exit=False).result.wasSuccessful()
"""


def value(code: str, *tests: str, **settings) -> float | None:
    problem = Problem("?", None, {"tests": list(tests) or ["assert square(3) == 9"]})
    return CodeReward(**{"seconds": 1.5} | settings)([f"```python\n{code}\n```"], [problem])[0]


def children() -> list[str]:
    """This process's children that run a sandbox, zombies included."""
    listed = subprocess.run(["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if "sandbox" in line or "defunct" in line]


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("a = 1", "a = 1"), ("so:\n```python\na = 1", "a = 1"),
        ("```python\na = 1\n```\n``` py\na = 2\n```\n```\nout\n```", "a = 2\n"),
        ("Mind the ``` here:\n```python\na = 1\n```", "a = 1\n"),
        ("1. So:\n\n   ```python\n   if a:\n       b\n   ```\n2. Done", "if a:\n    b\n"),
        ("```\ndef f(): pass\n```\nprints\n```\n3\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n```\nUse it:\n```python\nx = f()\n```", "def f(): pass\n"),
        ("`" * 10**6, "`" * 10**6), ("```\n" * 9 + "~" * 10**6, "~" * 10**6), (LONG_LANGUAGE, LONG_LANGUAGE),
    ],
)  # fmt: skip
def test_extract_code(completion, code):
    assert extract_code(completion) == code


def test_share_of_tests():
    tests = ("assert square(2) == 4", "assert square(3) == 6", "assert square(-1) == 1", "nonsense(")
    assert value(SQUARE, *tests) == 0.5
    assert value(SQUARE, *tests, all_or_nothing=True) == 0
    assert value(SQUARE, *tests[::2], all_or_nothing=True) == 1
    assert value("def square(x): return x", "assert square(2) == 4") == 0


def test_each_completion_meets_its_own_tests_in_order():
    tests = [*(f"assert f() == {i}" for i in range(6)), None]
    completions = [f"def f(): return {i - i % 2}" for i in range(7)]
    problems = [Problem("?", "", {"tests": test}) for test in tests]
    assert CodeReward()(completions, problems) == [1, 0, 1, 0, 1, 0, None]


def test_missing_tests_are_named():
    with pytest.raises(UserCodeError, match=r"no column 'tests' \(columns: checks\)"):
        CodeReward()(["x"], [Problem("?", None, {"checks": "assert 1"})])
    assert CodeReward(column="checks")(["x = 1"], [Problem("?", None, {"checks": "assert x"})]) == [1]


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps(["assert square(2) == 4"]), json.dumps({"inputs": [2]}), 4, [{}], HUMAN_EVAL, ["# to come"],
        ["import math", "assert square(2) == 4"], "square(2) == 4",
        "try: assert square(2) == 4\nexcept Exception: pass",
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self): assert square(2) == 4\nunittest.main()",
    ],
)  # fmt: skip
def test_what_passes_with_any_program_is_no_test(tests):
    with pytest.raises(UserCodeError, match="tests must hold a test or a list of tests, Python that asserts"):
        check_rewards(RewardConfig([CodeReward()]), [Problem("?", None, {"tests": tests})])


def test_what_fails_with_some_program_is_a_test():
    for test in ("(a, b) = f(2)\nassert a == 1", f"{HUMAN_EVAL}def both(f): check(f)\nboth(square)",
                 "try:\n    square('a')\n    assert False\nexcept TypeError: pass", UNITTEST,
                 "import pytest\nwith pytest.raises(TypeError): square('a')"):  # fmt: skip
        check_rewards(RewardConfig([CodeReward()]), [Problem("?", None, {"tests": [test]})])


@pytest.mark.parametrize("test", ["if __name__ == '__main__': assert square(3) == 9", UNITTEST])
def test_the_main_part_of_a_test_runs(test):
    assert [value(program, test) for program in (SQUARE, "def square(x): return 0", "square = exit")] == [1, 0, 0]


@pytest.mark.parametrize(
    "program",
    [
        "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: 0).__code__",
        "import builtins\nbuiltins.exec = lambda *a: None",
        "import builtins\nbuiltins.__build_class__ = lambda *a, **k: type('Nine', (), {'square': 0})",
        "import __main__\n__main__.exec = lambda *a: None",
        "import sys\ndef trace(frame, event, argument):\n"
        "    if frame.f_code.co_filename == 'test.py': frame.f_globals['square'] = lambda x: 9\n"
        "sys.settrace(trace)\nsys.setprofile(trace)\nsys.settrace = sys.setprofile = lambda hook: None",
        "import json\ndumps = json.dumps\njson.dumps = lambda record: dumps(record | {'passed': 1})",
    ],
)
def test_a_program_that_replaces_what_runs_the_tests_gains_nothing(program):
    test = "class Nine: square = 9\nassert abs(square(3)) == Nine.square"
    assert value(f"{program}\ndef square(x): return 0", test) == 0
    assert value(f"def square(x): return 9\n{program}", test) == 1


def test_usual_programs_run():
    assert value(
        "import collections, dataclasses, datetime, decimal, functools, hashlib, heapq, io, itertools, json\n"
        "import math, os, queue, random, re, statistics, string, threading, time, typing, uuid\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = 1\n"
        "thread = threading.Thread(target=random.random); thread.start(); thread.join(); time.sleep(0.01)\n"
        "print(uuid.uuid4(), datetime.datetime.now(), os.listdir('.'), open('/dev/null').read())\n"
        "if __name__ == '__main__':\n    input()\n" + SQUARE
    )
    assert value("import numpy as np\nassert (np.ones((50, 50)) @ np.ones((50, 50)) == 50).all()" + SQUARE) == 1


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "output": "while True: print('x' * 10**6)",
    "signals ignored": "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
                       "    except (OSError, ValueError): pass\nwhile True: pass",
    "memory": "parts = []\nwhile True: parts.append('x' * 10**7)",
}  # fmt: skip
STOLEN = (
    "import json, os, sys\nframe = sys._getframe()\nwhile 'channel' not in frame.f_locals: frame = frame.f_back\n"
    "secret, channel = frame.f_locals['specification']['secret'], frame.f_locals['channel']\n"
)
REFUSED = {
    "write": "open('HERE/evil', 'w')",
    "memory file": "import os; os.memfd_create('x')",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "exit": "import sys; sys.exit()",
    "crash": "import ctypes; ctypes.string_at(0)",
    "no text": "x = '\ud800'",
    "a report": "import json, os\nfor fd in range(64):\n"
                "    try: os.write(fd, json.dumps({'secret': '', 'passed': 1}).encode() + b'\\n')\n"
                "    except OSError: pass\nos._exit(0)",
    "a stolen report": f"{STOLEN}os.write(channel, json.dumps([secret]).encode() + b'\\n')",
    "a report of too many": f"{STOLEN}report = json.dumps({{'secret': secret, 'passed': 2}})\n"
                            "os.write(channel, report.encode() + b'\\n')",
    "a flood": "import os\nwhile True:\n    for fd in range(64):\n        try: os.write(fd, b'x' * 65536)\n"
               "        except OSError: pass",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*ENDLESS, *REFUSED])
def test_a_hostile_program_gains_nothing_and_leaves_nothing(kind, tmp_path):
    (tmp_path / "kept").write_text("kept")
    code = (ENDLESS | REFUSED)[kind].replace("HERE", str(tmp_path))
    threads = threading.active_count()
    assert value(f"{code}\n{SQUARE}", seconds=0.4 if kind in ENDLESS else 1.5) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept": "kept"}
    assert not children()
    assert threading.active_count() == threads


def test_raw_system_calls_are_refused_too():
    numbers = {"x86_64": (57, 58, 0x40000039, 41, 435, 56), "aarch64": (198, 220, 435)}[os.uname().machine]
    calls = "".join(f"assert libc.syscall({number}, 17, 0, 0, 0, 0) == -1\n" for number in numbers)
    assert value(f"import ctypes\nlibc = ctypes.CDLL(None)\n{calls}{SQUARE}") == 1


def test_the_trainer_s_environment_and_files_are_not_handed_over(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        code = f"import os\nassert 'HF_TOKEN' not in os.environ\ntry: os.fstat({file.fileno()})\nexcept OSError: pass\n"
        assert value(f"{code}else: raise SystemExit\n{SQUARE}") == 1


def test_without_a_sandbox_no_program_runs(monkeypatch, tmp_path):
    sandbox = tmp_path / "sandbox.py"
    text = SANDBOX.read_text()
    sandbox.write_text(text.replace('"x86_64": (0,', '"pdp11": (0,').replace('"aarch64": (1,', '"vax": (1,'))
    monkeypatch.setattr("pspo_lab.code.SANDBOX", sandbox)
    with pytest.raises(UserCodeError, match=r"cannot be set up here.*pdp11 and vax.*; no program was run"):
        value(SQUARE)
