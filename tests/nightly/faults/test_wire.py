"""A server with any fault on the wire, under each kind of load, measured by `slmserve measure` and by pytest."""

import contextlib
import os
import random
import resource
import signal

import psutil
import pytest
import wire_server
from campaign import LOADS, SIGNALS, killed, measure, measure_odd, run_tests
from judged import Case, command
from processes import until

from pytest_slmserve.engines.endpoint import CLIENT

FAULTS = sorted(wire_server.FAULTS)
# Before a load begins: the first request of an endpoint has the fault.
FIRST = [f"first-{name}" for name in FAULTS if name.startswith(("event-", "http-", "wire-", "hang-"))]


@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("fault", FAULTS)
def test_wire_fault_is_told(case: Case, url: str, fault: str, load: str, way) -> None:
    way(case, url, fault, load)


@pytest.mark.parametrize("way", [measure, run_tests])
@pytest.mark.parametrize("fault", FIRST)
def test_first_request_fault_is_told(case: Case, url: str, fault: str, way) -> None:
    way(case, url, fault, "window")


@pytest.mark.parametrize("number", range(40))
def test_odd_stream_counts_written_tokens(case: Case, url: str, number: int) -> None:
    measure_odd(case, url, random.randrange(1 << 32))


@pytest.mark.parametrize(("what", "least", "said"), [
    (resource.RLIMIT_NOFILE, 60, "ulimit -n 116"), (resource.RLIMIT_NOFILE, 115, "ulimit -n 116"),
    (resource.RLIMIT_FSIZE, 64, "cannot write to|File too large"), (resource.RLIMIT_NPROC, 0, ""),
    (resource.RLIMIT_CORE, 0, ""), (resource.RLIMIT_STACK, 1 << 20, ""),
])  # fmt: skip
def test_process_limit_is_told(case: Case, url: str, what: int, least: int, said: str) -> None:
    words = ["measure", f"--endpoint={url}/good/v1/completions", "--model=m", "--max-concurrency=100", "--window=0.5"]

    def work() -> int:
        resource.setrlimit(what, (least, least))
        return command(words)()

    case.judge("limits", case.fork(work), (1, 4) if said else (0, 1), said)


# What is ended under its load


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_load_generator_is_named(case: Case, url: str, processes: int, number: signal.Signals) -> None:
    load = ["--max-concurrency=2", "--window=60", f"--processes={processes}", "--input-len=8", "--output-len=2000"]
    words = ["-m", "pytest_slmserve", "measure", f"--endpoint={url}/good/v1/completions", "--model=m"]

    def end(pid: int) -> None:
        until(lambda: sending(pid, processes), case.within_s, "a load")[-1].send_signal(number)

    said = f"error: the load generator was killed by {number.name}; "
    case.judge("kills", killed(case, [*words, *load], end), (1,), said, may_stay=["pytest-slmserve-*"])  # a log, named


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_command_under_load(case: Case, url: str, number: signal.Signals) -> None:
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
