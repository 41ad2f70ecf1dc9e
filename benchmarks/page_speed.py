"""How long a page of more than 20,000 requests takes to be written, to open in a browser, and to follow a slider.

    python benchmarks/page_speed.py [ARCHIVE]

Without an archive it makes one, a sweep of three repeats as `report_speed.py` makes it. Each time is told as a multiple
of a bare one that the same run measures beside it: the report without a page, an empty page in the same browser, a
frame in which nothing changes. Needs Jinja2, Playwright and a Chromium. Exit status 1 where a median is over its limit.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report_speed
from playwright.sync_api import sync_playwright

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.requests import build_workload

REPEATS = 3
RUNS = 5
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
SLIDES = """async () => {
    const slider = document.querySelector("#tpot-slider");
    const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const times = { slid: [], bare: [] };
    for (let i = 0; i < 40; i++) {
        await painted();
        const begun = performance.now();
        if (i % 2) {
            slider.value = 100 + 20 * i;
            slider.dispatchEvent(new Event("input"));
        }
        await painted();
        times[i % 2 ? "slid" : "bare"].push(performance.now() - begun);
    }
    return times;
}"""


@dataclass(frozen=True)
class Times:
    """Seconds of the thing and of the bare one. limit_s: the most that its median may be."""

    name: str
    beside: str
    limit_s: float
    seconds: list[float]
    bare: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high, bare = min(self.seconds), max(self.seconds), statistics.median(self.bare)
        found = f"{self.median_s:.3f} s ({low:.3f} to {high:.3f}), limit {self.limit_s:g} s"
        return f"{self.name}: {found}; {self.beside}: {bare:.3f} s, ratio {self.median_s / bare:.1f}"


def make(path: Path) -> None:
    """A sweep of three repeats of each load, in windows of equally many steps."""
    workload = build_workload(WorkloadSpec(), model_of("opt-125m"))
    with Archive.open(path) as archive:
        archive.begin({"rows": [lookup.row_to_record(row) for row in table.ROWS]}, {})
        for concurrency in report_speed.BATCHES:
            simulated = report_speed.simulate(concurrency, workload)
            for repeat in range(REPEATS):
                archive.add(report_speed.roughened(simulated, repeat))


def seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def report(*words: object) -> None:
    command = [sys.executable, "-m", "pytest_slmserve", "report", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1, 10):
        sys.exit(done.stderr)


def measured(archive: Path, folder: Path) -> Iterator[Times]:
    page, empty = folder / "out.html", folder / "empty.html"
    empty.write_text("<!doctype html><html data-ready=yes><title>empty</title>", "utf-8")
    report(archive, "--html", page)  # writes the bytecode of a checkout
    written = [
        (seconds(lambda: report(archive, "--html", page)), seconds(lambda: report(archive))) for _ in range(RUNS)
    ]
    yield Times("written", "the report without a page", 3.0, *map(list, zip(*written)))
    print(f"page: {page.stat().st_size / 1e6:.2f} MB")
    with sync_playwright() as driver:
        path = next(filter(None, map(shutil.which, NAMES)), None)
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))

        def opened(file: Path) -> Any:
            seen = browser.new_page(viewport={"width": 1400, "height": 900})
            seen.goto(file.as_uri())
            seen.wait_for_selector("html[data-ready=yes]")
            return seen

        opened(empty).close()
        opens, bare = [], []
        for _ in range(RUNS):
            bare.append(seconds(lambda: opened(empty)))
            opens.append(seconds(lambda: opened(page)))
        yield Times("opens", "an empty page", 2.0, opens, bare)
        seen = opened(page)
        seen.locator("#slo").scroll_into_view_if_needed()
        slides = seen.evaluate(SLIDES)
        slid, still = ([ms / 1e3 for ms in slides[name]] for name in ("slid", "bare"))
        yield Times("a slider", "a frame without a change", 0.1, slid, still)
        browser.close()


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = Path(arguments[0]) if arguments else folder / "records.jsonl.gz"
        if not arguments:
            make(archive)
        found = read(archive).measurements
        requests = sum(len(m.run.samples.sent_s) for m in found)
        print(f"{len(found)} measurements, {requests:,} requests, {archive.stat().st_size / 1e6:.2f} MB")
        slow = 0
        for times in measured(archive, folder):
            print(times, flush=True)
            slow += times.median_s > times.limit_s
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
