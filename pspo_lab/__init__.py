"""Look at runs and plan them: view, report, sweep, compare, findings; code rewards in a sandbox."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def view(*runs: str | Path, surrogates: Sequence[str] = (), height: int = 900) -> Any:
    """Show the page of some runs in a notebook; ``surrogates`` are those of ``pspo view --surrogates``."""
    from IPython.display import IFrame

    from pspo_lab.view_command import make_page, run_folders  # slow to import: torch

    page = html.escape(make_page(run_folders(runs), surrogates))
    return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])
