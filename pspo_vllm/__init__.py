"""Rollouts by vLLM: ``--rollout.engine pspo_vllm.VLLM``, or ``pspo_vllm.Servers``, which ``pspo serve`` starts."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import the engines when they are named: each of vLLM's processes imports this package for its plugin."""
    if name == "VLLM":
        from pspo_vllm.vllm import VLLM

        return VLLM
    if name == "Servers":
        from pspo_vllm.servers import Servers

        return Servers
    raise AttributeError(f"module {__name__} has no attribute {name}")
