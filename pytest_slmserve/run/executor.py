"""An executor measures cases until enough repeats are clean, and keeps each repeat: in results, archive and export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar

from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.analysis.points import JobPoint, ReplicaPoint, group_key, job_points, shared_points
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.base import Engine, ProgressCallback, ignore_progress
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.report.export.vllm_bench import Export
from pytest_slmserve.run.devices import Devices
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import DoesNotFit
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop, Workload, is_job
from pytest_slmserve.schema.records import GateLaunch, Measurement, Progress, ReplicaGroup, Run
from pytest_slmserve.schema.specs import ReplicaSpec
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
    """Run the loads of a case once, with the sensors read beside them, and keep every fact: a record for each engine.

    What the sensors said is of all engines, and stands in the first record; where that engine has a clock of its own
    it is left out. Raises EngineFailed when an engine dies; sensors that fail leave a note in the record, nothing more.
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
        for engine, workload, load, run, replica in zip(
            engines, case.workloads, case.loads, (first, *runs[1:]), case.replicas(), strict=True
        )
    )


@dataclass(repr=False)
class Results:
    """repeats: by the key of their case, in the order made. requested: keys of this run's cases, in the order that they
    were requested; what an archive knows beyond them is no part of this run."""

    repeats: dict[str, list[ReplicaGroup]] = field(default_factory=dict)
    requested: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.repeats)

    def add(self, groups: Iterable[ReplicaGroup]) -> None:
        """Know these as if they had been made in this process. Repeats of a gate are no part of a run's results."""
        for group in groups:
            if group[0].paired is None:
                self.repeats.setdefault(group_key(group), []).append(group)

    def request(self, key: str) -> list[ReplicaGroup]:
        """The repeats of a case that this run requests; new ones are added to the same list."""
        self.requested.setdefault(key)
        return self.repeats.setdefault(key, [])

    def measurements(self, keys: Iterable[str] | None = None) -> Iterator[Measurement]:
        """All records of the cases with these keys; None: of those that this run requested."""
        for key in self.requested if keys is None else keys:
            yield from (m for group in self.repeats.get(key, ()) for m in group)

    def shared_points(self) -> tuple[ReplicaPoint, ...]:
        """Points that replicas served in this run, in the order measured."""
        return shared_points(self.measurements())

    def job_points(self) -> tuple[JobPoint, ...]:
        """Jobs that were served in this run, in the order requested."""
        return job_points(self.measurements())


T = TypeVar("T")

SECOND_CHANCES = 1
WARM_UP = 64  # requests at once


class RemoteExecutor(Protocol):
    """Measures cases in place of an executor."""

    def fetch(self, case: Case) -> None:
        """Wait until all repeats of it are in the results. Raises what kept it from being measured."""

    def close(self) -> None:
        """Take what has come, and stop what still runs there; may be called twice."""


