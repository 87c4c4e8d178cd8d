"""Rewards: their exact values, plug-ins, and what is refused."""

import asyncio
import importlib
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import completions
from light_rewards import Leaves, calls_in_turn
from naive import make_rollout

from pspo.config import RewardConfig
from pspo.errors import UserCodeError, user_frames
from pspo.tasks import ExactMatch, MathVerifyReward, SoftOverlong
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import FormatReward, MathReward, Reward, math_reward
from pspo.tasks.scoring import check_rewards, show_failures, total_rewards
from pspo.tasks.workers import worker_pool


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("#### 5", 5, 1.0), ("#### 5 apples", 5, 1.0), ("it is 5", 5, 1.0),  # 1 + 0.05 is clipped
        ("#### 6", 5, 0.05), ("it is 6", 5, 0.0), ("", 5, 0.0), ("####", 0, 0.0), ("#### 1e9999", 5, 0.05),
        ("#### 0.333333", Fraction(1, 3), 1.0), ("#### 0.33333", Fraction(1, 3), 0.05),
        ("#### 1/3", Fraction(1, 3), 1.0), ("#### 1.000001", 1, 1.0), ("#### 0.999999", 1, 1.0),  # the tolerance away
        ("#### 1.0000010000000000000001", 1, 0.05), ("#### 0.9999989999999999999999", 1, 0.05),
        ("#### 9007199254740993", 2**53 + 1, 1.0), ("#### 9007199254740993", 2**53, 0.05),  # equal as floats
    ],
)  # fmt: skip
def test_math_reward(completion, gold, reward):
    assert math_reward(completion, gold) == reward


def batch(*rows):
    return [text for text, _ in rows], [Problem("?", Fraction(gold)) for _, gold in rows]


def test_math_reward_options():
    completions, problems = batch(("#### 5\n#### 6", 5), ("#### 5.05", 5), ("#### 9", 5))
    assert MathReward(marker="first")(completions, problems) == [1.0, 0.05, 0.05]
    assert MathReward(tolerance="0.05", format_bonus=0.0)(completions, problems) == [0.0, 1.0, 0.0]
    assert MathReward(tolerance=0, format_bonus=1)(completions, problems) == [1.0, 1.0, 1.0]
    assert MathReward(tolerance=1e-6)(*batch(("#### 1.000001", 1))) == [1.0]  # the decimal as written, not its float


def total(functions, weights, completions, problems, timeout=0.0, on_error="raise", workers=0, **inputs):
    reward = RewardConfig(functions, weights, timeout, on_error, workers)
    return total_rewards(reward, completions, problems, **inputs)


@dataclass(frozen=True)
class Returns(Reward):
    """A user's reward, without registration."""

    value: object

    def __call__(self, completions, problems):
        return self.value


