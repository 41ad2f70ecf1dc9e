"""Sessions on the simulated engine, and what the items of a run ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.options.read import read_options
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec

MODEL = "opt-125m"
BATCHES = (8, 64, 256, 512)
Open = Callable[..., Session]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens sessions on one archive, one after the other; options go by their names."""
    sessions: list[Session] = []

    def open_session(**given: object) -> Session:
        for earlier in sessions:
            earlier.close()
        words = {"simulate": True, "models": MODEL, "concurrency": "8,64,256,512", "records": str(tmp_path / "a.jsonl")}
        sessions.append(Session.from_options(read_options({**words, **given}, {}, {}), tmp_path))
        sessions[-1].open()
        return sessions[-1]

    yield open_session
    for each in sessions:
        each.close()


def judged(session: Session, name: str, model: str = MODEL) -> Verdict:
    """The verdict on a claim from what was measured, which the session remembers."""
    return session.verdicts.judge(session.verdicts.question(name, model))


def sweep(session: Session, only: Sequence[int] = BATCHES) -> None:
    """As the items of a run do."""
    planned = session.planner.sweep(MODEL)
    session.begin()
    for case in planned.cases:
        if case.concurrency in only:
            session.executor.measure(case)


def point(session: Session, concurrency: int = 8, repeats: int = 2) -> list[Measurement]:
    return records_of(session, session.planner.spec(MODEL), ClosedLoop(concurrency), repeats)


def records_of(session: Session, spec: EngineSpec, load: ClosedLoop, repeats: int | None = None) -> list[Measurement]:
    """The records of one engine under one load, measured where they are missing."""
    case = session.planner.case(spec, [session.planner.workload(spec.model)], [load])
    return [m for (m,) in session.executor.measure(case, repeats)]
