"""Real programs and processes: an interpreter and git are asked, a child's CPU time is found once, whole, and pieces of
the speed probe take time on its core until its parent's end, and nothing else, ends it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, until

from pytest_slmserve.schema.sensors import OWN_CORES, PROBE, PROBE_CPU
from pytest_slmserve.telemetry import host
from pytest_slmserve.telemetry.host import SCRIPT, Reading, SpeedProbeSource

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_commit_is_named_with_changes(tmp_path, monkeypatch):
    packages = tmp_path / "vllm-0.26.0.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n", "utf-8")
    assert host.interpreter(sys.executable, {"PYTHONPATH": str(tmp_path)})["vllm"] == "0.26.0"
    assert host.git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert host.git_commit(tmp_path) is None, "nothing was committed yet"
    (tmp_path / "a.txt").write_text("one", "utf-8")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    (tmp_path / "new.txt").write_text("not tracked", "utf-8")
    assert host.git_commit(tmp_path) == commit
    (tmp_path / "a.txt").write_text("two", "utf-8")
    assert host.git_commit(tmp_path) == f"{commit}+"
    monkeypatch.setenv("PATH", "/nowhere")
    assert host.git_commit(tmp_path) is None


def git(root, *words):
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=20).stdout.strip()


@pytest.mark.parametrize("looks", [False, True])
def test_ended_child_is_counted_once(monkeypatch, looks):
    monkeypatch.setattr(host, "LIST_S", 0.0)
    source = host.HostSource()
    source.read(began := time.monotonic())
    used_s, at = 0.0, began
    with subprocess.Popen([sys.executable, "-S", "-c", BURN]) as child:
        while child.poll() is None:
            time.sleep(0.05)
            if looks:
                last, at = at, time.monotonic()
                used_s += source.read(at).values[OWN_CORES] * (at - last)
    ended = time.monotonic()
    used_s += source.read(ended).values[OWN_CORES] * (ended - at)
    ticks_s = 2 / os.sysconf("SC_CLK_TCK")  # user and system time are whole ticks each
    assert 0.3 - ticks_s <= round(used_s, 6) < 0.55, "with a second count it is above 0.6"


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


def test_speed_probe_times_its_core(probe, process):
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


def test_speed_probe_ends_with_parent():
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
