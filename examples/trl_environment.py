"""Play environments that were written for TRL's `environment_factory`.

    python -m pspo.train --rollout.environment \
        '{class_path: examples.trl_environment.TRLEnvironment, init_args: {factory: my_env.Game}}'

The factory's public methods are the tools, as in TRL. A `get_reward` method is the environment's reward.
"""

import inspect
import pkgutil
from typing import Any

from pspo.tasks import Problem

NO_TOOLS = ("reset", "get_reward", "close")


class TRLEnvironment:
    role = "tool"

    def __init__(self, factory: str) -> None:
        self.game = pkgutil.resolve_name(factory)()
        names = [name for name, _ in inspect.getmembers(type(self.game), inspect.isfunction)]
        self.tools = [getattr(self.game, name) for name in names if name[0] != "_" and name not in NO_TOOLS]

    def reset(self, problem: Problem) -> str:
        self.total = 0.0
        observation = self.game.reset(prompt=problem.prompt, **problem.fields)
        return problem.prompt + (observation or "")

    def step(self, text: str, calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, float, bool]:
        tools = {tool.__name__: tool for tool in self.tools}
        results = []
        for name, arguments in calls:
            try:
                results.append(str(tools[name](**arguments)))
            except Exception as error:  # the model reads errors of the environment and of its arguments
                results.append(f"error: {error!r}")
        gained = (self.game.get_reward() if hasattr(self.game, "get_reward") else 0.0) - self.total
        self.total += gained  # an episode that is cut keeps the reward of its state so far
        return "\n".join(results), gained, not calls

    def close(self) -> None:
        if hasattr(self.game, "close"):
            self.game.close()
