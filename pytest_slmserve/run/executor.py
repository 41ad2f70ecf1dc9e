"""An executor measures cases until enough repeats are clean, and keeps each repeat: in results, archive and export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.report.export.vllm_bench import Export
from pytest_slmserve.run.devices import Devices
from pytest_slmserve.run.measure import measure_case
from pytest_slmserve.run.results import Results
from pytest_slmserve.schema.errors import DoesNotFit
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.loads import ClosedLoop, OpenLoop, is_job
from pytest_slmserve.schema.records import GateLaunch, Progress, ReplicaGroup
from pytest_slmserve.schema.specs import ReplicaSpec

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
