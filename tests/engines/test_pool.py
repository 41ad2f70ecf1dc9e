"""One engine at a time, one start per specification, and a lock that the kernel lets go of."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import SIMULATED, small_workload

from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy, EngineFailed
from pytest_slmserve.schema.loads import OpenLoop

OTHER = replace(SIMULATED, model="opt-125m", model_facts=None)
HOLD = """
import sys, time
from pathlib import Path
from pytest_slmserve.engines.launch.device_lock import DeviceLock
lock = DeviceLock("gpu-0", Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


class Watched(SimulatedEngine):
    """Notes what happens to it, in the order it happens."""

    def __init__(self, spec, events):
        super().__init__(spec)
        self.events = events
        events.append(f"start {spec.model}")

    def close(self):
        self.events.append(f"close {self.spec.model}")


@pytest.fixture
def events():
    return []


@pytest.fixture
def pool(events):
    with closing(Pool(lambda spec, **_: Watched(spec, events))) as pool:
        yield pool


def test_one_start_per_specification(pool, events):
    assert pool.engine(SIMULATED) is pool.engine(replace(SIMULATED))
    assert events == ["start opt-tiny"]
    assert pool.current == SIMULATED


def test_another_specification_stops_the_first_before_it_starts(pool, events):
    pool.engine(SIMULATED)
    pool.engine(OTHER)
    assert events == ["start opt-tiny", "close opt-tiny", "start opt-125m"]
    assert pool.starts == [SIMULATED, OTHER]


def test_closing_stops_once_and_may_be_repeated(pool, events):
    pool.engine(SIMULATED)
    pool.close()
    pool.close()
    assert events == ["start opt-tiny", "close opt-tiny"]
    assert pool.current is None


def test_leaving_the_pool_closes_it(events):
    with pytest.raises(KeyboardInterrupt), closing(Pool(lambda spec, **_: Watched(spec, events))) as pool:
        pool.engine(SIMULATED)
        raise KeyboardInterrupt
    assert events[-1] == "close opt-tiny"


def test_an_engine_that_died_is_closed_and_the_next_is_a_new_one(pool, events):
    mortal = replace(SIMULATED, extra=(("die_at", 4),))
    first = pool.engine(mortal)
    with pytest.raises(EngineFailed):
        first.run(small_workload(), OpenLoop(requests=4))
    second = pool.engine(mortal)
    assert events == ["start opt-tiny", "close opt-tiny", "start opt-tiny"]
    assert first.launch != second.launch
    assert second.run(small_workload(), OpenLoop(requests=3)).failures == 0


def test_a_load_that_is_refused_costs_no_start(pool, events):
    with pytest.raises(BadUsage):
        pool.engine(SIMULATED).run(small_workload(output_tokens=500), OpenLoop(requests=1))
    assert pool.engine(SIMULATED).ready
    assert events == ["start opt-tiny"]


def test_what_did_not_start_is_not_tried_again_and_says_why():
    def refuse(spec, **_):
        raise EngineFailed(
            "the engine did not start: no memory; /tmp/x/engine.log ends with\n  | bang", "a smaller model"
        )

    pool = Pool(refuse)
    with pytest.raises(EngineFailed, match="bang"):
        pool.engine(SIMULATED)
    with pytest.raises(EngineFailed) as again:
        pool.engine(SIMULATED)
    assert again.value.problem == "not tried again: the engine did not start: no memory; /tmp/x/engine.log"
    assert again.value.hint == "a smaller model"
    with pytest.raises(EngineFailed, match="^the engine did not start"):
        pool.engine(OTHER)
    assert pool.starts == [SIMULATED, OTHER]


def test_a_start_is_heard_of_while_it_goes_on_and_when_it_is_ready(tmp_path):
    heard = []

    class Slow(SimulatedEngine):
        def start(self, on_wait):
            on_wait(tmp_path)
            return self

    with closing(Pool(lambda spec, **_: Slow(spec))) as pool:
        pool.on_wait = lambda spec, log: heard.append((spec, log))
        pool.on_started = lambda spec, seconds: heard.append((spec, seconds >= 0))
        pool.engine(SIMULATED)
        pool.engine(SIMULATED)
    assert heard == [(SIMULATED, tmp_path), (SIMULATED, True)]


def test_the_backend_chooses_the_interface():
    assert type(launch_engine(SIMULATED)) is SimulatedEngine


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of gpu-0."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_holder_is_refused_and_told_of_the_first(tmp_path, holder):
    with pytest.raises(DeviceBusy) as caught:
        DeviceLock("gpu-0", tmp_path).acquire()
    assert f"process {holder.pid}, since " in caught.value.problem
    assert f"in {Path.cwd()}" in caught.value.problem
    assert "wait until it ends" in caught.value.hint


def test_the_kernel_lets_go_when_the_holder_is_killed(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(20)
    lock = DeviceLock("gpu-0", tmp_path)
    lock.acquire()
    assert f'"pid": {os.getpid()}' in lock.path.read_text("utf-8")
    lock.release()


def test_other_devices_are_free(tmp_path, holder):
    lock = DeviceLock("gpu-1", tmp_path)
    lock.acquire()
    lock.release()
    assert lock.file is None


def test_a_file_system_without_locks_is_a_sentence(tmp_path, monkeypatch):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(BadUsage, match=r"cannot be taken \(No locks available\)") as caught:
        DeviceLock("cpu", tmp_path).acquire()
    assert "TMPDIR" in caught.value.hint


def test_releasing_empties_the_file_but_leaves_it(tmp_path):
    first, second = DeviceLock("cpu", tmp_path), DeviceLock("cpu", tmp_path)
    first.acquire()
    first.release()
    first.release()
    assert first.path.read_text("utf-8") == ""
    second.acquire()
    second.release()


def test_a_shorter_note_replaces_a_longer_one(tmp_path):
    lock = DeviceLock("cpu", tmp_path)
    lock.path.write_text("x" * 10_000, "utf-8")
    lock.acquire()
    assert lock.path.read_text("utf-8").startswith('{"pid": ')
    assert "x" * 100 not in lock.path.read_text("utf-8")
    lock.release()


def test_a_holder_that_left_no_note_is_still_respected(tmp_path):
    first, second = DeviceLock("cpu", tmp_path), DeviceLock("cpu", tmp_path)
    first.acquire()
    first.path.write_text("", "utf-8")
    with pytest.raises(DeviceBusy, match="it has not said which"):
        second.acquire()
    first.release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_of_another_user_can_be_locked_by_reading_it(tmp_path):
    lock = DeviceLock("cpu", tmp_path)
    lock.path.touch(0o444)
    lock.acquire()
    lock.release()


def test_a_file_that_may_only_be_read_can_be_locked(tmp_path, monkeypatch):
    lock = DeviceLock("cpu", tmp_path)
    lock.path.touch()
    monkeypatch.setattr("pytest_slmserve.engines.launch.device_lock.open_lock", lambda path: path.open("r"))
    lock.acquire()
    with pytest.raises(DeviceBusy):
        DeviceLock("cpu", tmp_path).acquire()
    lock.release()
    assert lock.path.read_text("utf-8") == ""
