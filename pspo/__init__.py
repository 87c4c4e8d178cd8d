"""pspo: a from-scratch, pure-PyTorch RL trainer for language models (reference implementation of PSPO)."""

import importlib
import importlib.util
from types import ModuleType

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import `pspo.train`, `pspo.losses` and the like on first use."""
    if importlib.util.find_spec(f"pspo.{name}"):
        return importlib.import_module(f"pspo.{name}")
    raise AttributeError(f"module 'pspo' has no attribute {name!r}")
