"""A repeat is a record of all that was asked and found, with the sensors of its time; a case has as many clean repeats
as were wanted, with one attempt more; devices are locked once, and slots are equal parts of a host."""

import os
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st
from measured import measure
from refusals import refused
from strategies import planted_run

from pytest_slmserve.engines.pool import Pool, equal_parts
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case, url_lock
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.run import executor as module
from pytest_slmserve.run.executor import Devices, Executor, GpuSlots, Results, count_missing, measure_case, slot_count
from pytest_slmserve.schema.errors import DeviceBusy, DoesNotFit, EngineFailed
from pytest_slmserve.schema.records import Environment, GateLaunch
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, ReplicaSpec, WorkloadSpec
from pytest_slmserve.telemetry.host import Gpu, Host
from pytest_slmserve.telemetry.sampler import Sampler, SimulatedSource
from pytest_slmserve.workload.requests import build_workload

HERE = Environment(platform="simulated", gpu_name="simulated")
SPEC = EngineSpec("opt-tiny", platform="simulated", extra=(("noise", 0.0), ("die_at", 16)))
LOAD = ClosedLoop(4, window_s=0.01)
WORKLOAD = build_workload(WorkloadSpec(prompt_tokens=8, output_tokens=4, requests=6), model_of("opt-tiny"))

# Of which nothing makes a repeat unclean.
STEADY = replace(SPEC, extra=(("noise", 0.0), ("t_inf", 2000), ("b_half", 16)))
REQUESTS = build_workload(WorkloadSpec(prompt_tokens=64, output_tokens=32, requests=16), model_of("opt-tiny"))
CASE = Case(STEADY, (REQUESTS,), (ClosedLoop(4, window_s=1),), HERE)


# One repeat


def test_record_holds_full_measurement():
    """An engine with a clock of its own keeps its own telemetry."""
    engine, before, heard = SimulatedEngine(SPEC), datetime.now(UTC), []
    found = measure(engine, WORKLOAD, LOAD, HERE, heard.append, Sensors())
    assert (found.spec, found.load, found.environment, found.launch) == (SPEC, LOAD, HERE, engine.launch)
    assert (found.resolved, found.workload, found.replica) == (engine.resolved, WORKLOAD.reference(), None)
    assert found.run == SimulatedEngine(SPEC).run(WORKLOAD, LOAD), "without noise a run is a function of its load"
    stamp = datetime.fromisoformat(found.measured_at)
    assert before - timedelta(milliseconds=1) <= stamp <= datetime.now(UTC) and stamp.utcoffset() == timedelta(0)
    assert [progress.phase for progress in heard] == ["over"] and found.run.telemetry.sources == ("simulated",)
    spec = ReplicaSpec((STEADY, replace(STEADY, max_num_seqs=8)))
    loads = ClosedLoop(2, window_s=1), ClosedLoop(3, window_s=1)
    running, case = Pool().engine(spec), Case(spec, (REQUESTS,) * 2, loads, HERE)
    executor = executor_on(running, archive=Store(), export=Store())
    found, again = executor.measure(case)
    assert (executor.archive, executor.export) == ([*found, *again], [])
    assert [(m.spec, m.load) for m in found] == list(zip(spec.engines, loads))
    assert [(m.replica.index, m.replica.count) for m in found] == [(0, 2), (1, 2)]
    assert len({m.replica.group for m in found}) == 1 and found[0].replica.set == again[0].replica.set
    assert found[0].replica.group != again[0].replica.group
    assert [m.launch for m in found] == [engine.launch for engine in running.engines]


class Sensors:
    """A sampler whose readings are what they are asked for; `told` has what happened when."""

    def __init__(self):
        self.told = []

    @contextmanager
    def recording(self):
        self.told.append("begins")
        try:
            yield SimpleNamespace(telemetry=lambda *of: of)
        finally:
            self.told.append("ends")


def test_readings_begin_with_run():
    sensors, engine, timed = Sensors(), SimulatedEngine(SPEC), replace(planted_run(2, 100.0), began_s=7.0)
    engine.run = lambda *of: sensors.told.append("runs") or timed
    assert measure(engine, WORKLOAD, LOAD, HERE, sampler=sensors).run.telemetry == (7.0, timed.window_s)
    assert measure(engine, WORKLOAD, LOAD, HERE).run.telemetry is None, "nobody asked for them"
    with pytest.raises(EngineFailed):
        measure(SimulatedEngine(SPEC), WORKLOAD, OpenLoop(requests=16), HERE, sampler=sensors)
    assert sensors.told == ["begins", "runs", "ends", "runs", "begins", "ends"]


