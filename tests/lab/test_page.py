"""The page of `pspo_lab.view` in a browser: Debian's Chromium (chromium and chromium-driver), driven by selenium."""

import json
import shutil

import pytest
from processes import until
from test_view import HOSTILE

from pspo.cli.files import read_jsonl
from pspo.train import main as train
from pspo_lab.view_command import make_page

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium and its driver"),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, one of whose recorded groups is made of hostile texts."""
    folder = tmp_path_factory.mktemp("page") / "run"
    train([
        "--run.max_steps=8", "--rollout.prompts=4", "--rollout.max_completion_tokens=32", "--run.test_limit=16",
        "--run.validate_every=4", "--run.validation_limit=4", "--data.limit=20", "--algorithm.surrogate=Clip",
        "--optimizer.lr=1e-3", "--run.record_tokens=4", "--run.quiet", f"--run.output_dir={folder}",
    ])  # fmt: skip
    samples = read_jsonl(folder / "samples.jsonl")
    hostile = [sample | {"prompt": text, "completion": text, "step": 1000, "sample": i} for i, (sample, text) in
               enumerate(zip(samples, HOSTILE, strict=False))]  # fmt: skip
    lines = "".join(json.dumps(sample) + "\n" for sample in samples + hostile)
    (folder / "samples.jsonl").write_text(lines)
    (folder / "view.html").write_text(make_page([folder]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def test_nothing_hostile_runs(browser, run):
    browser.get(f"file://{run}/view.html")
    until(lambda: browser.execute_script("return document.body.dataset.ready") == "true")
    for tab in ("curves", "groups", "tokens", "tests", "findings"):
        browser.find_element("id", f"tab-{tab}").click()
        if tab == "groups":
            browser.execute_script("const slider = document.getElementById('step'); slider.value = slider.max;"
                                   "slider.dispatchEvent(new Event('change'))")  # fmt: skip
            assert browser.execute_script("return document.getElementById('main').innerText.includes(' alone')")
    assert browser.execute_script("return document.body.dataset.hacked ?? null") is None
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []
