"""Devices with their locks and sensors, the engine that runs on them, and GPUs that serve at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.device_lock import DeviceLock
from pytest_slmserve.engines.endpoint import check_endpoints
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.replicas import ReplicaEngines
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import url_lock
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host import Host, near_cores, numa_nodes, own_cores, visible_names
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler, open_sampler


@dataclass(repr=False)
class Devices:
    """Locks, sensors and the running engine of a session, held from `hold` until `close`.

    Attributes:
        locked_for_us: Whether the process that started this one has locked the devices.
        sampler: Sensors of the first device.
    """

    planner: Planner
    pool: Pool = field(default_factory=Pool)
    locked_for_us: bool = False
    sampler: Sampler | None = None
    _samplers: dict[tuple[str, ...], Sampler | None] = field(default_factory=dict)  # of others
    _locked: set[str] = field(default_factory=set)
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_options(cls, planner: Planner) -> Devices:
        """The devices of a run, with sensors if any can be read. Raises SensorFailed or BadUsage if requested sensors
        are missing."""
        found = cls(planner, Pool(device=planner.host.device, timeout_s=planner.options.timeout))
        if planner.platform == "remote":
            planner.notes.append("no sensors are read: on which device an endpoint runs is not known")
        elif planner.platform != "simulated" and not (planner.options.plan or planner.options.ray):
            found.sampler = found._opened((planner.host.device,))  # the simulated engine simulates its own
        return found

    def hold(self) -> None:
        """Take the first device, or the endpoints. Raises BadUsage if no endpoint answers, DeviceBusy."""
        if urls := self.planner.options.endpoint:
            self.lock([url_lock(url) for url in urls])
            check_endpoints(urls, self.planner.models, self.planner.options.timeout)
        else:
            self.lock((self.planner.host.device,))
        self._undo.callback(self.pool.close)

    def take(self, spec: EngineSpec | ReplicaSpec) -> None:
        """Lock the GPUs that it runs on until the session ends; the first is locked since the session was opened.
        Raises BadUsage if they are not there, DeviceBusy if another run has one of them."""
        self.lock([device for device in self.planner.devices(spec) if device != self.planner.host.device])

    def lock(self, devices: Sequence[str]) -> None:
        """Lock devices until the session ends. A simulated run locks none, because a formula disturbs nobody; nor does
        a run whose engines are on a cluster. Raises DeviceBusy."""
        options = self.planner.options
        on_a_cluster = options.ray and not options.on_all_gpus
        if self.locked_for_us or self.planner.platform == "simulated" or on_a_cluster:
            return
        for device in devices:
            if device not in self._locked:
                lock = DeviceLock(device)
                lock.acquire()
                self._locked.add(device)
                self._undo.callback(lock.release)

    def close(self) -> None:
        self._undo.close()

    # Engines

    def start(self, spec: EngineSpec | ReplicaSpec) -> Engine | ReplicaEngines:
        """The engine, or the set of replicas, of `spec`: what runs, or what is started. What runs is stopped if `spec`
        does not start. Raises BadUsage, DeviceBusy, EngineFailed."""
        self.take(spec)
        self.pool.check(spec)
        try:
            return self.pool.replicas(spec) if isinstance(spec, ReplicaSpec) else self.pool.engine(spec)
        except BaseException:
            self.pool.close()
            raise

    # Sensors

    def _opened(self, devices: Sequence[str]) -> Sampler | None:
        """Raises SensorFailed or BadUsage if sensors that were asked for are not there."""
        options, notes = self.planner.options, self.planner.notes
        interval_s = options.telemetry_interval or INTERVAL_S
        sampler, said = open_sampler(options.telemetry, devices[0], interval_s, devices[1:])
        notes.extend(note for note in said if note not in notes)
        if sampler:
            self._undo.callback(sampler.close)
        return sampler

    def sampler_on(self, devices: tuple[str, ...]) -> Sampler | None:
        """The sensors of GPUs on which an engine runs, opened once for each set of them."""
        if self.sampler is None or devices == (self.planner.host.device,):
            return self.sampler
        if devices not in self._samplers:
            self._samplers[devices] = self._opened(devices)
        return self._samplers[devices]

    def own_sampler(self) -> Sampler | None:
        """A sampler for blocks of a user's tests: the sensors of the engines, or simulated ones for a simulated engine.
        None if the run reads no sensors."""
        options = self.planner.options
        if self.sampler or self.planner.platform != "simulated" or options.telemetry == "off":
            gpus = self.planner.host.gpus[: options.tensor_parallel_size[0]]
            return self.sampler_on(tuple(gpu.uuid for gpu in gpus)) if len(gpus) > 1 else self.sampler
        from pytest_slmserve.telemetry.sampler import SimulatedSource

        return Sampler([SimulatedSource()], options.telemetry_interval or INTERVAL_S)


@dataclass(frozen=True, slots=True)
class GpuSlots:
    """Slots of a host. A slot is a GPU, or a part of the CPU if there are no GPUs, and serves one engine at a time.

    devices: in the order of the host. visible: their names in CUDA_VISIBLE_DEVICES, none on a simulated host. cores:
    of each slot, equally many.
    """

    devices: tuple[str, ...]
    visible: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_host(cls, host: Host, count: int, widest: int = 1) -> GpuSlots:
        """The first `count` slots. widest: GPUs of an engine, or its processes on the CPU. Raises BadUsage for more
        slots than GPUs or cores, and for an engine that is wider than they are."""
        if host.gpus and count > len(host.gpus):
            there = f"{len(host.gpus)} GPU{'s are' if len(host.gpus) > 1 else ' is'}"
            raise BadUsage(f"--slm-ray local:{count}: {there} visible", f"--slm-ray local:{len(host.gpus)}")
        ours = own_cores()
        if 0 < len(ours) < count:
            why = f"each engine needs a core, and there are {len(ours)}"
            raise BadUsage(f"--slm-ray local:{count}: {why}", f"--slm-ray local:{len(ours)}")
        near = [near_cores(gpu) & ours or ours for gpu in host.gpus[:count]] or [ours] * count
        devices = [gpu.uuid for gpu in host.gpus[:count]] or [f"{host.device}-{i}" for i in range(count)]
        visible = visible_names()[:count] if host.environment.platform == "cuda" else []
        cores = equal_parts(near, sorted(ours))
        if host.gpus and count < widest:
            raise BadUsage(f"--slm-ray local:{count}: an engine takes {widest} GPUs", f"--slm-ray local:{widest}")
        if not host.gpus and 0 < len(cores[0]) < widest:
            why = f"an engine of {widest} processes needs a core for each, and has {len(cores[0])}"
            raise BadUsage(f"--slm-ray local:{count}: {why}", f"--slm-ray local:{len(ours) // widest or 1}")
        return cls(tuple(devices), tuple(visible), tuple(cores))

    def block(self, count: int, free: Set[int]) -> tuple[int, ...] | None:
        """The first of `free` for one GPU; for several, GPUs next to each other, in the order of the host: how
        they reach each other is then found out by vLLM once. None if none are free."""
        if count == 1:
            return (min(free),) if free else None
        blocks = (range(first, first + count) for first in range(0, len(self.devices) - count + 1, count))
        return next((tuple(block) for block in blocks if free >= set(block)), None)

    def pin(self, at: Sequence[int]) -> None:
        """Pins this process, and all that it starts, to the cores of the slots `at`, and shows it only their GPUs."""
        if any(self.cores) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core for slot in at for core in self.cores[slot]})
        if self.visible:  # by their numbers if those were given: not every vLLM understands a UUID
            names = ",".join(self.visible[slot] for slot in at)
            os.environ |= {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def host(self, host: Host, at: Sequence[int]) -> Host:
        """The host as an engine on the slots `at` finds it: their GPUs, and for each the cores of one slot."""
        by_name = {gpu.uuid: gpu for gpu in host.gpus}
        gpus = tuple(by_name[self.devices[slot]] for slot in at if self.devices[slot] in by_name)
        cores = len(self.cores[0]) if any(self.cores) else host.environment.cores
        environment = replace(host.environment, cores=cores, of_gpus=1 if gpus else None)
        return replace(host, environment=environment, gpus=gpus)


def slot_count(options: Options, host: Host) -> int:
    """The number of slots that `--slm-ray local` asks for: as many as it names, else all visible GPUs, simulated GPUs
    (no more than cores), or the NUMA nodes of a CPU."""
    if named := options.ray.partition(":")[2]:
        return int(named)
    match host.environment.platform:
        case "cuda":
            return len(host.gpus)
        case "simulated":
            return min(len(host.gpus), len(own_cores()) or 1)
        case _:
            return numa_nodes()


def equal_parts(near: Sequence[frozenset[int]], ours: Sequence[int]) -> list[tuple[int, ...]]:
    """Parts of the cores, one for each slot: equally many, near its GPU, adjacent, none for two slots. Measurements on
    different numbers of cores are not compared. If the cores near some GPU are too few, the parts are taken from all
    cores."""
    sharers = [sum(not here.isdisjoint(there) for there in near) for here in near]
    each = min((len(cores) // sharing for cores, sharing in zip(near, sharers)), default=0)
    if each == 0:
        near, each = [frozenset(ours)] * len(near), len(ours) // max(1, len(near))
    taken, parts = set[int](), []
    for cores in near:
        part = tuple(sorted(cores - taken)[:each])
        taken |= set(part)
        parts.append(part)
    return parts
