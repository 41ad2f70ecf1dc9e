"""One engine at a time or several at once, one start for each specification; ways to share a device: what each replica
is told of it, what is looked after, and what is said where it cannot be. Engines, cards and the daemon are planted."""

import re
import threading
from contextlib import nullcontext
from dataclasses import replace

import pynvml
import pytest
from fake_mps import install
from fake_nvml import NOT_SUPPORTED, UUID, FakeNvml, State, installed
from hypothesis import given, strategies as st
from interfaces import SIMULATED, small_workload

from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import Pool, ReplicaEngines, cannot_share, equal_parts, launch_engine, mps_unable
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, ReplicaSpec
from pytest_slmserve.telemetry.host import own_cores

OTHER = replace(SIMULATED, model="opt-125m", model_facts=None)
CUDA, CPU = (replace(SIMULATED, platform=name) for name in ("cuda", "cpu"))
PAIR = ReplicaSpec((SIMULATED, SIMULATED))
WORKLOAD, LOAD = small_workload(), ClosedLoop(4, window_s=0.5)
GPU = "GPU-1234"
LAUNCH, CLOSE = "launch opt-tiny 0", "close opt-tiny 0"
VERIFIED = [f"verify replica {n} of 2 (opt-tiny) []" for n in (1, 2)]


@pytest.fixture
def log():
    return []


@pytest.fixture
def launching(log):
    """How to launch engines that are noted: `launching(on_start)`, which is called with each that starts."""

    def launching(on_start=lambda engine, on_wait: None):
        class Noted(SimulatedEngine):
            def start(self, on_wait=None):
                on_start(self, on_wait)
                return self

            def close(self):
                log.append(f"close {self.spec.model} {self.spec.gpu}")

        def launch(spec, *, extra_env=None, **how):
            log.append(f"launch {spec.model} {spec.gpu}")
            return Noted(spec, extra_env=extra_env)

        return launch

    return launching


def refuse(spec, **how):
    raise EngineFailed("did not start: no memory; /tmp/x/engine.log ends with\n  | bang", "a smaller model")


def test_pool_starts_each_engine_once(launching, log, tmp_path):
    pool = Pool(launching())
    first = pool.engine(SIMULATED)
    with pytest.raises(BadUsage):
        first.run(small_workload(output_tokens=500), OpenLoop(requests=1))
    assert pool.engine(replace(SIMULATED)) is first and first.ready, "a load that is refused costs no start"
    pool.engine(OTHER)
    two = pool.engine(PAIR)
    assert pool.engine(replace(PAIR)) is two and two.ready and pool.current == PAIR
    pool.close()
    pool.close()
    tiny, other = (LAUNCH, CLOSE), ("launch opt-125m 0", "close opt-125m 0")
    assert log == [*tiny, *other, LAUNCH, *tiny, CLOSE]
    assert pool.starts == [SIMULATED, OTHER, PAIR] and pool.current is None
    log.clear()
    pool, mortal = Pool(launching()), replace(SIMULATED, extra=(("die_at", 4),))
    first = pool.engine(mortal)
    with pytest.raises(EngineFailed):
        first.run(WORKLOAD, OpenLoop(requests=4))
    second = pool.engine(mortal)
    assert log == [LAUNCH, CLOSE, LAUNCH] and first.launch != second.launch
    assert second.run(WORKLOAD, OpenLoop(requests=3)).failures == 0
    heard, pool = [], Pool(launching(lambda engine, on_wait: on_wait(tmp_path)))
    pool.on_wait = lambda spec, log: heard.append((spec, log))
    pool.on_started = lambda spec, seconds: heard.append((spec, seconds >= 0))
    pool.engine(SIMULATED)
    pool.engine(SIMULATED)
    assert heard == [(SIMULATED, tmp_path), (SIMULATED, True)]


@pytest.mark.parametrize(("spec", "name"), [(SIMULATED, ""), (PAIR, r"replica 1 of 2 \(opt-tiny\): ")])
def test_failed_start_is_not_repeated(spec, name):
    pool, again = Pool(refuse), rf"^\S.*: {name}did not start: no memory; /tmp/x/engine.log\n"
    for asked, told, bang in ((spec, f"^{name}did", True), (spec, again, False), (OTHER, "did not", True)):
        with pytest.raises(EngineFailed, match=told) as caught:
            pool.engine(asked)
        assert ("bang" in caught.value.problem, caught.value.hint) == (bang, "a smaller model")
    assert pool.starts == [spec, OTHER]


def test_specification_chooses_engine_class(monkeypatch):
    for name in ("EndpointEngine", "ServerEngine", "OfflineEngine", "BatchedEngine", "SimulatedBatches"):
        monkeypatch.setattr(pools, name, lambda spec, name=name, **_: name)
    kinds = {
        replace(SIMULATED, interface="transformers"): "SimulatedBatches",
        replace(SIMULATED, platform="remote", interface="endpoint", url="http://h/v1"): "EndpointEngine",
        CPU: "OfflineEngine",
        replace(CPU, interface="server"): "ServerEngine",
        replace(CPU, interface="transformers"): "BatchedEngine",
    }
    assert {spec: launch_engine(spec) for spec in kinds} == kinds
    assert type(launch_engine(SIMULATED)) is SimulatedEngine


