"""The page of `pspo_lab.view` in a browser: Debian's Chromium (chromium and chromium-driver), driven by selenium."""

import json
import shutil
import time

import numpy as np
import pandas as pd
import pytest
from test_view import HOSTILE

from pspo.cli.files import read_jsonl
from pspo.losses import PSPO, Clip
from pspo.train import main as train
from pspo_lab.view_command import make_page
from pspo_lab.view_data import surrogate_weights

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium and its driver"),
]
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
LOOKS = [(1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")]
TABS = ("curves", "groups", "tokens", "tests", "findings")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that moves far, one of whose recorded groups is made of hostile texts."""
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


@pytest.fixture
def page(browser, run):
    """Opens the page in a width and a colour scheme."""

    def open_page(width=1400, scheme="light"):
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        browser.get(f"file://{run}/view.html")
        deadline = time.monotonic() + 20
        while browser.execute_script("return document.body.dataset.ready") != "true":
            assert time.monotonic() < deadline, browser.get_log("browser")
            time.sleep(0.02)
        return browser

    return open_page


def click(browser, name):
    browser.find_element("id", f"tab-{name}").click()


def choose(browser, name, text):
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_visible_text(text)


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_tab_fits_and_nothing_hostile_runs(page, width, scheme):
    browser = page(width, scheme)
    for tab in TABS:
        click(browser, tab)
        if tab == "groups":
            browser.execute_script("const slider = document.getElementById('step'); slider.value = slider.max;"
                                   "slider.dispatchEvent(new Event('change'))")  # fmt: skip
            assert browser.execute_script("return document.getElementById('main').innerText.includes(' alone')")
        inside = (
            "[...document.querySelectorAll('main *')].every(e => e.getBoundingClientRect().right <= innerWidth + 1)"
        )
        assert browser.execute_script(f"return {inside}"), (tab, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, tab
    assert browser.execute_script("return document.body.dataset.hacked ?? null") is None
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []


def shown(browser, position):
    """The numbers under the mouse at a token."""
    from selenium.webdriver import ActionChains

    token = browser.find_element("css selector", f'[data-position="{position}"]')
    ActionChains(browser).move_to_element(token).perform()
    rows = browser.find_elements("css selector", "#tip tr[data-name]")
    return {row.get_attribute("data-name"): float(row.get_attribute("data-value")) for row in rows}


def test_a_token_under_the_mouse_has_the_parquet_s_numbers(page, run):
    """Of another rollout, completion, visit and surrogate than those that the page opens with."""
    table = pd.read_parquet(run / "tokens.parquet")
    table["sequence"] = (table["position"] == 0).cumsum()
    of_clip, of_pspo = (surrogate_weights(surrogate, table) for surrogate in (Clip(), PSPO()))
    table = table.assign(difference=of_clip.astype(np.float64) - of_pspo)
    browser = page()
    click(browser, "tokens")
    options = [option.text for option in browser.find_elements("css selector", "#completion option")]
    chosen = options[-1]
    choose(browser, "completion", chosen)
    problem, sample = (int(part.split()[1]) for part in chosen.split(", ")[1:3])
    step = int(browser.find_element("css selector", "#visit option").text.split()[2])
    choose(browser, "visit", f"optimizer step {step} (visit 1)")
    own = table[(table.step == step) & (table.problem == problem) & (table["sample"] == sample)]
    for position in (0, len(own) // 2):
        row, numbers = own.iloc[position], shown(browser, position)
        for name in ("logprob", "old_logprob", "entropy", "weight"):
            assert numbers[name] == row[name], name
        assert numbers["ratio"] == pytest.approx(np.exp(row["logprob"] - row["old_logprob"]), rel=1e-6)
    choose(browser, "surrogate", "Clip")
    choose(browser, "minus", "PSPO")
    for position in (0, len(own) // 2):
        assert shown(browser, position)["weight"] == own.iloc[position]["difference"]
