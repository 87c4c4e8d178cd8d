"""Tables and pictures of trainings: ``pspo report``, or ``pspo_lab.report("runs")`` in a notebook."""

import base64
import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType


class Page(str):
    """Markdown that a notebook shows as such."""

    _repr_markdown_ = str.__str__


class CallableModule(ModuleType):
    """Makes this module callable: ``pspo_lab.report("runs")``."""

    def __call__(self, *runs: str | Path, output_dir: str | Path = "report") -> Page:
        """Write the report of some runs, as the command does; returns it for a notebook, with its pictures."""
        from pspo_lab.report.__main__ import report
        from pspo_lab.report.runs import read_runs

        output = Path(output_dir)
        output.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            report(read_runs([Path(run) for run in runs]), output)

        def inlined(link: re.Match) -> str:
            picture = base64.b64encode((output / link[2]).read_bytes()).decode()
            return f"{link[1]}(data:image/svg+xml;base64,{picture})"

        text = (output / "report.md").read_text(encoding="utf-8")
        return Page(re.sub(r"^(!\[.*\])\((\S+\.svg)\)$", inlined, text, flags=re.MULTILINE))


sys.modules[__name__].__class__ = CallableModule