# As many clean repeats as are wanted


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 5))
def test_missing_repeats_are_counted(known, wanted):
    """At most one repeat more than wanted is made in all."""
    made = 0
    while sum(known) + made < wanted and len(known) + made < wanted + 1:
        made += 1
    assert count_missing(known, wanted) == made


class Failing(SimulatedEngine):
    """Runs in a row have failed requests, or none."""

    def __init__(self, failures, spec=STEADY):
        super().__init__(spec)
        self.failures, self.loads = iter(failures), []

    def run(self, workload, load, on_progress=None):
        self.loads.append(load)
        return replace(super().run(workload, load, on_progress), failures=next(self.failures, 0))


class Store(list):
    """An archive, or an export."""

    def add(self, m):
        self.append(m)
        return m

    check_writable = list.copy  # which raises nothing

    def __bool__(self):
        return True


def executor_on(engine, repeats=2, **given):
    planner = SimpleNamespace(devices=lambda spec: ("simulated",))
    devices = SimpleNamespace(start=lambda spec: engine, sampler_on={("simulated",): None}.__getitem__, planner=planner)
    return Executor(devices, Results(), repeats, **given)


@pytest.mark.parametrize(("failures", "wanted", "clean"), [
    ([], None, [1, 1]), ([1], None, [0, 1, 1]), ([1, 1], None, [0, 0, 1]), ([0, 1], 3, [1, 0, 1, 1]), ([], 1, [1]),
])  # fmt: skip
def test_unclean_repeat_is_made_again(failures, wanted, clean):
    executor = executor_on(Failing(failures), archive=Store(), export=Store())
    found = executor.measure(CASE, wanted)
    assert [m.run.failures == 0 for (m,) in found] == list(map(bool, clean))
    assert executor.archive == executor.export == [m for (m,) in found] == list(executor.results.measurements())


def test_known_case_is_not_remeasured():
    told, executor = [], executor_on(Failing([]))
    executor.on_progress = lambda case, title, progress: told.append((case.key, title))
    first = list(executor.measure(CASE))
    assert executor.measure(CASE) == first
    third = executor.measure(CASE, 3, "undecided")[2]
    assert third not in first and len(executor.results.repeats[CASE.key]) == 3
    assert told == [(CASE.key, f"opt-tiny at 4, repeat {n}") for n in ("1", "2", "3 (undecided)")]
    archive, engine, waited = Store(), Failing([]), []
    archive.check_writable = Mock(side_effect=OSError("full"))
    with pytest.raises(OSError, match="full"):
        executor_on(engine, archive=archive).measure(CASE)
    executor = executor_on(engine, fetch=waited.append)
    assert executor.measure(CASE, 3) is executor.results.repeats[CASE.key]
    assert (waited, engine.loads, executor.awaited()) == ([CASE], [], {CASE: 3})


def test_largest_asked_number_is_awaited():
    executor, other = executor_on(Failing([])), replace(CASE, loads=(ClosedLoop(2, window_s=1),))
    executor.ask([CASE], 3)
    executor.ask([CASE, other])
    assert executor.awaited() == {CASE: 3, other: 2} and executor.count_missing(CASE) == 3
    executor.measure(CASE, 1)
    assert executor.awaited() == {CASE: 2, other: 2}
    executor.forget_awaited()
    assert executor.awaited() == {} and list(executor.results.requested) == [CASE.key, other.key]
    assert (executor.count_missing(CASE), executor.count_missing(CASE, 5)) == (1, 4)
    assert executor_on(Failing([])).count_missing(CASE) == 2, "nobody asked"
    executor, (known,) = executor_on(Failing([]), archive=Store()), measure_case(SimulatedEngine(STEADY), CASE)
    executor.results.repeats["of the archive"] = [(known,)]
    [(mine,), (other,)] = executor.measure(CASE)
    assert list(executor.results.measurements()) == [mine, other] != [known, mine]
    assert list(executor.results.measurements(["of the archive", "nowhere"])) == [known]
    paired = GateLaunch("gate", 1, "candidate", True)
    [of_a_gate] = executor.measure_once(CASE, "title", paired)
    assert of_a_gate.paired == paired and executor.archive == [mine, other, of_a_gate]
    assert executor.results.repeats[CASE.key] == [(mine,), (other,)]


# A load that has no room, and the first job of a launch

