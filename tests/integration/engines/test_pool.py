"""Several engines: launched at once, with the device one after the other, where waiting is no part of a start; or
replicas that begin together, and have one window and one end."""

import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import SIMULATED, small_workload, stand_in
from processes import gone, group
from traces import share_a_window

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.engines import server
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.pool import Pool, ReplicaEngines, abreast, equal_parts, launch_engine
from pytest_slmserve.engines.server import ProcessEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, ReplicaSpec
from pytest_slmserve.telemetry.host import own_cores

OTHER = stand_in(step_s=0.003)
WORKLOAD, LOAD = small_workload(), ClosedLoop(4, window_s=0.5)


@pytest.fixture
def launched():
    return []


@pytest.fixture
def pool(launched):
    with closing(Pool(lambda spec, **how: launched.append(launch_engine(spec, **how)) or launched[-1])) as pool:
        yield pool


def pids(engines):
    return [engine.child.process.pid for engine in engines]


def has_started(engine):
    return "starts" in engine.child.log.read_text()


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_engines_start_one_by_one(pool, launched, interface):
    specs = [replace(stand_in(), interface=interface), replace(OTHER, interface=interface)]
    with abreast(pool, [(spec, {}) for spec in specs]) as (first, second):
        assert ["all is imported" in engine.child.log.read_text() for engine in launched] == [True, True]
        assert [has_started(engine) for engine in launched] == [False, False]
        assert first() is launched[0] and launched[0].ready and not has_started(launched[1])
        assert second() is launched[1] and launched[1].ready and pool.current == specs[1]
        assert gone(pids(launched)[0])
    assert all(map(gone, pids(launched))) and pool.current is None and pool.starts == specs


def test_equal_specs_get_separate_launches(pool, launched):
    asked = [(stand_in(), {"MINE": number}) for number in "12"]
    with pytest.raises(KeyboardInterrupt), abreast(pool, asked) as (first, _):
        found = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids(launched)]
        assert "MINE=1" in found[0] and "MINE=2" in found[1] and launched[0].launch != launched[1].launch
        first()
        raise KeyboardInterrupt
    assert len(launched) == 2 and all(map(gone, pids(launched)))


def test_failed_launch_stops_earlier_engines(pool, launched, temporary):
    nowhere, strange = replace(OTHER, python="/no/python"), stand_in(unheard_of=1)
    with pytest.raises(FileNotFoundError), abreast(pool, [(stand_in(), {}), (nowhere, {})]):
        pytest.fail("both were launched")
    assert len(launched) == 1 and gone(pids(launched)[0]) and [*temporary.iterdir()] == []
    with abreast(pool, [(stand_in(), {}), (strange, {})]) as (first, second):
        assert first().ready
        with pytest.raises(EngineFailed, match="TypeError: .*unheard_of"):
            second()  # when its turn comes
    assert all(map(gone, pids(launched)))


def test_simulated_engine_launches_at_turn(pool, launched):
    with abreast(pool, [(SIMULATED, {}), (SIMULATED, {})]) as (first, second):
        assert pool.starts == [] and not launched and first() is not second()
    assert len(pool.starts) == len(launched) == 2


class Sleeping(ProcessEngine):
    """An engine whose process began long ago, and sleeps for the sum of the two numbers that follow."""

    def _launch(self, model, folder, environment):
        self.child = Child(["sleep"], environment, folder)
        self._began -= 1000

    def _await_ready(self, on_wait):
        return {}


@pytest.fixture
def sleeping():
    engine = Sleeping(replace(stand_in(), tensor_parallel_size=2))
    yield engine
    engine.child.kill()


def test_start_time_excludes_waiting(sleeping, monkeypatch):
    monkeypatch.setattr(server, "START_S", 0.1)
    folder, heard = sleeping.child.folder, []
    (folder / "turn.1").touch()
    with pytest.raises(EngineFailed, match=" 0 s"):
        sleeping.await_turn(heard.append)
    assert sleeping.child.log in heard
    for name, ago in (("turn.1", 600), ("turn.2", 400)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - ago,) * 2)
    sleeping.await_turn()
    assert not (folder / "turn").exists() and not sleeping.ready
    sleeping.start()
    assert (folder / "turn").exists() and sleeping.resolved.ready_s == pytest.approx(600, abs=20)


def test_early_turn_costs_no_time(sleeping):
    assert sleeping.start().resolved.ready_s == pytest.approx(1000, abs=20)
    sleeping.child.process.kill()
    sleeping.await_turn()
    assert sleeping.child.process.poll() is not None


def started(*specs, launch=launch_engine, **how):
    return closing(ReplicaEngines(ReplicaSpec(specs, **how), launch).start())


def measured(replicas, **load):
    n = len(replicas.engines)
    return replicas.run([WORKLOAD] * n, [replace(LOAD, **load)] * n)


def test_replicas_share_one_window():
    with started(stand_in(), stand_in(), pinned=True) as replicas:
        runs, again = measured(replicas), measured(replicas, concurrency=2)
        kept = [os.sched_getaffinity(pid) for pid in pids(replicas.engines)]
    assert kept == [{*(part or own_cores())} for part in equal_parts([own_cores()] * 2, own_cores())]
    assert runs[0].began_s == pytest.approx(runs[1].began_s, abs=0.2)
    assert share_a_window(runs) and not any(run.failures for run in runs)
    assert all(closes - opens >= 0.4 for opens, closes in (run.window_s for run in runs))
    assert [max(run.steps.new_tokens) for run in (*runs, *again)] == [4, 4, 2, 2]
    with started(stand_in(), stand_in(step_s=0.03)) as replicas:
        fast, slow = measured(replicas)
        convoys = measured(replicas, ramp_up="burst", window_s=0.01)
    assert share_a_window([fast, slow]) and len(fast.steps) > 2 * len(slow.steps)
    for run in convoys:
        steps, period = len(window.window_trace(run).steps) - 1, WORKLOAD.mean_output_tokens + 1
        assert round(steps / period) >= 2 and abs(steps - round(steps / period) * period) <= 1
    ends = [(run.began_s + run.window_s[1], run.began_s + run.steps.time_s[-1]) for run in convoys]
    assert max(closed for closed, _ in ends) <= min(served for _, served in ends) + 0.1


def test_failed_replica_is_named():
    with started(stand_in(), stand_in()) as replicas:
        served = pids(replicas.engines)
        members, began = [pid for leader in served for pid in group(leader)], time.monotonic()
        threading.Timer(1.5, os.kill, (served[0], signal.SIGKILL)).start()
        with pytest.raises(EngineFailed, match=r"^replica 1 of 2 \(opt-tiny\): .*SIGKILL"):
            measured(replicas, window_s=30.0)
        assert not replicas.ready and all(map(gone, [*served, *members]))
        assert time.monotonic() - began < 15 and not [t for t in threading.enumerate() if t.name.startswith("slm-")]
    began = time.monotonic()
    name = r"^replica 2 of 2 \(opt-tiny\)"
    with started(stand_in(), stand_in(fault="exit", fault_at=3)) as replicas, pytest.raises(EngineFailed, match=name):
        measured(replicas)
    with started(stand_in(), stand_in(fault="refuse", fault_at=200)) as replicas:
        served, refused = measured(replicas)
    assert time.monotonic() - began < 30
    assert refused.first_failure == "ValueError: refused, as planted"
    assert served.failures == 0 and served.window_s[1] - served.window_s[0] >= 0.4
