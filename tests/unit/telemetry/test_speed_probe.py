"""The piece is the same work each time and is timed by two clocks; its process ends with its parent; and its source
gives each piece once, rests between two, and makes values unknown, no more, if anything fails."""

import os
import signal
import sys
from unittest.mock import MagicMock, Mock

import pytest

from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU
from pytest_slmserve.telemetry import host, speed_probe
from pytest_slmserve.telemetry.host import OWN_REST_S, SHARED_REST_S, Reading, SpeedProbeSource, open_speed_probe

GPU = "GPU-0000"


def test_probe_work_uses_two_clocks(monkeypatch):
    assert speed_probe.probe_work() == sum(range(0, 30_000, 1021))  # 7919 is prime to the table's length
    clocks = {"perf_counter_ns": iter([5_000, 3_005_999]), "thread_time_ns": iter([7_000, 2_000_000 + 7_999])}
    for name, times in clocks.items():
        monkeypatch.setattr(speed_probe.time, name, lambda times=times: next(times))
    monkeypatch.setattr(speed_probe, "probe_work", work := Mock())
    assert speed_probe.timed() == (3000, 2000) and work.call_count == 1


LINE, GONE = 0, 99  # descriptors: its standard input, and its parent


@pytest.mark.parametrize(("ready", "read", "pieces"), [
    ([[LINE], [LINE], [GONE]], [b"\n", b"\n"], 2), ([[LINE], [LINE, GONE]], [b"\n", b"\n"], 1),
    ([[LINE], [LINE]], [b"\n", b""], 1), ([[LINE], []], [b"\n"], 1),
])  # fmt: skip
def test_probe_ends_with_its_parent(monkeypatch, ready, read, pieces):
    done, written, ready, read = [], [], iter(ready), iter(read)
    monkeypatch.setattr(os, "pidfd_open", {4711: GONE}.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: done.append((pid, cores)))
    monkeypatch.setattr(os, "read", lambda descriptor, count: {LINE: next(read)}[descriptor] if count > 1 else b"")
    monkeypatch.setattr(os, "write", lambda *what: written.append(what))
    monkeypatch.setattr(signal, "signal", lambda *what: done.append(what))
    monkeypatch.setattr(speed_probe.select, "select", lambda r, w, x: {(LINE, GONE): (next(ready),)}[tuple(r + w + x)])
    monkeypatch.setattr(speed_probe, "probe_work", lambda: done.append("warm"))
    monkeypatch.setattr(speed_probe, "timed", lambda: (3747, 3694))
    speed_probe._main("4711", "3")
    assert done == [(signal.SIGINT, signal.SIG_IGN), (0, {3}), "warm"]
    assert written == [(1, b"3747 3694\n")] * pieces
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=ProcessLookupError))
    monkeypatch.setattr(speed_probe, "probe_work", lambda: pytest.fail("worked for nobody"))
    assert speed_probe._main("4711") is None


@pytest.fixture
def started(monkeypatch):
    """In place of the probe's processes: their pipes are real, and the test writes what they say."""
    found = []

    def start(words, stdin, stdout, stderr, bufsize):
        (told, says), (hears, asks) = os.pipe(), os.pipe()
        os.set_blocking(hears, False)
        process = MagicMock(words=words, bufsize=bufsize, hears=hears, stdout=os.fdopen(told, "rb"))
        process.stdin, process.says = (os.fdopen(end, "wb", buffering=0) for end in (asks, says))
        found.append(process)
        return process

    monkeypatch.setattr(host.subprocess, "Popen", start)
    yield found
    for process in found:
        process.stdin.close(), process.stdout.close(), process.says.close()
        os.close(process.hears)


def test_probe_rests_between_pieces(started):
    probe = SpeedProbeSource(3)
    assert not started and probe.name == f"host-speed probe (Python 3.{sys.version_info.minor})"
    assert probe.read(0.0) == probe.read(1.0) == Reading() and probe.asked_s == 0.0, "it still works: one at a time"
    (process,) = started
    assert process.words == [sys.executable, "-I", "-S", speed_probe.__file__, str(os.getpid()), "3"]
    process.says.write(b"3747 3694\n")
    assert probe.read(2.0) == Reading({PROBE: 0.003747, PROBE_CPU: 0.003694})
    assert probe.read(3.0) == Reading() and probe.asked_s == 2.0
    assert os.read(process.hears, 99) == b"\n\n" and process.bufsize == 0
    probe.close(), probe.close()
    assert [name for name, *_ in process.mock_calls][-3:] == ["__enter__", "kill", "__exit__"] and len(started) == 1
    probe, asked = SpeedProbeSource(rest_s=0.75), []
    for now_s in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5):
        probe.read(now_s)
        if not asked or asked[-1] != probe.asked_s:
            started[-1].says.write(b"1 1\n")
        asked.append(probe.asked_s)
    assert asked == [0.0] * 3 + [0.75] * 3 + [1.5]
    assert started[-1].words[-1] == str(os.getpid()), "wherever the kernel puts it"


def test_failed_probe_gives_unknown_values(started, monkeypatch):
    probe = SpeedProbeSource()
    probe.read(0.0)
    started[0].says.close()
    first, second = probe.read(1.0), probe.read(2.0)
    monkeypatch.setattr(host.subprocess, "Popen", Mock(side_effect=FileNotFoundError(2, "not there", sys.executable)))
    never = SpeedProbeSource().read(0.0)
    assert first == second and first.span_s is None and sys.executable in never.missing[0]
    for found in (first, never):
        assert found.values == {PROBE: None, PROBE_CPU: None}
        assert [why.partition(":")[0] for why in found.missing] == [str(PROBE)]


@pytest.mark.parametrize(("device", "allowed", "core"), [
    (GPU, {0, 1, 2, 3}, 3), (GPU, {4, 5, 6, 7, 12}, 12), (GPU, {0, 1, 2}, None), (GPU, set(), None),
    ("cpu", set(range(64)), None), ("none", {0, 1, 2, 3}, None),
])  # fmt: skip
def test_probe_takes_spare_core(monkeypatch, device, allowed, core):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    probe = open_speed_probe(device)
    assert (probe.core, probe.rest_s) == (core, SHARED_REST_S if core is None else OWN_REST_S)
    assert OWN_REST_S < SHARED_REST_S