UNKNOWN = replace(STEADY, extra=(*STEADY.extra, ("disable_hybrid_kv_cache_manager", True)))


class Roomy(Failing):
    """Says that its KV cache has so many blocks of 16 tokens; a request has six."""

    def __init__(self, blocks, spec=UNKNOWN):
        super().__init__([])
        self.spec, self.resolved = spec, replace(self.resolved, kv_blocks=blocks)


@pytest.mark.parametrize(("requests", "first"), [(3, 3), (100, 64)])
def test_load_without_room_is_refused(requests, first):
    """One block is the engine's own. Where the plan knew the room, it is not looked at again."""
    for roomy in (Roomy(25), Roomy(None), Roomy(2, STEADY)):
        assert executor_on(roomy).measure(replace(CASE, engines=roomy.spec))
    engine = Roomy(24)
    with refused("3 requests of 96 tokens", kind=DoesNotFit, hint="up to 3"):
        executor_on(engine).measure(replace(CASE, engines=UNKNOWN))
    assert engine.loads == []
    engine, job = Failing([]), replace(CASE, loads=(OpenLoop(requests=requests),))
    executor = executor_on(engine)
    executor.measure(CASE)
    executor.measure(job)
    assert [load.requests for load in engine.loads] == [None, None, first, requests, requests]
    engine.launch = "another"
    executor.measure(job, 3)
    assert [load.requests for load in engine.loads[5:]] == [first, requests]
    assert len(executor.results.repeats[job.key]) == 3


# Devices


def host_of(number, platform="simulated"):
    found = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 << 30, "1", "12.8") for i in range(number))
    return Host(Environment(platform=platform), found[0].uuid if found else "none", gpus=found)


@pytest.fixture
def devices(monkeypatch):
    """Devices of a run with these options; `devices.locked` and `devices.read` have what it took and whose sensors."""
    made = SimpleNamespace(locked=[], read=[])

    @contextmanager
    def lock(device):
        if device in made.busy:
            raise DeviceBusy(f"{device} is taken")
        made.locked.append(device)
        yield
        made.locked.remove(device)

    def opens(choice, device, interval_s, others, window_s):
        made.read.append((choice, device, interval_s, *others))
        made.window_s = window_s
        return (None if choice == "off" else Sampler([SimulatedSource()], interval_s)), ["a note"]

    def open_devices(host=None, busy=(), **given):
        options, made.busy = read_options(given or {"gpu": True}, {}, {}), busy
        made.devices = Devices.from_options(Planner(options, options.platform, host or host_of(2, "cuda")))
        return made.devices

    monkeypatch.setattr(module, "lock_device", lock)
    monkeypatch.setattr(module, "open_sampler", opens)
    made.open = open_devices
    yield made
    made.devices.close()


def test_each_gpu_is_locked_once(devices):
    held, (one, both) = devices.open(), (EngineSpec("opt-125m", tensor_parallel_size=n) for n in (1, 2))

    def sampler_of(spec):
        return held.sampler_on(held.planner.devices(spec))

    assert sampler_of(one) is held.sampler
    assert sampler_of(both) is sampler_of(both) is not held.sampler
    assert sampler_of(replace(one, gpu=1)) not in (held.sampler, sampler_of(both))
    assert [each[1::2] for each in devices.read] == [("GPU-0",), ("GPU-0", "GPU-1"), ("GPU-1",)]
    assert held.planner.notes == ["a note"], "each once"
    assert held.own_sampler() is held.sampler, "engines of this run have one GPU"
    held.planner.options = held.planner.options._replace(tensor_parallel_size=(2,))
    assert held.own_sampler() is sampler_of(both)
    held = devices.open(simulate=True)
    held.hold()
    assert held.start(SPEC).spec == SPEC == held.pool.current and held.start(SPEC) and held.pool.starts == [SPEC]
    held.close()
    assert held.pool.current is None, "the end stops what runs"
    held = devices.open()
    held.hold()
    assert held.pool.device == "GPU-0"
    for spec, locked in ((one, ["GPU-0"]), (both, ["GPU-0", "GPU-1"]), (both, ["GPU-0", "GPU-1"])):
        held.take(spec)
        assert devices.locked == locked
    with refused("3 GPUs"):
        held.take(replace(both, gpu=1))
    assert devices.locked == ["GPU-0", "GPU-1"]
    held.close()
    assert devices.locked == []
    with pytest.raises(DeviceBusy):
        devices.open(busy=["GPU-0"]).hold()


