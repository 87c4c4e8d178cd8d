"""pspo: a from-scratch, pure-PyTorch RL trainer for language models (reference implementation of PSPO)."""

import importlib
import importlib.util
import sys
from types import ModuleType, TracebackType

__version__ = "0.1.0"


def _show_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, frames)


if sys.argv[:1] == ["-m"]:  # python -m pspo.train: Ctrl-C, while it imports, too, ends it without a traceback
    sys.excepthook = _show_error


def __getattr__(name: str) -> ModuleType:
    """Import `pspo.train`, `pspo.losses` and the like on first use."""
    if importlib.util.find_spec(f"pspo.{name}"):
        return importlib.import_module(f"pspo.{name}")
    raise AttributeError(f"module 'pspo' has no attribute {name!r}")
