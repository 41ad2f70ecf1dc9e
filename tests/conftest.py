"""How the suite runs and what it prints: a line for each folder, and no skip or case without an assertion that
`tests/skips.toml` does not allow."""

from __future__ import annotations

import gc
import re
import signal
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
pytest.register_assert_rewrite(*(path.stem for path in TESTS.glob("support/*.py")))

from real_engine import vllm_here  # noqa: E402, F401 - a fixture for tests with a real engine
from simulated_sessions import opened  # noqa: E402, F401

# pytest reads this file for whatever runs in the checkout, where only the package may be installed.
with suppress(ImportError):
    from hypothesis import settings

    # There is no deadline, because a busy machine is no finding. Each change is tried on the same examples;
    # `tox -e nightly` draws ten times as many, and others each night.
    settings.register_profile("tests", deadline=None, max_examples=20, derandomize=True)
    settings.register_profile("thorough", deadline=None, max_examples=200)
    settings.load_profile("tests")

ALLOWED = [re.compile(skip["reason"]) for skip in tomllib.loads((TESTS / "skips.toml").read_text("utf-8"))["skip"]]

# What a shell starts in the background ignores SIGINT, and behind nohup SIGHUP; so would all that a test starts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def wide_terminal() -> Iterator[None]:
    """Texts are the same wherever the tests run, those of a module's own run too, and tables have all their columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "150")
        yield


@pytest.fixture(autouse=True, scope="session")
def hasty_disk() -> Iterator[None]:
    """Nobody waits until a record is on the disk: no power fails, and a busy disk takes its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is collected stays to the end, so the garbage collector leaves it out: it would look at it over and over."""
    gc.freeze()


# Skips


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fails a skip whose reason `tests/skips.toml` does not allow."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed.search(reason) for allowed in ALLOWED):
            problem = f"skipped: {reason}\nThis reason is not in tests/skips.toml, so the skip is an error."
            report.outcome, report.longrepr = "failed", problem


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    judge(report)
    if report.when == "call" and report.passed and item.config.getini(COUNTED) and not ASSERTED[item.nodeid]:
        report.outcome, report.longrepr = "failed", "no assertion ran in this case"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    report = yield
    judge(report)
    return report


# Assertions, which `tox -e nightly` counts, because pytest then takes a third longer

COUNTED = "enable_assertion_pass_hook"  # pytest's own word in the ini file
ASSERTED: Counter[str] = Counter()  # by the id of a case


def pytest_assertion_pass(item: pytest.Item) -> None:
    ASSERTED[item.nodeid] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """An error or a warning that a test waits for is an assertion, and so are lines of an inner run of pytest."""
    if not item.config.getini(COUNTED):
        return (yield)

    def counted(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            ASSERTED[item.nodeid] += 1
            return function(*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("raises", "warns", "fail", "LineMatcher.fnmatch_lines", "RunResult.assert_outcomes"):
            patch.setattr(f"pytest.{name}", counted(attrgetter(name)(pytest)))
        return (yield)


# A line for each folder


class Folders:
    """Counts the tests of each folder, and writes its line as soon as the last of them is done.

    Its seconds are those of its tests, in all processes together.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.began = config, time.monotonic()
        self.expected, self.seconds = Counter[str](), Counter[str]()
        self.seen = defaultdict[str, Counter[str]](Counter)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.expected = self.expected or Counter(map(self.folder, ids))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    def folder(self, node_id: str) -> str:
        return "/".join(node_id.partition("::")[0].split("/")[:-1][:3]) or "."

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = self.folder(report.nodeid)
        self.seconds[folder] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.seen[folder][report.outcome] += 1
        self.expected[folder] -= report.when == "teardown"
        if report.when == "teardown" and self.expected[folder] == 0:
            found = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.seen[folder].items()))
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            clock = time.monotonic() - self.began
            reporter.write_line(f"{clock:4.0f} s  {folder:<32}{self.seconds[folder]:7.1f} s  {found}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        quiet = report.outcome == "passed" or (report.skipped and not hasattr(report, "wasxfail"))
        return (report.outcome if report.when == "call" or report.skipped else "", "", "") if quiet else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Benchmarks keep pytest's own lines, and so does `-v` or `-q`."""
    config = session.config
    ours = all("tests" in Path(arg).parts for arg in config.args)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if ours and reporter and config.get_verbosity() == 0:
        reporter.showfspath = False
        config.pluginmanager.register(Folders(config), "folders")
