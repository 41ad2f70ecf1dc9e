"""A record's telemetry, played back through the sampler."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import BASELINES, needs_checkout

from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import health
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.schema.sensors import POWER, SM_ACTIVE
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Recording


class ReplaySource:
    """Each reading is the next row, whenever it is asked for."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.name = f"replay of {' + '.join(telemetry.sources) or 'nothing'}"
        self._telemetry, self._next = telemetry, 0

    def read(self, now_s: float) -> Reading:
        stored, row = self._telemetry, self._next
        if row >= len(stored):
            raise SensorFailed("the record has no more rows")
        self._next += 1
        values = {number: column[row] for number, column in stored.columns.items()}
        missing = tuple(f"{number}: not known in the record" for number, value in values.items() if value is None)
        return Reading(values, stored.span_s[row], missing)

    def close(self) -> None:
        """A record holds nothing open."""


VALUES = st.none() | st.integers(0, 10**9).map(lambda thousandths: thousandths / 1000)  # as records keep them


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=8))
def test_a_replay_that_is_recorded_is_the_record(rows):
    span_s, power, active = zip(*rows)
    times = tuple(0.25 * row for row in range(len(rows)))
    stored = Telemetry(("planted",), 0.25, times, span_s, {POWER: power, SM_ACTIVE: active})
    clock = iter(times)
    recording = Recording([ReplaySource(stored)], 0.25, clock=lambda: next(clock))
    for _ in times:
        recording.read()
    found = recording.telemetry(began_s=0.0)
    assert (found.time_s, found.span_s, found.columns) == (stored.time_s, stored.span_s, stored.columns)
    assert found.sources == ("replay of planted",)


BASELINE = BASELINES / "h200-vllm-0.26.0-sensors.jsonl.xz"


@pytest.fixture(scope="module")
def measured():
    needs_checkout()
    return read(BASELINE).measurements


def test_a_committed_record_played_back_tells_the_same(measured):
    for m in measured[::10]:
        stored = m.run.telemetry
        times = iter(stored.time_s)
        recording = Recording([ReplaySource(stored)], stored.interval_s, clock=lambda times=times: next(times))
        for _ in range(len(stored)):
            recording.read()
        again = replace(m.run, telemetry=recording.telemetry(0.0))
        assert again.telemetry.columns == stored.columns and again.telemetry.time_s == stored.time_s
        assert device_figures(again) == device_figures(m.run)
        assert health(again, m.environment) == health(m.run, m.environment)


def test_every_window_of_the_committed_record_was_seen_whole(measured):
    assert len(measured) == 79
    for m in measured:
        seen = device_figures(m.run)
        assert health(m.run, m.environment).state in ("ok", "degraded")
        assert seen.coverage > 0.95 and seen.power_limit_w == 700.0
        assert 0 < seen.dram_active < seen.engine_active <= 1.0 and seen.sm_occupancy < seen.sm_active
        assert m.run.telemetry.sources == ("nvml-gpm", "host") and not m.run.telemetry.notes


def test_a_replay_that_ends_too_early_is_a_degraded_window(measured):
    m = measured[0]
    source, rows = ReplaySource(m.run.telemetry), count(1)
    recording = Recording(
        [source], m.run.telemetry.interval_s, clock=lambda: m.run.telemetry.time_s[0] + next(rows) / 4
    )
    for _ in range(len(m.run.telemetry) + 3):
        recording.read()
    again = replace(m.run, telemetry=recording.telemetry(0.0))
    assert again.telemetry.notes == (
        f"{source.name} failed after {len(m.run.telemetry)} readings: the record has no more rows",
    )
    assert "a sensor was lost" in " ".join(health(again, m.environment).reasons)
