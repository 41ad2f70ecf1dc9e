"""Devices with their locks and sensors, and the executor that measures cases on them and stores each repeat."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product

from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.archive.external import Export
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.base import Engine, ProgressCallback
from pytest_slmserve.engines.device_lock import lock_device
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.pool import Pool, ReplicaEngines, equal_parts
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Case, url_lock
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.records import GateLaunch, Measurement, Progress, ReplicaGroup, Run
from pytest_slmserve.schema.specs import ClosedLoop, Engines, EngineSpec, OpenLoop, is_job
from pytest_slmserve.telemetry.gpu import BusyClock, NvmlSource
from pytest_slmserve.telemetry.host import Host, numa_nodes, own_cores, visible_names
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler, SimulatedSource, open_sampler


def measure_case(
    running: Engine | ReplicaEngines,
    case: Case,
    on_progress: ProgressCallback = None,
    sampler: Sampler | None = None,
) -> ReplicaGroup:
    """Run the loads of a case once while the sensors are read, and return a record for each engine.

    The first record has the readings for all engines, unless its engine has its own clock. Failed sensors only leave a
    note.

    Raises:
        EngineFailed: if an engine dies.
    """
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    engines: Sequence[Engine]
    runs: Sequence[Run]
    with sampler.recording() if sampler else nullcontext() as recording:
        if isinstance(running, ReplicaEngines):
            loads = [load for load in case.loads if isinstance(load, ClosedLoop)]  # replicas have only closed loops
            engines, runs = running.engines, running.run(case.workloads, loads, on_progress)
        else:
            engines, runs = [running], [running.run(case.workloads[0], case.loads[0], on_progress)]
    first = runs[0]
    if recording and first.began_s is not None:
        first = replace(first, telemetry=recording.telemetry(first.began_s, first.window_s))
    parts = zip(engines, case.workloads, case.loads, (first, *runs[1:]), case.replicas(), strict=True)
    return tuple(
        Measurement(
            spec=engine.spec,
            resolved=engine.resolved,
            environment=case.environment.of(engine.spec),
            workload=workload.reference(),
            load=load,
            run=run,
            launch=engine.launch,
            measured_at=began,
            replica=replica,
        )
        for engine, workload, load, run, replica in parts
    )


@dataclass(repr=False)
class Devices:
    """Locks, sensors and the running engine of a session, from `hold` to `close`."""

    planner: Planner
    pool: Pool = field(default_factory=Pool)
    locked_for_us: bool = False  # the process that started this one holds the locks
    sampler: Sampler | None = None  # of the first device
    _samplers: dict[tuple[str, ...], Sampler | None] = field(default_factory=dict)  # of others
    _locked: set[str] = field(default_factory=set)
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_options(cls, planner: Planner) -> Devices:
        """Return the devices of a run.

        Raises:
            SensorFailed, BadUsage: if requested sensors are missing.
        """
        found = cls(planner, Pool(device=planner.host.device, timeout_s=planner.options.timeout))
        if planner.platform == "remote":
            planner.notes.append("no sensors are read: on which device an endpoint runs is not known")
        elif planner.platform != "simulated" and not (planner.options.plan or planner.options.ray):
            found.sampler = found._opened((planner.host.device,))  # the simulated engine simulates its own
        return found

    def hold(self) -> None:
        """Lock the first device, or lock the endpoints and check that they answer."""
        if urls := self.planner.options.endpoint:
            self.lock([url_lock(url) for url in urls])
            for url, model in product(urls, self.planner.models):
                spec = EngineSpec(model, platform="remote", interface="endpoint", url=url)
                EndpointEngine(spec, timeout_s=self.planner.options.timeout).close()
        else:
            self.lock((self.planner.host.device,))
        self._undo.callback(self.pool.close)

    def take(self, spec: Engines) -> None:
        """Lock the GPUs of an engine until the session ends. Raise BadUsage if they do not exist."""
        self.lock([device for device in self.planner.devices(spec) if device != self.planner.host.device])

    def lock(self, devices: Sequence[str]) -> None:
        """Lock devices until the session ends, except in a simulation, or if engines run on a cluster.

        Raises:
            DeviceBusy: if another run has one of them.
        """
        options = self.planner.options
        on_a_cluster = options.ray and not options.on_all_gpus
        if self.locked_for_us or self.planner.platform == "simulated" or on_a_cluster:
            return
        for device in devices:
            if device not in self._locked:
                self._undo.enter_context(lock_device(device))
                self._locked.add(device)

    def close(self) -> None:
        self._undo.close()

    # Engines

    def start(self, spec: Engines) -> Engine | ReplicaEngines:
        """Return the running engine or replicas of `spec`, started if necessary."""
        self.take(spec)
        return self.pool.engine(spec)

    # Sensors

    def busy_clock(self) -> BusyClock | None:
        """Return a clock of the first GPU's busy seconds, or None if its counters are not read."""
        sources = self.sampler.sources if self.sampler else ()
        return next((source.busy_clock() for source in sources if isinstance(source, NvmlSource)), None)

    def _opened(self, devices: Sequence[str]) -> Sampler | None:
        options, notes = self.planner.options, self.planner.notes
        interval_s = options.telemetry_interval or INTERVAL_S
        sampler, said = open_sampler(options.telemetry, devices[0], interval_s, devices[1:], self.planner.window_s)
        notes.extend(note for note in said if note not in notes)
        if sampler:
            self._undo.callback(sampler.close)
        return sampler

    def sampler_on(self, devices: tuple[str, ...]) -> Sampler | None:
        """Return the sensors of an engine's GPUs, opened once for each set of GPUs."""
        if self.sampler is None or devices == (self.planner.host.device,):
            return self.sampler
        if devices not in self._samplers:
            self._samplers[devices] = self._opened(devices)
        return self._samplers[devices]

    def own_sampler(self) -> Sampler | None:
        """Return the sensors for blocks of a user's tests, simulated if the engines are, or None if none are read."""
        options = self.planner.options
        if self.sampler or self.planner.platform != "simulated" or options.telemetry == "off":
            gpus = self.planner.host.gpus[: options.tensor_parallel_size[0]]
            return self.sampler_on(tuple(gpu.uuid for gpu in gpus)) if len(gpus) > 1 else self.sampler
        return Sampler([SimulatedSource()], options.telemetry_interval or INTERVAL_S)


