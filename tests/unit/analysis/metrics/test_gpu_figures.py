from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import WELL, any_telemetry, planted_telemetry, watched_run

from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, decode_window, device_figures, watched
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Steps, Telemetry


def figures(columns=(), window_s=(2.0, 12.0), **planted):
    return device_figures(watched_run(planted_telemetry({**WELL, **dict(columns)}, **planted), window_s))


def test_no_telemetry_no_figures():
    assert device_figures(watched_run(None)) == DeviceFigures()
    assert set(asdict(DeviceFigures()).values()) == {None}
    assert device_figures(watched_run(planted_telemetry(until_s=1.0))) == DeviceFigures(), "all before the window"


def test_what_was_planted_is_found():
    found = figures()
    assert found.gpu_util == found.sm_clock_hz / 1980e6 == 1.0
    assert (found.sm_active, found.sm_active_max) == pytest.approx((0.8, 0.8))
    assert (found.tensor_active, found.dram_active) == pytest.approx((0.1, 0.6))
    assert (found.power_w, figures({sensors.ENERGY: None}).power_w) == pytest.approx((400, 400))
    assert found.energy_deviation == pytest.approx(0, abs=1e-9)
    assert found.memory_used_bytes == 60e9
    assert (found.own_cores, found.host_cores, found.stolen_cores) == pytest.approx((2, 2.5, 0))
    assert found.coverage == pytest.approx(1)


def test_a_number_that_no_source_has_is_none_not_zero():
    found = device_figures(watched_run(planted_telemetry({sensors.GPU_UTIL: 0.5})))
    assert found.gpu_util == 0.5
    assert {k for k, v in asdict(found).items() if v is not None} == {"gpu_util", "coverage"}


def test_values_outside_of_the_window_do_not_count():
    found = figures({sensors.DRAM_ACTIVE: lambda at: 0.6 if 2 < at <= 8 else 1.0}, window_s=(2.0, 8.0))
    assert found.dram_active == pytest.approx(0.6)


def test_none_is_left_out_of_a_mean():
    found = figures({sensors.SM_ACTIVE: lambda at: None if at < 7 else 0.3})
    assert found.sm_active == pytest.approx(0.3)


@pytest.mark.parametrize(("at_s", "belongs"), [(2.2, False), (2.3, True), (12.2, True), (12.3, False)])
def test_a_row_belongs_where_most_of_its_span_lies(at_s, belongs):
    one = Telemetry(("planted",), 0.5, (at_s,), (0.5,), {sensors.SM_ACTIVE: (0.5,)})
    assert (device_figures(watched_run(one)).sm_active is not None) is belongs
    moment = replace(one, span_s=(None,))
    assert (device_figures(watched_run(moment)).sm_active is not None) is (2 <= at_s <= 12)


def test_means_are_weighted_by_span():
    uneven = Telemetry(("planted",), 0.25, (3.0, 4.0), (0.25, 0.75), {sensors.SM_ACTIVE: (1.0, 0.2)})
    assert device_figures(watched_run(uneven)).sm_active == pytest.approx(0.4)


def test_largest_and_median():
    found = figures({sensors.SM_ACTIVE: lambda at: at / 20, sensors.SM_CLOCK: lambda at: 1e9 if at == 3 else 2e9})
    assert found.sm_active_max == pytest.approx(12 / 20)
    assert found.sm_clock_hz == 2e9


@given(st.floats(30, 700), st.floats(0, 1e9))
def test_counter_and_integral_agree_on_a_steady_load(watts, start):
    counted = {sensors.ENERGY: lambda at: start + watts * at, sensors.POWER_INSTANT: watts}
    integrated = figures({**counted, sensors.ENERGY: None})
    assert figures(counted).power_w == pytest.approx(integrated.power_w, rel=1e-6)


@pytest.mark.parametrize("phase_s", [0.0, 0.03, 0.05, 0.08])
def test_a_counter_that_moves_every_tenth_of_a_second_is_no_power_too_much_or_little(phase_s):
    """Between two single readings it would be 0.5 % off in this window of 10 s, and 2.5 % in one of 2 s."""
    found = figures({sensors.ENERGY: lambda at: 40.0 * math.floor(round((at - phase_s) / 0.1, 6))})
    assert found.power_w == pytest.approx(400, rel=1e-3)


