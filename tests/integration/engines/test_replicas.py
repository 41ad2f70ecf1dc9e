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
from hypothesis import given
from hypothesis import strategies as st
from interfaces import SIMULATED, small_workload, stand_in
from processes import gone, group
from traces import share_a_window

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.engines import pool as replicas
from pytest_slmserve.engines.base import WindowBarrier, message_of
from pytest_slmserve.engines.pool import ReplicaEngines, equal_parts, launch_engine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
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
    for first, second in pairwise(run.began_s for run in runs):
        assert first == pytest.approx(second, abs=0.2)
    assert share_a_window(runs)
    assert all(closes - opens >= 0.4 for opens, closes in (run.window_s for run in runs))
    assert not any(run.failures for run in runs)


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


def test_a_second_run_on_the_same_replicas():
    with started(stand_in(), stand_in()) as replicas:
        first, second = measured(replicas), measured(replicas, replace(LOAD, concurrency=2))
        assert [max(run.steps.new_tokens) for run in (*first, *second)] == [4, 4, 2, 2]


def test_a_slow_replica_is_waited_for():
    with started(stand_in(), stand_in(step_s=0.05)) as replicas:
        fast, slow = measured(replicas)
    assert share_a_window([fast, slow])
    assert len(fast.steps) > 2 * len(slow.steps)


def test_simulated_replicas_share_the_device():
    with started(SIMULATED, SIMULATED) as two, started(SIMULATED) as one:
        halves, whole = measured(two), measured(one)
    for half in halves:
        assert half.steps.time_s[0] == pytest.approx(2 * whole[0].steps.time_s[0], rel=0.05)


def test_cores_and_shares_are_of_each_and_each_is_checked_when_it_has_started(monkeypatch):
    seen = []

    def launch(spec, *, extra_env, cores, speed):
        seen.append((cores, speed))
        return SimulatedEngine(spec)

    monkeypatch.setattr(ReplicaEngines, "check", lambda self, index: seen.append(self.name(index)))
    started(SIMULATED, SIMULATED, launch=launch, pinned=True)
    cores = equal_parts([own_cores()] * 2, own_cores())
    assert seen == [(cores[0], 0.5), (cores[1], 0.5), "replica 1 of 2 (opt-tiny)", "replica 2 of 2 (opt-tiny)"]
    seen.clear()
    started(SIMULATED, SIMULATED, launch=launch)
    assert seen[:2] == [((), 0.5), ((), 0.5)], "all cores, unless they are pinned"


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


@given(st.integers(1, 9))
def test_cores_are_in_equal_parts_and_nobody_has_anothers(replicas):
    parts = equal_parts([own_cores()] * replicas, own_cores())
    assert len(parts) == replicas and len({len(part) for part in parts}) == 1
    assert len({core for part in parts for core in part}) == sum(map(len, parts))


# Faults


def test_one_that_does_not_start_is_named_and_the_others_are_stopped():
    made = []

    def launch(spec, **how):
        made.append(launch_engine(spec, **how))
        return made[-1]

    with pytest.raises(EngineFailed, match=r"^replica 2 of 3 \(opt-tiny\): .*did not start: ValueError: max_model_len"):
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
        name = rf"^replica {victim + 1} of 2 \(opt-tiny\): the engine was killed by SIGKILL"
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


def test_different_kv_blocks_are_no_replicas():
    class Odd(SimulatedEngine):
        def __init__(self, spec, blocks):
            super().__init__(spec)
            self.resolved = replace(self.resolved, kv_blocks=blocks)

    blocks = iter([100, 99])
    with pytest.raises(EngineFailed, match=r"different numbers of KV blocks: \[100, 99\]"):
        started(SIMULATED, SIMULATED, launch=lambda spec, **how: Odd(spec, next(blocks)))


class Ended:
    """A daemon of MPS that has ended."""

    def verify(self, name, pids):
        if name.startswith("replica 2"):
            raise EngineFailed("the MPS control daemon ended (signal SIGKILL)")


def test_one_that_is_no_longer_where_it_should_be_after_a_run():
    with started(SIMULATED, SIMULATED) as replicas:
        replicas._daemon = Ended()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): the MPS control daemon ended"):
            measured(replicas)


def test_loads_that_are_none_for_replicas():
    with started(SIMULATED, SIMULATED) as replicas, pytest.raises(BadUsage, match="no window to measure"):
        replicas.run([WORKLOAD] * 2, [replace(LOAD, requests=8)] * 2)


