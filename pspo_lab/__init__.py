"""Look at runs and plan them: view, report, sweep, compare, findings, plan; code rewards in a sandbox.

In a notebook ``pspo_lab.view("runs/mine")`` shows the page of a run, ``pspo_lab.report("runs")`` the report of some.
"""

import importlib
from typing import Any

MODULES = {"report": "report_command", "view": "view_command"}
__all__ = ["report", "view"]


def __getattr__(name: str) -> Any:
    """Import the functions when they are first used: they need pandas, matplotlib and torch."""
    if name in MODULES:
        return getattr(importlib.import_module(f"pspo_lab.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
