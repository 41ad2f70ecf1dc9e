"""Several engines at once on one device, started one after the other, loaded and measured at the same time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Protocol

import psutil

from pytest_slmserve.engines.base import Engine, ProgressCallback, ignore_progress, message_of
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.load_client import TIMEOUT_S
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.engines.replicas import mps
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.engines.worker.slm_pacing import shared_window_s
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, Sharing, naming
from pytest_slmserve.schema.loads import ClosedLoop, Workload
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host import memory_used, own_cores

BEGIN_S = 0.5  # from saying when to begin to beginning: all workers have heard of it by then
OPEN_S = 0.2  # likewise of the window
SETTLE_S = 600.0  # the slowest replica has settled by then, or something is wrong
STABLE_READINGS, STABLE_S, STABLE_WITHIN_S = 2, 0.5, 30.0  # of the device's memory, between two starts


class HeldEngine(Engine, Protocol):
    """One that does not touch the device before its turn."""

    def start(self) -> None:
        """Start the engine, whose turn it is; returns when it is ready. Raises EngineFailed."""


class ReplicaEngines:
    """Starts all when made; raises EngineFailed, naming the replica, when one does not start, and stops the others.

    All are launched at once, for half of a start is imports. Then each in turn takes its part of the device.

    launch: launches the engine of a specification; extra_env are its variables of the following, cores those that it
    may use, none for all, and share how many it shares the device with, itself included. extra_envs: variables for each
    replica, which make it an MPS client or name its MIG instance. check: looks, after a
    start and after each run, whether the replica is where it should be, and raises EngineFailed. memory_used: bytes of
    the device that are taken, asked until they stand still before the next one starts: vLLM takes what others free or
    take meanwhile for its own. last: called when all have been stopped.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        launch: Callable[..., HeldEngine],
        *,
        extra_envs: Sequence[Mapping[str, str]] = (),
        check: Callable[[str, Engine], None] = lambda name, engine: None,
        memory_used: Callable[[], int] | None = None,
        last: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.launch = uuid.uuid4().hex[:12]
        self.engines: list[HeldEngine] = []
        self._check, self._undo = check, ExitStack()
        if last:
            self._undo.callback(last)
        try:
            self._launch(launch, extra_envs or [{}] * len(spec))
            self._start_in_turn(memory_used)
            self._check_blocks()
        except BaseException:
            self.close()
            raise

    def _launch(self, launch: Callable[..., HeldEngine], extra_envs: Sequence[Mapping[str, str]]) -> None:
        cores = cores_of_each(len(self.spec), self.spec.pinned)
        for index, each in enumerate(self.spec.engines):
            with naming(self.name(index), EngineFailed):
                engine = launch(each, extra_env=extra_envs[index], cores=cores[index], share=len(self.spec))
            self.engines.append(engine)
            self._undo.callback(engine.close)

    def _start_in_turn(self, memory_used: Callable[[], int] | None) -> None:
        """Start the engines one after the other, each once the device's memory is stable. With a GPU each the first
        compiles, and the others, which find that done, start side by side."""
        if self.spec.sharing == "gpus":
            self._start(0)
            with ThreadPoolExecutor(len(self.spec)) as pool:
                list(pool.map(self._start, range(1, len(self.spec))))
            return
        for index in range(len(self.engines)):
            if memory_used and index:
                wait_until_stable(memory_used)
            self._start(index)

    def _start(self, index: int) -> None:
        with naming(self.name(index), EngineFailed):
            self.engines[index].start()
            self._check(self.name(index), self.engines[index])

    @property
    def ready(self) -> bool:
        return bool(self.engines) and all(engine.ready for engine in self.engines)

    def name(self, index: int) -> str:
        return f"replica {index + 1} of {len(self.spec)} ({short_name(self.spec.engines[index].model)})"

    def run(
        self,
        workloads: Sequence[Workload],
        loads: Sequence[ClosedLoop],
        on_progress: ProgressCallback = ignore_progress,
    ) -> tuple[Run, ...]:
        """Put a load on each, all beginning at once; all have one window, which opens when the last has settled.
        Of requests that start together it is long enough for two whole convoys of each.

        Raises EngineFailed, naming the replica, when one dies; the others are stopped then.
        """
        if len(workloads) != len(self.engines) or len(loads) != len(self.engines):
            raise BadUsage(
                f"{len(self.engines)} replicas, {len(workloads)} workloads, {len(loads)} loads", "one of each"
            )
        if any(load.requests is not None for load in loads):
            raise BadUsage("a load of a fixed number of requests has no window to measure", "a ClosedLoop without")
        for index, (engine, workload) in enumerate(zip(self.engines, workloads)):
            with naming(self.name(index), EngineFailed):
                engine.load_requests(workload)
        barrier = SharedWindow(loads)
        listeners = [on_progress, *[ignore_progress] * (len(self.engines) - 1)]

        def measured(engine: HeldEngine, workload: Workload, load: ClosedLoop, listener: ProgressCallback) -> Run:
            run = engine.run(workload, load, listener, barrier)
            barrier.ended()
            return run

        pool = ThreadPoolExecutor(len(self.engines), thread_name_prefix="slm-replica")
        try:
            runs = [pool.submit(measured, *each) for each in zip(self.engines, workloads, loads, listeners)]
            wait(runs, return_when=FIRST_EXCEPTION)
            # Those that have ended come first: none of them was stopped for another's failure.
            for index, run in sorted(enumerate(runs), key=lambda numbered: not numbered[1].done()):
                with naming(self.name(index), EngineFailed):
                    run.result()
            for index, engine in enumerate(self.engines):
                with naming(self.name(index), EngineFailed):
                    self._check(self.name(index), engine)
            return tuple(run.result() for run in runs)
        except BaseException:
            barrier.give_up()
            self.close()
            raise
        finally:
            pool.shutdown()

    def close(self) -> None:
        """Stop them all; may be called twice."""
        self._undo.close()

    def _check_blocks(self) -> None:
        """Replicas of one specification must have got the same KV blocks: else they are not replicas."""
        specs = [replace(engine, gpu=0) for engine in self.spec.engines]
        for spec in dict.fromkeys(specs):
            blocks = [e.resolved.kv_blocks for e, s in zip(self.engines, specs) if s == spec]
            if len(set(blocks)) > 1:
                raise EngineFailed(
                    f"replicas of {short_name(spec.model)} got different numbers of KV blocks: {blocks}",
                    "a fixed kv_cache_bytes, and nobody else on the device",
                )


