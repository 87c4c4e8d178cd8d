"""Look inside runs: ``pspo view RUN``, or ``pspo_lab.view("runs/mine")`` in a notebook."""

import html
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """Makes this module callable: ``pspo_lab.view("runs/mine")``."""

    def __call__(self, *runs: str | Path, surrogates: tuple[str, ...] = (), height: int = 900) -> Any:
        """The page of some runs in a frame of a notebook; ``surrogates`` as those of the command."""
        from IPython.display import IFrame

        from pspo_lab.view.page import make_page

        page = html.escape(make_page([Path(run) for run in runs], surrogates))
        return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])


sys.modules[__name__].__class__ = CallableModule