def test_nobody_waits_for_one_that_has_failed():
    barrier, stopped = WindowBarrier([message_of(LOAD)] * 2), []

    def fail():
        time.sleep(0.1)
        raise EngineFailed("was killed")

    def settle():
        with pytest.raises(EngineFailed, match="another replica did not come as far"):
            barrier.settled()
        stopped.append("too")

    with pytest.raises(EngineFailed, match="was killed"):
        barrier.run_together(lambda index: [settle, fail][index](), 2, lambda: stopped.append("all"))
    assert sorted(stopped) == ["all", "too"]


@pytest.mark.parametrize(("ramp_up", "seconds"), [("staggered", 0.5), ("burst", 5.0)])
def test_a_window_of_requests_that_start_together_has_room_for_two_convoys(ramp_up, seconds):
    barrier = WindowBarrier([message_of(replace(LOAD, ramp_up=ramp_up))])
    barrier.begins_s -= 4.0  # two periods of the slowest
    opens, closes = barrier.settled()
    assert opens - barrier.begins_s == pytest.approx(3.7, abs=0.2)
    assert closes - opens == pytest.approx(seconds, abs=0.5)


# Specifications


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"engines": ()}, "without an engine"),
        ({"sharing": "luck"}, "unknown sharing 'luck'"),
        ({"thread_percentage": 50}, "a thread percentage of 50 with time-slicing"),
        ({"thread_percentage": 0, "sharing": "mps"}, "a thread percentage of 0"),
        ({"engines": (SIMULATED, replace(SIMULATED, platform="cpu"))}, "share one device"),
        ({"engines": (replace(SIMULATED, platform="cpu"),), "sharing": "mps"}, "a way to share a GPU"),
    ],
)
def test_specifications_that_cannot_be(words, problem):
    with pytest.raises(BadUsage, match=problem):
        ReplicaSpec(**{"engines": (SIMULATED, SIMULATED), **words})


def test_the_key_tells_all_that_matters():
    pair = ReplicaSpec((SIMULATED, SIMULATED))
    others = [
        ReplicaSpec((SIMULATED, SIMULATED, SIMULATED)),
        replace(pair, sharing="mps"),
        replace(pair, pinned=True),
        replace(pair, sharing="mps", thread_percentage=50),
        ReplicaSpec((SIMULATED, replace(SIMULATED, seed=1))),
    ]
    assert len({spec.key for spec in (pair, *others)}) == 6 and len(pair) == 2


# Between two starts


@pytest.mark.parametrize(("readings", "read"), [([5, 7, 9, 9, 9], 4), (range(1000), 60)])
def test_memory_is_waited_for_until_it_stands_still_and_not_for_ever(monkeypatch, readings, read):
    left = iter(readings)
    monkeypatch.setattr(replicas, "memory_used", lambda device: next(left))
    monkeypatch.setattr(replicas, "STABLE_S", 0.001)
    monkeypatch.setattr(replicas, "STABLE_WITHIN_S", 0.06)
    started(*[replace(SIMULATED, platform="cuda")] * 2, launch=lambda spec, **_: SimulatedEngine(spec))
    assert len(list(left)) == len(readings) - read


def on_gpus(number):
    return ReplicaSpec(tuple(replace(SIMULATED, gpu=i) for i in range(number)), "gpus")


def test_with_a_gpu_each_the_first_starts_alone_and_the_others_side_by_side():
    side_by_side, order = threading.Barrier(2), []

    class Noting(SimulatedEngine):
        def start(self, on_wait=None):
            if self.spec.gpu:
                side_by_side.wait(5)  # breaks where the other does not start meanwhile
            order.append(self.spec.gpu)

    replicas = ReplicaEngines(on_gpus(3), lambda spec, **_: Noting(spec)).start()
    assert order[0] == 0 and sorted(order) == [0, 1, 2]
    assert len(measured(replicas)) == 3


def test_one_of_them_that_does_not_start_is_named_and_the_others_are_stopped():
    closed = []

    class Odd(SimulatedEngine):
        def start(self, on_wait=None):
            if self.spec.gpu == 2:
                raise EngineFailed("did not start: out of memory")

        def close(self):
            closed.append(self.spec.gpu)

    with pytest.raises(EngineFailed, match=r"replica 3 of 3 \(.*\): did not start: out of memory"):
        ReplicaEngines(on_gpus(3), lambda spec, **_: Odd(spec)).start()
    assert sorted(closed) == [0, 1, 2]


def test_replicas_with_a_gpu_each_must_get_the_same_kv_blocks():
    class Less(SimulatedEngine):
        def start(self, on_wait=None):
            if self.spec.gpu:
                self.resolved = replace(self.resolved, kv_blocks=7)

    with pytest.raises(EngineFailed, match="got different numbers of KV blocks"):
        ReplicaEngines(on_gpus(2), lambda spec, **_: Less(spec)).start()