def test_total_is_the_weighted_sum():
    completions, problems = batch(("#### 5", 5), ("#### 6", 5))
    assert math.isnan(total([Returns([1, None])], None, completions, problems).totals[1])
    functions = [MathReward(), FormatReward(), Returns([3, -2]), Returns(np.array([0.5, 0.25], dtype=np.float32))]
    totals, by_name, *_ = total(functions, [1.0, 0.5, 2.0, 4.0], completions, problems)
    assert totals == [1.0 + 0.5 + 6.0 + 2.0, 0.05 + 0.5 - 4.0 + 1.0]
    returned = {"Returns": [3.0, -2.0], "Returns_2": [0.5, 0.25]}
    assert by_name == {"MathReward": [1.0, 0.05], "FormatReward": [1.0, 1.0]} | returned
    assert [type(each) for each in total([MathReward(format_bonus=1)], None, completions, problems)[0]] == [float] * 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "Returns: returned: 1 values for 2 completions"), ([1.0, "1"], "for completion 1 returned '1'"),
        ([float("nan"), 1.0], "completion 0 returned nan"), (1.0, "Returns returned 1.0"),
        ([1.0, 10**400], "completion 1 returned 1.*; it must be a number up to 1e.15"),
        ([1.0, 1e39], "completion 1 returned 1e.39"), ([torch.ones(2), 1.0], "returned tensor"),
    ],
)  # fmt: skip
def test_a_bad_return_value_names_the_reward(value, message):
    with pytest.raises(ValueError, match=message):
        total([MathReward(), Returns(value)], None, *batch(("#### 5", 5), ("#### 6", 5)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_exits_has_failed(workers):
    message = "called sys.exit('bye')"
    arguments = [Leaves(), MathReward()], None, *batch(("#### 5", 5))
    with pytest.raises(UserCodeError, match=re.escape(f"reward Leaves {message}")):
        total(*arguments, workers=workers)
    totals, by_name, _, failures = total(*arguments, workers=workers, on_error="none")
    assert math.isnan(totals[0])
    assert by_name["MathReward"] == [1.0]
    assert message in str(failures["Leaves"])


PROBLEMS = [
    Problem("1+1?", Fraction(2), {"hint": "add", "level": 3}, "own", "sum", "easy"),
    Problem([{"role": "user", "content": "Hi"}], "hello", {}, "chat"),
]
GIVEN = {
    "completion_ids": [[5, 6, 7], [8]], "completion_tokens": [3, 1], "truncated": [True, False], "step": 12,
    "max_completion_tokens": 16,
}  # fmt: skip


def called_with(function, completions=("#### 2", "hello"), problems=PROBLEMS, **given):
    given = {name: value for name, value in (GIVEN | given).items() if value is not None}
    return total([function], None, list(completions), problems, **given)[1]


def test_a_function_gets_what_it_names_and_nothing_else():
    seen = {}

    def asks(completions, prompts, problems, completion_ids, completion_tokens, truncated, step, hint, level, category,
             max_completion_tokens, answer, trainer_state, absent=7):  # fmt: skip
        seen.update(locals())
        return [0, 1]

    assert called_with(asks) == {"asks": [0.0, 1.0]}
    assert seen.pop("trainer_state").global_step == seen.pop("step") == 12
    del seen["seen"]
    assert seen == {
        "completions": ["#### 2", [{"role": "assistant", "content": "hello"}]],  # as in TRL where the prompt is a chat
        "prompts": ["1+1?", [{"role": "user", "content": "Hi"}]], "problems": PROBLEMS,
        "completion_ids": [[5, 6, 7], [8]], "completion_tokens": [3, 1], "truncated": [True, False],
        "hint": ["add", None], "level": [3, ""], "category": ["sum", ""], "max_completion_tokens": 16,
        "answer": [Fraction(2), "hello"], "absent": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("function", "answer", "message"),
    [
        (lambda completions, hnit: [], "yes", "^reward <lambda>: missing a required argument: 'hnit'; .*, hint, level"),
        (MathReward(), "yes", "MathReward needs numeric answers, not 'yes'; ExactMatch takes texts"),
    ],
)
def test_what_a_reward_cannot_have_is_refused_before_a_model_is_loaded(function, answer, message):
    with pytest.raises(ValueError, match=message):
        check_rewards(RewardConfig([function]), [Problem("?", answer, {"hint": "add", "level": 3})])


def test_rewards_hear_what_was_drawn_and_which_completions_hit_the_limit():
    heard = {}

    def hears(**inputs):
        heard.update(inputs)
        return [0.5] * len(inputs["completions"])

    rollout, _ = make_rollout()
    assert rollout.score([Problem("?")] * len(rollout), 1, RewardConfig([hears]), 3, 10).totals == [0.5] * len(rollout)
    ids = completions(rollout)
    told = {"completion_ids": ids, "completion_tokens": [*map(len, ids)], "truncated": (~rollout.terminated).tolist()}
    assert heard == heard | told | {"step": 3, "max_completion_tokens": 10}


def only_math(prompts, completions, task, **kwargs):
    assert kwargs["trainer_state"].global_step == 12
    return [1.0 if name == "math" else None for name in task]


async def judge(prompts, completions, **kwargs):
    async def one(completion):
        await asyncio.sleep(0.01)
        return len(completion[0]["content"]) / 10

    return await asyncio.gather(*(one(completion) for completion in completions))


def test_trl_style_functions_run_unchanged():
    problems = [Problem([{"role": "user", "content": "?"}], None, {"task": task}) for task in ("math", "code")]
    totals, by_name, *_ = total([only_math, judge], None, ["four", "five or six"], problems, **GIVEN)
    assert by_name["only_math"] == pytest.approx([1.0, math.nan], nan_ok=True)
    assert by_name["judge"] == [0.4, 1.1]
    assert totals == [1 + 0.4, 1.1]

    async def cell():  # a notebook's loop is running
        return called_with(judge, completions=["abcdef", "hello"], problems=[PROBLEMS[1]] * 2)

    assert asyncio.run(cell()) == {"judge": [0.6, 0.5]}


@pytest.mark.parametrize("workers", [0, 1])
def test_async_functions_have_one_loop_for_all_calls(workers):
    """What a module makes once, such as a semaphore, works in every call."""
    problems = [Problem("?")] * 3
    for _ in range(2):
        assert total([calls_in_turn], None, ["a", "bc", ""], problems, workers=workers).totals == [1, 2, 0]
    with pytest.raises(Exception, match=r"reward calls_in_turn called sys.exit\(3\)"):
        total([calls_in_turn], None, ["exit", "a", "b"], problems, workers=workers)


WORK = """
import array, asyncio, os, time

async def hangs_async(completions):
    await asyncio.sleep(60)

def process_id(completions, step):
    assert step == 12
    time.sleep(0.2)  # until the other process has its part
    return [float(os.getpid())] * len(completions)

def logs(completions, log_metric, log_extra):
    log_metric("longest", max(map(len, completions)))
    log_extra("kinds", [complex(len(text)) for text in completions])
    log_extra("size", array.array("q", map(len, completions)))
    return [0.0] * len(completions)

def own_length(completions):
    return array.array("d", map(len, completions))

def longest(prompts, completions):
    if "raise" in completions:
        raise KeyError("raise")
    lengths = {prompt: [] for prompt in prompts}
    for prompt, completion in zip(prompts, completions):
        lengths[prompt].append(len(completion))
    return [float(len(text) == max(lengths[prompt])) for prompt, text in zip(prompts, completions)]

def hangs_on_x(completions):
    for completion in completions:
        while completion == "x":
            time.sleep(0.1)
        if completion == "exit":
            os._exit(3)
        if completion == "raise":
            raise KeyError("in a worker")
        if completion == "leave":
            raise SystemExit(3)
    return [1.0] * len(completions)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module of reward functions that a new process imports in no time."""
    (tmp_path / "work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    worker_pool.cache_clear()  # whose processes know no such folder
    yield importlib.import_module("work")
    worker_pool.cache_clear()


def test_what_functions_log_as_trls_do(work):
    """In workers each group its own; a name that two functions log is there twice."""
    texts, problems = ["a", "b", "bcd", "ef"], [Problem("?")] * 4
    for workers, longest in ((0, [3.0] * 4), (2, [1.0, 1.0, 3.0, 3.0])):
        functions = [work.logs, work.own_length, work.logs]
        logged = total(functions, None, texts, problems, workers=workers, group_size=2).logged
        columns = {"longest": longest, "kinds": ["(1+0j)", "(1+0j)", "(3+0j)", "(2+0j)"], "size": [1, 1, 3, 2]}
        assert logged == columns | {f"{name}_2": values for name, values in columns.items()}


def in_workers(function, *completions, group_size=1, **settings):
    problems = [Problem("?")] * len(completions)  # of all groups, as where a pass over one problem ends
    rows = {"problems": problems, "completion_ids": None, "truncated": None}
    (values,) = called_with(function, completions, **rows, group_size=group_size, **settings).values()
    return values


def test_workers_share_a_batch_and_keep_its_order(work):
    ids = in_workers(work.process_id, *"abcd", group_size=2, workers=2)
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert os.getpid() not in ids
    assert in_workers(work.process_id, *"abcd", group_size=2, workers=2) in (ids, ids[::-1])  # kept
    assert in_workers(work.own_length, "a", "bb", "ccc", "dddd", "e", workers=3) == [1, 2, 3, 4, 1]


def test_values_do_not_depend_on_the_number_of_workers(work):
    """A group is called whole, by any number of processes, and where another group's call failed."""
    texts = ["a", "bb", "ccc", "dddd"]
    for workers in (0, 1, 3):
        assert in_workers(work.longest, *texts, *texts, group_size=4, workers=workers) == [0, 0, 0, 1] * 2
        values = in_workers(work.longest, *texts[1:], "raise", *texts, group_size=4, workers=workers, on_error="none")
        assert values == pytest.approx([math.nan] * 4 + [0, 0, 0, 1], nan_ok=True)


def test_workers_that_hang_or_die_are_replaced(work):
    lenient = {"workers": 2, "timeout": 2.0, "on_error": "none"}
    values = in_workers(work.hangs_on_x, "a", "b", "x", "c", group_size=2, **lenient)
    assert values == pytest.approx([1, 1, math.nan, math.nan], nan_ok=True)
    values = in_workers(work.hangs_on_x, "a", "exit", "raise", "c", "leave", "d", **lenient)
    assert values == pytest.approx([1, math.nan, math.nan, 1, math.nan, 1], nan_ok=True)
    with pytest.raises(UserCodeError, match=r'raise KeyError\("in a worker"\)'):
        in_workers(work.hangs_on_x, "a", "raise", workers=2)
    with pytest.raises(TimeoutError, match=r"reward hangs_on_x took longer than 1 sec"):
        in_workers(work.hangs_on_x, "a", "x", workers=2, timeout=1)
    with pytest.raises(TimeoutError, match=r"reward hangs_async took longer than 0.2 sec"):
        in_workers(work.hangs_async, "a", timeout=0.2)


def test_an_async_reward_that_hangs_lets_the_process_end(work):
    code = "import os, signal, threading, work; from pspo.tasks.scoring import call_reward; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # in the background a shell ignores it
    code += "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start(); "
    code += "call_reward('', work.hangs_async, {'completions': []}, 0)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=30)
    assert b"KeyboardInterrupt" in ended.stderr


def test_a_failing_group_alone_is_unknown_and_the_traceback_is_shown_once(capsys):
    shown = {}

    def divides(completions):
        return [1 / (len(completion) - 1) for completion in completions]

    for _ in range(2):
        functions = [divides, MathReward()]
        scores = total(functions, None, *batch(("abc", 5), ("a", 6)), on_error="none")
        show_failures(scores.failures, shown)
        assert scores.totals == pytest.approx([0.5, math.nan], nan_ok=True)
    err = capsys.readouterr().err
    assert err.count("reward divides failed (shown once)") == 1
    assert err.count("ZeroDivisionError") == 1
    assert shown == {"divides": "ZeroDivisionError: division by zero"}


def test_only_frames_inside_the_package_are_the_packages():
    """A module beside the package whose name begins as the package's does is the user's."""
    package = str(Path(user_frames.__code__.co_filename).parent)
    if "site-packages" in package:
        pytest.skip("all beside an installed package is installed")
    for file, is_users in ((f"{package}_my.py", True), (f"{package}/own.py", False), (f"{package}_lab/own.py", False)):
        with pytest.raises(KeyError) as raised:
            exec(compile("{}['key']", file, "exec"))
        assert (file in [frame.filename for frame in user_frames(raised.value)]) is is_users


def test_exact_match():
    problems = [Problem("?", answer) for answer in ("New York", "new york", "b", None, Fraction("5000.5"))]
    completions = ["It is\n#### New  York", "New York", "#### a", "x", "$5,000.50"]
    assert ExactMatch()(completions, problems) == [1, 0, 0, None, 1]


def test_soft_overlong_is_the_formula():
    lengths = [0, 80, 81, 90, 99, 100, 101, 500]
    expected = [0, 0, -1 / 20, -0.5, -19 / 20, -1, -1, -1]
    assert SoftOverlong(20)(lengths, max_completion_tokens=100) == pytest.approx(expected)
    with pytest.raises(ValueError, match="buffer must be"):
        SoftOverlong(0)


def test_math_verify_reads_formulas_and_survives_hostile_ones():
    pytest.importorskip("math_verify")
    cases = [(r"$\frac{2}{4}$", "1/2", 1), (r"\boxed{1 + x^2}", "x^2+1", 1), (r"\boxed{(1,2)}", "(1,2)", 1),
             (r"\boxed{3}", "4", 0), ("5", None, None),
             ("7", Fraction(7), 1), (r"The values are $\boxed{-2}$ and $\boxed{1}$", "1", 1),
             (r"First $\boxed{\frac{\pi}{4}}$. So $\boxed{\frac{5\pi}{4}}$.", r"\frac{5\pi}{4}", 1),
             (r"$\boxed{1}$ and $\boxed{-2}$", "1", 0), (r"$\boxed{1}$, $\boxed{1", "1", 0)]  # fmt: skip
    problems = [Problem("?", answer) for _, answer, _ in cases]
    values = MathVerifyReward(seconds=60)([completion for completion, _, _ in cases], problems)
    assert values == [value for _, _, value in cases]
    began = time.monotonic()
    assert MathVerifyReward(seconds=1)(["$9^{9^{9^{9}}}!$"], [Problem("?", "5")]) == [None]
    assert time.monotonic() - began < 4  # its own limit is 5 s