@dataclass(repr=False)
class Results:
    """Repeats of cases, in the order measured.

    Attributes:
        repeats: by the key of their case.
        requested: cases of this run by key, with the clean repeats that somebody waits for. A results file may have
            more cases.
    """

    repeats: dict[str, list[ReplicaGroup]] = field(default_factory=dict)
    requested: dict[str, tuple[Case, int]] = field(default_factory=dict)

    def measurements(self, keys: Iterable[str] | None = None) -> Iterator[Measurement]:
        """Yield the records of the cases with these keys; None means the cases that this run requested."""
        for key in self.requested if keys is None else keys:
            yield from (m for group in self.repeats.get(key, ()) for m in group)


PACED_S = 10.0  # of repeats after which the pace of a host is known
EXTRA_ATTEMPTS = 1  # for each case, if a repeat is not clean
WARM_UP = 64  # concurrent requests


@dataclass(repr=False)
class Executor:
    """Executor that measures each case until it has the requested number of clean repeats.

    Invalid or degraded repeats, for example because another process used the GPU, are stored and shown like any other.
    A case with one gets one extra attempt.
    """

    devices: Devices
    results: Results
    repeats: int  # clean repeats of each case, unless a caller requests another number
    archive: Archive | None = None  # None before the session is open, and in a task of Ray
    export: Export | None = None
    fetch: Callable[[Case], None] | None = None  # waits for all repeats of a case that another process measures
    on_progress: Callable[[Case, str, Progress], None] = lambda case, title, progress: None  # title: of the repeat
    spent_s: defaultdict[Engines, float] = field(default_factory=lambda: defaultdict(float))  # on repeats
    took_s: float = 0.0  # real seconds of all repeats
    estimated_s: float = 0.0  # of the same ones
    earlier: dict[Engines, int] = field(default_factory=dict)  # launches of each engine in the resumed results file
    _warmed: str | None = None  # the launch that has served a request before its first job

    def measure(self, case: Case, repeats: int | None = None, why: str = "") -> list[ReplicaGroup]:
        """Measure the missing repeats of a case, and return all that it has, including unclean ones.

        Args:
            repeats: clean repeats; None means those of the run.
            why: reason for a further measurement, for the progress.

        Raises:
            DoesNotFit: if the engine's KV cache is too small for the load.
            EngineFailed: if the engine did not start, or crashed.
        """
        self.ask([case], repeats)
        known = self.results.repeats.setdefault(case.key, [])
        if self.fetch:
            self.fetch(case)
            return known
        reason = f" ({why})" if why else ""
        while self.count_missing(case, repeats or self.repeats):
            known.append(self.measure_once(case, f"{case.title}, repeat {len(known) + 1}{reason}"))
        return known

    def ask(self, cases: Sequence[Case], repeats: int | None = None) -> None:
        """Request cases that will be measured, for the progress. The largest number of repeats counts."""
        for case in cases:
            _, before = self.results.requested.get(case.key, (case, 0))
            self.results.requested[case.key] = case, max(before, repeats or self.repeats)

    def awaited(self) -> dict[Case, int]:
        """Return the requested cases with missing repeats, and the number of these."""
        missing = {case: self.count_missing(case, n) for case, n in self.results.requested.values()}
        return {case: n for case, n in missing.items() if n}

    def forget_awaited(self) -> None:
        """Stop waiting for the cases requested so far, which stay part of this run."""
        self.results.requested |= {key: (case, 0) for key, (case, _) in self.results.requested.items()}

    def count_missing(self, case: Case, repeats: int | None = None) -> int:
        """Return the number of missing repeats of a case, if each new one is clean.

        Args:
            repeats: None means those of the run, or more if somebody waits for more.
        """
        if repeats is None:
            repeats = max(self.repeats, self.wanted(case))
        return count_missing(map(is_clean, self.results.repeats.get(case.key, ())), repeats)

    def wanted(self, case: Case) -> int:
        """Return the number of repeats of a case that somebody waits for, or 0."""
        return self.results.requested.get(case.key, (case, 0))[1]

    @property
    def pace(self) -> float:
        """Ratio of measured to estimated time of the repeats so far; 1 while too little is known."""
        return self.took_s / self.estimated_s if self.estimated_s > PACED_S else 1.0

    def measure_once(
        self,
        case: Case,
        title: str,
        paired: GateLaunch | None = None,
        running: Engine | None = None,
        clock: BusyClock | None = None,
    ) -> ReplicaGroup:
        """Measure one repeat, and write it.

        Args:
            paired: its place in a gate.
            running: warm engine to use in place of that of the devices.
            clock: counts the busy seconds of a window of a gate.

        Raises:
            DoesNotFit: if the engine reports a KV cache that is too small, which the plan could not know.
        """
        if self.archive:
            self.archive.check_writable()  # do not spend GPU time on a repeat that cannot be stored
        devices, spec = self.devices, case.engine
        engine = running or devices.start(spec)
        if not isinstance(engine, ReplicaEngines):
            if launches := self.earlier.pop(spec, 0):
                engine.differ(f"launch {launches + 1}", resumed=True)
            [workload], [load] = case.workloads, case.loads
            if isinstance(load, ClosedLoop) and kv_capacity(engine.spec, workload.longest) is None:
                room = kv_capacity(engine.spec, workload.longest, engine.resolved)
                if room is not None and room < load.concurrency:
                    problem = f"the engine says that its KV cache holds {room} requests of {workload.longest} tokens"
                    raise DoesNotFit(problem, f"Use --slm-concurrency up to {room}, or shorter requests.")
            if is_job(load) and engine.launch != self._warmed:
                # A job has no ramp-up, and the first requests of a fresh engine are slow.
                engine.run(workload, OpenLoop(requests=min(load.requests or 1, WARM_UP)))
                self._warmed = engine.launch
        sampler, began = devices.sampler_on(devices.planner.devices(spec)), time.monotonic()
        group = measure_case(engine, case, partial(self.on_progress, case, title), sampler)
        took_s = time.monotonic() - began
        self.spent_s[spec] += max(took_s, group[0].run.window_s[1])  # the clock of a simulated engine goes faster
        self.took_s, self.estimated_s = self.took_s + took_s, self.estimated_s + case.estimate_s
        if paired:
            paired = replace(paired, busy_s=clock.lap()) if clock else paired
            group = tuple(replace(m, paired=paired) for m in group)
        return self.write(group)

    def write(self, group: ReplicaGroup) -> ReplicaGroup:
        """Write a repeat to the results file and the export, and return it as it was stored."""
        if self.archive:
            group = tuple(map(self.archive.add, group))
        for m in group:
            if self.export and m.alone:
                self.export.add(m)
        return group


