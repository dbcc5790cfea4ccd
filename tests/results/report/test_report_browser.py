"""Test the report in a real browser, Debian's chromium without a window."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedcsd as package
from fedcsd.results.report.page import write_report
from helpers.federations import blobs
from helpers.reports import HOSTILE, SMALL, made, record, thirty

pytestmark = pytest.mark.browser

Chrome = Any
LINES = "return document.querySelectorAll('#accuracy .scatterlayer .trace').length"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program
    assert driver
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: Chrome) -> Iterator[Chrome]:
    """Give a wide, light window; after each test its console must be empty."""
    look(chromium, 1400)
    chromium.get_log("browser")
    yield chromium
    assert chromium.get_log("browser") == []


def look(browser: Chrome, width: int, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    colour = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [colour]})


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def open_page(browser: Chrome, path: Path) -> None:
    browser.get(path.as_uri())
    until(lambda: browser.execute_script(LINES))


def scrolled_through(browser: Chrome) -> int:
    """Every chart has been in sight; how many are drawn."""
    for index in range(browser.execute_script("return document.querySelectorAll('section').length")):
        browser.execute_script("document.querySelectorAll('section')[arguments[0]].scrollIntoView()", index)
        until(
            lambda: browser.execute_script(
                "return [...drawn.values()].every(c => !c.seen || c.node.querySelector('.main-svg'))"
            )
        )
        time.sleep(0.05)
    until(
        lambda: browser.execute_script(
            "return [...drawn.values()].every(c => c.seen && c.node.querySelector('.main-svg'))"
        )
    )
    return int(browser.execute_script("return drawn.size"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    package.compare("fedavg,fedcsd,ditto", [0, 1], data=blobs(), out=folder / "c", track_drift=True, **SMALL)
    return write_report([folder / "c"], folder / "report.html")


def test_charts_draw_and_switch(browser: Chrome, compared: Path) -> None:
    open_page(browser, compared)
    assert scrolled_through(browser) == 10
    assert browser.execute_script(LINES) == 6  # a line and a band for each method
    title = "return document.querySelector('#accuracy .xtitle').textContent"
    browser.execute_script("document.querySelectorAll('#accuracy [name=accuracy-x]')[2].click()")
    until(lambda: "MB" in browser.execute_script(title))
    browser.execute_script("document.querySelectorAll('#accuracy [name=accuracy-y]')[1].click()")
    until(
        lambda: (
            "test loss"
            in browser.execute_script("return document.querySelector('#accuracy .ytitle').textContent")
        )
    )
    assert "fedcsd" in browser.find_element("css selector", "#accuracy .plot").get_attribute("aria-label")


def test_the_legend_hides_a_method_everywhere_by_keyboard(browser: Chrome, compared: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    open_page(browser, compared)
    scrolled_through(browser)
    button = browser.find_element("css selector", "#legend button[data-label=fedavg]")
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        if browser.switch_to.active_element == button:
            break
    assert browser.switch_to.active_element == button
    button.send_keys(Keys.SPACE)
    assert button.get_attribute("aria-pressed") == "false"
    until(lambda: browser.execute_script(LINES) == 4)
    rows = "return [...document.querySelectorAll('#classes .ytick text')].length"
    until(lambda: browser.execute_script(rows) == 2)
    button.send_keys(Keys.SPACE)
    until(lambda: browser.execute_script(LINES) == 6)


def test_zoom_by_keyboard(browser: Chrome, compared: Path) -> None:
    open_page(browser, compared)
    plot = browser.find_element("css selector", "#accuracy .plot")
    width = "const [a, b] = document.querySelector('#accuracy .plot')._fullLayout.xaxis.range; return b - a"
    before = browser.execute_script(width)
    plot.send_keys("+")
    until(lambda: browser.execute_script(width) < 0.6 * before)
    plot.send_keys("0")
    until(lambda: browser.execute_script(width) > 0.9 * before)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_never_scrolls_sideways(browser: Chrome, compared: Path, dark: bool) -> None:
    look(browser, 360, dark)
    open_page(browser, compared)
    scrolled_through(browser)
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
    wide = "return [document.documentElement.scrollWidth, innerWidth]"
    assert browser.execute_script(wide) == [360, 360]
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == dark


def test_print_is_light_and_complete(browser: Chrome, compared: Path) -> None:
    look(browser, 1400, dark=True)
    open_page(browser, compared)
    state = """
      dispatchEvent(new Event('beforeprint'));
      const plots = [...document.querySelectorAll('.plot .main-svg:first-child')];
      const found = [plots.length, Math.max(...plots.map(p => +p.getAttribute('width'))),
        document.querySelectorAll('details:not([open])').length, getComputedStyle(document.documentElement).getPropertyValue('--ground')];
      dispatchEvent(new Event('afterprint'));
      return found"""
    plots, width, folded, ground = browser.execute_script(state)
    assert (plots, width, folded, ground.strip()) == (10, 660, 0, "#ffffff")
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 50_000


def test_hostile_names_are_text(browser: Chrome, tmp_path: Path) -> None:
    made(tmp_path / "c" / "a", [0.5, 0.6], data=HOSTILE, method={"name": HOSTILE, HOSTILE: HOSTILE})
    made(
        tmp_path / "c" / "b",
        [0.5, 0.7],
        data="<img src=x onerror=document.title=1>",
        method={"name": "fedavg"},
    )
    (tmp_path / "c" / "<i>torn").mkdir()
    (tmp_path / "c" / "<i>torn" / "config.toml").write_text("<b>")
    open_page(browser, write_report([tmp_path / "c"], tmp_path / "r.html"))
    scrolled_through(browser)
    assert browser.title == "c – fedcsd"
    assert browser.execute_script("return document.querySelectorAll('img, b, i').length") == 0
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#legend span')].map(s => s.textContent)"
    )
    assert any(HOSTILE in label for label in labels)
    shown = browser.execute_script("return document.body.innerText")
    assert "<script>document.title='owned'</script>" in shown
    ticks = browser.execute_script(
        "return [...document.querySelectorAll('#classes .ytick text')].map(t => t.textContent)"
    )
    assert any(tick.startswith("</script><script>") for tick in ticks)


def test_thirty_runs_open_in_time(browser: Chrome, tmp_path: Path) -> None:
    """Two seconds are what a machine to itself may take (studies/report_page.py); here others are at work."""
    path = write_report([thirty(tmp_path)], tmp_path / "r.html")
    began = time.monotonic()
    open_page(browser, path)
    assert time.monotonic() - began < 10
    painted = "return performance.getEntriesByType('paint')[0].startTime"
    assert browser.execute_script(painted) < 5000
    assert browser.execute_script(LINES) == 10
    scrolled_through(browser)


def test_runs_without_anything_to_draw(browser: Chrome, tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5], ended=False, rounds=4)
    (run / "metrics.jsonl").unlink()
    (run / "partition.npz").unlink()
    browser.get(write_report([run], tmp_path / "r.html").as_uri())
    until(lambda: "not finished: 0 of 4 rounds" in browser.find_element("id", "alerts").text)
    assert browser.execute_script("return document.querySelectorAll('.plot').length") == 0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `fedcsd …` in an empty folder, and end it with the test."""
    running: list[subprocess.Popen[str]] = []

    def call(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "fedcsd", *arguments]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe))
        return running[-1]

    yield call
    for process in running:
        process.kill()
        process.communicate()


