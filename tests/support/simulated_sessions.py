"""Sessions on the simulated engine, without a process of git, and what the items of a run ask of them."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan import planner
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec
from pytest_slmserve.telemetry import host

MODEL = "opt-125m"
BATCHES = (8, 64, 256, 512)
Open = Callable[..., Session]


# Steps of some 10 ms: a window has a hundred, and a run takes a millisecond.
FEW_STEPS = {"input_len": "64", "output_len": "32", "window": "1", "engine_arg": ["t_inf=2000", "b_half=16"]}

remembered = lru_cache(maxsize=40)(planner.build_workload)  # requests take longer to make than to serve


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens sessions on one archive, one after the other, unless it is named; options go by their names."""
    monkeypatch.setattr(host, "git_commit", lambda root: None)
    monkeypatch.setattr(host.system, "platform", lambda: "Linux")  # which asks uname for the processor
    monkeypatch.setattr(planner, "build_workload", remembered)
    sessions: list[Session] = []

    def open_session(archive: str = "a", **given: object) -> Session:
        for earlier in sessions:
            earlier.close()
        words = {"simulate": True, "models": MODEL, "concurrency": "8,64,256,512"}
        words["records"] = str(tmp_path / f"{archive}.jsonl")
        sessions.append(Session.from_options(read_options({**words, **given}, {}, {}), tmp_path))
        sessions[-1].open()
        return sessions[-1]

    yield open_session
    for each in sessions:
        each.close()


def stored(session: Session) -> list[Measurement]:
    return list(read(session.options.records).measurements)


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