def test_energy_counts_each_part_of_the_window_alike():
    found = figures({sensors.ENERGY: lambda at: 300.0 * at + 400.0 * min(max(at - 6, 0), 2)}, (2.0, 12.0))
    assert found.power_w == pytest.approx(300 + 400 * 2 / 10, rel=0.03), "a fit would have 3/2 of the burst"


def test_power_is_integrated_as_steps_not_as_ramps():
    rows = Telemetry(("planted",), 1.0, (3.0, 4.0, 8.0), (None,) * 3, {sensors.POWER_INSTANT: (0.0, 100.0, 500.0)})
    found = device_figures(watched_run(rows))
    assert found.power_w == pytest.approx((100 * 1 + 500 * 4) / 5), "there is no counter"


def test_averaged_power_stands_in_for_instant_power():
    both = {sensors.ENERGY: None, sensors.POWER_INSTANT: 350.0, sensors.POWER: 300.0}
    assert figures(both).power_w == pytest.approx(350)
    assert figures({**both, sensors.POWER_INSTANT: None}).power_w == pytest.approx(300)


def test_the_power_limit_is_one_or_none():
    assert figures().power_limit_w == 700
    assert figures({sensors.POWER_LIMIT: lambda at: 700.0 if at < 5 else 500.0}).power_limit_w is None


def test_an_unknown_power_reading_is_left_out():
    found = figures({sensors.POWER_INSTANT: lambda at: None if 4 < at < 6 else 400.0, sensors.ENERGY: None})
    assert found.power_w == pytest.approx(400)


def test_the_deviation_is_of_the_time_that_the_counter_tells_of():
    late = {sensors.ENERGY: lambda at: 400.0 * at if at > 7 else None}
    power = {sensors.POWER_INSTANT: lambda at: 440.0 if at > 7 else 100.0}
    assert figures({**late, **power}).energy_deviation == pytest.approx(0.1)
    assert figures({sensors.ENERGY: None, **power}).power_w < 300


@pytest.mark.parametrize("counter", [lambda at: 5000.0 - at, lambda at: 400.0 * (at % 7), 1e6])
def test_a_counter_that_falls_or_stands_still_is_no_figure(counter):
    found = figures({sensors.ENERGY: counter})
    assert (found.power_w, found.energy_deviation) == (None, None)


def test_coverage_counts_what_is_inside_once():
    columns = {sensors.SM_ACTIVE: (0.5,) * 3}
    apart = Telemetry(("planted",), 1.0, (3.0, 5.0, 12.5), (2.0, 1.0, 1.0), columns)
    assert device_figures(watched_run(apart)).coverage == pytest.approx((1 + 1 + 0.5) / 10)
    overlapping = Telemetry(("planted",), 1.0, (4.0, 4.5, 5.0), (1.0, 1.0, 1.0), columns)
    assert device_figures(watched_run(overlapping)).coverage == pytest.approx(2 / 10)


def test_coverage_is_of_the_profiled_counters_where_there_are_any():
    gone = {number: (lambda at: 0.5 if at <= 7 else None) for number in sensors.PROFILED}
    assert figures(gone).coverage == pytest.approx(0.5)
    assert figures(dict.fromkeys(sensors.PROFILED)).coverage == 0
    assert figures({sensors.GPU_UTIL: None}).coverage == pytest.approx(1)
    assert figures(spans=False).coverage is None


def test_a_change_is_told_by_the_value_before_the_window():
    watch = watched(watched_run(planted_telemetry({sensors.XID: lambda at: at if at in (1, 3) else None})))
    assert watch.with_before(sensors.XID) == [1, 3]
    assert watch.with_before(sensors.ENERGY) == []


@settings(max_examples=200, deadline=None)
@given(any_telemetry(), st.tuples(st.floats(0, 10), st.floats(0, 10)))
def test_figures_of_anything(telemetry, window_s):
    found = device_figures(watched_run(telemetry, window_s))
    assert found.coverage is None or 0 <= found.coverage <= 1 + 1e-9
    known = [v for v in telemetry.columns.get(sensors.SM_ACTIVE, ()) if v is not None]
    assert found.sm_active_max is None or found.sm_active_max in known


