"""Does an archive that is resumed answer anything of this run, and if not, what differs?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plugin.items import case_of, engine_of, is_gate, is_measured, is_reader, is_skipped
from pytest_slmserve.run.differences import difference, kind_of
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement


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
