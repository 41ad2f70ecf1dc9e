"""A measurement keeps every fact of a run, and what it was a run of."""

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from measured import measure
from strategies import planted_run

from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import EngineFailed, SensorFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.sensors import HOST_CORES, POWER
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Sampler
from pytest_slmserve.workload.requests import build_workload

HERE = Environment(platform="simulated", gpu_name="simulated")
SPEC = EngineSpec("opt-tiny", platform="simulated", extra=(("noise", 0.0), ("die_at", 16)))
LOAD = ClosedLoop(4, window_s=0.01)


@pytest.fixture
def workload():
    return build_workload(WorkloadSpec(prompt_tokens=8, output_tokens=4, requests=6), model_of("opt-tiny"))


def test_it_holds_what_was_asked_for_and_what_came_of_it(workload):
    engine = SimulatedEngine(SPEC)
    found = measure(engine, workload, LOAD, HERE)
    assert (found.spec, found.load, found.environment, found.launch) == (SPEC, LOAD, HERE, engine.launch)
    assert found.resolved == engine.resolved
    assert found.workload == workload.reference()
    assert found.run == SimulatedEngine(SPEC).run(workload, LOAD)  # without noise a run is a function of its load


def test_its_time_is_the_beginning_in_utc(workload):
    before = datetime.now(UTC)
    stamp = datetime.fromisoformat(measure(SimulatedEngine(SPEC), workload, LOAD, HERE).measured_at)
    assert stamp.utcoffset() == timedelta(0)
    assert before - timedelta(milliseconds=1) <= stamp <= datetime.now(UTC)


def test_one_question_has_one_key_however_often_it_is_asked(workload):
    engine = SimulatedEngine(SPEC)
    once, again, other = (measure(engine, workload, load, HERE) for load in (LOAD, LOAD, OpenLoop(requests=3)))
    assert once.key == again.key
    assert once.key != other.key


def test_the_listener_hears_of_it(workload):
    heard = []
    measure(SimulatedEngine(SPEC), workload, LOAD, HERE, heard.append)
    assert [progress.phase for progress in heard] == ["over"]


def test_the_death_of_an_engine_is_passed_on(workload):
    with pytest.raises(EngineFailed):
        measure(SimulatedEngine(SPEC), workload, OpenLoop(requests=16), HERE)


# With sensors beside it


class Planted:
    """Says how long it has been asked for; fails from one reading on."""

    def __init__(self, number=POWER, fails_at=10**9, error=SensorFailed):
        self.name, self.number, self.fails_at, self.error = f"source of {number}", number, fails_at, error
        self.asked = []

    def read(self, now_s):
        self.asked.append(now_s)
        if len(self.asked) >= self.fails_at:
            raise self.error("as it was told to")
        return Reading({self.number: float(len(self.asked))}, 0.1)

    def close(self):
        pass


class Timed(SimulatedEngine):
    """Serves on the clock of the host: idle for a while, then a window, as a worker in its own process does."""

    def __init__(self, before_s=0.3, window_s=0.4, dies=False):
        super().__init__(SPEC)
        self.before_s, self.window_s, self.dies = before_s, window_s, dies

    def run(self, workload, load, on_progress=None):
        time.sleep(self.before_s)
        self.began = time.monotonic()
        time.sleep(self.window_s)
        if self.dies:
            raise EngineFailed("it died, as it was told to")
        return replace(planted_run(2, 100.0), window_s=(0.0, self.window_s), began_s=self.began)


def recording():
    return "slm-telemetry" in {thread.name for thread in threading.enumerate()}


def test_rows_of_the_sensors_have_the_time_since_the_run_began(workload):
    engine, source = Timed(), Planted()
    seen = measure(engine, workload, LOAD, HERE, sampler=Sampler([source], 0.1)).run.telemetry
    wanted = [at - engine.began for at in source.asked]
    assert list(seen.time_s) == pytest.approx([at for at in wanted if -0.4 <= at <= 0.5], abs=1e-5)
    assert seen.time_s[0] < 0 and any(0 < at < 0.4 for at in seen.time_s)
    first = len(wanted) - len([at for at in wanted if at >= -0.4])
    assert seen.columns[POWER][0] == first + 1 and seen.sources == ("source of 155",) and seen.notes == ()
    assert not recording()


def test_an_engine_with_a_clock_of_its_own_keeps_its_own_telemetry(workload):
    source = Planted()
    found = measure(SimulatedEngine(SPEC), workload, LOAD, HERE, sampler=Sampler([source], 0.1))
    assert found.run == SimulatedEngine(SPEC).run(workload, LOAD)
    assert found.run.telemetry.sources == ("simulated",)


@pytest.mark.parametrize("error", [SensorFailed, ZeroDivisionError])
def test_sensors_that_fail_cost_a_note_and_no_measurement(workload, error):
    engine, lost, other = Timed(), Planted(fails_at=3, error=error), Planted(HOST_CORES)
    found = measure(engine, workload, LOAD, HERE, sampler=Sampler([lost, other], 0.1))
    seen = found.run.telemetry
    assert len(found.run.samples) and found.run.failures == 0
    assert len(seen.notes) == 1 and "source of 155 failed after 2 readings" in seen.notes[0]
    told = [number for number, at in enumerate(other.asked, 1) if -0.4 <= at - engine.began <= 0.5]
    assert list(seen.columns[HOST_CORES]) == told and told[-1] > 3, "the other source goes on"
    assert len(lost.asked) == 3


def test_a_dead_engine_stops_the_sensors_and_is_passed_on(workload):
    source = Planted()
    with pytest.raises(EngineFailed, match="it died"):
        measure(Timed(dies=True), workload, LOAD, HERE, sampler=Sampler([source], 0.1))
    assert not recording()
    asked = len(source.asked)
    time.sleep(0.25)
    assert len(source.asked) == asked > 0


def test_without_a_sampler_nothing_is_read(workload):
    assert measure(Timed(0, 0), workload, LOAD, HERE).run.telemetry is None
