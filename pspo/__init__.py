"""pspo: a from-scratch, pure-PyTorch RL trainer for language models (reference implementation of PSPO)."""

import importlib

__version__ = "0.1.0"
__all__ = ["config", "losses", "model", "rollout", "tasks", "train", "update"]


def __getattr__(name: str) -> object:
    """Import the modules of ``__all__``, and the function `train`, on first use: torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'pspo' has no attribute {name!r}")
    if name != "train":
        return importlib.import_module(f"pspo.{name}")
    function = importlib.import_module("pspo.train").train_model
    globals()["train"] = function  # over the module pspo.train, which the import has put here
    return function


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