@pytest.mark.parametrize(("given", "for_us", "locks", "read"), [
    ({"simulate": True}, False, [], []),  # a formula disturbs nobody
    ({"gpu": True}, False, ["GPU-0"], [("auto", "GPU-0", 0.25)]),
    ({"gpu": True}, True, [], [("auto", "GPU-0", 0.25)]),  # by the process that started this one
    ({"gpu": True, "telemetry_interval": "0.5"}, False, ["GPU-0"], [("auto", "GPU-0", 0.5)]),
    ({"gpu": True, "plan": True}, False, ["GPU-0"], []),
    ({"gpu": True, "ray": "auto"}, False, [], []),
    ({"gpu": True, "ray": "local"}, False, ["GPU-0"], []),
])  # fmt: skip
def test_first_device_is_locked(devices, given, for_us, locks, read):
    held = devices.open(**given)
    held.locked_for_us = for_us
    held.hold()
    assert (devices.locked, devices.read) == (locks, read)
    assert (held.sampler is not None, held.planner.notes) == (bool(read), ["a note"] * len(read))


def test_each_endpoint_url_is_locked(devices, monkeypatch):
    monkeypatch.setattr(module, "EndpointEngine", engine := Mock())
    urls = [f"http://host{i}:80/v1/completions" for i in range(2)]
    given = {"endpoint": ",".join(urls), "models": "a,b", "timeout": "7"}
    held = devices.open(Host(Environment(platform="remote"), "none"), **given)
    held.hold()
    assert devices.locked == list(map(url_lock, urls)) and engine.return_value.close.call_count == 4
    asked = [(call.args[0].url, call.args[0].model, call.kwargs) for call in engine.call_args_list]
    assert asked == [(url, model, {"timeout_s": 7.0}) for url in urls for model in "ab"]
    assert held.sampler is None and devices.read == [] and len(held.planner.notes) == 1
    assert held.pool.launch.keywords == {"timeout_s": 7.0}


@pytest.mark.parametrize(("given", "interval_s", "read"), [
    ({"simulate": True}, 0.25, 0),
    ({"simulate": True, "telemetry_interval": "0.5"}, 0.5, 0),
    ({"simulate": True, "telemetry": "off"}, None, 0),
    ({"gpu": True, "telemetry": "off"}, None, 1),  # for one GPU, and so for all
])  # fmt: skip
def test_watched_block_uses_engine_sensors(devices, given, interval_s, read):
    held = devices.open(host_of(1), **given)
    sampler = held.own_sampler()
    assert (sampler and sampler.interval_s) == interval_s
    assert sampler is None or sampler.name == SimulatedSource().name
    assert held.sampler_on(("GPU-0", "GPU-1")) is None and len(devices.read) == read


# Slots of a host

CPU = Host(Environment(platform="cpu", cores=5), "cpu")


@pytest.fixture
def cores(monkeypatch):
    """Gives this process so many cores, and keeps what is done to its cores and variables."""
    pinned = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: pinned.append(sorted(to)))

    def have(number):
        if number is None:  # a system that does not say
            monkeypatch.delattr(os, "sched_getaffinity")
        else:
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))
        return pinned

    return have


@given(st.lists(st.frozensets(st.integers(0, 63), min_size=1, max_size=16), min_size=1, max_size=4), st.integers(1, 8))
def test_slots_share_no_core(nodes, workers):
    """GPUs in turn on NUMA nodes; on those of the same size that share no core, each has some near it."""
    alike = [frozenset(range(i * 8, i * 8 + 8)) for i in range(len(nodes))]
    for of in (nodes, alike):
        near = [of[i % len(of)] for i in range(workers)]
        parts = equal_parts(near, frozenset().union(*near))
        given = [core for part in parts for core in part]
        assert len(set(map(len, parts))) == 1 and len(set(given)) == len(given)
    assert parts[0] and all(set(part) <= there for part, there in zip(parts, near))


FAR = replace(host_of(2), gpus=tuple(replace(g, near_cores=n) for g, n in zip(host_of(2).gpus, ({8, 9}, {1, 3, 9}))))


