"""Ways to share a device: what each replica is told of it, what is looked after, what is said where it cannot be."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pynvml
import pytest
from interfaces import SIMULATED, stand_in

from pytest_slmserve.engines import pool as gpu_sharing
from pytest_slmserve.engines.pool import Pool, ReplicaEngines, cannot_share, mig_instances
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import ReplicaSpec

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
    monkeypatch.setattr(gpu_sharing, "mps_unable", lambda gpu: None)
    monkeypatch.setattr(gpu_sharing, "MpsDaemon", Daemon)
    monkeypatch.setattr(gpu_sharing, "memory_used", lambda device: 0)


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
    with pytest.raises(EngineFailed, match=r"replica 2 of 2 \(opt-tiny\): the MPS control daemon does not serve"):
        ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mps"), launched, GPU).start()
    assert Daemon.log.count("engine ends") == 2 and "close" in Daemon.log


def test_a_daemon_is_closed_when_no_engine_starts(under_mps):
    def refuse(spec, **how):
        raise EngineFailed("no room")

    with pytest.raises(EngineFailed, match=r"replica 1 of 2 \(opt-tiny\): no room"):
        ReplicaEngines(ReplicaSpec((CUDA, CUDA), "mps"), refuse, GPU)
    assert Daemon.log[-1] == "close"


def test_where_mps_cannot_run_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(gpu_sharing, "mps_unable", lambda gpu: f"{gpu} has no MPS")
    spec = ReplicaSpec((CUDA, CUDA), "mps")
    assert cannot_share(spec, GPU) == "GPU-1234 has no MPS"
    with pytest.raises(BadUsage, match=r"GPU-1234 has no MPS\n  try: another way of sharing: time-slicing"):
        Pool(launched, device=GPU).engine(spec)


@pytest.mark.parametrize("spec", [ReplicaSpec((CUDA, CUDA)), ReplicaSpec((SIMULATED, SIMULATED), "mps")])
def test_taking_turns_and_a_simulated_device_need_nothing(spec):
    assert cannot_share(spec, "none") is None


def test_engines_on_the_cpu_need_a_core_each(monkeypatch):
    cpu = replace(SIMULATED, platform="cpu")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert cannot_share(ReplicaSpec((cpu, cpu)), "cpu") is None
    assert cannot_share(ReplicaSpec((cpu,) * 3), "cpu") == "3 engines of vLLM's CPU backend need a core each"


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
    assert three == "2 MIG instances are there for 3 replicas; none is made here"


def test_without_mig_there_are_none(monkeypatch):
    Nvml(monkeypatch, on=False)
    assert mig_instances(GPU) == []


def test_without_nvml_there_are_none():
    assert mig_instances(GPU) == []


# Processes and the pool


def test_an_engines_processes_are_its_own():
    engine = OfflineEngine(stand_in()).start()
    with closing(engine):
        assert engine.child.process.pid in engine.processes() and len(engine.processes()) > 1
    assert engine.processes() == set() == SimulatedEngine(SIMULATED).processes()


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
    with pytest.raises(EngineFailed, match=r"not tried again: replica 1 of 2 \(opt-tiny\): no room"):
        pool.engine(ReplicaSpec((SIMULATED, SIMULATED)))
