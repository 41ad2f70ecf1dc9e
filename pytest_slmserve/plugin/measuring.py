"""The part of the plugin that is imported only if something is measured: what fixtures hand to tests, and the check of
an archive that a run resumes from."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain
from typing import Any, TypeVar

import pytest

from pytest_slmserve.analysis import points
from pytest_slmserve.analysis.claims.table import claim_of
from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.metrics.validity import Health, health, trustworthy
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.engines.replicas import cannot_share
from pytest_slmserve.plan.case_lists import sized_workload
from pytest_slmserve.plan.cases import Case, engine_title
from pytest_slmserve.plugin.items import ItemPlan, marker_overrides
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run.session import Session
from pytest_slmserve.run.sweeps import Rounds, Sweeps
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit, Sharing
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, Run, Samples, Steps, Telemetry, differences
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, ReplicaSpec, Workload, load_facts
from pytest_slmserve.telemetry.sampler import Sampler
from pytest_slmserve.workload.arrivals import job

LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to say what differs
CLAUSES = 3
NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)
Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to whoever else is there
T = TypeVar("T")


def checked(name: str, function: Callable[..., T], *given: object) -> Callable[..., T]:
    """Return a function that tests call as `name`, with its first values `given`. It raises BadUsage for a word that
    the function does not have, for one that is missing, and for repeats that are no number. Words that it takes as
    `**load` are fields of ClosedLoop."""
    signature = inspect.signature(partial(function, *given))
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
        return function(*given, *values, **words)

    return call


def nearest(word: str, known: Iterable[str]) -> str:
    """The known words that are most like this one, or all of them if none is."""
    names = list(known)
    near = get_close_matches(word, names, cutoff=0.7)
    return " or ".join(near) if near else ", ".join(names)


# What a run resumes from


def fits(session: Session, plans: Sequence[ItemPlan]) -> str:
    """A sentence on what is resumed. Raises BadUsage if another run's archive was named, and nothing of it answers
    the items of this run: it would all be measured again by somebody who believes it to be there."""
    asked = [plan for plan in plans if not plan.reads and not plan.compares]
    cases = [plan.case for plan in asked if plan.case]
    # Of what only a test's body determines the engine is known.
    wanted = dict.fromkeys(plan.engine for plan in asked if plan.engine and not plan.case)
    engines = [Case(engine, environment=session.planner.environment(engine)) for engine in wanted]
    path, stored, why = session.source, session.stored, ""
    known, kinds = {case.key for case in cases}, {(case.each[0].key, case.environment.key) for case in engines}
    certain = [m for group in points.all_groups(stored) if points.group_key(group) in known for m in group]
    others = [m for m in stored if kinds and (m.spec.key, m.environment.key) in kinds]
    answering = {m.id: m for m in (*certain, *others)}.values()
    if not stored:
        why = f"{path} holds no measurement"
    elif (cases or engines) and not answering:
        why = f"{path} answers nothing of this run: {difference(stored, [*cases, *engines])}"
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


def difference(stored: Sequence[Measurement], cases: Sequence[Case]) -> str:
    """The differences between the measurement and the case that are most alike: three clauses at most, and the number
    of further ones. "There" is the archive, "here" the run. cases: without a workload and a load if only a test's body
    determines them."""
    kinds = list({m.key: m for m in stored}.values())
    pairs = [(m, case) for m in kinds[:LOOKED_AT] for case in cases[:LOOKED_AT]]
    fewest = min((_clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def _clauses(m: Measurement, case: Case) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    spec = case.each[0]  # as all replicas of a planned set
    found = differences(m.environment.kind, case.environment.kind)
    if short_name(m.spec.model) != short_name(spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(spec.model)} here")
    else:
        found += differences(m.spec.facts, spec.facts)
    for workload, load in zip(case.workloads[:1], case.loads):
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
                    pytest.skip(skip_note(self.session.verdicts.curve(model), concurrency))
                wanted = repeats
            groups = self.session.executor.measure(self.case, wanted)
        except DoesNotFit as error:
            pytest.skip(error.problem)
        self.carry([*chain.from_iterable(groups)])
        return trustworthy(repr(self), groups, wanted)

    def __repr__(self) -> str:
        return self.case.id


@dataclass(frozen=True, repr=False)
class OwnEngine:
    """The engine that the marker of a test item asks for, and what the test measures on it."""

    session: Session
    spec: EngineSpec
    workload: Workload
    item: pytest.Item

    def case(self, concurrency: int, own: Mapping[str, Any]) -> Case:
        """Return the case of a closed loop. own: its fields that differ from those of the options and the marker.
        Raises BadUsage for a loop without a window."""
        planner = self.session.planner
        load = replace(planner.load(concurrency, marker_overrides(self.item)), **own)
        if load.requests is not None:
            raise BadUsage("a load of a fixed number of requests has no window to measure", "slm_engine.run(...)")
        return planner.case(self.spec, [self.workload], [load])

    @partial(checked, "slm_measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> points.Point:
        """Measure one point."""
        groups = self.session.executor.measure(self.case(concurrency, load), repeats)
        return points.points_of(chain.from_iterable(groups))[0]

    @partial(checked, "slm_sweep")
    def sweep(self, concurrency: Sequence[int], *, repeats: int | None = None, **load: Any) -> Curve:
        """Measure points in rounds. Without `repeats` rounds go on until it is decided whether there is a plateau."""
        session = self.session
        if isinstance(concurrency, str | int):
            raise BadUsage(f"slm_sweep(concurrency={concurrency!r}) is no list of numbers", "concurrency=[1, 2, 4]")
        cases = {n: self.case(n, load) for n in concurrency}
        if not cases:
            raise BadUsage("slm_sweep(concurrency=[]) names no load", "concurrency=[1, 2, 4]")
        session.executor.ask(list(cases.values()), repeats)
        rounds = Rounds(session, cases)
        for number in range(1, (repeats or session.options.repeats) + 1):
            rounds.round(number, cases)

        def curve() -> Curve:
            found = session.results.measurements(case.key for case in cases.values())
            looks = () if repeats else session.looks
            return curve_of(short_name(self.spec.model), found, planned=[*cases], looks=looks)

        if repeats is None:
            rounds.until_decided(lambda: [curve().pareto_plateau()])
        for error in rounds.failed.values():
            raise error
        return curve()


def own_job(
    session: Session,
    spec: EngineSpec,
    requests: int,
    rate: float = math.inf,
    *,
    lengths: tuple[int, int] | None = None,
    burstiness: float = 1.0,
    repeats: int | None = None,
) -> points.JobPoint:
    """Serve one job on the engine of a test."""
    workload = sized_workload(session.planner, spec.model, requests, lengths)
    load = job(requests, rate, session.options.seed, burstiness=burstiness)
    groups = session.executor.measure(session.planner.case(spec, [workload], [load]), repeats)
    return points.job_points(chain.from_iterable(groups))[0]


def planned_sweeps(session: Session, plans: Sequence[ItemPlan]) -> Sweeps:
    """Return the planned sweeps of a run, with the loads and the claims that its items ask for."""
    loads, claims = defaultdict[str, list[int]](list), defaultdict[str, list[str]](list)
    for plan in plans:
        if plan.case and plan.swept:
            loads[plan.case.model].append(plan.case.concurrency)
        if plan.claim and plan.model and claim_of(plan.claim).of == "sweeps":
            claims[plan.model].append(plan.claim)
    return Sweeps(session, loads, claims)


def shared_engines(
    session: Session,
    n: int = 2,
    *,
    sharing: Sharing | None = None,
    model: str | None = None,
    models: Sequence[str] | None = None,
    pinned: bool | None = None,
    thread_percentage: int | None = None,
) -> SharedEngines:
    """Return engines on one device; the test is skipped if they cannot share it."""
    planner = session.planner
    if not models and n < 2:
        raise BadUsage(f"{n} replica is an engine like any other", "slm_measure, or two and more")
    spec = planner.replicas(models or [model or planner.models[0]] * n, sharing, pinned, thread_percentage)
    if why := cannot_share(spec, planner.host.device):
        pytest.skip(why)
    return SharedEngines(session, spec)


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, started when they are first measured."""

    session: Session
    spec: ReplicaSpec

    @partial(checked, "slm_replicas(...).measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> points.ReplicaPoint:
        """Put `concurrency` requests in flight in all, the same number in each; more words are fields of ClosedLoop."""
        case = self.session.planner.replicas_case(self.spec, concurrency, load)
        return points.shared_points(chain.from_iterable(self.session.executor.measure(case, repeats)))[0]

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