def count_missing(clean: Iterable[bool], repeats: int) -> int:
    """Return the number of repeats to measure until `repeats` are clean, with one extra attempt for an unclean one.

    Args:
        clean: whether each known repeat is clean.
    """
    known = list(clean)
    return max(0, min(repeats - sum(known), repeats - len(known) + EXTRA_ATTEMPTS))


# GPUs that serve at the same time


@dataclass(frozen=True, slots=True)
class GpuSlots:
    """Slots of a host, each for one engine at a time: a GPU, or a part of the CPU if there are no GPUs.

    Attributes:
        visible: names of the devices in CUDA_VISIBLE_DEVICES, only for CUDA.
        cores: of each slot, equally many.
    """

    devices: tuple[str, ...]
    visible: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_host(cls, host: Host, count: int, widest: int = 1) -> GpuSlots:
        """Return the first `count` slots. Raise BadUsage if there are fewer, or if an engine is wider.

        Args:
            widest: number of GPUs of an engine, or of its processes on the CPU.
        """
        ours, there = own_cores(), len(host.gpus)
        each, why, most = len(ours) // count, "", 0
        if there and count > there:
            why, most = f"{there} GPU{'s are' if there > 1 else ' is'} visible", there
        elif 0 < len(ours) < count:
            why, most = f"each engine needs a core, and there are {len(ours)}", len(ours)
        elif there and count < widest:
            why, most = f"an engine takes {widest} GPUs", widest
        elif not there and 0 < each < widest:
            why, most = f"an engine of {widest} processes needs a core for each, and has {each}", len(ours) // widest
        if why:
            raise BadUsage(f"--slm-ray local:{count}: {why}", f"--slm-ray local:{most or 1}")
        near = [gpu.near_cores & ours or ours for gpu in host.gpus[:count]] or [ours] * count
        devices = [gpu.uuid for gpu in host.gpus[:count]] or [f"{host.device}-{i}" for i in range(count)]
        visible = visible_names()[:count] if host.environment.platform == "cuda" else []
        return cls(tuple(devices), tuple(visible), tuple(equal_parts(near, ours)))

    def block(self, count: int, free: Set[int]) -> tuple[int, ...] | None:
        """Return free slots for `count` GPUs, or None.

        Sets of several GPUs are adjacent and fixed, so that vLLM tests only once how they reach each other.
        """
        if count == 1:
            return (min(free),) if free else None
        blocks = (range(first, first + count) for first in range(0, len(self.devices) - count + 1, count))
        return next((tuple(block) for block in blocks if free >= set(block)), None)

    def pin(self, at: Sequence[int]) -> None:
        """Pin this process and its children to the cores of the slots `at`, and show them only their GPUs."""
        if any(self.cores) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core for slot in at for core in self.cores[slot]})
        if self.visible:  # numbers if the user gave numbers, because not every vLLM understands a UUID
            names = ",".join(self.visible[slot] for slot in at)
            os.environ |= {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def host(self, host: Host, at: Sequence[int]) -> Host:
        """Return the host as an engine on the slots `at` finds it: their GPUs, and the cores of one slot."""
        by_name = {gpu.uuid: gpu for gpu in host.gpus}
        gpus = tuple(by_name[self.devices[slot]] for slot in at if self.devices[slot] in by_name)
        cores = len(self.cores[0]) if any(self.cores) else host.environment.cores
        environment = replace(host.environment, cores=cores, of_gpus=1 if gpus else None)
        return replace(host, environment=environment, gpus=gpus)


def slot_count(options: Options, host: Host) -> int:
    """Return the number of slots for `--slm-ray local`: as named, else all GPUs, or the NUMA nodes of a CPU.

    There are at most as many simulated GPUs as cores.
    """
    if named := options.ray.partition(":")[2]:
        return int(named)
    match host.environment.platform:
        case "cuda":
            return len(host.gpus)
        case "simulated":
            return min(len(host.gpus), len(own_cores()) or 1)
        case _:
            return numa_nodes()
