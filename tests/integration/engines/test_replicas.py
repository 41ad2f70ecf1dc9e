"""Several engines at once: one start after the other, one beginning, one window, and one end for all."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from interfaces import small_workload, stand_in
from processes import gone, group
from traces import share_a_window

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.engines.pool import ReplicaEngines, equal_parts, launch_engine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, ReplicaSpec
from pytest_slmserve.telemetry.host import own_cores

WORKLOAD = small_workload()
LOAD = ClosedLoop(4, window_s=0.5)


def started(*specs, launch=launch_engine, **how):
    return closing(ReplicaEngines(ReplicaSpec(specs, **how), launch).start())


def processes_of(replicas):
    return [engine.child.process.pid for engine in replicas.engines]


def measured(replicas, load=LOAD):
    n = len(replicas.engines)
    return replicas.run([WORKLOAD] * n, [load] * n)


def test_all_have_one_window_and_begin_together():
    with started(stand_in(), stand_in(), stand_in()) as replicas:
        runs = measured(replicas)
        assert replicas.ready and len(runs) == 3
        again = measured(replicas, replace(LOAD, concurrency=2))
    for first, second in pairwise(run.began_s for run in runs):
        assert first == pytest.approx(second, abs=0.2)
    assert share_a_window(runs)
    assert all(closes - opens >= 0.4 for opens, closes in (run.window_s for run in runs))
    assert not any(run.failures for run in runs)
    assert [max(run.steps.new_tokens) for run in (*runs, *again)] == [4, 4, 4, 2, 2, 2]


def test_of_requests_that_start_together_each_has_whole_convoys_while_all_are_under_load():
    with started(stand_in(), stand_in(step_s=0.02)) as replicas:
        runs = measured(replicas, replace(LOAD, ramp_up="burst", window_s=0.01))
    output_tokens = WORKLOAD.mean_output_tokens
    for run in runs:
        steps = len(window.window_trace(run).steps) - 1
        periods = round(steps / (output_tokens + 1))
        assert periods >= 2 and abs(steps - periods * (output_tokens + 1)) <= 1
    ends = [(run.began_s + run.window_s[1], run.began_s + run.steps.time_s[-1]) for run in runs]
    assert max(closed for closed, _ in ends) <= min(served for _, served in ends) + 0.1


def test_a_slow_replica_is_waited_for():
    with started(stand_in(), stand_in(step_s=0.05)) as replicas:
        fast, slow = measured(replicas)
    assert share_a_window([fast, slow])
    assert len(fast.steps) > 2 * len(slow.steps)


def test_all_are_launched_at_once_and_take_the_device_in_turn(monkeypatch):
    replicas, logs = ReplicaEngines(ReplicaSpec((stand_in(),) * 3), launch_engine), []

    def check(self, index):
        """After each start: which of all have touched the device."""
        logs.append(["starts" in engine.child.log.read_text() for engine in self.engines])

    monkeypatch.setattr(ReplicaEngines, "check", check)
    with closing(replicas):
        for engine in replicas.engines:
            engine.await_turn()
        replicas.start()
    assert logs == [[True, False, False], [True, True, False], [True, True, True]]


def test_a_pinned_replica_keeps_to_its_cores():
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("one core")
    with started(stand_in(), stand_in(), pinned=True) as replicas:
        kept = [os.sched_getaffinity(pid) for pid in processes_of(replicas)]
    assert kept == [set(part) for part in equal_parts([own_cores()] * 2, own_cores())] and not kept[0] & kept[1]


# Faults


def test_one_that_does_not_start_is_named_and_the_others_are_stopped():
    made = []

    def launch(spec, **how):
        made.append(launch_engine(spec, **how))
        return made[-1]

    with pytest.raises(EngineFailed, match=r"^replica 2 of 3 \(opt-tiny\): .*ValueError: max_model_len"):
        started(stand_in(), stand_in(fault="raise"), stand_in(), launch=launch)
    assert len(made) == 3 and all(gone(each.child.process.pid) for each in made)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_is_killed_while_it_serves_is_named_and_nothing_is_left(victim):
    with started(stand_in(), stand_in()) as replicas:
        pids = processes_of(replicas)
        groups = [group(pid) for pid in pids]
        killer = threading.Timer(1.5, os.kill, (pids[victim], signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        name = rf"^replica {victim + 1} of 2 \(opt-tiny\): .*SIGKILL"
        with pytest.raises(EngineFailed, match=name):
            measured(replicas, replace(LOAD, window_s=30.0))
        killer.join()
        assert time.monotonic() - began < 15 and not replicas.ready
        for pid in (*pids, *groups[0], *groups[1]):
            assert gone(pid)
        assert not [t for t in threading.enumerate() if t.name.startswith("slm-")]


def test_one_that_dies_before_it_has_settled_keeps_nobody_waiting():
    with started(stand_in(), stand_in(fault="exit", fault_at=3)) as replicas:
        began = time.monotonic()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\)"):
            measured(replicas)
        assert time.monotonic() - began < 15


def test_one_whose_requests_fail_before_it_has_settled_keeps_nobody_waiting():
    with started(stand_in(), stand_in(fault="refuse", fault_at=200)) as replicas:
        began = time.monotonic()
        served, refused = measured(replicas)
        assert time.monotonic() - began < 15
    assert refused.first_failure == "ValueError: refused, as planted"
    assert served.failures == 0 and served.window_s[1] - served.window_s[0] >= 0.4


# Specifications


# Between two starts
