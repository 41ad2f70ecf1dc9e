"""Several engines at once on one device, started one after the other, loaded and measured at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from pytest_slmserve.engines.base import Engine, ProgressCallback, StartCallback, WindowBarrier, message_of
from pytest_slmserve.engines.replicas import mps
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, Sharing, naming
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import ClosedLoop, ReplicaSpec, Workload
from pytest_slmserve.telemetry.host import memory_used, own_cores

STABLE_S, STABLE_WITHIN_S = 0.5, 30.0  # of the device's memory, between two starts
IMAGINED_GAIN: dict[Sharing, float] = {"mps": 1.2}  # of the simulated device; other ways of sharing have no gain


class ReplicaEngines:
    """Replicas that are launched at once, because half of a start is imports, and then take their parts of the device
    one after the other."""

    def __init__(self, spec: ReplicaSpec, launch: Callable[..., Engine], device: str = "none") -> None:
        """Launch all replicas.

        Args:
            launch: Launches one engine, as `pool.launch_engine` does.
            device: UUID of the device that they share, or "cpu" or "none".

        Raises:
            EngineFailed: One of them, which is named, cannot be launched.
        """
        self.spec, self.device = spec, device
        self.engines: list[Engine] = []
        self._daemon: mps.MpsDaemon | None = None
        self._undo = ExitStack()
        count, simulated = len(spec), spec.platform == "simulated"
        extra_envs: Sequence[Mapping[str, str]] = [{}] * count
        cores = cores_of_each(count, spec.pinned)
        on_gpus = spec.sharing == "gpus"
        part = {"gpus": count} if on_gpus else {"speed": IMAGINED_GAIN.get(spec.sharing, 1.0) / count}
        try:
            if spec.sharing == "mps" and not simulated:
                self._daemon = mps.MpsDaemon(device, spec.thread_percentage)
                self._undo.callback(self._daemon.close)
                extra_envs = [self._daemon.environment] * count
            elif spec.sharing == "mig" and not simulated:
                extra_envs = [{"CUDA_VISIBLE_DEVICES": instance} for instance in mig_instances(device)]
            for index, engine in enumerate(spec.engines):
                with naming(self.name(index), EngineFailed):
                    self.engines.append(launch(engine, extra_env=extra_envs[index], cores=cores[index], **part))
                self._undo.callback(self.engines[-1].close)
        except BaseException:
            self.close()
            raise

    def start(self, on_wait: StartCallback | None = None) -> Self:
        """Start the replicas one after the other, each as soon as the device's memory is stable, because vLLM takes
        memory that other processes free or take meanwhile for its own. With a GPU each the first replica compiles, and
        the others, which find the compiled code, start side by side.

        Raises EngineFailed, naming the replica, if one does not start or is not a client of the MPS daemon; then all
        are stopped."""
        try:
            if self.spec.sharing == "gpus":
                self._start(0, on_wait)
                with ThreadPoolExecutor(len(self.spec)) as pool:
                    list(pool.map(self._start, range(1, len(self.spec))))
            else:
                for index in range(len(self.spec)):
                    if index and self.spec.platform == "cuda" and self.spec.sharing != "mig":
                        used: int | None = (
                            None  # until two readings agree; then, or too late, the engine's own check decides
                        )
                        for _ in range(round(STABLE_WITHIN_S / STABLE_S)):
                            before, used = used, memory_used(self.device)
                            if before == used:
                                break
                            time.sleep(STABLE_S)
                    self._start(index, on_wait)
            specs = [replace(engine, gpu=0) for engine in self.spec.engines]
            for spec in dict.fromkeys(specs):
                blocks = [e.resolved.kv_blocks for e, s in zip(self.engines, specs) if s == spec]
                if len(set(blocks)) > 1:
                    raise EngineFailed(
                        f"replicas of {short_name(spec.model)} got different numbers of KV blocks: {blocks}",
                        "a fixed kv_cache_bytes, and nobody else on the device",
                    )
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, index: int, on_wait: StartCallback | None = None) -> None:
        with naming(self.name(index), EngineFailed):
            self.engines[index].start(on_wait)
        self.check(index)

    def check(self, index: int) -> None:
        """Raise EngineFailed, naming the replica, unless it is a client of the MPS daemon, if there is one."""
        if self._daemon:
            with naming(self.name(index), EngineFailed):
                self._daemon.verify(self.name(index), self.engines[index].processes())

    @property
    def ready(self) -> bool:
        """Whether all replicas wait for their next loads."""
        return bool(self.engines) and all(engine.ready for engine in self.engines)

    def name(self, index: int) -> str:
        """The name of a replica in errors, for example "replica 1 of 2 (opt-125m)"."""
        return f"replica {index + 1} of {len(self.spec)} ({short_name(self.spec.engines[index].model)})"

    def run(
        self, workloads: Sequence[Workload], loads: Sequence[ClosedLoop], on_progress: ProgressCallback | None = None
    ) -> tuple[Run, ...]:
        """Put a load on each replica and return their runs. All begin at once and have one window, which opens when the
        last replica has settled (`WindowBarrier`).

        Args:
            on_progress: Called with the progress of the first replica.

        Raises:
            BadUsage: There is not one workload and one load with a window for each replica.
            EngineFailed: A replica, which is named, died; the others are stopped.
        """
        engines = self.engines
        if len(workloads) != len(engines) or len(loads) != len(engines):
            raise BadUsage(f"{len(engines)} replicas, {len(workloads)} workloads, {len(loads)} loads", "one of each")
        if any(load.requests is not None for load in loads):
            raise BadUsage("a load of a fixed number of requests has no window to measure", "a ClosedLoop without")
        for index, (engine, workload) in enumerate(zip(engines, workloads)):
            with naming(self.name(index), EngineFailed):
                engine.load_requests(workload)
        barrier = WindowBarrier([message_of(load) for load in loads])

        def run_one(index: int) -> Run:
            with naming(self.name(index), EngineFailed):
                return engines[index].run(workloads[index], loads[index], None if index else on_progress, barrier)

        try:
            runs = barrier.run_together([partial(run_one, index) for index in range(len(engines))], self.close)
            for index in range(len(engines)):
                self.check(index)
        except BaseException:
            self.close()
            raise
        return tuple(runs)

    def close(self) -> None:
        """Stop all replicas, and last the MPS daemon. May be called twice."""
        self._undo.close()


def cores_of_each(replicas: int, pinned: bool) -> list[tuple[int, ...]]:
    """The CPU cores of each replica: ours in equal parts, neighbors together. Parts are empty, which means all cores,
    if replicas are not pinned or there are fewer cores than replicas."""
    ours = sorted(own_cores()) if pinned else []
    each = len(ours) // replicas
    return [tuple(ours[i * each : (i + 1) * each]) for i in range(replicas)]


def cannot_share(spec: ReplicaSpec, device: str) -> str | None:
    """The reason that these replicas cannot share the device in this way, in one sentence; None if they can."""
    if spec.platform == "cpu" and len(own_cores()) < len(spec):
        return f"{len(spec)} engines of vLLM's CPU backend need a core each"
    if spec.platform == "simulated" or spec.sharing in ("time-slicing", "gpus", "urls"):
        return None
    if spec.sharing == "mps":
        return mps.unable(device)
    there = len(mig_instances(device))
    return f"{there} MIG instances are there for {len(spec)} replicas; none is made here" if there < len(spec) else None


def mig_instances(device: str) -> list[str]:
    """UUIDs of the MIG instances of a GPU, as NVML lists them; none if MIG is off, or there is no NVML."""
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
                continue  # there may be gaps between instances
            found.append(str(pynvml.nvmlDeviceGetUUID(instance)))
        return found
    except pynvml.NVMLError:
        return []
