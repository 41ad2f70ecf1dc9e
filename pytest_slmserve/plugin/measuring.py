"""The part of the plugin that is imported only if something is measured: what fixtures hand to tests, and the check of
an archive that a run resumes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache, partial, wraps
from typing import Any, TypeVar

import pytest

from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.metrics.validity import Health, health, trustworthy
from pytest_slmserve.analysis.points import ReplicaPoint, shared_points
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.cases import Case, engine_title
from pytest_slmserve.plan.planner import MarkerOverrides, closed_loop_of
from pytest_slmserve.plugin.items import ItemPlan
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Sweeps
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, Run, Samples, Steps, Telemetry, differences
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, ReplicaSpec, load_facts
from pytest_slmserve.telemetry.sampler import Sampler

LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to say what differs
CLAUSES = 3
NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)
Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there
T = TypeVar("T")


def checked(name: str, function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that tests call as `name`. It raises BadUsage for a word that the function does not have, for
    one that is missing, and for repeats that are no number. Words that it takes as `**load` are fields of
    ClosedLoop."""
    signature = inspect.signature(function)
    known = [word for word in signature.parameters if word not in ("self", "load")]
    if "load" in signature.parameters:
        known += [field.name for field in fields(ClosedLoop) if field.name != "concurrency"]

    @wraps(function)
    def call(*values: object, **words: object) -> T:
        if unknown := [word for word in words if word not in known]:
            raise BadUsage(f"{name} takes no {unknown[0]!r}", nearest(unknown[0], known))
        try:
            signature.bind(*values, **words)
        except TypeError as error:
            raise BadUsage(f"{name}: {error}", ", ".join(known)) from None
        repeats = words.get("repeats")
        if repeats is not None and not (isinstance(repeats, int) and repeats > 0):
            raise BadUsage(f"{name}: repeats={repeats!r} is no number of repeats", "repeats=3")
        return function(*values, **words)

    return call


def nearest(word: str, known: Iterable[str]) -> str:
    """The known words that are most like this one, or all of them if none is."""
    names = list(known)
    near = get_close_matches(word, names, cutoff=0.7)
    return " or ".join(near) if near else ", ".join(names)


def window_load(
    session: Session, spec: EngineSpec, concurrency: int, overrides: MarkerOverrides, own: Mapping[str, Any]
) -> ClosedLoop:
    """The closed loop of a point. own: its fields that differ from those of the options and the marker. Raises BadUsage
    for a loop without a window."""
    load = replace(closed_loop_of(session.options, spec.platform, concurrency, overrides.ramp_up), **own)
    if load.requests is not None:
        raise BadUsage("a load of a fixed number of requests has no window to measure", "slm_engine.run(...)")
    return load


# What a run resumes from


def fits(session: Session, plans: Sequence[ItemPlan]) -> str:
    """A sentence on what is resumed. Raises BadUsage if another run's archive was named, and nothing of it answers
    the items of this run: it would all be measured again by somebody who believes it to be there."""
    # Cases of one engine each. They lack a workload and a load if only a test's body determines them.
    cases: list[Case] = []
    for plan in plans:
        if plan.reads or plan.compares:
            continue
        if case := plan.case:
            each = zip(case.each, case.workloads, case.loads)
            cases += [Case(spec, (workload,), (load,), case.environment) for spec, workload, load in each]
        elif plan.engine:
            cases.append(Case(plan.engine, environment=session.planner.environment(plan.engine)))
    path, stored, why = session.source, session.stored, ""
    known = {kind_of(c.each[0], c.environment, c.workloads[0].hash, c.loads[0]) for c in cases if c.loads}
    engines = {kind_of(c.each[0], c.environment) for c in cases if not c.loads}
    certain = [m for m in stored if kind_of(m.spec, m.environment, m.workload.hash, m.load) in known]
    others = [m for m in stored if kind_of(m.spec, m.environment) in engines]
    answering = {m.id: m for m in (*certain, *others)}.values()
    if not stored:
        why = f"{path} holds no measurement"
    elif cases and not answering:
        why = f"{path} answers nothing of this run: {difference(stored, cases)}"
    if why and isinstance(session.options.resume, str):
        raise BadUsage(f"--slm-resume: {why}", "the options of the run that wrote it, or no --slm-resume")
    if why:
        return f"nothing is resumed: {why}"
    valid = sum(m.id in session.reused for m in answering)
    sure = sum(m.id in session.reused for m in certain)
    told = [f"{sure} measurements for this run"]
    told += [f"{valid - sure} of engines that its own tests use"] if valid > sure else []
    told += [f"{len(answering) - valid} that are not valid"] if len(answering) > valid else []
    return f"{path} holds {', and '.join(told)}"


def kind_of(
    spec: EngineSpec, environment: Environment, workload: str | None = None, load: Load | None = None
) -> tuple[str | None, ...]:
    """A key that is equal if one engine is measured in the same way. workload, load: None if only a test's body
    determines them."""
    return _key(spec), _key(environment), workload, str(load_facts(load)) if load else None


@lru_cache(maxsize=1024)
def _key(of: EngineSpec | Environment) -> str:
    return of.key


def difference(stored: Sequence[Measurement], cases: Sequence[Case]) -> str:
    """The differences between the measurement and the case that are most alike: three clauses at most, and the number
    of further ones. "There" is the archive, "here" the run. cases: of one engine each, without a workload and a load
    if only a test's body determines them."""
    kinds = list({kind_of(m.spec, m.environment, m.workload.hash, m.load): m for m in stored}.values())
    pairs = [(m, case) for m in kinds[:LOOKED_AT] for case in cases[:LOOKED_AT]]
    fewest = min((_clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def _clauses(m: Measurement, case: Case) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    [spec], environment = case.each, case.environment
    found = differences(m.environment.kind, environment.kind)
    if short_name(m.spec.model) != short_name(spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(spec.model)} here")
    else:
        found += differences(m.spec.facts, spec.facts)
    for workload, load in zip(case.workloads, case.loads):
        if m.workload.hash != workload.hash:
            there, here = m.workload, workload.reference()
            lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
            made = ", ".join(differences(asdict(there.spec), asdict(here.spec)))
            if lengths[0] != lengths[1]:
                found.append(f"requests of {lengths[0]} tokens there, {lengths[1]} here")
            else:
                found.append(f"other requests ({made})" if made else "other requests of the same lengths")
        found += differences(load_facts(m.load), load_facts(load))
    return found


# What tests get


@dataclass(frozen=True, repr=False)
class PlannedCase:
    """The case of a test. sweeps: those of the run, if it is a point of one."""

    session: Session
    case: Case
    carry: Carry = lambda measurements: None
    sweeps: Sweeps | None = None

    def measure(self) -> Verdict:
        """Measure it (unless it is known already). The verdict tells whether the measurements can be trusted. The test
        is skipped if an adaptive sweep does not need this point, or the engine turns out to have no room for it."""
        model, concurrency, wanted = self.case.model, self.case.concurrency, self.session.options.repeats
        try:
            if self.sweeps:
                repeats = self.sweeps.repeats(model, concurrency)
                if repeats is None:
                    pytest.skip(self.sweeps.why_not(model, concurrency))
                wanted = repeats
            groups = self.session.executor.measure(self.case, wanted)
        except DoesNotFit as error:
            pytest.skip(error.problem)
        self.carry([m for group in groups for m in group])
        return trustworthy(repr(self), groups, wanted)

    def __repr__(self) -> str:
        return self.case.id


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    @partial(checked, "slm_replicas(...).measure")
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
