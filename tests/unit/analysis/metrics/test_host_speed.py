from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200, WELL, measurement, planted_telemetry

from pytest_slmserve.analysis.metrics.gpu_figures import device_figures, host_speeds, probe_waiting
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU

FORMATS = sorted((Path(__file__).parents[3] / "data").glob("archive-format-3.jsonl"))
NAME = "host-speed probe (Python 3.12)"


def beside(cpu_s, host: str | None = "a", name: str = NAME, wall_s: float = 0.01) -> Measurement:
    """A measurement with a host-speed probe beside it. cpu_s: of its pieces, or a function of the time."""
    made = measurement(environment=replace(H200, host=host))
    columns = {**WELL, PROBE: wall_s, PROBE_CPU: cpu_s}
    telemetry = planted_telemetry(columns, until_s=made.run.window_s[1] + 0.1, interval_s=0.01)
    return replace(made, run=replace(made.run, telemetry=replace(telemetry, sources=("host", name))))


def speeds(*measurements: Measurement) -> list[float | None]:
    numbered = [replace(m, launch=f"{i}") for i, m in enumerate(measurements)]
    found = host_speeds(numbered)
    return [found.get(m.id) for m in numbered]


def test_a_window_is_as_fast_as_its_host_at_best_or_slower():
    assert speeds(beside(0.004), beside(0.005), beside(0.008)) == pytest.approx([1.0, 0.8, 0.5])


def test_hosts_are_compared_with_themselves_alone():
    assert speeds(beside(0.004, "a"), beside(0.005, "b"), beside(0.010, "b")) == pytest.approx([1.0, 1.0, 0.5])


def test_so_are_pythons():
    assert speeds(beside(0.004), beside(0.008, name="host-speed probe (Python 3.10)")) == pytest.approx([1.0, 1.0])


def test_one_lucky_piece_is_not_the_speed_of_a_host():
    seen = beside(lambda at: 0.001 if at == 0.3 else 0.004)
    assert PROBE_CPU in seen.run.telemetry.columns and min(seen.run.telemetry.columns[PROBE_CPU]) == 0.001
    assert speeds(seen)[0] == pytest.approx(1.0, rel=0.05)


def test_pieces_outside_the_window_do_not_count():
    opens = beside(0.004).run.window_s[0]
    seen = beside(lambda at: 0.001 if at < opens else 0.004)
    assert speeds(seen) == [pytest.approx(1.0)], "else it is four times as slow as these pieces"


def test_windows_without_a_probe_are_left_out():
    assert speeds(beside(0.004), measurement(), beside(0.008)) == [pytest.approx(1.0), None, pytest.approx(0.5)]
    assert host_speeds([]) == {}


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6))
def test_no_window_is_much_faster_than_the_fastest(times):
    found = speeds(*(beside(each) for each in times))
    assert max(found) >= 1.0 - 1e-9, "the fastest pieces are of some window"
    assert sorted(found, reverse=True) == [each for _, each in sorted(zip(times, found))]


def test_the_time_without_a_core():
    assert probe_waiting(0.008, 0.004) == 0.5
    assert probe_waiting(0.004, 0.004001) == 0.0, "two clocks, read one after the other"
    assert probe_waiting(None, 0.004) is probe_waiting(0.004, None) is probe_waiting(0.0, 0.0) is None


def test_the_figures_of_a_window_are_means_over_its_pieces():
    seen = device_figures(beside(lambda at: 0.004 if round(100 * at) % 2 else 0.006, wall_s=0.007).run)
    assert seen.probe_s == pytest.approx(0.007) and seen.probe_cpu_s == pytest.approx(0.005, rel=0.05)


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.name)
def test_records_without_a_probe_tell_no_speed(path):
    found = read(path).measurements
    assert found and host_speeds(found) == {}
    assert all(device_figures(m.run).probe_s is None for m in found)
