"""The page of `pspo view` in a browser, Chromium: nothing that a model wrote runs, on any of its tabs."""

import json
import shutil
import subprocess

import pytest
from test_view import HOSTILE, train_run

from pspo.cli.files import read_jsonl
from pspo_lab.view_command import make_page

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium"),
]
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
    """A run, one of whose recorded groups is made of hostile texts; the group is seen in its tab alone."""
    train_run(tmp_path / "run", 0)
    sample = read_jsonl(tmp_path / "run/samples.jsonl")[0]
    hostile = [sample | {"prompt": text, "completion": text, "step": 1000, "sample": i} for i, text in
               enumerate(HOSTILE)]  # fmt: skip
    with (tmp_path / "run/samples.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in hostile))
    page = make_page([tmp_path / "run"]).replace("</body>", f"{CLICKS}</body>")
    (tmp_path / "view.html").write_text(page, encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, f"file://{tmp_path}/view.html"], capture_output=True, text=True)
    body = done.stdout.rpartition("<body")[2].partition(">")[2].partition("</body>")[0]
    assert body.split() == ["false,true,false,false,false", "undefined", "0"]