class SharedWindow:
    """The gate of one run: `begins_s` is soon, and the window opens when all have said `settled`, but for those that
    have `ended` before."""

    def __init__(self, loads: Sequence[ClosedLoop]) -> None:
        self.begins_s = time.monotonic() + BEGIN_S
        self._loads, self._awaited = loads, len(loads)
        self._window: tuple[float, float] | None = None
        self._given_up = False
        self._changed = threading.Condition()

    def _open(self) -> None:
        opens = time.monotonic() + OPEN_S
        seconds = (shared_window_s(message_of(load), opens - self.begins_s) for load in self._loads)
        self._window = opens, opens + max(seconds)

    def settled(self) -> tuple[float, float]:
        with self._changed:
            self.ended()
            self._changed.wait_for(lambda: self._window or self._given_up, SETTLE_S)
            if self._window is None:
                raise EngineFailed("was stopped, for another replica did not come as far")
            return self._window

    def ended(self) -> None:
        """Await one less: a load that has ended without settling, such as one whose requests failed."""
        with self._changed:
            self._awaited -= 1
            if self._awaited == 0:
                self._open()
                self._changed.notify_all()

    def give_up(self) -> None:
        """Release all that wait for the window: nobody needs to wait any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()


def cores_of_each(replicas: int, pinned: bool) -> list[tuple[int, ...]]:
    """The CPU cores of each replica: ours in equal parts, neighbours together. Parts are empty, for "all", where they
    are not to be pinned or there are fewer cores than replicas."""
    ours = sorted(own_cores()) if pinned else []
    each = len(ours) // replicas
    return [tuple(ours[i * each : (i + 1) * each]) for i in range(replicas)]


def wait_until_stable(read: Callable[[], int], sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until STABLE_READINGS readings in a row agree, at most STABLE_WITHIN_S: then the engine's check decides."""
    readings = [read()]
    for _ in range(round(STABLE_WITHIN_S / STABLE_S)):
        sleep(STABLE_S)
        readings.append(read())
        if len(set(readings[-STABLE_READINGS:])) == 1:
            return


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