def replicas_of(*specs, launch=launch_engine, device="none", **how):
    return ReplicaEngines(ReplicaSpec(specs, **how), launch, device)


def on_gpus(number, launch):
    return replicas_of(*(replace(SIMULATED, gpu=i) for i in range(number)), launch=launch, sharing="gpus")


def measured(replicas):
    n = len(replicas.engines)
    return replicas.run([WORKLOAD] * n, [LOAD] * n)


@pytest.mark.parametrize("of", [on_gpus, lambda n, launch: replicas_of(*[SIMULATED] * n, launch=launch)])
def test_replicas_share_kv_blocks_equally(launching, of):
    one, two = (replicas_of(*[SIMULATED] * n).start() for n in (1, 2))
    [whole] = measured(one)
    for half in measured(two):
        assert half.steps.time_s[0] == pytest.approx(2 * whole.steps.time_s[0], rel=0.05)
    with pytest.raises(BadUsage):
        two.run([WORKLOAD] * 2, [replace(LOAD, requests=8)] * 2)
    blocks = iter([100, 99])

    def start(engine, on_wait):
        engine.resolved = replace(engine.resolved, kv_blocks=next(blocks))

    with pytest.raises(EngineFailed, match=r"\[100, 99\]"):
        of(2, launching(start)).start()


@pytest.mark.parametrize("pinned", [True, False])
def test_replicas_get_own_cores(monkeypatch, pinned):
    seen = []

    def launch(spec, *, extra_env, cores, speed):
        seen.append((cores, speed))
        return SimulatedEngine(spec)

    monkeypatch.setattr(ReplicaEngines, "check", lambda self, index: seen.append(self.name(index)))
    replicas_of(SIMULATED, SIMULATED, launch=launch, pinned=pinned).start()
    cores = equal_parts([own_cores()] * 2, own_cores()) if pinned else [(), ()]
    assert seen == [(cores[0], 0.5), (cores[1], 0.5), "replica 1 of 2 (opt-tiny)", "replica 2 of 2 (opt-tiny)"]


@given(st.lists(st.frozensets(st.integers(0, 7)), min_size=1, max_size=9))
def test_core_split_is_equal(near):
    parts = equal_parts(near, frozenset(range(8)))
    assert len(parts) == len(near) and len({len(part) for part in parts}) == 1
    assert len({core for part in parts for core in part}) == sum(map(len, parts))


@pytest.mark.parametrize(("readings", "read"), [([5, 7, 9, 9, 9], 4), (range(1000), 60)])
def test_start_waits_for_stable_memory(monkeypatch, readings, read):
    left = iter(readings)
    monkeypatch.setattr(pools, "memory_used", lambda device: next(left))
    monkeypatch.setattr(pools, "STABLE_S", 0.001)
    monkeypatch.setattr(pools, "STABLE_WITHIN_S", 0.06)
    replicas_of(CUDA, CUDA, launch=lambda spec, **_: SimulatedEngine(spec)).start()
    assert len(list(left)) == len(readings) - read


@pytest.mark.parametrize("fails", [False, True])
def test_first_gpu_replica_starts_alone(launching, log, fails):
    side_by_side, order = threading.Barrier(2), []

    def start(engine, on_wait):
        if engine.spec.gpu:
            side_by_side.wait(5)  # breaks where the other does not start meanwhile
        if engine.spec.gpu == 2 and fails:
            raise EngineFailed("did not start: out of memory")
        order.append(engine.spec.gpu)

    replicas = on_gpus(3, launching(start))
    with pytest.raises(EngineFailed, match=r"replica 3 of 3 \(.*\): .*out of memory") if fails else nullcontext():
        assert len(measured(replicas.start())) == 3
    assert order[0] == 0 and sorted(order) == ([0, 1] if fails else [0, 1, 2])
    assert sorted(log[3:]) == [f"close opt-tiny {n}" for n in range(3) if fails], "the others are stopped"


@pytest.fixture
def daemon(monkeypatch, log):
    """The daemon of MPS on an imagined GPU that it can run on; `lost` names replicas that it does not serve."""

    class Daemon:
        lost = ()

        def __init__(self, gpu, thread_percentage):
            log.append(f"daemon {gpu} {thread_percentage}")
            self.environment = {"CUDA_MPS_PIPE_DIRECTORY": "/pipe", "CUDA_VISIBLE_DEVICES": gpu}

        def verify(self, name, pids):
            log.append(f"verify {name} {sorted(pids)}")
            if name in self.lost:
                raise EngineFailed("the MPS control daemon ended")

        def close(self):
            log.append("daemon ends")

    monkeypatch.setattr(pools, "mps_unable", lambda gpu: None)
    monkeypatch.setattr(pools, "MpsDaemon", Daemon)
    monkeypatch.setattr(pools, "memory_used", lambda device: 0)
    return Daemon


