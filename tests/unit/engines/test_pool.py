"""One engine at a time or several at once, one start for each specification; ways to share a device: what each replica
is told of it, what is looked after, and what is said where it cannot be. Engines are simulated, and the daemon of MPS
and the cards are planted."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from dataclasses import replace

import pynvml
import pytest
from fake_mps import install
from fake_nvml import NOT_SUPPORTED, UUID, FakeNvml, State, installed
from hypothesis import given
from hypothesis import strategies as st
from interfaces import SIMULATED, small_workload

from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import (
    Pool,
    ReplicaEngines,
    cannot_share,
    equal_parts,
    launch_engine,
    mig_instances,
    mps_unable,
)
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, ReplicaSpec
from pytest_slmserve.telemetry.host import own_cores

OTHER = replace(SIMULATED, model="opt-125m", model_facts=None)


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
    with pytest.raises(KeyboardInterrupt), closing(pool):
        pool.engine(SIMULATED)
        raise KeyboardInterrupt
    pool.close()
    assert events == ["start opt-tiny", "close opt-tiny"]
    assert pool.current is None


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
    assert again.value.problem.endswith("no memory; /tmp/x/engine.log") and "bang" not in again.value.problem
    assert again.value.hint == "a smaller model"
    with pytest.raises(EngineFailed, match="bang"):
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


def test_the_platform_and_the_interface_choose_the_engine(monkeypatch):
    for name in ("EndpointEngine", "ServerEngine", "OfflineEngine", "BatchedEngine", "SimulatedBatches"):
        monkeypatch.setattr(pools, name, lambda spec, name=name, **_: name)
    cpu = replace(SIMULATED, platform="cpu")
    kinds = {
        replace(SIMULATED, interface="transformers"): "SimulatedBatches",
        replace(SIMULATED, platform="remote", interface="endpoint", url="http://h/v1"): "EndpointEngine",
        cpu: "OfflineEngine",
        replace(cpu, interface="server"): "ServerEngine",
        replace(cpu, interface="transformers"): "BatchedEngine",
    }
    assert {spec: launch_engine(spec) for spec in kinds} == kinds
    assert type(launch_engine(SIMULATED)) is SimulatedEngine


# Several at once


WORKLOAD = small_workload()


LOAD = ClosedLoop(4, window_s=0.5)


def started(*specs, launch=launch_engine, **how):
    return closing(ReplicaEngines(ReplicaSpec(specs, **how), launch).start())


def measured(replicas, load=LOAD):
    n = len(replicas.engines)
    return replicas.run([WORKLOAD] * n, [load] * n)


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


@given(st.integers(1, 9))
def test_cores_are_in_equal_parts_and_nobody_has_anothers(replicas):
    parts = equal_parts([own_cores()] * replicas, own_cores())
    assert len(parts) == replicas and len({len(part) for part in parts}) == 1
    assert len({core for part in parts for core in part}) == sum(map(len, parts))


def test_different_kv_blocks_are_no_replicas():
    class Odd(SimulatedEngine):
        def __init__(self, spec, blocks):
            super().__init__(spec)
            self.resolved = replace(self.resolved, kv_blocks=blocks)

    blocks = iter([100, 99])
    with pytest.raises(EngineFailed, match=r"\[100, 99\]"):
        started(SIMULATED, SIMULATED, launch=lambda spec, **how: Odd(spec, next(blocks)))


class Ended:
    """A daemon of MPS that has ended."""

    def verify(self, name, pids):
        if name.startswith("replica 2"):
            raise EngineFailed("the MPS control daemon ended (signal SIGKILL)")


def test_one_that_is_no_longer_where_it_should_be_after_a_run():
    with started(SIMULATED, SIMULATED) as replicas:
        replicas._daemon = Ended()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): .*SIGKILL"):
            measured(replicas)


def test_loads_that_are_none_for_replicas():
    with started(SIMULATED, SIMULATED) as replicas, pytest.raises(BadUsage):
        replicas.run([WORKLOAD] * 2, [replace(LOAD, requests=8)] * 2)


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


@pytest.mark.parametrize(("readings", "read"), [([5, 7, 9, 9, 9], 4), (range(1000), 60)])
def test_memory_is_waited_for_until_it_stands_still_and_not_for_ever(monkeypatch, readings, read):
    left = iter(readings)
    monkeypatch.setattr(pools, "memory_used", lambda device: next(left))
    monkeypatch.setattr(pools, "STABLE_S", 0.001)
    monkeypatch.setattr(pools, "STABLE_WITHIN_S", 0.06)
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

    with pytest.raises(EngineFailed, match=r"replica 3 of 3 \(.*\): .*out of memory"):
        ReplicaEngines(on_gpus(3), lambda spec, **_: Odd(spec)).start()
    assert sorted(closed) == [0, 1, 2]


def test_replicas_with_a_gpu_each_must_get_the_same_kv_blocks():
    class Less(SimulatedEngine):
        def start(self, on_wait=None):
            if self.spec.gpu:
                self.resolved = replace(self.resolved, kv_blocks=7)

    with pytest.raises(EngineFailed, match=r", 7\]"):
        ReplicaEngines(on_gpus(2), lambda spec, **_: Less(spec)).start()


# Ways to share a device


CUDA = replace(SIMULATED, platform="cuda")
GPU = "GPU-1234"


class Daemon:
    """Stands in for the control daemon of MPS. lost: names of replicas that are not its clients."""

    lost: tuple[str, ...] = ()
    log: list[str]

    def __init__(self, gpu, thread_percentage):
        Daemon.log = [f"start {gpu} {thread_percentage}"]
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": "/pipe", "CUDA_VISIBLE_DEVICES": gpu}

    def verify(self, name, pids):
        self.log.append(f"verify {name} {sorted(pids)}")
        if name in self.lost:
            raise EngineFailed(f"the MPS control daemon does not serve {name}")

    def close(self):
        self.log.append("close")


class Engine(SimulatedEngine):
    def close(self):
        if hasattr(Daemon, "log"):
            Daemon.log.append("engine ends")


@pytest.fixture(autouse=True)
def no_daemon_of_another_test(monkeypatch):
    monkeypatch.setattr(Daemon, "lost", ())
    monkeypatch.setattr(Daemon, "log", [], raising=False)


@pytest.fixture
def under_mps(monkeypatch):
    """Replicas on an imagined GPU that MPS can run on."""
    monkeypatch.setattr(pools, "mps_unable", lambda gpu: None)
    monkeypatch.setattr(pools, "MpsDaemon", Daemon)
    monkeypatch.setattr(pools, "memory_used", lambda device: 0)


def launched(spec, **how):
    return Engine(spec, extra_env=how["extra_env"])


def test_replicas_under_mps_are_verified_at_the_start_and_the_daemon_ends_last(under_mps):
    replicas = ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mps", thread_percentage=50), launched, GPU).start()
    assert [engine.extra_env["CUDA_MPS_PIPE_DIRECTORY"] for engine in replicas.engines] == ["/pipe"] * 2
    replicas.close()
    assert Daemon.log == [
        f"start {GPU} 50",
        "verify replica 1 of 2 (opt-tiny) []",
        "verify replica 2 of 2 (opt-tiny) []",
        "engine ends",
        "engine ends",
        "close",
    ]


def test_a_replica_that_runs_without_mps_is_an_error_and_everything_ends(under_mps, monkeypatch):
    monkeypatch.setattr(Daemon, "lost", ("replica 2 of 2 (opt-tiny)",))
    with pytest.raises(EngineFailed, match=r"replica 2 of 2 \(opt-tiny\): "):
        ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mps"), launched, GPU).start()
    assert Daemon.log.count("engine ends") == 2 and "close" in Daemon.log


def test_a_daemon_is_closed_when_no_engine_starts(under_mps):
    def refuse(spec, **how):
        raise EngineFailed("no room")

    with pytest.raises(EngineFailed, match=r"replica 1 of 2 \(opt-tiny\): no room"):
        ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mps"), refuse, GPU)
    assert Daemon.log[-1] == "close"


def test_where_mps_cannot_run_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(pools, "mps_unable", lambda gpu: f"{gpu} has no MPS")
    spec = ReplicaSpec((CUDA, CUDA), "mps")
    assert cannot_share(spec, GPU) == "GPU-1234 has no MPS"
    with pytest.raises(BadUsage, match=r"GPU-1234 has no MPS\n.* time-slicing"):
        Pool(launched, device=GPU).engine(spec)


@pytest.mark.parametrize("spec", [ReplicaSpec((CUDA, CUDA)), ReplicaSpec((SIMULATED, SIMULATED), "mps")])
def test_taking_turns_and_a_simulated_device_need_nothing(spec):
    assert cannot_share(spec, "none") is None


def test_engines_on_the_cpu_need_a_core_each(monkeypatch):
    cpu = replace(SIMULATED, platform="cpu")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert cannot_share(ReplicaSpec((cpu, cpu)), "cpu") is None
    assert cannot_share(ReplicaSpec((cpu,) * 3), "cpu").startswith("3 ")


# MIG


class Nvml:
    """What of NVML tells about MIG: instances by their place on the GPU, with a gap between them."""

    def __init__(self, monkeypatch, on=True, instances=("MIG-a", None, "MIG-b")):
        def at(gpu, index):
            if instances[index] is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return instances[index]

        told = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetMigMode": lambda gpu: [int(on), int(on)],
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: len(instances),
            "nvmlDeviceGetMigDeviceHandleByIndex": at,
            "nvmlDeviceGetUUID": lambda handle: handle,
        }
        for name, answer in told.items():
            monkeypatch.setattr(pynvml, name, answer)


def test_instances_that_are_there_are_used_and_none_is_made(monkeypatch):
    Nvml(monkeypatch)
    assert mig_instances(GPU) == ["MIG-a", "MIG-b"]
    replicas = ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mig"), launched, GPU).start()
    assert [engine.extra_env for engine in replicas.engines] == [
        {"CUDA_VISIBLE_DEVICES": "MIG-a"},
        {"CUDA_VISIBLE_DEVICES": "MIG-b"},
    ]
    three = cannot_share(ReplicaSpec((CUDA,) * 3, "mig"), GPU)
    assert {"2", "3"} <= {*three.split()}


def test_without_mig_there_are_none(monkeypatch):
    Nvml(monkeypatch, on=False)
    assert mig_instances(GPU) == []


def test_without_nvml_there_are_none():
    assert mig_instances(GPU) == []


# Processes and the pool


def test_the_pool_holds_an_engine_or_replicas():
    pair = ReplicaSpec((SIMULATED, SIMULATED))
    with closing(Pool()) as pool:
        alone = pool.engine(SIMULATED)
        assert pool.engine(SIMULATED) is alone and pool.current == SIMULATED
        two = pool.engine(pair)
        assert pool.engine(pair) is two and pool.current == pair and two.ready
        assert pool.engine(SIMULATED) is not alone
        assert pool.starts == [SIMULATED, pair, SIMULATED]
    assert pool.current is None


def test_replicas_that_did_not_start_are_not_tried_again():
    def refuse(spec, **how):
        raise EngineFailed("no room")

    pool = Pool(refuse)
    with pytest.raises(EngineFailed, match=r"^replica 1 of 2 \(opt-tiny\): no room"):
        pool.engine(ReplicaSpec((SIMULATED, SIMULATED)))
    with pytest.raises(EngineFailed, match=r": replica 1 of 2 \(opt-tiny\): no room"):
        pool.engine(ReplicaSpec((SIMULATED, SIMULATED)))


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The folder of the programs of MPS, first on the PATH; none is started."""
    return install(tmp_path / "bin", monkeypatch)


