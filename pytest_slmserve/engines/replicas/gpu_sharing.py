"""Starts replicas the way they are to share their device: by time slicing, under MPS, or on MIG instances."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import psutil

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.load_client import TIMEOUT_S
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.engines.replicas import mps
from pytest_slmserve.engines.replicas.replica_set import HeldEngine, ReplicaEngines, cores_of_each
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.literals import Sharing
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host_probe import memory_used

IMAGINED_GAIN: dict[Sharing, float] = {"time-slicing": 1.0, "mps": 1.2, "mig": 1.0}  # of the one simulated device


def start_replicas(spec: ReplicaSpec, device: str = "none", timeout_s: float = TIMEOUT_S) -> ReplicaEngines:
    """Start them on the device of that UUID ("cpu" and "none" are none). timeout_s: the longest that a request to an
    endpoint may last.

    Raises BadUsage where they cannot share it so (`cannot_share` says it beforehand), EngineFailed where one of them
    does not start, or is not where it should be.
    """
    if why := cannot_share(spec, device):
        raise BadUsage(why, "another way of sharing: time-slicing")
    launch = partial(_launch, sharing=spec.sharing, timeout_s=timeout_s)
    used = partial(memory_used, device) if spec.platform == "cuda" else None
    if spec.platform == "simulated" or spec.sharing in ("time-slicing", "urls"):
        return ReplicaEngines(spec, launch, memory_used=used)
    if spec.sharing == "gpus":  # nobody takes memory where another looks
        return ReplicaEngines(spec, launch)
    if spec.sharing == "mig":
        extra_envs = [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in mig_instances(device)]
        return ReplicaEngines(spec, launch, extra_envs=extra_envs)
    daemon = mps.MpsDaemon(device, spec.thread_percentage)
    return ReplicaEngines(
        spec,
        launch,
        extra_envs=[daemon.environment] * len(spec),
        check=lambda name, engine: daemon.verify(name, processes(engine)),
        memory_used=used,
        last=daemon.close,
    )


def cannot_share(spec: ReplicaSpec, device: str) -> str | None:
    """The reason that these replicas cannot share the device in this way, in one sentence; None where they can."""
    if spec.platform == "cpu" and not all(cores_of_each(len(spec), pinned=True)):
        return f"{len(spec)} engines of vLLM's CPU backend need a core each"
    if spec.platform == "simulated" or spec.sharing in ("time-slicing", "gpus", "urls"):
        return None
    if spec.sharing == "mps":
        return mps.unable(device)
    there = len(mig_instances(device))
    return f"{there} MIG instances are there for {len(spec)} replicas; none is made here" if there < len(spec) else None


def mig_instances(device: str) -> list[str]:
    """UUIDs of the MIG instances of a GPU, as NVML lists them; none where MIG is off, or there is no NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(device)
        if not pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            return []
        found = []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            except pynvml.NVMLError_NotFound:
                continue  # instances may have gaps between them
            found.append(str(pynvml.nvmlDeviceGetUUID(instance)))
        return found
    except pynvml.NVMLError:
        return []


def processes(engine: Engine) -> set[int]:
    """Ids of an engine's own processes; none of a simulated one."""
    if not isinstance(engine, OfflineEngine | ServerEngine):
        return set()
    try:
        worker = psutil.Process(engine.child.process.pid)
        return {worker.pid, *(child.pid for child in worker.children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def _launch(
    spec: EngineSpec,
    *,
    extra_env: Mapping[str, str],
    cores: Collection[int],
    share: int,
    sharing: Sharing,
    timeout_s: float,
) -> HeldEngine:
    if spec.platform == "remote":
        return EndpointEngine(spec, timeout_s=timeout_s)
    if spec.platform == "simulated":
        if sharing == "gpus":
            return SimulatedEngine(spec, gpus=share)
        return SimulatedEngine(spec, speed=IMAGINED_GAIN[sharing] / share)
    engine = ServerEngine if spec.interface == "server" else OfflineEngine
    return engine(spec, extra_env=extra_env, cores=cores, held=True)
