"""A server with any fault on the wire, under each kind of load, measured by `slmserve measure` and by pytest."""

import contextlib
import os
import signal

import psutil
import pytest
import wire_server
from campaign import LOADS, SIGNALS, killed, measure, run_tests
from judged import Case
from processes import until

from pytest_slmserve.engines.endpoint import CLIENT

FAULTS = sorted(wire_server.FAULTS)
# Before a load begins: the first request of an endpoint has the fault.
FIRST = [f"first-{name}" for name in FAULTS if name.startswith(("event-", "http-", "wire-", "hang-"))]


@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_under_each_load(case: Case, url: str, fault: str, load: str, way) -> None:
    way(case, url, fault, load)


@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("fault", FIRST)
def test_each_fault_of_the_first_request(case: Case, url: str, fault: str, way) -> None:
    way(case, url, fault, "window")


# What is ended under its load


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_load_generator_and_each_signal(case: Case, url: str, processes: int, number: signal.Signals) -> None:
    load = ["--max-concurrency=2", "--window=60", f"--processes={processes}", "--input-len=8", "--output-len=2000"]
    words = ["-m", "pytest_slmserve", "measure", f"--endpoint={url}/good/v1/completions", "--model=m"]

    def end(pid: int) -> None:
        until(lambda: sending(pid, processes), case.within_s, "a load")[-1].send_signal(number)

    said = f"error: the load generator was killed by {number.name}; "
    case.judge("kills", killed(case, [*words, *load], end), (1,), said, may_stay=["pytest-slmserve-*"])  # a log, named


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_ended_under_its_load(case: Case, url: str, number: signal.Signals) -> None:
    words = ["measure", f"--endpoint={url}/good/v1/completions", "--model=m", "--max-concurrency=2", "--window=60"]

    def end(pid: int) -> None:
        until(lambda: sending(pid, 1), case.within_s, "a load")
        os.kill(pid, number)

    case.judge("kills", killed(case, ["-m", "pytest_slmserve", *words], end), (130, -number))


def sending(pid: int, processes: int) -> list[psutil.Process]:
    """The processes of its load generator that send requests; none until all do."""
    busy = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since, as a probe's does
            if str(CLIENT) in each.cmdline() and each.net_connections("tcp"):
                busy.append(each)
    return busy if len(busy) == processes else []
