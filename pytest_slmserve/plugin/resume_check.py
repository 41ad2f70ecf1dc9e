"""Does an archive that is resumed answer anything of this run, and if not, what differs?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plugin.items import case_of, engine_of, is_gate, is_measured, is_reader, is_skipped
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load, load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.stored_names import from_stored
from pytest_slmserve.schema.workloads import WorkloadReference

LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to say what differs
CLAUSES = 3


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
        found += differences(from_stored(m.spec.facts), from_stored(spec.facts))
    for workload, load in zip(case.workloads, case.loads):
        if m.workload.hash != workload.hash:
            found.append(_requests(m.workload, workload.reference()))
        found += differences(from_stored(load_facts(m.load)), from_stored(load_facts(load)))
    return found


def _requests(there: WorkloadReference, here: WorkloadReference) -> str:
    """A clause on how the requests of two workloads differ: their mean lengths in tokens, or what they were made of."""
    lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
    if lengths[0] != lengths[1]:
        return f"requests of {lengths[0]} tokens there, {lengths[1]} here"
    made = differences(asdict(there.spec), asdict(here.spec))
    return f"other requests ({', '.join(made)})" if made else "other requests of the same lengths"
