"""Environments of the package `verifiers` (pip install 'verifiers<0.2'), as environments of a rollout.

In `my_env.py`, for --rollout.environment my_env.wordle:

    wordle = adapt(verifiers.load_environment("wordle"))
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import verifiers

from pspo.environments.tools import Call
from pspo.tasks.environment import MakeEnvironment
from pspo.tasks.problem import Messages, Problem


def adapt(env: verifiers.Environment) -> MakeEnvironment:
    """The environment, which plays and scores each episode by its own ``run_rollout``."""
    loop = asyncio.new_event_loop()
    return lambda: VerifiersEnvironment(env, loop)


class Policy(verifiers.OpenAIChatCompletionsClient):
    """What the environment asks for the model's turns: waits for both, the messages and the turn."""

    async def get_response(self, prompt: Sequence[Any], *_: Any, **__: Any) -> verifiers.Response:
        self.asked.set_result(prompt)
        return await self.answered


def response(text: str, calls: Sequence[Call]) -> verifiers.Response:
    """The model's turn."""
    tools = [{"id": str(i), "name": name, "arguments": json.dumps(values)} for i, (name, values) in enumerate(calls)]
    message = {"content": text, "tool_calls": tools or None, "finish_reason": "stop", "is_truncated": False}
    return verifiers.Response(id="", created=0, model="policy", message=message)


class VerifiersEnvironment:
    """One episode; the reward comes with its end. ``role`` is that of the last message observed."""

    def __init__(self, env: verifiers.Environment, loop: asyncio.AbstractEventLoop) -> None:
        self.env, self.loop, self.task, self.role = env, loop, None, "user"
        if tools := [{"type": "function", "function": tool.model_dump()} for tool in env.tool_defs or ()]:
            self.tools = tools

    def __del__(self) -> None:
        if self.task is not None and not self.task.done():  # an episode that met a limit of the rollout's
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self.task)

    def reset(self, problem: Problem) -> Messages:
        self.__del__()
        row = {"example_id": 0, **problem.fields, "prompt": problem.prompt, "answer": str(problem.answer or "")}
        self.policy = Policy(None)
        self.task = self.loop.create_task(self.env.run_rollout(row, self.policy, "policy", {}))
        self.messages: Sequence[Any] = ()
        self.messages = self.wait()
        if self.task.done():  # before its first request: raises what it raised
            self.task.result()
        return [{"role": message.role, "content": message.content} for message in self.messages]

    def step(self, text: str, calls: Sequence[Call] = ()) -> tuple[str, float, bool]:
        before = len(self.messages) + 1  # with the model's own
        self.policy.answered.set_result(response(text, calls))
        self.messages = self.wait()
        if self.task.done():
            return "", float(self.task.result()["reward"]), True
        self.role = self.messages[-1].role
        return "\n\n".join(str(message.content) for message in self.messages[before:]), 0.0, False

    def wait(self) -> Sequence[Any]:
        """The messages that the model has to answer; those before once the episode is over."""
        asked, self.policy.answered = self.loop.create_future(), self.loop.create_future()
        self.policy.asked = asked
        self.loop.run_until_complete(asyncio.wait({self.task, asked}, return_when=asyncio.FIRST_COMPLETED))
        return asked.result() if asked.done() else self.messages
