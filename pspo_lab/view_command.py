"""Look inside runs: ``pspo view RUN [RUN ...]`` writes a page of curves, groups, tokens, tests, findings.

RUN is a run's folder, or one that holds some. A run in progress is shown up to now.
``--surrogates 'Clip(epsilon=0.1)' PSPO my_loss.SoftClip`` compares the tokens' weights under these; unset, under
all of `pspo.losses`.

The page is one HTML file that asks no host for anything. Charts are uPlot's (https://github.com/leeoniya/uPlot, MIT).
"""

import argparse
import base64
import gzip
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pspo.endings import user_errors
from pspo.files import write_text
from pspo.tasks.files import local_path, plain
from pspo_lab.identities import surrogate_classes
from pspo_lab.runs import read_runs, run_folders
from pspo_lab.view_data import page_data, parse_surrogate

FOLDER = Path(__file__).parent / "page"


def view(*runs: str | Path, surrogates: Sequence[str] = (), height: int = 900) -> Any:
    """The page of some runs in a frame of a notebook; ``surrogates`` as those of the command."""
    from IPython.display import IFrame

    page = html.escape(make_page(run_folders(runs), surrogates))
    return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])


def make_page(roots: Sequence[Path], surrogates: Sequence[str] = ()) -> str:
    """The HTML of runs, or folders that hold some; ValueError if there is none, or a surrogate cannot be made."""
    files = {"css": "page.css", "js": "page.js", "uplot_js": "uplot.js"}
    assets = {name: Markup((FOLDER / file).read_text(encoding="utf-8")) for name, file in files.items()}
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html.j2")
    compared = {text: parse_surrogate(text) for text in surrogates}
    compared = compared or {name: surrogate() for name, surrogate in surrogate_classes().items()}
    runs = read_runs(roots)
    if runs.configs.empty:
        raise ValueError(f"no run is in {', '.join(map(str, roots))}")
    content = json.dumps(plain(page_data(runs, compared))).encode()  # ASCII: lone surrogates are escaped
    data = base64.b64encode(gzip.compress(content, mtime=0)).decode()  # in which no text can end the element
    return template.render(title=", ".join(root.resolve().name for root in roots), data=data, **assets)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo view", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders above them")
    parser.add_argument("--output", type=Path, help="the file (default: view.html in the first folder with a run)")
    parser.add_argument("--surrogates", nargs="+", default=[], metavar="SURROGATE", help="compare tokens under these")
    options = parser.parse_args(args)
    with user_errors("pspo view"):
        runs = run_folders(options.runs)
        folders = [root for root in runs if any(root.rglob("metrics.jsonl"))] or runs  # a data folder gets no page
        output = local_path(options.output or folders[0] / "view.html")
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, make_page(runs, options.surrogates))
    print(f"{output}  ({output.stat().st_size / 1e6:.1f} MB)")
