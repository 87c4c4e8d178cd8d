"""Look at runs and plan them: view, report, sweep, compare, findings; code rewards in a sandbox.

In a notebook ``pspo_lab.view("runs/mine")`` shows the page of a run.
"""


def __getattr__(name: str) -> object:
    """Import the function when it is first used: it needs pandas and torch."""
    if name == "view":
        from pspo_lab.view_command import view

        return view
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
