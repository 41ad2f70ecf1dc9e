"""An executor measures cases until enough repeats are clean, and keeps each repeat: in results, archive and export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.base import Engine, ProgressCallback, ignore_progress
from pytest_slmserve.engines.replicas import ReplicaEngines
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.report.export.vllm_bench import Export
from pytest_slmserve.run.devices import Devices
from pytest_slmserve.schema.errors import DoesNotFit
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.records import Environment, GateLaunch, Measurement, Progress, ReplicaGroup, Run
from pytest_slmserve.schema.specs import ClosedLoop, Load, OpenLoop, Workload, is_job
from pytest_slmserve.telemetry.sampler import Sampler


def measure(
    engine: Engine,
    workload: Workload,
    load: Load,
    environment: Environment,
    on_progress: ProgressCallback = ignore_progress,
    sampler: Sampler | None = None,
) -> Measurement:
    """Measure one load on one engine that runs; see `measure_case`."""
    [found] = measure_case(engine, Case(engine.spec, (workload,), (load,), environment), on_progress, sampler)
    return found


def measure_case(
    running: Engine | ReplicaEngines,
    case: Case,
    on_progress: ProgressCallback = ignore_progress,
    sampler: Sampler | None = None,
) -> ReplicaGroup:
    """Run the loads of a case once, with the sensors read meanwhile, and keep every fact: a record for each engine.

    The readings of the sensors are those of all engines, and stand in the first record; if that engine has a clock of
    its own they are left out. Raises EngineFailed when an engine dies; sensors that fail only leave a note in the
    record.
    """
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    engines: Sequence[Engine]
    runs: Sequence[Run]
    with sampler.recording() if sampler else nullcontext() as recording:
        if isinstance(running, ReplicaEngines):
            loads = [load for load in case.loads if isinstance(load, ClosedLoop)]  # replicas have no other
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
class Results:
    """Repeats of cases.

    Attributes:
        repeats: Repeats by the key of their case, in the order made.
        requested: Keys of this run's cases, in the order that they were requested; what an archive knows beyond them is
            no part of this run.
    """

    repeats: dict[str, list[ReplicaGroup]] = field(default_factory=dict)
    requested: dict[str, None] = field(default_factory=dict)

    def measurements(self, keys: Iterable[str] | None = None) -> Iterator[Measurement]:
        """All records of the cases with these keys; None: of those that this run requested."""
        for key in self.requested if keys is None else keys:
            yield from (m for group in self.repeats.get(key, ()) for m in group)


EXTRA_ATTEMPTS = 1  # of each case, if a repeat is not clean
WARM_UP = 64  # requests at once


@dataclass(repr=False)
class Executor:
    """Measures the cases of a run.

    A case is measured until it has the number of clean repeats that was requested. A repeat that is invalid or degraded
    (for example because another process used the GPU) is stored and shown like any other, and the case gets one extra
    attempt.
    """

    devices: Devices
    results: Results
    repeats: int  # clean repeats of each case, unless a caller requests another number
    archive: Archive | None = None  # None if the run keeps no records
    export: Export | None = None
    fetch: Callable[[Case], None] | None = None  # waits for all repeats of a case that another process measures
    on_progress: Callable[[Case, str, Progress], None] = lambda case, title, progress: None  # title: of the repeat
    asked: dict[str, tuple[Case, int]] = field(default_factory=dict)  # requested cases by key, with the clean repeats
    _warmed: str | None = None  # the launch that has served a request before its first job

    def measure(self, case: Case, repeats: int | None = None, why: str = "") -> list[ReplicaGroup]:
        """Measure the repeats that are missing for a case, and return all that it has, also unclean ones.

        Args:
            repeats: Number of clean repeats wanted. Defaults to that of the run.
            why: Reason for measuring the case again, for example "the noise is not known yet". Shown with the progress.

        Raises:
            DoesNotFit: The engine's KV cache is too small for the load.
            EngineFailed: The engine did not start, or crashed.
        """
        self.ask([case], repeats)
        self.results.requested.setdefault(case.key)
        known = self.results.repeats.setdefault(case.key, [])
        if self.fetch:
            self.fetch(case)
            return known
        reason = f" ({why})" if why else ""
        while self.count_missing(case, repeats):
            known.append(self.measure_once(case, f"{case.title}, repeat {len(known) + 1}{reason}"))
        return known

    def ask(self, cases: Sequence[Case], repeats: int | None = None) -> None:
        """Note cases that will be measured, so that the progress shows all of them from the first one on. The largest
        number of repeats that was requested for a case stays."""
        for case in cases:
            _, before = self.asked.get(case.key, (case, 0))
            self.asked[case.key] = case, max(before, repeats or self.repeats)

    def count_missing(self, case: Case, repeats: int | None = None) -> int:
        """Return the number of repeats of a case that are still to be made, if each new one is clean."""
        return count_missing(map(is_clean, self.results.repeats.get(case.key, ())), repeats or self.repeats)

    def measure_once(self, case: Case, title: str, paired: GateLaunch | None = None) -> ReplicaGroup:
        """Measure one repeat, and write it. paired: the part of a gate that it is; a gate counts pairs, so the results
        do not have it. Raises DoesNotFit if the engine reports a KV cache for fewer requests than the load keeps in
        flight; a load that the plan could check has been checked there."""
        if self.archive:
            self.archive.check_writable()  # a repeat that cannot be stored is not worth its GPU time
        devices, spec = self.devices, case.engine
        running = devices.start(spec)
        if not isinstance(running, ReplicaEngines):
            [workload], [load] = case.workloads, case.loads
            if isinstance(load, ClosedLoop) and kv_capacity(running.spec, workload.longest) is None:
                room = kv_capacity(running.spec, workload.longest, running.resolved)
                if room is not None and room < load.concurrency:
                    problem = f"the engine says that its KV cache holds {room} requests of {workload.longest} tokens"
                    raise DoesNotFit(problem, f"--slm-concurrency up to {room}, or shorter requests")
            if is_job(load) and running.launch != self._warmed:
                # A job has no ramp-up, and the first requests of a fresh engine are slow.
                running.run(workload, OpenLoop(requests=min(load.requests or 1, WARM_UP)))
                self._warmed = running.launch
        sampler = devices.sampler_on(devices.planner.devices(spec))
        group = measure_case(running, case, partial(self.on_progress, case, title), sampler)
        if paired:
            group = tuple(replace(m, paired=paired) for m in group)
        self.write(group)
        return group

    def write(self, group: ReplicaGroup) -> None:
        """Write a repeat into the archive and the export."""
        for m in group:
            if self.archive:
                self.archive.add(m)
            if self.export and m.alone:
                self.export.add(m)


def count_missing(clean: Iterable[bool], repeats: int) -> int:
    """Return the number of repeats still to be made, if each new one is clean. clean: whether each known repeat is.

    A case is measured until `repeats` are clean, with one extra attempt for one that is not; call this again after each
    repeat to know whether another one is due.
    """
    known = list(clean)
    return max(0, min(repeats - sum(known), repeats - len(known) + EXTRA_ATTEMPTS))