# The power limit


@pytest.mark.parametrize(
    ("columns", "share"),
    [
        ({sensors.CAPPED_POWER: lambda at: 0.3 * at}, 0.3),
        ({sensors.CAPPED_POWER: lambda at: 0.3 * at if at % 1 == 0 else None}, 0.3),
        ({sensors.CAPPED_POWER: lambda at: 1.01 * at}, 1.0),
        ({sensors.CAPPED_POWER: None, sensors.CLOCK_REASONS: lambda at: 4.0 if at > 7 else 0.0}, 0.5),
        ({sensors.CAPPED_POWER: None, sensors.CLOCK_REASONS: None}, None),
    ],
    ids=["counter", "counter asked seldom", "rounding", "readings", "neither"],
)
def test_how_much_the_power_limit_held_the_clock_down(columns, share):
    assert figures(columns).power_capped == (share if share is None else pytest.approx(share))


# Decoding alone


def decoding(prompt_steps, dram=0.6, step_s=0.1, window_s=(2.0, 12.0), **planted):
    """Readings of the decoding in a run of even steps, some of which processed prompts."""
    columns = {**WELL, sensors.DRAM_ACTIVE: dram}
    return decode_window(stepping(watched_run(planted_telemetry(columns, **planted), window_s), prompt_steps, step_s))


def stepping(run, prompt_steps, step_s=0.1):
    ends = [round(step_s * (i + 1), 6) for i in range(round(13 / step_s))]
    prompts = [512 if i in prompt_steps else 0 for i in range(len(ends))]
    n = len(ends)
    return replace(run, steps=Steps(ends, [8] * n, [0] * n, [8] * n, prompts, [None] * n, [0] * n))


def seconds(watch):
    return 0.25 * len(watch.values(sensors.DRAM_ACTIVE))


def test_readings_beside_prompts_do_not_tell_of_decoding():
    # steps 41 to 50 end at 4.2 to 5.1 s: with the step before and after, 4.0 to 5.2 s; readings end every 0.25 s
    found = decoding(range(41, 51), dram=lambda at: 0.1 if 4 < at <= 5.25 else 0.6)
    assert found.mean(sensors.DRAM_ACTIVE) == pytest.approx(0.6)
    assert seconds(found) == pytest.approx(10 - 1.25)
    assert found.mean(sensors.TENSOR_ACTIVE) == pytest.approx(0.1)


def test_the_edge_of_a_prompt_is_left_out():
    lower = decoding(range(41, 51), dram=lambda at: 0.1 if 4.25 < at <= 5.0 else 0.6)
    assert lower.rows == decoding(range(41, 51)).rows and set(lower.values(sensors.DRAM_ACTIVE)) == {0.6}
    assert seconds(decoding([0, 129])) == 10, "prompts of before and after the window"


def test_where_a_prompt_is_in_every_reading_decoding_is_not_known():
    assert decoding(range(0, 130, 3)).rows == ()
    assert decoding([], spans=False).rows == (), "without a span nobody knows what a reading tells of"
    assert decode_window(watched_run(None)) is None


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 129)))
def test_decoding_is_never_seen_beside_a_prompt(prompt_steps):
    """By brute force, from the definition."""
    spans = [(0.25 * i, 0.25 * (i + 1)) for i in range(48) if 2 < 0.25 * (i + 1) <= 12 and 0.25 * (i + 1) - 2 > 0.125]
    beside = [(0.1 * (i - 1) if i > 1 else float("-inf"), 0.1 * min(i + 2, 130)) for i in prompt_steps]
    pure = [s for s in spans if not any(began < s[1] - 1e-9 and s[0] + 1e-9 < ended for began, ended in beside)]
    assert seconds(decoding(prompt_steps)) == pytest.approx(0.25 * len(pure), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(any_telemetry())
def test_decoding_of_any_telemetry(telemetry):
    run = stepping(watched_run(telemetry), {3, 50})
    found, whole = decode_window(run), watched(run)
    assert (found is None) == (whole is None)
    assert found is None or set(found.rows) <= set(whole.rows)
