"""Look at runs and plan them: view, report, sweep, compare, findings; code rewards in a sandbox."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def view(*runs: str | Path, surrogates: Sequence[str] = (), height: int = 900) -> Any:
    """The page of some runs in a frame of a notebook; ``surrogates`` as those of the command."""
    from IPython.display import IFrame

    from pspo_lab.view_command import make_page, run_folders  # slow to import: torch

    page = html.escape(make_page(run_folders(runs), surrogates))
    return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])
