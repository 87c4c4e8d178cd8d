"""Look inside runs: ``pspo view RUN [RUN ...]`` writes a page of curves, groups, tokens, tests, findings.

RUN is a run's folder, or one that holds some; or a rollout dump of verl. ``--watch`` serves the page
here instead, and follows runs that train. ``--surrogates 'Clip(epsilon=0.1)' PSPO my_loss.SoftClip``
compares the tokens' weights under these; unset, under all of `pspo.losses`.

The page is one HTML file that asks no host for anything. Charts are uPlot's (https://github.com/leeoniya/uPlot, MIT).
"""

import argparse
import base64
import gzip
import html
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from pspo.cli.files import write_text
from pspo.cli.parse import user_errors
from pspo.cli.terminal import tolerate_output
from pspo.rollout import Experience
from pspo.tasks.files import local_path, plain
from pspo_lab.dumps import is_dump
from pspo_lab.runs import read_runs, run_folders
from pspo_lab.view_data import make_surrogate, page_data, surrogate_classes

FOLDER = Path(__file__).parent / "page"
NEWS = ("metrics.jsonl", "summary.json")


def view(*runs: str | Path, surrogates: Sequence[str] = (), height: int = 900) -> Any:
    """The page of some runs in a frame of a notebook; ``surrogates`` as those of the command."""
    from IPython.display import IFrame

    page = html.escape(make_page(run_folders(runs), surrogates))
    return IFrame("about:blank", "100%", height, [f'srcdoc="{page}"'])


def live_curve() -> Callable[..., None]:
    """An ``on_rollout`` of `pspo.train` that draws the mean reward of every rollout below a notebook's cell.

    ``pspo.train(..., on_rollout=pspo_lab.live_curve())``. Raises RuntimeError outside a notebook.
    """
    from IPython.display import SVG, display
    from matplotlib.figure import Figure

    picture = display(display_id=True)
    if picture is None:
        raise RuntimeError("pspo_lab.live_curve() draws in a notebook: leave it out elsewhere")
    rewards: list[float] = []

    def draw(experience: Experience, steps: list[dict[str, float]]) -> None:
        rewards.append(experience.rewards.nanmean().item())
        figure = Figure(figsize=(6, 3))
        figure.subplots().plot(range(1, len(rewards) + 1), rewards, marker=".")
        figure.supxlabel("rollout")
        figure.supylabel("mean reward")
        image = io.StringIO()
        figure.savefig(image, format="svg", bbox_inches="tight")
        picture.update(SVG(image.getvalue()))

    return draw


def make_page(roots: Sequence[Path], surrogates: Sequence[str] = (), watch: bool = False) -> str:
    """The HTML of runs, or folders that hold some; with ``watch`` it asks its server for news.

    Raises ValueError if there is nothing to show, or a surrogate cannot be made.
    """
    files = {"css": "page.css", "js": "page.js", "uplot_js": "uplot.js"}
    assets = {name: Markup((FOLDER / file).read_text(encoding="utf-8")) for name, file in files.items()}
    template = Environment(loader=FileSystemLoader(FOLDER), autoescape=True).get_template("page.html.j2")
    title = ", ".join(root.resolve().name for root in roots[:3])
    if len(roots) > 3:
        title += " ..."
    return template.render(title=title, data=packed_data(roots, surrogates), watch=watch, **assets)


def packed_data(roots: Sequence[Path], surrogates: Sequence[str] = ()) -> str:
    """The page's data, base64 of gzipped JSON: nothing that a model wrote can end the element that holds it."""
    compared = {text: make_surrogate(text) for text in surrogates}
    if not compared:
        compared = {name: surrogate() for name, surrogate in surrogate_classes().items()}
    runs = read_runs(roots)
    if runs.configs.empty:
        raise ValueError(f"no run is in {', '.join(map(str, roots))}")
    content = json.dumps(plain(page_data(runs, compared))).encode()  # ASCII: lone surrogates are escaped
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


class Handler(BaseHTTPRequestHandler):
    """Serves the page, and its data once they are newer than those of ``?since=``."""

    def __init__(self, roots: list[Path], surrogates: list[str], *args: object) -> None:
        self.roots = roots
        self.surrogates = surrogates
        super().__init__(*args)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        host = self.headers.get("Host", "").partition(":")[0]
        if host not in ("127.0.0.1", "localhost"):  # another site's name for this machine
            return self.send_error(403)
        now = version(self.roots)
        if address.path == "/":
            self.answer(make_page(self.roots, self.surrogates, watch=True), "text/html; charset=utf-8", now)
        elif address.path == "/data" and parse_qs(address.query).get("since") != [now]:
            self.answer(packed_data(self.roots, self.surrogates), "text/plain", now)
        else:
            self.send_response(204)
            self.end_headers()

    def answer(self, text: str, kind: str, now: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("X-Version", now)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print no line for a request."""


def version(roots: list[Path]) -> str:
    """Changes when a run has another rollout, or an end; "" before the first."""
    files = [file for root in roots for file in root.rglob("*.json*") if is_dump(file) or file.name in NEWS]
    return "-".join(str(file.stat().st_mtime_ns) for file in sorted(files))


def serve(roots: list[Path], surrogates: list[str], port: int) -> None:
    """Serve the page on this machine alone until Ctrl-C, from the first rollout on."""
    if not version(roots):
        print("waiting for the first rollout", file=sys.stderr)
    while not version(roots):
        time.sleep(2)
    packed_data(roots, surrogates)  # raises what is wrong before anything is served
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, roots, surrogates))
    print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("pspo view", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders above them")
    parser.add_argument("--output", type=Path, help="the file (default: view.html in the first folder)")
    parser.add_argument("--surrogates", nargs="+", default=[], metavar="SURROGATE", help="compare tokens under these")
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1, and follow the runs")
    parser.add_argument("--port", type=int, default=8765, help="with --watch (default: 8765)")
    options = parser.parse_args(args)
    tolerate_output()
    with user_errors("pspo view"):
        runs = run_folders(options.runs)
        if options.watch:
            return serve(runs, options.surrogates, options.port)
        output = local_path(options.output or runs[0] / "view.html")
        write_text(output, make_page(runs, options.surrogates))
    print(f"{output}  ({output.stat().st_size / 1e6:.1f} MB)")
