"""Train on a taskset written for `verifiers` 0.4: its tasks are the problems, its reward methods the reward.

The tasks must have one turn, and scoring that needs no container.
"""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


class Tasks:
    """The tasks of a taskset: `problems` is the data, `rewards` scores completions by the tasks' own methods."""

    def __init__(self, taskset: Iterable[vf.Task]) -> None:
        self.tasks = list(taskset)
        self.problems = [{"prompt": task.data.prompt_text, "task": i} for i, task in enumerate(self.tasks)]

    def rewards(self, completions: list[str], task: list[int]) -> list[float]:
        return [asyncio.run(self.reward(self.tasks[i], text)) for i, text in zip(task, completions, strict=True)]

    async def reward(self, task: vf.Task, completion: str) -> float:
        user = MessageNode(message=vf.UserMessage(content=task.data.prompt_text))
        answer = MessageNode(parent=0, message=vf.AssistantMessage(content=completion), sampled=True)
        record = TraceTask(type=type(task).__name__, data=task.data)
        trace = Trace(task=record, agent=AgentInfo(config=vf.AgentConfig()), nodes=[user, answer])
        await task.score(trace)
        return trace.reward
