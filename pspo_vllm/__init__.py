"""Rollouts by vLLM: ``--rollout.engine pspo_vllm.VLLM``, or ``pspo_vllm.Servers``, which ``pspo serve`` starts."""

import pkgutil
from typing import Any

ENGINES = {"VLLM": "pspo_vllm.vllm:VLLM", "Servers": "pspo_vllm.servers:Servers"}


def __getattr__(name: str) -> Any:
    """Import an engine only when it is named: each of vLLM's processes imports this package for the plugin."""
    if name not in ENGINES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return pkgutil.resolve_name(ENGINES[name])
