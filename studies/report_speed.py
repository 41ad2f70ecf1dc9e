"""How long `slmserve report` takes: of a large archive, with its page in a browser, or in two checkouts side by side.

    python studies/report_speed.py [--archive FILE] [--page | --many 100000]
    python studies/report_speed.py OLD_CHECKOUT NEW_CHECKOUT [--rounds 11]

Without --archive it makes one of 100 measurements of about 2,500 engine steps each, from the simulated engine, whose
times and counts it roughens, since real ones do not compress as well. Interpreter start and imports are part of the
time, compiling the package is not: an installation has its bytecode, and a first run that is not counted writes that of
a checkout. Exit status 1 where a median is over its limit.

With --page the archive has three repeats of each load, more than 20,000 requests, and each time is told as a multiple
of a bare one that the same run measures beside it: the report without a page, an empty page in the same browser, a
frame in which nothing changes. Needs Jinja2, Playwright and a Chromium.

With --many the archive has so many short measurements of four loads, and what is told is CPU seconds and memory: only
the columns of few measurements are in memory at a time.

Two checkouts report on the largest and the smallest archive in turn: old new, new old, and so on. Each reads its own
copy, because formats of records differ. The ratio of CPU times (user and system) is the median over these pairs, with
the middle half of them.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from common import cpu_s, parser_of

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.lines import line_of
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment, Measurement, Run
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, WorkloadSpec
from pytest_slmserve.workload.requests import Workload, build_workload

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS, REPEATS_OF_PAGE = 10, 3
STEPS = 2500
T_INF, B_HALF = 20_000.0, 50.0
REPORT_S, WRITTEN_S, OPENED_S, SLIDER_S = 1.0, 3.0, 2.0, 0.1  # limits
MANY, MANY_S, MANY_MB = 100_000, 60.0, 600.0  # limits of a report of so many measurements
SHORT_S = 0.01  # their windows: ten requests, and a kilobyte
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
    """Seconds of a thing, and of the bare one beside it, if there is one. limit_s: the most that its median may be."""

    name: str
    limit_s: float
    seconds: list[float]
    beside: str = ""
    bare: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high = min(self.seconds), max(self.seconds)
        found = f"{self.name}: {self.median_s:.3f} s ({low:.3f} to {high:.3f}), limit {self.limit_s:g} s"
        if not self.bare:
            return found
        bare = statistics.median(self.bare)
        return f"{found}; {self.beside}: {bare:.3f} s, ratio {self.median_s / bare:.1f}"


def measured(concurrency: int, window_s: float, workload: Workload) -> Measurement:
    engine = SimulatedEngine(EngineSpec("opt-125m", platform="simulated", extra=(("t_inf", T_INF), ("b_half", B_HALF))))
    environment = Environment(platform="simulated", gpu_name="simulated")
    [found] = measure_case(engine, Case(engine.spec, (workload,), (ClosedLoop(concurrency, window_s),), environment))
    return found


def make(path: Path, repeats: int) -> None:
    """An archive of a sweep: so many repeats of each load, in windows of equally many steps."""
    workload = build_workload(WorkloadSpec(), model_of("opt-125m"))
    with Archive.open(path) as archive:
        archive.begin({"rows": [asdict(row) for row in table.ROWS]}, {})
        for concurrency in BATCHES:
            window_s = (STEPS - 2 * workload.mean_output_tokens) * (B_HALF + concurrency) / T_INF
            simulated = measured(concurrency, window_s, workload)
            for repeat in range(repeats):
                archive.add(roughened(simulated, repeat))


def make_many(path: Path, count: int) -> None:
    """An archive of so many short measurements, a second apart."""
    workload = build_workload(WorkloadSpec(output_tokens=4), model_of("opt-125m"))
    with Archive.open(path) as archive:
        archive.begin({"rows": [asdict(row) for row in table.ROWS]}, {})
        each = [archive.add(measured(concurrency, SHORT_S, workload)) for concurrency in (1, 2, 3, 4)]
    lines = [measurement_line(m) | {"engine": each[0].launch} for m in each]
    begins = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("ab") as file:
        for number in range(count - len(each)):
            at = (begins + timedelta(seconds=number)).isoformat(timespec="milliseconds")
            file.write(line_of(lines[number % len(lines)] | {"measured_at": at}))


def roughened(measurement: Measurement, repeat: int) -> Measurement:
    """Another repeat: each step a little longer or shorter, and a KV usage that changes with each."""
    run = measurement.run
    speed = 1 + 0.002 * math.sin(repeat)

    def later(stamps: Any) -> tuple[Any, ...]:
        return tuple(None if t is None else round(speed * t + 2e-4 * math.sin(997 * t + repeat), 6) for t in stamps)

    samples = replace(
        run.samples,
        **{n: later(getattr(run.samples, n)) for n in ("sent_s", "admitted_s", "first_token_s", "last_token_s")},
    )
    usage = tuple(round(0.5 + 0.1 * math.sin(step + repeat), 6) for step in range(len(run.steps)))
    steps = replace(run.steps, time_s=later(run.steps.time_s), kv_usage=usage)
    start, stop = later(run.window_s)
    at = f"2026-01-01T00:{repeat // 60:02d}:{repeat % 60:02d}.000+00:00"
    return replace(measurement, run=Run(samples, steps, (start, stop)), measured_at=at)


def seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def page_times(archive: Path, folder: Path, report: Callable[..., float], rounds: int) -> Iterator[Times]:
    """Seconds until a page is written, until it is open, and until it follows a slider."""
    from playwright.sync_api import sync_playwright

    page, empty = folder / "out.html", folder / "empty.html"
    empty.write_text("<!doctype html><html data-ready=yes><title>empty</title>", "utf-8")
    report("--html", str(page))  # writes the bytecode of a checkout
    written = [(seconds(lambda: report("--html", str(page))), seconds(report)) for _ in range(rounds)]
    yield Times("written", WRITTEN_S, [one for one, _ in written], "no page", tuple(bare for _, bare in written))
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
        both = [(seconds(lambda: opened(empty)), seconds(lambda: opened(page))) for _ in range(rounds)]
        yield Times("opens", OPENED_S, [one for _, one in both], "an empty page", tuple(bare for bare, _ in both))
        seen = opened(page)
        seen.locator("#slo").scroll_into_view_if_needed()
        slides = seen.evaluate(SLIDES)
        slid, still = ([ms / 1e3 for ms in slides[name]] for name in ("slid", "bare"))
        yield Times("a slider", SLIDER_S, slid, "a frame without a change", tuple(still))
        browser.close()


def side_by_side(old: Path, new: Path, rounds: int, folder: Path) -> None:
    """Print the ratio of CPU times of two checkouts, of the largest and of the smallest archive."""
    archives = sorted((new / "benchmarks" / "baselines").glob("*.jsonl.xz"), key=lambda path: path.stat().st_size)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installation has compiled files
    for archive in (archives[-1], archives[0]):
        ratios, spent = [], []
        for number in range(-1, rounds):
            found = {}
            for checkout in (old, new) if number % 2 else (new, old):
                own = checkout / archive.relative_to(new)
                words = ["pytest_slmserve", "report", str(own)]
                found[checkout] = cpu_s(words, folder, {"PYTHONPATH": str(checkout)})
            if number >= 0:  # the first pair writes bytecode and fills caches
                spent.append((found[old], found[new]))
                ratios.append(found[new] / found[old])
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        before, after = map(statistics.median, zip(*spent))
        print(f"{archive.name}, {archive.stat().st_size:,} bytes: CPU time {before:.3f} s, now {after:.3f} s")
        print(f"  ratio new over old {middle:.3f} ({low:.3f} to {high:.3f}), {rounds} pairs", flush=True)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT", help="the old one, then the new one")
    parser.add_argument("--archive", type=Path, metavar="FILE")
    parser.add_argument("--page", action="store_true", help="the page, and how it follows a slider")
    parser.add_argument("--many", type=int, nargs="?", const=MANY, help=f"short measurements (default: {MANY:,})")
    parser.add_argument("--rounds", type=int, help="runs, or pairs of them (default: 7, of a page 5, of checkouts 11)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.checkouts:
            checkouts = [path.resolve() for path in given.checkouts]
            if len(checkouts) != 2 or not all((path / "pytest_slmserve").is_dir() for path in checkouts):
                parser.error("two checkouts are compared: the old one, then the new one")
            side_by_side(*checkouts, given.rounds or 11, folder)
            return 0
        if given.many:
            archive = folder / "records.jsonl"
            make_many(archive, given.many)
            spent_s = cpu_s(["pytest_slmserve", "report", str(archive)], folder)
            most_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
            print(f"{given.many:,} measurements, {archive.stat().st_size / 1e6:.0f} MB: ", end="")
            print(f"CPU {spent_s:.1f} s, limit {MANY_S:g} s; memory {most_mb:.0f} MB, limit {MANY_MB:g} MB")
            return int(spent_s > MANY_S or most_mb > MANY_MB)
        archive = (given.archive and given.archive.resolve()) or folder / "records.jsonl.gz"
        if not given.archive:
            make(archive, REPEATS_OF_PAGE if given.page else REPEATS)
        found = read(archive).measurements
        requests, size = sum(len(m.run.samples.sent_s) for m in found), archive.stat().st_size
        print(f"{len(found)} measurements, {requests:,} requests, {size / 1e6:.2f} MB")

        def report(*words: str) -> float:
            return cpu_s(["pytest_slmserve", "report", str(archive), *words], folder)

        if given.page:
            times = page_times(archive, folder, report, given.rounds or 5)
        else:
            report()  # writes the bytecode of a checkout
            times = iter([Times("report", REPORT_S, [seconds(report) for _ in range(given.rounds or 7)])])
        slow = 0
        for each in times:
            print(each, flush=True)
            slow += each.median_s > each.limit_s
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
