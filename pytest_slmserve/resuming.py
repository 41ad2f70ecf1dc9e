"""Does an archive that is resumed answer anything of this run, and if not, what differs?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from pytest_slmserve.ahead import question_of
from pytest_slmserve.items import engine_of, is_gate, is_measured, is_reader, is_skipped
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import MUST_MATCH, OF_AN_ENDPOINT, Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load, load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.schema.workloads import WorkloadReference
from pytest_slmserve.session import Session

LOOKED_AT = 100  # kinds of questions and of measurements that are compared to say what differs
CLAUSES = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks of one engine. workload, load: None where only the test that asks knows them."""

    spec: EngineSpec
    environment: Environment
    workload: WorkloadReference | None = None
    load: Load | None = None


def asked_by(session: Session, items: Sequence[Any]) -> Iterator[Asked]:
    """What the items will ask, as far as it is known before they run. Those that only read ask nothing."""
    for item in items:
        if is_skipped(item) or is_reader(item) or is_gate(item) or not is_measured(item):
            continue
        if question := question_of(session, item):
            for spec, workload, load in zip(_engines(question.engine), question.workloads, question.loads):
                yield Asked(spec, session.agenda.environment(question.engine), workload.reference(), load)
        elif engine := engine_of(session, item):
            yield from (Asked(spec, session.agenda.environment(engine)) for spec in _engines(engine))


def _engines(engine: EngineSpec | ReplicaSpec) -> Sequence[EngineSpec]:
    return engine.engines if isinstance(engine, ReplicaSpec) else (engine,)


def fits(session: Session, questions: Sequence[Asked]) -> str:
    """A sentence on what is resumed. Raises BadUsage where another run's archive was named, and nothing of it answers
    this one: it would all be measured anew by somebody who believes it to be there."""
    path, stored = session.source, session.stored
    if not stored:
        return _nothing(session, f"{path} holds no measurement")
    known = {_question(q.spec, q.environment, q.workload.hash, q.load) for q in questions if q.workload}
    asked = known | {_question(q.spec, q.environment, None, None) for q in questions if not q.workload}
    answering = [m for m in stored if not asked.isdisjoint(_answered(m))]
    if questions and not answering:
        return _nothing(session, f"{path} answers nothing of this run: {difference(stored, questions)}")
    valid = [m for m in answering if m.id in session.reused]
    sure = sum(not known.isdisjoint(_answered(m)) for m in valid)
    told = [f"{sure} measurements for this run"]
    told += [f"{len(valid) - sure} of engines that its own tests use"] if len(valid) > sure else []
    told += [f"{len(answering) - len(valid)} that are not valid"] if len(answering) > len(valid) else []
    return f"{path} holds {', and '.join(told)}"


def _nothing(session: Session, why: str) -> str:
    if isinstance(session.options.resume, str):
        raise BadUsage(f"--slm-resume: {why}", "the options of the run that wrote it, or no --slm-resume")
    return f"nothing is resumed: {why}"


def _answered(m: Measurement) -> Iterator[tuple[Any, ...]]:
    for workload in (m.workload.hash, None):
        for load in (m.load, None):
            yield _question(m.spec, m.environment, workload, load)


def _question(
    spec: EngineSpec, environment: Environment, workload: str | None, load: Load | None
) -> tuple[str | None, ...]:
    return _key(spec), _key(environment), workload, str(load_facts(load)) if load else None


@lru_cache(maxsize=1024)
def _key(of: EngineSpec | Environment) -> str:
    return of.key


def difference(stored: Sequence[Measurement], questions: Sequence[Asked]) -> str:
    """What differs between the two that are most alike. "There" is the archive, "here" the run."""
    kinds = list({_question(m.spec, m.environment, m.workload.hash, m.load): m for m in stored}.values())
    pairs = [(m, q) for m in kinds[:LOOKED_AT] for q in questions[:LOOKED_AT]]
    fewest = min((clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def clauses(m: Measurement, question: Asked) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    environment = question.environment
    names = (*MUST_MATCH, *(OF_AN_ENDPOINT if environment.backend == "remote" else ()))
    found = _apart({name: getattr(m.environment, name) for name in names}, {n: getattr(environment, n) for n in names})
    if short_name(m.spec.model) != short_name(question.spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(question.spec.model)} here")
    else:
        found += _apart(m.spec.facts, question.spec.facts)
    if question.workload and m.workload.hash != question.workload.hash:
        found.append(_requests(m.workload, question.workload))
    if question.load:
        found += _apart(load_facts(m.load), load_facts(question.load))
    return found


def _apart(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*there, *here])
    sides = ((n, there.get(n, "not set"), here.get(n, "not set")) for n in names)
    return [f"{name} {one} there, {other} here" for name, one, other in sides if one != other]


def _requests(there: WorkloadReference, here: WorkloadReference) -> str:
    """How the requests of two workloads differ: their lengths, or what they were made of."""
    lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
    if lengths[0] != lengths[1]:
        return f"requests of {lengths[0]} tokens there, {lengths[1]} here"
    made = _apart(asdict(there.spec), asdict(here.spec))
    return f"other requests ({', '.join(made)})" if made else "other requests of the same lengths"
