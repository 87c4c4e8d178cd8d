"""Look at runs and plan them: view, report, sweep, compare, findings, plan; code rewards in a sandbox.

In a notebook ``pspo_lab.view("runs/mine")`` shows the page of a run, ``pspo_lab.report("runs")`` the report of some.
"""

from typing import Any

__all__ = ["report", "view"]


def __getattr__(name: str) -> Any:
    """Import `view` and `report` when they are first used: they need pandas, matplotlib and torch."""
    if name == "view":
        from pspo_lab.view_command import view

        return view
    if name == "report":
        from pspo_lab.report_command import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
