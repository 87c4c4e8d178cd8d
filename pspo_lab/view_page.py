"""The page of some runs: one HTML file that asks no host for anything.

Charts are uPlot's (https://github.com/leeoniya/uPlot, MIT licence): 51 kB, a crosshair over all charts, bands and
thousands of points without a delay. Plotly and Vega-Lite are 4.5 and 0.8 MB of script.
"""

import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pspo_lab.runs import read_runs
from pspo_lab.view_data import built_in_surrogates, make_surrogate, page_data

FOLDER = Path(__file__).parent / "page"


def view(*runs: str | Path, surrogates: Sequence[str] = (), height: int = 900) -> Any:
    """The page of some runs in a frame of a notebook; ``surrogates`` as those of the command."""
    from IPython.display import IFrame

    page = html.escape(make_page([Path(run) for run in runs], surrogates))
    return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])


def make_page(roots: Sequence[Path], surrogates: Sequence[str] = (), watch: bool = False) -> str:
    """The HTML of runs, packed runs, or folders that hold some; with ``watch`` it asks its server for news.

    Raises ValueError if there is nothing to show, or a surrogate cannot be made.
    """
    files = {"css": "page.css", "js": "page.js", "uplot_css": "uplot.css", "uplot_js": "uplot.js"}
    assets = {name: Markup((FOLDER / file).read_text(encoding="utf-8")) for name, file in files.items()}
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html.j2")
    title = ", ".join(root.resolve().name for root in roots[:3])
    if len(roots) > 3:
        title += " ..."
    return template.render(title=title, data=packed_data(roots, surrogates), watch=watch, **assets)


def packed_data(roots: Sequence[Path], surrogates: Sequence[str] = ()) -> str:
    """The page's data, base64 of gzipped JSON: nothing that a model wrote can end the element that holds it."""
    compared = {text: make_surrogate(text) for text in surrogates} or built_in_surrogates()
    runs = read_runs(roots)
    if runs.configs.empty:
        raise ValueError(f"no run is in {', '.join(map(str, roots))}")
    content = json.dumps(page_data(runs, compared)).encode()  # ASCII: lone surrogates are escaped
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