def under_mps(launch, **how):
    return replicas_of(CUDA, CUDA, launch=launch, device=GPU, sharing="mps", **how)


def test_mps_replicas_start_in_turn(daemon, launching, log):
    launch = launching(lambda engine, on_wait: log.append("start"))
    made, ends = [f"daemon {GPU} 50", LAUNCH, LAUNCH], [CLOSE, CLOSE, "daemon ends"]
    started = ["start", VERIFIED[0], "start", VERIFIED[1]]
    replicas, late = (under_mps(launch, thread_percentage=50) for _ in "ab")
    assert [engine.extra_env["CUDA_MPS_PIPE_DIRECTORY"] for engine in replicas.start().engines] == ["/pipe"] * 2
    measured(replicas)
    daemon.lost = ["replica 2 of 2 (opt-tiny)"]
    for use in (lambda: measured(replicas), late.start):
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): the MPS control daemon ended"):
            use()
    assert log == [*made, *made, *started, *VERIFIED, *VERIFIED, *ends, *started, *ends]
    log.clear()
    with pytest.raises(EngineFailed, match=r"replica 1 of 2 \(opt-tiny\): did not start"):
        under_mps(refuse)
    assert log == [f"daemon {GPU} None", "daemon ends"]


def test_mig_replicas_use_instances(monkeypatch, launching):
    assert pools.mig_instances(GPU) == [], "without NVML"
    on = [1, 1]

    def at(gpu, index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return ("MIG-a", None, "MIG-b")[index]

    told = {"Init": lambda: None, "DeviceGetMigMode": lambda gpu: on, "DeviceGetMaxMigDeviceCount": lambda gpu: 3}
    told |= {"DeviceGetMigDeviceHandleByIndex": at, "DeviceGetUUID": str, "DeviceGetHandleByUUID": str}
    for name, answer in told.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    assert pools.mig_instances(GPU) == ["MIG-a", "MIG-b"]
    replicas = replicas_of(CUDA, CUDA, launch=launching(), device=GPU, sharing="mig").start()
    assert [engine.extra_env["CUDA_VISIBLE_DEVICES"] for engine in replicas.engines] == ["MIG-a", "MIG-b"]
    assert {"2", "3"} <= {*cannot_share(ReplicaSpec((CUDA,) * 3, "mig"), GPU).split()}
    on[0] = 0
    assert pools.mig_instances(GPU) == []
    monkeypatch.setattr(pools, "mps_unable", lambda gpu: f"{gpu} has no MPS")
    spec = ReplicaSpec((CUDA, CUDA), "mps")
    assert cannot_share(spec, GPU) == "GPU-1234 has no MPS"
    with pytest.raises(BadUsage, match=r"GPU-1234 has no MPS\n.*=time-slicing"):
        Pool(refuse, device=GPU).engine(spec)
    for free in (ReplicaSpec((CUDA, CUDA)), replace(PAIR, sharing="mps")):  # taking turns, and a simulated device
        assert cannot_share(free, "none") is None
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert cannot_share(ReplicaSpec((CPU, CPU)), "cpu") is None
    assert cannot_share(ReplicaSpec((CPU,) * 3), "cpu").startswith("3 "), "a core each"


class Gpu(FakeNvml):
    mode = 0

    def nvmlDeviceGetComputeMode(self, device, mode):  # noqa: N802 - NVML's name
        mode._obj.value = self.mode


@pytest.mark.parametrize(("gpu", "mode", "reason"), [
    (Gpu(), 0, None),
    (Gpu(), 3, None),
    (Gpu(mig_mode=True), 0, "MIG mode"),
    (Gpu(), 2, "prohibited"),
    (Gpu(missing=frozenset({"nvmlDeviceGetMigMode"})), 0, "Function Not Found"),  # the driver is too old to tell
    (Gpu(State(refused={"nvmlDeviceGetMigMode": NOT_SUPPORTED})), 0, None),
])  # fmt: skip
def test_gpu_decides_mps_support(tmp_path, monkeypatch, gpu, mode, reason):
    install(tmp_path / "bin", monkeypatch)  # of its programs none is started
    gpu.mode = mode
    with installed(gpu):
        why = mps_unable(UUID)
        assert why is None if reason is None else {*reason.split()} <= {*re.split("[ ,:]", why)}
        assert mps_unable("GPU-of-nobody").startswith("no GPU GPU-of-nobody ")
    assert "MIG-7" in mps_unable("MIG-7")
    monkeypatch.setattr(pools.platform, "system", lambda: "Darwin")
    assert "Darwin" in mps_unable(UUID)
