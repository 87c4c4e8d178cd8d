"""The page of `pspo view` in a browser, Chromium: nothing that a model wrote runs, on any of its tabs."""

import json
import shutil
import subprocess

import pytest
from test_view import HOSTILE, train_run

from pspo.files import read_jsonl
from pspo_lab.view_command import make_page

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")]
CLICKS = """<script>
const errors = [], texts = [];
addEventListener("error", (event) => errors.push(event.message));
const wait = setInterval(() => {
  if (document.body.dataset.ready !== "true") return;
  clearInterval(wait);
  for (const tab of ["curves", "groups", "tokens", "tests", "findings"]) {
    document.getElementById(`tab-${tab}`).click();
    const slider = document.getElementById("step");
    if (tab === "groups") { slider.value = slider.max; slider.dispatchEvent(new Event("change")); }
    texts.push(document.getElementById("main").innerText.includes(" alone"));
  }
  setTimeout(() => { // handlers of what was inserted have run by then
    document.body.textContent = `${errors} ${texts} ${document.body.dataset.hacked}
      ${performance.getEntriesByType("resource").length}`;
  }, 1000);
}, 50);
</script>"""


def test_nothing_hostile_runs(tmp_path):
    """A run with a metric that varies by rounding, and a group of hostile texts, which is seen in its tab alone."""
    run = tmp_path / "run"
    train_run(run)
    lines = read_jsonl(run / "metrics.jsonl")
    flat = [line | {"flat": 1 + i % 2 * 2**-23} for i, line in enumerate(lines)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in flat))
    sample = read_jsonl(run / "samples.jsonl")[0] | {"step": 1000}
    hostile = [sample | {"prompt": text, "completion": text, "sample": i} for i, text in enumerate(HOSTILE)]
    with (run / "samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in hostile))
    page = make_page([run]).replace("</body>", f"{CLICKS}</body>")
    (tmp_path / "view.html").write_text(page, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    command = ["chromium", *flags, f"file://{tmp_path}/view.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)  # a script of the page hangs beyond
    body = done.stdout.rpartition("<body")[2].partition(">")[2].partition("</body>")[0]
    assert body.split() == ["false,true,false,false,false", "undefined", "0"]
