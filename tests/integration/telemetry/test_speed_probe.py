"""The probe's real process: its pieces take time, it stays on its core, and nothing but its parent's end ends it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, until

from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU
from pytest_slmserve.telemetry.host import SCRIPT, Reading, SpeedProbeSource

PATIENCE_S = 30.0  # on a host that others keep busy


def running(parent: int) -> list[int]:
    """Ids of the host-speed probes that watch this process."""
    probes = [(pid, words[words.index(str(SCRIPT)) + 1]) for pid, _, words in alive() if str(SCRIPT) in words]
    return [pid for pid, watched in probes if watched == str(parent)]


@pytest.fixture
def probe():
    source = SpeedProbeSource(max(os.sched_getaffinity(0)))
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


def test_pieces_take_time_on_its_core_until_it_is_closed(probe, process):
    os.kill(process, signal.SIGSTOP)
    assert probe.read(1.0) == Reading() and probe.asked_s == 0.0
    os.kill(process, signal.SIGCONT)
    for number in (signal.SIGINT, 0, 0):  # of a terminal, it does not end it
        found = piece_of(probe)
        assert found.values.keys() == {PROBE, PROBE_CPU} and not found.missing
        assert 1e-4 < found.values[PROBE_CPU] < found.values[PROBE] + 1e-3 < PATIENCE_S
        os.kill(process, number)
    assert running(os.getpid()).count(process) == 1 and os.sched_getaffinity(process) == {probe.core}
    probe.close()
    assert process not in running(os.getpid())


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
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
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
