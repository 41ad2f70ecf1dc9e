"""The part of the plugin that is imported only if something is measured: what fixtures hand to tests, and the check of
an archive that a run resumes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pytest

from pytest_slmserve.analysis.device.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.device.sensor_health import Health, health
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.points import ReplicaPoint, shared_points
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.cases import Case, engine_title
from pytest_slmserve.plugin.items import (
    case_of,
    checked,
    engine_of,
    is_gate,
    is_measured,
    is_reader,
    is_skipped,
)
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Sweeps
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit
from pytest_slmserve.schema.loads import Load, WorkloadReference, load_facts
from pytest_slmserve.schema.records import Measurement, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.sampler import Sampler

LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to say what differs
CLAUSES = 3
NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)
Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there


def cases_by_engine(session: Session, items: Sequence[Any]) -> Iterator[Case]:
    """Cases that the items will measure on each engine, as far as determined before they run. They lack a workload and
    a load where only a test's body determines them. Items that only read measure nothing."""
    for item in items:
        if is_skipped(item) or is_reader(item) or is_gate(item) or not is_measured(item):
            continue
        if case := case_of(item):
            for spec, workload, load in zip(case.each, case.workloads, case.loads):
                yield Case(spec, (workload,), (load,), case.environment)
        elif engine := engine_of(session, item):
            yield Case(engine, environment=session.planner.environment(engine))


def fits(session: Session, cases: Sequence[Case]) -> str:
    """A sentence on what is resumed. Raises BadUsage where another run's archive was named, and nothing of it answers
    this one: it would all be measured anew by somebody who believes it to be there."""
    path, stored = session.source, session.stored
    if not stored:
        return _nothing(session, f"{path} holds no measurement")
    known = {kind_of(c.each[0], c.environment, c.workloads[0].hash, c.loads[0]) for c in cases if c.loads}
    wanted = known | {kind_of(c.each[0], c.environment, None, None) for c in cases if not c.loads}
    answering = [m for m in stored if not wanted.isdisjoint(_kinds(m))]
    if cases and not answering:
        return _nothing(session, f"{path} answers nothing of this run: {difference(stored, cases)}")
    valid = [m for m in answering if m.id in session.reused]
    sure = sum(not known.isdisjoint(_kinds(m)) for m in valid)
    told = [f"{sure} measurements for this run"]
    told += [f"{len(valid) - sure} of engines that its own tests use"] if len(valid) > sure else []
    told += [f"{len(answering) - len(valid)} that are not valid"] if len(answering) > len(valid) else []
    return f"{path} holds {', and '.join(told)}"


def _nothing(session: Session, why: str) -> str:
    if isinstance(session.options.resume, str):
        raise BadUsage(f"--slm-resume: {why}", "the options of the run that wrote it, or no --slm-resume")
    return f"nothing is resumed: {why}"


def _kinds(m: Measurement) -> Iterator[tuple[Any, ...]]:
    for workload in (m.workload.hash, None):
        for load in (m.load, None):
            yield kind_of(m.spec, m.environment, workload, load)


def kind_of(
    spec: EngineSpec, environment: Environment, workload: str | None, load: Load | None
) -> tuple[str | None, ...]:
    """A key that is equal where one engine is measured in the same way. workload, load: None where only a test's body
    determines them."""
    return _key(spec), _key(environment), workload, str(load_facts(load)) if load else None


@lru_cache(maxsize=1024)
def _key(of: EngineSpec | Environment) -> str:
    return of.key


def difference(stored: Sequence[Measurement], cases: Sequence[Case]) -> str:
    """The differences between the measurement and the case that are most alike: three clauses at most, and the number
    of further ones. "There" is the archive, "here" the run. cases: of one engine each, without a workload and a load
    where only a test's body determines them."""
    kinds = list({kind_of(m.spec, m.environment, m.workload.hash, m.load): m for m in stored}.values())
    pairs = [(m, case) for m in kinds[:LOOKED_AT] for case in cases[:LOOKED_AT]]
    fewest = min((clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def clauses(m: Measurement, case: Case) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    [spec], environment = case.each, case.environment
    found = differences(m.environment.kind, environment.kind)
    if short_name(m.spec.model) != short_name(spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(spec.model)} here")
    else:
        found += differences(m.spec.facts, spec.facts)
    for workload, load in zip(case.workloads, case.loads):
        if m.workload.hash != workload.hash:
            found.append(_requests(m.workload, workload.reference()))
        found += differences(load_facts(m.load), load_facts(load))
    return found


def _requests(there: WorkloadReference, here: WorkloadReference) -> str:
    """A clause on how the requests of two workloads differ: their mean lengths in tokens, or what they were made of."""
    lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
    if lengths[0] != lengths[1]:
        return f"requests of {lengths[0]} tokens there, {lengths[1]} here"
    made = differences(asdict(there.spec), asdict(here.spec))
    return f"other requests ({', '.join(made)})" if made else "other requests of the same lengths"


@dataclass(frozen=True, repr=False)
class PlannedCase:
    """The case of a test. sweeps: those of the run, where it is a point of one."""

    session: Session
    case: Case
    carry: Carry = lambda measurements: None
    sweeps: Sweeps | None = None

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted. The test
        is skipped where an adaptive sweep does not need this point, or the engine turns out to have no room for it."""
        try:
            wanted = self._repeats()
            repeats = self.session.executor.measure(self.case, wanted)
        except DoesNotFit as error:
            pytest.skip(error.problem)
        self.carry([m for group in repeats for m in group])
        return trustworthy(repr(self), repeats, wanted)

    def _repeats(self) -> int:
        if self.sweeps is None:
            return self.session.options.repeats
        model, concurrency = self.case.model, self.case.concurrency
        wanted = self.sweeps.repeats(model, concurrency)
        if wanted is None:
            pytest.skip(self.sweeps.why_not(model, concurrency))
        return wanted

    def __repr__(self) -> str:
        return self.case.id


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    @checked("slm_replicas(...).measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> ReplicaPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        case = self.session.planner.replicas_case(self.spec, concurrency, load)
        groups = self.session.executor.measure(case, repeats)
        return shared_points(m for group in groups for m in group)[0]

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


@dataclass(repr=False)
class SampledBlock:
    """Sensor readings over a block; there are none before the block has ended, and reading them raises BadUsage."""

    environment: Environment
    run: Run | None = None

    @property
    def seen(self) -> Run:
        if self.run is None:
            raise BadUsage("the block that is watched has not ended", "ask after the with statement")
        return self.run

    @property
    def telemetry(self) -> Telemetry:
        """Rows; their times are seconds since the block began."""
        assert self.seen.telemetry is not None
        return self.seen.telemetry

    @property
    def figures(self) -> DeviceFigures:
        return device_figures(self.seen)

    @property
    def health(self) -> Health:
        return health(self.seen, self.environment)


Watching = Callable[[], AbstractContextManager[SampledBlock]]


@contextmanager
def watching(sampler: Sampler, environment: Environment) -> Iterator[SampledBlock]:
    """Reads the sensors until the block ends, by an exception too."""
    watched = SampledBlock(environment)
    with sampler.recording() as recording:
        began_s = recording.clock()
        try:
            yield watched
        finally:
            window_s = 0.0, recording.clock() - began_s
    watched.run = Run(NOBODY, NOTHING, window_s, began_s=began_s, telemetry=recording.telemetry(began_s, window_s))
