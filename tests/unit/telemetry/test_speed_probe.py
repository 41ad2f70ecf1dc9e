"""The probe: what its pieces say, and that its process never outlives us nor costs a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, until
from strategies import watched_run

from pytest_slmserve.analysis.metrics.validity import health
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU
from pytest_slmserve.telemetry.host import (
    OWN_REST_S,
    SCRIPT,
    SHARED_REST_S,
    Reading,
    SpeedProbeSource,
    open_speed_probe,
)
from pytest_slmserve.telemetry.sampler import Sampler

PATIENCE_S = 30.0  # on a host that others keep busy
GPU = "GPU-0000"


def running(parent: int) -> list[int]:
    """Ids of the host-speed probes that watch this process."""
    return [
        pid for pid, _, words in alive() if str(SCRIPT) in words and words[words.index(str(SCRIPT)) + 1] == str(parent)
    ]


@pytest.fixture
def probe():
    source = SpeedProbeSource()
    yield source
    source.close()


@pytest.fixture
def process(probe):
    """The id of its process, which the first reading starts."""
    before = running(os.getpid())
    assert probe.read(0.0) == Reading(), "there is no piece yet"
    # its words are not there yet at the very beginning: Linux closes what Popen waits for before it sets them
    [pid] = until(lambda: set(running(os.getpid())) - set(before), PATIENCE_S, "its process")
    return pid


def piece_of(probe: SpeedProbeSource) -> Reading:
    return until(lambda: (read := probe.read(time.monotonic())).values and read, PATIENCE_S, "a piece")


def test_a_reading_tells_of_the_piece_that_the_one_before_began(probe, process):
    for _ in range(3):
        found = piece_of(probe)
        assert found.values.keys() == {PROBE, PROBE_CPU} and not found.missing
        assert 1e-4 < found.values[PROBE_CPU] < found.values[PROBE] + 1e-3 < PATIENCE_S
        assert all(1e6 * value == pytest.approx(round(1e6 * value)) for value in found.values.values())
    assert running(os.getpid()).count(process) == 1, "started once and kept"


def test_it_does_the_same_work_each_time():
    script = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import speed_probe as c; "
    script += "print(c.probe_work())"
    told = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert int(told.stdout) == sum(n for n in range(30_000) if n * 7919 % 1021 == 0)


def test_a_piece_that_still_works_is_waited_for(probe, process):
    os.kill(process, signal.SIGSTOP)
    for now in (1.0, 2.0, 3.0):
        assert probe.read(now) == Reading()
    assert probe.asked_s == 0.0, "one at a time"
    os.kill(process, signal.SIGCONT)
    assert piece_of(probe).values[PROBE] > 0


def test_between_two_pieces_it_rests():
    probe = SpeedProbeSource(rest_s=0.9)
    asked = []
    try:
        for now in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0):
            probe.read(now)
            if probe.asked_s == now:
                until(lambda: probe.read(probe.asked_s).values, PATIENCE_S, "a piece")
            asked.append(probe.asked_s)
    finally:
        probe.close()
    assert asked == [0.0] * 4 + [1.0] * 4 + [2.0]


@pytest.mark.parametrize(
    ("device", "allowed", "core"),
    [
        (GPU, {0, 1, 2, 3}, 3),
        (GPU, {4, 5, 6, 7, 12}, 12),
        (GPU, {0, 1, 2}, None),
        (GPU, {5}, None),
        (GPU, set(), None),
        ("cpu", set(range(64)), None),
        ("none", {0, 1, 2, 3}, None),
    ],
)
def test_it_has_a_core_that_an_engine_can_spare_and_rests_longer_without_one(monkeypatch, device, allowed, core):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    probe = open_speed_probe(device)
    assert (probe.core, probe.rest_s) == (core, SHARED_REST_S if core is None else OWN_REST_S)
    assert OWN_REST_S < SHARED_REST_S and running(os.getpid()) == [], "the first reading starts it"


def test_it_stays_on_its_core():
    core = max(os.sched_getaffinity(0))
    probe = SpeedProbeSource(core)
    try:
        probe.read(0.0)
        piece_of(probe)
        assert [os.sched_getaffinity(pid) for pid in running(os.getpid())] == [{core}]
    finally:
        probe.close()


def test_close_ends_its_process_and_may_be_called_twice(probe, process):
    probe.close()
    assert process not in running(os.getpid())
    probe.close()
    SpeedProbeSource().close()


def test_an_interrupt_from_the_terminal_does_not_end_it(probe, process):
    piece_of(probe)
    os.kill(process, signal.SIGINT)
    piece_of(probe), piece_of(probe)
    assert process in running(os.getpid())


def test_one_that_ends_makes_its_values_unknown_and_degrades_nothing(probe, process):
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)  # its end of the pipe is closed from here on
    with Sampler([probe], 0.1).recording() as recording:
        time.sleep(0.25)
    told = recording.telemetry(began_s=recording.rows[0][0] - 1.0)
    assert set(told.columns[PROBE]) == set(told.columns[PROBE_CPU]) == {None}
    assert told.notes == () and told.missing == {f"{PROBE}: the host-speed probe's process has ended": len(told)}
    assert "lost" not in " ".join(health(watched_run(told, (0.5, 2.0)), None).reasons)


def test_one_that_cannot_be_started_makes_its_values_unknown(probe, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = probe.read(0.0)
    assert found.values == {PROBE: None, PROBE_CPU: None} and "/nowhere/python" in found.missing[0]


# A forked process holds our end of the pipe as well, so the host-speed probe sees no end of file when we are killed.
PARENT = """
import os, time
from pytest_slmserve.telemetry.host import SpeedProbeSource
source = SpeedProbeSource()
source.read(time.monotonic())
if (beside := os.fork()) == 0:
    time.sleep(600)
print(beside, flush=True)
time.sleep(600)
"""


def test_it_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    with parent:
        beside = int(parent.stdout.readline())
        try:
            [pid] = until(lambda: running(parent.pid), PATIENCE_S, "the host-speed probe")
            parent.kill()
            parent.wait()
            until(lambda: pid not in [each for each, _, _ in alive()], PATIENCE_S, "the host-speed probe's end")
            assert beside in [each for each, _, _ in alive()]
        finally:
            parent.kill()
            os.kill(beside, signal.SIGKILL)
