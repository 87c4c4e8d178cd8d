"""pspo: a from-scratch, pure-PyTorch RL trainer for language models (reference implementation of PSPO)."""

import importlib

__version__ = "0.1.0"
__all__ = ["config", "losses", "model", "rollout", "tasks", "train", "update"]


def __getattr__(name: str) -> object:
    """Import the modules of ``__all__`` on first use: importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'pspo' has no attribute {name!r}")
    return importlib.import_module(f"pspo.{name}")