@pytest.mark.parametrize(("there", "ours", "slots", "at", "seen"), [
    (host_of(4), 16, {"GPU-0": (0, 1, 2, 3, 4), "GPU-1": (5, 6, 7, 8, 9), "GPU-2": (10, 11, 12, 13, 14)}, (1,), (5, 1)),
    (CPU, 5, {"cpu-0": (0, 1), "cpu-1": (2, 3)}, (0,), (2, None)),
    (FAR, 4, {"GPU-0": (0,), "GPU-1": (1,)}, (1,), (1, 1)),  # cores near a GPU that are not ours are not given
    (host_of(4), None, {"GPU-0": (), "GPU-1": ()}, (0,), (None, 1)),
])  # fmt: skip
def test_slot_sees_own_gpu(cores, there, ours, slots, at, seen):
    cores(ours)
    found = GpuSlots.from_host(there, len(slots))
    assert found == GpuSlots(tuple(slots), (), tuple(slots.values()))
    host = found.host(there, at)
    assert host.gpus == there.gpus[at[0] : at[0] + 1]
    assert (host.environment.cores, host.environment.of_gpus) == seen


@pytest.mark.parametrize(("number", "free", "block"), [
    (1, {2, 3}, (2,)), (1, set(), None),
    (2, {0, 1, 2, 3}, (0, 1)), (2, {1, 2, 3}, (2, 3)), (2, {1, 2}, None),
    (4, {0, 1, 2, 3, 4}, (0, 1, 2, 3)),
])  # fmt: skip
def test_gpu_blocks_are_neighbours(number, free, block):
    assert GpuSlots(tuple("abcde")).block(number, free) == block


@pytest.mark.parametrize(("platform", "given", "seen"), [
    ("cuda", "2,5", ["5", "2,5"]), ("cuda", "GPU-a,GPU-b", ["GPU-b", "GPU-a,GPU-b"]), ("cuda", None, ["1", "0,1"]),
    ("simulated", None, [None, None]),
])  # fmt: skip
def test_pinned_gpus_keep_names(cores, platform, given, seen):
    pinned = cores(4)
    os.environ |= {"CUDA_VISIBLE_DEVICES": given} if given else {}
    slots, found = GpuSlots.from_host(host_of(2, platform), 2), []
    for at in ((1,), (0, 1)):
        slots.pin(at)
        found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert (found, pinned) == (seen, [[2, 3], [0, 1, 2, 3]])
    assert os.environ.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if platform == "cuda" else None)


def test_engine_gets_cores_of_gpus(cores):
    """An engine that shares a GPU has the cores of one."""
    cores(8)
    slots, options = GpuSlots.from_host(host_of(4), 4), read_options({"simulate": True}, {}, {})
    planner = Planner(options, "simulated", slots.host(host_of(4), range(4)))
    one, two = (planner.spec("opt-125m", number) for number in (1, 2))
    each, both = (planner.replicas(["opt-125m"] * 2, how) for how in ("gpus", "time-slicing"))
    found = [planner.environment(spec) for spec in (one, two, each, both)]
    assert [where.cores for where in found] == [2, 4, 4, 2]
    assert len({where.per_gpu_key for where in found}) == 1, "they are compared"
    assert len({where.key for where in found}) == 2, "but not mixed"


@pytest.mark.parametrize(("there", "number", "ours", "widest", "facts", "most"), [
    (host_of(1), 2, 8, 1, "1 GPU is", 1), (host_of(2), 3, 8, 1, "2 GPUs are", 2), (host_of(2), 2, 1, 1, "are 1", 1),
    (host_of(8), 2, 4, 4, "4 GPUs", 4), (CPU, 4, 5, 2, "2 processes", 2), (CPU, 2, 1, 2, "are 1", 1),
    (host_of(8), 4, 4, 4, "", 4), (host_of(2), 2, 2, 1, "", 2), (host_of(2), 2, 2, 2, "", 2),
    (CPU, 2, 4, 2, "", 2), (CPU, 2, 2, 1, "", 2),
])  # fmt: skip
def test_impossible_slots_are_refused(cores, there, number, ours, widest, facts, most):
    cores(ours)
    if facts:
        with refused(f"local:{number}", facts, hint=f"local:{most}"):
            GpuSlots.from_host(there, number, widest)
    else:
        assert len(GpuSlots.from_host(there, number, widest).devices) == number == most


@pytest.mark.parametrize(("word", "platform", "ours", "number"), [
    ("local", "simulated", 3, 3), ("local", "simulated", None, 1), ("local:7", "simulated", 3, 7),
    ("local", "cuda", 3, 8), ("local", "cpu", 3, 2),
])  # fmt: skip
def test_host_gives_all_slots(word, platform, ours, number, cores, monkeypatch):
    cores(ours)
    monkeypatch.setattr(module, "numa_nodes", lambda: 2)
    assert slot_count(read_options({"simulate": True, "ray": word}, {}, {}), host_of(8, platform)) == number