@dataclass(repr=False)
class Executor:
    """repeats: clean ones that are wanted of each case. on_progress: called while a repeat is measured, with its title.
    asked: cases that were asked for, by key, with the clean repeats that are wanted of each. remote: measures instead
    of the devices here."""

    devices: Devices
    results: Results
    repeats: int
    archive: Archive | None = None
    export: Export | None = None
    remote: RemoteExecutor | None = None
    on_progress: Callable[[Case, str, Progress], None] = lambda case, title, progress: None
    asked: dict[str, tuple[Case, int]] = field(default_factory=dict)
    _warmed: str | None = None  # the launch that has served something

    def measure(self, case: Case, repeats: int | None = None, why: str = "") -> list[ReplicaGroup]:
        """All repeats of a case: those that are known, and new ones until enough are clean. why: added to their titles.

        One that is invalid or degraded (another process in the way, say) is kept, shown, and measured again, once for
        each case.
        """
        self.ask([case], repeats)
        found = self.results.request(case.key)
        if self.remote:
            self.remote.fetch(case)
        else:
            for _ in self.iter_repeats(case, repeats, why):
                pass
        return found

    def ask(self, cases: Sequence[Case], repeats: int | None = None) -> None:
        """Note what will be measured, so that progress tells of all of it from the first case on. Who asks for fewer
        repeats than before asks for a round of them."""
        for case in cases:
            _, before = self.asked.get(case.key, (case, 0))
            self.asked[case.key] = case, max(before, repeats or self.repeats)

    def iter_repeats(self, case: Case, repeats: int | None = None, why: str = "") -> Iterator[ReplicaGroup]:
        """Measure what is missing of a case; each repeat is given when it has been kept."""
        known = self.results.repeats.setdefault(case.key, [])
        for number in missing_repeats(known, repeats or self.repeats, is_clean):
            group = self._measure(case, f"{case.title}, repeat {number}{why and f' ({why})'}")
            self.keep(case, group)
            yield group

    def count_missing(self, case: Case, repeats: int | None = None) -> int:
        """The number of repeats of a case that are still to be made, if each new one is clean."""
        return count_missing(self.results.repeats.get(case.key, ()), repeats or self.repeats, is_clean)

    def keep(self, case: Case, group: ReplicaGroup) -> None:
        """Know a repeat from now on. The archive has it on return."""
        self.results.repeats.setdefault(case.key, []).append(group)
        self._write(group)

    def measure_once(self, case: Case, title: str, paired: GateLaunch) -> ReplicaGroup:
        """One more repeat, on the engine that runs or on one that is started. The archive has it on return, the results
        do not. paired: its part in a gate."""
        group = tuple(replace(m, paired=paired) for m in self._measure(case, title))
        self._write(group)
        return group

    def _write(self, group: ReplicaGroup) -> None:
        for m in group:
            if self.archive:
                self.archive.add(m)
            if self.export and m.alone:
                self.export.add(m)

    def _measure(self, case: Case, title: str) -> ReplicaGroup:
        if self.archive:
            self.archive.check_writable()
        devices = self.devices
        running: Engine | ReplicaEngines
        match case.engine:
            case ReplicaSpec() as several:
                running = devices.replicas(several)
            case alone:
                running = devices.engine(alone)
                check_room(running, case)
                self._warm(running, case)
        return measure_case(running, case, partial(self.on_progress, case, title), devices.sampler_of(case.engine))

    def _warm(self, engine: Engine, case: Case) -> None:
        """Serve some requests before a job. It has no ramp, and the first ones of a fresh engine are slow."""
        [workload], [load] = case.workloads, case.loads
        if is_job(load) and engine.launch != self._warmed:
            engine.run(workload, OpenLoop(requests=min(load.requests or 1, WARM_UP)))
            self._warmed = engine.launch


def check_room(engine: Engine, case: Case) -> None:
    """Raises DoesNotFit where a plan could not know how many requests the KV cache holds, and the engine says that it
    holds fewer than the load keeps in flight."""
    [workload], [load] = case.workloads, case.loads
    planned = kv_capacity(engine.spec, workload.longest)
    if not isinstance(load, ClosedLoop) or planned is not None:
        return
    room = kv_capacity(engine.spec, workload.longest, engine.resolved)
    if room is not None and room < load.concurrency:
        problem = f"the engine says that its KV cache holds {room} requests of {workload.longest} tokens"
        raise DoesNotFit(problem, f"--slm-concurrency up to {room}, or shorter requests")


def missing_repeats(known: Sequence[T], repeats: int, is_clean: Callable[[T], bool]) -> Iterator[int]:
    """Numbers of the repeats still to be made, while those that are made are put into `known`: until so many are clean,
    with a second chance for one that is not."""
    for _ in range(repeats - len(known) + SECOND_CHANCES):
        if sum(map(is_clean, known)) >= repeats:
            return
        yield len(known) + 1


def count_missing(known: Sequence[T], repeats: int, is_clean: Callable[[T], bool]) -> int:
    """The number of repeats still to be made, if each new one is clean; as in `missing_repeats`, an unclean one has a
    single second chance."""
    return max(0, min(repeats - sum(map(is_clean, known)), repeats - len(known) + SECOND_CHANCES))