class Gpu(FakeNvml):
    mode = 0

    def nvmlDeviceGetComputeMode(self, device, mode):  # noqa: N802 - NVML's name
        mode._obj.value = self.mode


@pytest.mark.parametrize(
    ("mig", "mode", "reason"),
    [
        (False, 0, None),
        (False, 3, None),
        (True, 0, "MIG mode"),
        (False, 2, "prohibited"),
    ],
)
def test_the_card_decides(told, mig, mode, reason):
    gpu = Gpu(mig_mode=mig)
    gpu.mode = mode
    with installed(gpu):
        told = mps_unable(UUID)
        assert told is None if reason is None else {UUID, *reason.split()} <= {*re.split("[ ,:]", told)}
        assert mps_unable("GPU-of-nobody").startswith("no GPU GPU-of-nobody ")


def test_a_card_without_mig_may_be_shared(told):
    with installed(Gpu(missing=frozenset({"nvmlDeviceGetMigMode"}))):
        assert "Function Not Found" in mps_unable(UUID), "the driver is too old to tell"
    with installed(Gpu(State(refused={"nvmlDeviceGetMigMode": NOT_SUPPORTED}))):
        assert mps_unable(UUID) is None


def test_other_reasons(told, monkeypatch):
    assert "MIG-7" in mps_unable("MIG-7")
    monkeypatch.setattr(pools.platform, "system", lambda: "Darwin")
    assert "Darwin" in mps_unable(UUID)
