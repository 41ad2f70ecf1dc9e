"""A measurement keeps every fact of a run, and what it was a run of."""

from datetime import datetime, timedelta, timezone

import pytest

from pytest_slmserve.engines.fake import FakeEngine
from pytest_slmserve.errors import EngineFailed
from pytest_slmserve.measure import measure
from pytest_slmserve.models import shape_of
from pytest_slmserve.records import Environment
from pytest_slmserve.spec import Burst, ClosedLoop, EngineSpec, WorkloadSpec
from pytest_slmserve.workload.build import build_workload

HERE = Environment(backend="fake", gpu_name="simulated")
SPEC = EngineSpec("opt-tiny", backend="fake", extra=(("noise", 0.0), ("die_at", 16)))
LOAD = ClosedLoop(4, window_s=0.01)


@pytest.fixture
def workload():
    return build_workload(WorkloadSpec(prompt_tokens=8, output_tokens=4, requests=6), shape_of("opt-tiny"))


def test_it_holds_what_was_asked_for_and_what_came_of_it(workload):
    engine = FakeEngine(SPEC)
    found = measure(engine, workload, LOAD, HERE)
    assert (found.spec, found.load, found.environment, found.launch) == (SPEC, LOAD, HERE, engine.launch)
    assert found.resolved == engine.resolved
    assert found.workload == workload.reference()
    assert found.run == FakeEngine(SPEC).run(workload, LOAD)  # without noise a run is a function of its load


def test_its_time_is_the_beginning_in_utc(workload):
    before = datetime.now(timezone.utc)
    stamp = datetime.fromisoformat(measure(FakeEngine(SPEC), workload, LOAD, HERE).measured_at)
    assert stamp.utcoffset() == timedelta(0)
    assert before - timedelta(milliseconds=1) <= stamp <= datetime.now(timezone.utc)


def test_one_question_has_one_key_however_often_it_is_asked(workload):
    engine = FakeEngine(SPEC)
    once, again, other = (measure(engine, workload, load, HERE) for load in (LOAD, LOAD, Burst(3)))
    assert once.key == again.key
    assert once.key != other.key


def test_the_listener_hears_of_it(workload):
    heard = []
    measure(FakeEngine(SPEC), workload, LOAD, HERE, heard.append)
    assert [progress.phase for progress in heard] == ["over"]


def test_the_death_of_an_engine_is_passed_on(workload):
    with pytest.raises(EngineFailed):
        measure(FakeEngine(SPEC), workload, Burst(16), HERE)