def test_the_live_page_follows_a_run(
    browser: Chrome, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    watch = start("watch", "r")
    assert watch.stdout is not None
    line = watch.stdout.readline()
    assert line.startswith("waiting for r at http://127.0.0.1:")
    browser.get(re.findall(r"http://\S+", line)[0])

    def said() -> str:
        return str(browser.find_element("id", "said").text)

    until(lambda: said() == "Waiting for the run to begin")
    run = start("run", *["--rounds", "250", "--epochs", "1", "--out", "r", "--workers", "1"])
    until(lambda: re.fullmatch(r"r: round \d+ of 250, about .* left", said()), 60)
    until(lambda: browser.execute_script(LINES))
    browser.execute_script(
        "Plotly.relayout(document.querySelector('#accuracy .plot'), {'xaxis.range': [2, 5]})"
    )
    points = "return document.querySelector('#accuracy .plot').data.at(-1).x.length"
    before = browser.execute_script(points)
    until(lambda: browser.execute_script(points) > before)
    kept = "return document.querySelector('#accuracy .plot')._fullLayout.xaxis.range.map(Math.round)"
    assert browser.execute_script(kept) == [2, 5]
    run.communicate(timeout=100)
    until(lambda: said() == "Finished")
    assert browser.execute_script(points) == 250
    watch.send_signal(signal.SIGINT)
    assert watch.communicate(timeout=30) == ("stopped watching\n", "")
    assert watch.returncode == 0
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["rounds"] == 250


def test_charts_fit_after_the_window_has_changed(browser: Chrome, compared: Path) -> None:
    """Lines have the positions that the axes say, whatever happened to the window before."""
    open_page(browser, compared)
    for width, dark in ((900, True), (500, False), (1300, True), (1400, False)):
        look(browser, width, dark)
    right = """
      const box = document.querySelector('#accuracy .plot'), full = box._fullLayout;
      const plot = box.querySelector('.nsewdrag').getBoundingClientRect();
      const last = [...box.querySelectorAll('.scatterlayer .trace .js-line')].at(-1).getBoundingClientRect();
      const axis = full.xaxis, x = box.data.at(-1).x;
      return [+box.querySelector('.main-svg').getAttribute('width') - box.clientWidth,
        last.left - plot.left - axis.l2p(x[0]), last.right - plot.left - axis.l2p(x.at(-1))]"""
    until(lambda: max(map(abs, browser.execute_script(right))) < 4, 10)


def test_ticks_can_be_told_apart(browser: Chrome, tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6])
    each = {"client_accuracies": [0.9, 0.1, 0.4, 0.5]}
    lines = [record(n, 0.5, target_entropy=1 - 1e-7 * n, **each) for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    open_page(browser, write_report([run], tmp_path / "r.html"))
    scrolled_through(browser)
    ticks = "return [...document.querySelectorAll(arguments[0])].map(t => t.textContent)"
    assert browser.execute_script(ticks, "#clients .xtick text") == ["1", "2", "3", "4"]
    entropy = browser.execute_script(ticks, "#target .ytick text")
    assert entropy[-1] == "1"
    assert len(set(entropy)) == len(entropy) > 2
    assert max(map(len, entropy)) <= 5
