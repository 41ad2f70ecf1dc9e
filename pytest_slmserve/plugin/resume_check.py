"""Does an archive that is resumed answer anything of this run, and if not, what differs?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.stored.differences import Asked, _question, difference
from pytest_slmserve.plugin.items import engine_of, is_gate, is_measured, is_reader, is_skipped, question_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec


def asked_by(session: Session, items: Sequence[Any]) -> Iterator[Asked]:
    """What the items will ask, as far as it is known before they run. Those that only read ask nothing."""
    for item in items:
        if is_skipped(item) or is_reader(item) or is_gate(item) or not is_measured(item):
            continue
        if question := question_of(session, item):
            for spec, workload, load in zip(_engines(question.engine), question.workloads, question.loads):
                yield Asked(spec, session.planner.environment(question.engine), workload.reference(), load)
        elif engine := engine_of(session, item):
            yield from (Asked(spec, session.planner.environment(engine)) for spec in _engines(engine))


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
