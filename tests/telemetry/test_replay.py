"""A record's telemetry, played back."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import BASELINES

from pytest_slmserve.analysis.device.gpu_figures import device_figures
from pytest_slmserve.analysis.device.sensor_health import health
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.records import Telemetry
from pytest_slmserve.schema.sensors import POWER, SM_ACTIVE
from pytest_slmserve.telemetry.base import Reading
from pytest_slmserve.telemetry.replay import ReplaySource, open_replay
from pytest_slmserve.telemetry.sampler import Recording

STORED = Telemetry(
    sources=("nvml-gpm", "host"),
    interval_s=0.25,
    time_s=(1.0, 1.25),
    span_s=(None, 0.25),
    columns={POWER: (300.0, 310.0), SM_ACTIVE: (None, 0.5)},
)


def test_each_reading_is_the_next_row():
    source = open_replay(STORED)
    assert source.read(0.0) == Reading(
        {POWER: 300.0, SM_ACTIVE: None}, None, (f"{SM_ACTIVE}: not known in the record",)
    )
    assert source.read(99.0) == Reading({POWER: 310.0, SM_ACTIVE: 0.5}, 0.25, ())


def test_after_the_last_row_it_fails():
    source = open_replay(STORED)
    source.read(0.0), source.read(0.0)
    for _ in range(2):
        with pytest.raises(SensorFailed, match="the record has no more rows"):
            source.read(0.0)


def test_two_replays_of_one_record_do_not_share_their_place():
    first, second = ReplaySource(STORED), ReplaySource(STORED)
    first.read(0.0)
    assert second.read(0.0).values[POWER] == 300.0


def test_it_names_the_sources_and_closes_twice():
    source = open_replay(STORED)
    assert source.name == "replay of nvml-gpm + host"
    source.close()
    source.close()


@pytest.mark.parametrize("telemetry", [None, Telemetry((), 0.25, (), (), {})])
def test_a_record_without_telemetry_is_no_source(telemetry):
    with pytest.raises(SensorFailed, match="no telemetry to replay"):
        open_replay(telemetry)


VALUES = st.none() | st.integers(0, 10**9).map(lambda thousandths: thousandths / 1000)  # as records keep them


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=8))
def test_a_replay_that_is_recorded_is_the_record(rows):
    span_s, power, active = zip(*rows)
    times = tuple(0.25 * row for row in range(len(rows)))
    stored = Telemetry(("planted",), 0.25, times, span_s, {POWER: power, SM_ACTIVE: active})
    clock = iter(times)
    recording = Recording([open_replay(stored)], 0.25, clock=lambda: next(clock))
    for _ in times:
        recording.read()
    found = recording.telemetry(began_s=0.0)
    assert (found.time_s, found.span_s, found.columns) == (stored.time_s, stored.span_s, stored.columns)
    assert found.sources == ("replay of planted",)


# What an H200 said, once more

BASELINE = BASELINES / "h200-vllm-0.26.0-sensors.jsonl.xz"


@pytest.fixture(scope="module")
def measured():
    if not BASELINE.exists():  # records stay in the checkout, tests may not
        pytest.skip("no checkout")
    return read(BASELINE).measurements


def test_a_committed_record_played_back_tells_the_same(measured):
    for m in measured[::10]:
        stored = m.run.telemetry
        times = iter(stored.time_s)
        recording = Recording([open_replay(stored)], stored.interval_s, clock=lambda times=times: next(times))
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
    source, rows = open_replay(m.run.telemetry), count(1)
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
