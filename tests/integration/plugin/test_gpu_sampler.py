"""The sensors beside any block, with a source that does as it is told."""

from __future__ import annotations

import threading
import time

import pytest

from pytest_slmserve.plugin.items import watching
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.sensors import FOREIGN_PROCESSES, SM_ACTIVE
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Sampler

HERE = Environment(platform="cuda", gpu_name="NVIDIA H200")


class Planted:
    """SM activity as planted, for the tenth of a second before each reading."""

    name = "planted"

    def __init__(self, *values: float, fails_at: int = 10**9, foreign: float = 0.0) -> None:
        self.values, self.fails_at, self.foreign, self.asked = values, fails_at, foreign, 0

    def read(self, now_s: float) -> Reading:
        self.asked += 1
        if self.asked >= self.fails_at:
            raise SensorFailed("as it was told to")
        value = self.values[min(self.asked, len(self.values)) - 1]
        return Reading({SM_ACTIVE: value, FOREIGN_PROCESSES: self.foreign}, 0.1)

    def close(self) -> None:
        pass


def recording() -> bool:
    return "slm-telemetry" in {thread.name for thread in threading.enumerate()}


def test_figures_are_of_the_block():
    with watching(Sampler([Planted(0.5)], 0.1), HERE) as watched:
        assert recording()
        time.sleep(0.45)
    assert not recording()
    assert watched.figures.sm_active == 0.5 == watched.figures.sm_active_max
    opened, closed = watched.seen.window_s
    assert opened == 0 and 0.4 < closed < 2
    rows = watched.telemetry
    assert len(rows) >= 3 and rows.sources == ("planted",) and rows.time_s[-1] <= closed + 0.2


def test_readings_before_the_block_are_not_in_its_figures():
    source = Planted(0.9)
    sampler = Sampler([source], 0.1)
    with sampler.recording() as outer:
        time.sleep(0.25)
        with watching(sampler, HERE) as watched:
            source.values = (0.1,)
            time.sleep(0.35)
    assert watched.figures.sm_active == pytest.approx(0.1) and watched.figures.sm_active_max == 0.1
    assert {reading.values[SM_ACTIVE] for _, reading in outer.rows} == {0.1, 0.9}


def test_the_verdict_is_over_the_block_too():
    with watching(Sampler([Planted(0.5, foreign=2.0)], 0.1), HERE) as watched:
        time.sleep(0.45)
    assert watched.health.state == "invalid" and "2 processes of others" in watched.health.reasons[-1]
    with watching(Sampler([Planted(0.5, fails_at=3)], 0.1), HERE) as watched:
        time.sleep(0.45)
    assert any("planted failed after 2 readings: as it was told to" in why for why in watched.health.reasons)


@pytest.mark.parametrize("name", ["seen", "telemetry", "figures", "health"])
def test_before_its_end_there_is_nothing(name):
    with watching(Sampler([Planted(0.5)], 0.1), HERE) as watched, pytest.raises(BadUsage, match="has not ended"):
        getattr(watched, name)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_block_stops_the_thread_and_is_passed_on(error):
    with pytest.raises(error), watching(Sampler([Planted(0.5)], 0.1), HERE) as watched:
        raise error
    assert not recording()
    with pytest.raises(BadUsage):
        _ = watched.figures


def test_a_block_too_short_for_a_reading_has_no_figures():
    with watching(Sampler([Planted(0.5)], 0.25), HERE) as watched:
        pass
    assert watched.figures.sm_active is None and watched.health.state == "unknown"


def test_a_watch_within_another_asks_nobody_twice():
    source = Planted(0.5)
    sampler = Sampler([source], 0.2)
    with watching(sampler, HERE) as outer:
        time.sleep(0.25)
        with watching(sampler, HERE) as inner:
            time.sleep(0.5)
        assert recording(), "the outer one goes on"
        time.sleep(0.25)
    assert source.asked == len(outer.telemetry) <= 8
    assert inner.figures.sm_active == outer.figures.sm_active == 0.5
    assert inner.seen.window_s[1] < outer.seen.window_s[1]
    with watching(sampler, HERE) as later:
        time.sleep(0.3)
    assert later.figures.sm_active == 0.5
