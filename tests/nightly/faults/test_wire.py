"""A server with any fault on the wire, under each kind of load, measured by `slmserve measure` and by pytest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import wire_server
from judged import Case, Seen, command, pytest_run, waited_for
from processes import until
from test_kills import SIGNALS, killed

from pytest_slmserve.engines.endpoint import CLIENT

FAULTS = sorted(wire_server.FAULTS)
# Before a load begins: the first request of an endpoint has the fault.
FIRST = [f"first-{name}" for name in FAULTS if name.startswith(("event-", "http-", "wire-", "hang-"))]
LOADS = {
    "window": ("--max-concurrency=2", "--window=0.5"),
    "count": ("--max-concurrency=2", "--num-prompts=12"),
    "rate": ("--request-rate=20", "--settle=0.2", "--window=0.6"),
}
TESTS = {
    "window": "def test(slm_measure): assert slm_measure(2, repeats=1).valid",
    "count": "def test(slm_job): assert slm_job(12, repeats=1).valid",
    "rate": "def test(slm_job): assert slm_job(12, rate=20, repeats=1).valid",
}
# What is said of requests that fail, by the beginning of the fault's name.
SAID = {
    "usage": "malformed|the server counts",
    "hang": "timeout|no end within|no request finished",
    "first": "error: |ERROR: |INVALID",
}
# What is told of a good answer.
TOLD = {"good-buffered": "answers came in one piece", "good-without-counts": "does not say how many tokens it sent"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of the server, but for the fault."""
    server = [sys.executable, str(Path(wire_server.__file__))]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def statuses(fault: str) -> tuple[int, ...]:
    """Those that are right: a busy machine may make a good load invalid."""
    match fault.partition("-")[0]:
        case "good":
            return (0, 1)
        case "first":
            return (1, 4)  # what the first request does not show, the load does
    return (1,)


def said(fault: str) -> str:
    return SAID.get(fault.partition("-")[0], "")


def timeout(fault: str) -> str:
    return "1" if "hang" in fault else "30"


def measure(case: Case, url: str, fault: str, load: str) -> None:
    words = ["measure", f"--endpoint={url}/{fault}/v1/completions", "--model=m", "--input-len=8", "--output-len=4"]
    seen = case.fork(command([*words, f"--timeout={timeout(fault)}", *LOADS[load]]))
    case.judge("wire", seen, statuses(fault), TOLD.get(fault) or said(fault), kept=not fault.startswith("first"))


def run_tests(case: Case, url: str, fault: str, load: str) -> None:
    (case.folder / "test_it.py").write_text(TESTS[load], "utf-8")
    words = [
        f"--slm-endpoint={url}/{fault}/v1/completions",
        "--slm-models=m",
        "--slm-input-len=8",
        "--slm-output-len=4",
    ]
    seen = case.fork(
        pytest_run([*words, f"--override-ini=slm_timeout={timeout(fault)}", "--slm-window=0.5", "test_it.py"])
    )
    case.judge("wire", seen, statuses(fault), said(fault), kept=not fault.startswith("first"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_under_one_load(case: Case, url: str, fault: str) -> None:
    """Each fault meets another load than the one before it."""
    measure(case, url, fault, list(LOADS)[FAULTS.index(fault) % len(LOADS)])


@pytest.mark.parametrize("fault", FIRST[::4])
def test_a_fault_of_the_first_request(case: Case, url: str, fault: str) -> None:
    measure(case, url, fault, "count")


@pytest.mark.faults
@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_under_each_load(case: Case, url: str, fault: str, load: str, way) -> None:
    way(case, url, fault, load)


@pytest.mark.faults
@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("fault", FIRST)
def test_each_fault_of_the_first_request(case: Case, url: str, fault: str, way) -> None:
    way(case, url, fault, "window")


# A load generator that is killed under its load


@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGKILL), (2, signal.SIGSEGV)])
def test_a_load_generator_that_is_killed(case: Case, url: str, processes: int, number: signal.Signals) -> None:
    kill_generator(case, url, processes, number)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_load_generator_and_each_signal(case: Case, url: str, processes: int, number: signal.Signals) -> None:
    kill_generator(case, url, processes, number)


def kill_generator(case: Case, url: str, processes: int, number: signal.Signals) -> None:
    load = ["--max-concurrency=2", "--window=60", f"--processes={processes}", "--input-len=8", "--output-len=2000"]
    words = [sys.executable, "-m", "pytest_slmserve", "measure", f"--endpoint={url}/good/v1/completions", "--model=m"]
    log, began = case.folder / "seen.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, *load], cwd=case.folder, env=case.environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    until(lambda: sending(process.pid, processes), case.within_s, "a load")[-1].send_signal(number)
    status = waited_for(process.pid, case.within_s)
    process.returncode = 0  # it is waited for
    seen = Seen(status, log.read_text("utf-8", errors="surrogateescape"), time.monotonic() - began)
    said = f"error: the load generator was killed by {number.name}; "
    case.judge("kills", seen, (1,), said, may_stay=["pytest-slmserve-*"])  # of its log, which is named


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_ended_under_its_load(case: Case, url: str, number: signal.Signals) -> None:
    words = ["measure", f"--endpoint={url}/good/v1/completions", "--model=m", "--max-concurrency=2", "--window=60"]

    def end(pid: int) -> None:
        until(lambda: sending(pid, 1), case.within_s, "a load")
        os.kill(pid, number)

    case.judge("kills", killed(case, ["-m", "pytest_slmserve", *words], end, "", 0.0), (130, -number))


def sending(pid: int, processes: int) -> list[psutil.Process]:
    """The processes of its load generator that send requests; none until all do."""
    busy = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since, as a probe's does
            if str(CLIENT) in each.cmdline() and each.net_connections("tcp"):
                busy.append(each)
    return busy if len(busy) == processes else []
