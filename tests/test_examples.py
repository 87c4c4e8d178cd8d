"""Examples for problems and environments that other projects bring."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from examples.trl_environment import TRLEnvironment
from pspo.tasks import Problem

EXAMPLES = Path(__file__).parents[1] / "examples"


class Counter:
    """An environment as TRL documents it: `reset` takes the columns, public methods are tools."""

    def reset(self, prompt: str, goal: int, **kwargs) -> str:
        self.count = 0
        self.goal = goal
        return f" Count to {goal}."

    def add(self, n: int) -> str:
        """Add to the count.

        Args:
            n: what to add
        """
        self.count += n
        return f"count {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)


def test_trl_environment_plays_tools_and_sums_to_its_reward():
    environment = TRLEnvironment("tests.test_examples.Counter")
    assert [tool.__name__ for tool in environment.tools] == ["add"]
    assert environment.reset(Problem("Begin.", None, fields={"goal": 3})) == "Begin. Count to 3."
    assert environment.step("", [("add", {"n": 1}), ("add", {"n": 2})]) == ("count 1\ncount 3", 1.0, False)
    assert environment.step("", [("add", {"n": 1})]) == ("count 4", -1.0, False)
    text, gained, is_over = environment.step("", [("gone", {}), ("add", {"m": 1})])
    assert text.splitlines()[0] == "error: KeyError('gone')"
    assert "unexpected keyword argument 'm'" in text
    assert (gained, is_over) == (0.0, False)
    assert environment.step("done", []) == ("", 0.0, True)


@pytest.mark.nightly
def test_reasoning_gym_trains(here, monkeypatch):
    gym = pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(sys, "argv", ["from_reasoning_gym.py", "chain_sum"])
    checked = runpy.run_path(str(EXAMPLES / "from_reasoning_gym.py"))["checked"]
    entry = gym.create_dataset("chain_sum", size=1, seed=0)[0]
    assert checked(["1 + 1\n#### " + entry["answer"], "#### none"], [entry, entry]) == [1.0, 0.0]
    runpy.run_path(str(EXAMPLES / "from_reasoning_gym.py"), run_name="__main__")
    (run,) = (here / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["optimizer_steps"] == 20


@pytest.mark.nightly
def test_a_taskset_of_verifiers_has_problems_and_rewards():
    vf = pytest.importorskip("verifiers.v1")
    from examples.from_verifiers import Tasks

    class Sum(vf.TaskData):
        a: int

    class SumTask(vf.Task[Sum]):
        @vf.reward(weight=0.5)
        async def right(self, task, trace) -> float:
            return float(trace.last_reply == f"#### {task.a + 1}")

    tasks = Tasks(SumTask(Sum(prompt=f"What is {a} + 1?", a=a)) for a in range(60))
    assert tasks.problems[3]["prompt"] == "What is 3 + 1?"
    assert tasks.rewards(["#### 4", "#### 4"], [3, 2]) == [0.5, 0.0]
