"""Several GPUs as one device: what adds up, what is a mean, and which of them lags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import WELL, planted_telemetry, watched_run

from pytest_slmserve.analysis.metrics.gpu_figures import (
    DeviceFigures,
    device_figures,
    joined_gpus,
    runs_of_each_gpu,
    watched,
)
from pytest_slmserve.analysis.metrics.validity import health
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Telemetry

HOST = {of.OWN_CORES: 2.0, of.HOST_CORES: 3.0}


def several(*gpus, host=HOST, notes=()):
    """GPUs that are well but for these columns, beside the host."""
    made = [planted_telemetry({n: c for n, c in {**WELL, **gpu}.items() if n < of.OURS or n > 9009}) for gpu in gpus]
    of_the_gpu = [{n: c for n, c in one.columns.items() if n < of.OURS} for one in made]
    beside = planted_telemetry(host).columns
    return Telemetry(("planted",), 0.25, made[0].time_s, made[0].span_s, beside, notes=notes, gpus=tuple(of_the_gpu))


def watts(power):
    return {of.POWER: power, of.POWER_INSTANT: power, of.ENERGY: lambda at: power * at}


def test_power_adds_up_ratios_are_means_and_the_slowest_clock_counts():
    first = {**watts(300.0), of.SM_ACTIVE: 0.4, of.SM_CLOCK: 1980e6, of.TEMPERATURE: 50.0, of.MEMORY_USED: 8e9}
    second = {**watts(200.0), of.SM_ACTIVE: 0.6, of.SM_CLOCK: 1755e6, of.TEMPERATURE: 61.0, of.MEMORY_USED: 9e9}
    run = watched_run(several(first, second))
    seen = device_figures(run)
    assert (seen.power_w, seen.sm_active, seen.sm_clock_hz) == pytest.approx((500.0, 0.5, 1755e6))
    assert max(watched(run).values(of.TEMPERATURE)) == 61.0
    assert seen.memory_used_bytes == pytest.approx(17e9) and seen.own_cores == 2.0
    assert seen.power_imbalance == pytest.approx(0.4), "100 W apart, 250 W in the mean"
    assert [device_figures(one).power_w for one in runs_of_each_gpu(run)] == pytest.approx([300.0, 200.0])


def test_reasons_of_a_clock_are_joined_bit_by_bit():
    telemetry = joined_gpus(several({of.CLOCK_REASONS: 4.0}, {of.CLOCK_REASONS: 1.0}))
    assert set(telemetry.columns[of.CLOCK_REASONS]) == {5.0}


def test_what_one_of_them_does_not_say_is_not_known_of_all():
    unsaid = {of.POWER: lambda at: None if at > 5 else 300.0}
    column = joined_gpus(several(unsaid, {of.POWER: 200.0})).columns[of.POWER]
    assert set(column) == {500.0, None} and column[-1] is None


def test_one_gpu_stays_what_it_is():
    one = planted_telemetry()
    assert joined_gpus(one) is one and runs_of_each_gpu(watched_run(one)) == ()
    assert device_figures(watched_run(one)).power_imbalance is None
    assert device_figures(watched_run(None)) == DeviceFigures()


def test_health_is_that_of_the_worst_and_names_it():
    assert health(watched_run(several({}, {}))).state == "ok"
    hot = health(watched_run(several({}, {of.CLOCK_REASONS: 64.0})))
    assert hot.state == "invalid" and hot.reasons[0].startswith("GPU 1: hardware thermal slowdown")
    lost = health(watched_run(several({}, {}, notes=("nvml failed",))))
    assert (lost.state, lost.reasons) == ("degraded", ("GPU 0: a sensor was lost: nvml failed",)), "said once"
    slow = {of.SM_CLOCK: lambda at: 1980e6 if at < 11.5 else 1500e6}
    both = health(watched_run(several(slow, {of.CLOCK_REASONS: 64.0})))
    assert both.state == "invalid" and len(both.reasons) == 1
    assert [text.partition(" fell")[0] for text in both.noise] == ["GPU 0: the SM clock"]
    held_up = health(watched_run(several({}, {}, host={**HOST, of.CPU_THROTTLED: 0.5})))
    assert held_up.state == "ok" and len(held_up.noise) == 1, "the host's is said once"


@given(st.lists(st.floats(1, 1000), min_size=2, max_size=8))
def test_imbalance_is_none_of_equals_and_grows_with_the_distance(values):
    assert 0 <= imbalance(*values) <= len(values)
    assert imbalance(*values[:1] * 3) == pytest.approx(0)
    assert imbalance(*values, None) is imbalance(values[0]) is None


def imbalance(*powers_w):
    columns = (
        watts(power) if power else {of.POWER: None, of.POWER_INSTANT: None, of.ENERGY: None} for power in powers_w
    )
    return device_figures(watched_run(several(*columns))).power_imbalance
