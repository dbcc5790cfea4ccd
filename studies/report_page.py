"""Measure the report of 30 runs of 100 rounds: its size, and the seconds to write it and to open it in a browser.

    python studies/report_page.py

The runs have invented numbers in all measurements that FedCSD records, 100 clients and 100 classes. A fresh
chromium opens the page from its file; the first chart is there when it is drawn, and text before that.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fedcsd
from fedcsd.experiments.summary import summarise
from fedcsd.results.report.page import write_report

METHODS, SEEDS, ROUNDS, TRIES = 10, 3, 100, 5
READY = "return document.querySelectorAll('.plot .main-svg').length"
PAINT = "return performance.getEntriesByType('paint')[0].startTime / 1000"


def runs(folder: Path) -> Path:
    """One real round, and from it a comparison of 30 runs."""
    settings: dict[str, Any] = {
        "clients": 100,
        "min_samples": 1,
        "rounds": 1,
        "epochs": 1,
        "partition": "iid",
        "track_drift": True,
    }
    fedcsd.run(method="fedcsd", out=folder / "one", **settings)
    line = json.loads((folder / "one" / "metrics.jsonl").read_text())
    config = (folder / "one" / "config.toml").read_text()
    random = np.random.default_rng(0)
    for method in range(METHODS):
        for seed in range(SEEDS):
            run = folder / "all" / f"{method}-{seed}"
            run.mkdir(parents=True)
            shutil.copy(folder / "one" / "partition.npz", run)
            changed = config.replace("\nlr = 0.01", f"\nlr = {0.01 * (method + 1):g}").replace(
                "\nseed = 0", f"\nseed = {seed}"
            )
            (run / "config.toml").write_text(changed.replace("\nrounds = 1\n", f"\nrounds = {ROUNDS}\n"))
            history = [invented(line, n, random) for n in range(1, ROUNDS + 1)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history))
            (run / "summary.json").write_text(json.dumps(summarise(history)))
    return folder / "all"


def invented(line: dict[str, Any], number: int, random: np.random.Generator) -> dict[str, Any]:
    values = {k: v * random.uniform(0.5, 1) for k, v in line.items() if isinstance(v, float)}
    each = {k: random.random(100).round(5).tolist() for k in ("class_accuracies", "client_accuracies")}
    return {**line, **values, **each, "round": number}


def opened(page: Path) -> tuple[float, float]:
    """Seconds until there is text, and until the first chart is drawn, in a browser that has just started."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1400,1000",
    ):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.get("about:blank")
        began = time.perf_counter()
        browser.get(page.as_uri())
        while not browser.execute_script(READY):
            time.sleep(0.01)
        return float(browser.execute_script(PAINT)), time.perf_counter() - began
    finally:
        browser.quit()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        found = runs(Path(name))
        began = time.perf_counter()
        page = write_report([found], Path(name) / "report.html")
        wrote = time.perf_counter() - began
        print(
            f"{METHODS * SEEDS} runs of {ROUNDS} rounds: {page.stat().st_size / 1e6:.2f} MB, written in {wrote:.2f} s"
        )
        times = [opened(page) for _ in range(TRIES)]
        text, chart = (median(some) for some in zip(*times, strict=True))
        print(f"median of {TRIES} fresh browsers: text after {text:.2f} s, first chart after {chart:.2f} s")


if __name__ == "__main__":
    main()
