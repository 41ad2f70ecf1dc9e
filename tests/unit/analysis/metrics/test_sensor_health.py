from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import WELL, any_telemetry, measurement, planted_telemetry, watched_run

from pytest_slmserve.analysis.metrics.validity import CheckResult, check, health
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.workload.arrivals import job

HOST = Environment(cores=16)


def of(columns=(), window_s=(2.0, 12.0), without=(), **planted):
    kept = {n: c for n, c in {**WELL, **dict(columns)}.items() if n not in without}
    return health(watched_run(planted_telemetry(kept, **planted), window_s), HOST)


def until(at_s, before, after):
    """A column that changes at a time."""
    return lambda at: before if at < at_s else after


def test_a_gpu_that_is_well():
    assert of() == CheckResult()
    assert of(spans=False) == CheckResult()
    assert of(interval_s=1.0) == CheckResult()


def test_nothing_sampled_is_not_ok():
    assert health(watched_run(None)) == CheckResult(unknown=("no telemetry was taken in the window",))
    assert of(until_s=1.0).state == "unknown", "only before the window"
    assert of(dict.fromkeys(WELL)).reasons == ("no sensor said anything in the window",)


FAULTS = {
    "profiled counters vanish": (dict.fromkeys(sensors.PROFILED, until(11, 0.5, None)), "noise", "cover 87.5 %"),
    "hardware slowdown": ({sensors.CLOCK_REASONS: until(11, 0.0, 8.0)}, "invalid", "hardware slowdown: in 5 of 40"),
    "SW thermal": ({sensors.CLOCK_REASONS: until(12, 4096.0, 32.0)}, "invalid", "software thermal slowdown: in 1 of"),
    "HW thermal": ({sensors.CLOCK_REASONS: 65.0}, "invalid", "hardware thermal slowdown: in 40 of 40"),
    "power brake": ({sensors.CLOCK_REASONS: 128.0}, "invalid", "hardware power brake"),
    "HW thermal counter": ({sensors.CAPPED_HW_THERMAL: until(9, 5.0, 5.2)}, "invalid", "2.1 % of the window"),
    "SW thermal counter": ({sensors.CAPPED_SW_THERMAL: until(9, 5.0, 5.2)}, "invalid", "software thermal slowdown: 2"),
    "brake counter": ({sensors.CAPPED_BRAKE: until(9, 5.0, 5.2)}, "invalid", "power brake: 2.1 % of the window"),
    "a counter asked seldom": (
        {sensors.CAPPED_BRAKE: lambda at: 0.02 * at if at % 1 == 0 else None},
        "invalid",
        "power brake: 2 % of the window",
    ),
    "clock under the power limit": (
        {sensors.SM_CLOCK: until(7.1, 1965e6, 1755e6), sensors.CLOCK_REASONS: 4.0},
        "noise",
        "under the power limit the mean SM clock moved from 1965 MHz in the first half of the window to 1755 MHz",
    ),
    "clock": ({sensors.SM_CLOCK: until(11.5, 1965e6, 1580e6)}, "noise", "fell to 1580 MHz from a median of 1965"),
    "foreign": ({sensors.FOREIGN_PROCESSES: until(11, 0.0, 2.0)}, "invalid", "2 processes of others"),
    "whose processes": ({sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}, "degraded", "3 processes"),
    "Xid": ({sensors.XID: until(11, 0.0, 79.0)}, "invalid", "Xid 79 (before: 0)"),
    "another Xid": ({sensors.XID: until(11, 13.0, 79.0)}, "invalid", "Xid 79 (before: 13)"),
    "Xid as the window begins": ({sensors.XID: until(2.1, 0.0, 31.0)}, "invalid", "Xid 31"),
    "ECC": ({sensors.ECC_DOUBLE_BIT: until(11, 1.0, 2.0)}, "invalid", "beyond repair grew from 1 to 2"),
    "rows": ({sensors.REMAPPED_ROWS: until(11, 0.0, 1.0)}, "invalid", "remapped memory rows grew from 0 to 1"),
    "power limit": ({sensors.POWER_LIMIT: until(11, 700.0, 500.0)}, "invalid", "between 500 W and 700 W"),
    "energy falls": (
        {sensors.ENERGY: lambda at: 400 * (at % 7)},
        "invalid",
        "the energy counter fell from 2700 J to 0",
    ),
    "energy stands": ({sensors.ENERGY: 5e6}, "invalid", "stood still for 9.8 s (limit 1.0 s)"),
    "energy apart": ({sensors.POWER_INSTANT: 430.0}, "degraded", "7.5 % apart from the energy counter (limit 5 %)"),
    "SM dead": ({sensors.SM_ACTIVE: 0.0}, "invalid", "PROF_SM_ACTIVE is 0 in all 40 readings"),
    "DRAM dead": ({sensors.DRAM_ACTIVE: 0.0}, "invalid", "PROF_DRAM_ACTIVE is 0 in all 40 readings"),
    "ratio above 1": ({sensors.SM_ACTIVE: until(11, 0.5, 1.29)}, "invalid", "was 1.29, which is no ratio"),
    "percent": ({sensors.GPU_UTIL: 97.0}, "invalid", "was 97, which is no ratio"),
    "below 0": ({sensors.TENSOR_ACTIVE: -0.1}, "invalid", "was -0.1, which is no ratio"),
    "one counter vanishes": ({sensors.TENSOR_ACTIVE: until(9, 0.1, None)}, "degraded", "missing in 13 of 40 readings"),
    "stolen": ({sensors.STOLEN_CORES: 0.1}, "noise", "took 0.10 cores where 2.00 were used (5 %, limit 2 %)"),
    "stolen from all": ({sensors.STOLEN_CORES: 0.1, sensors.OWN_CORES: None}, "noise", "where 2.50 were used"),
    "throttled": ({sensors.CPU_THROTTLED: 0.03}, "noise", "used up for 3 % of the time (limit 1 %)"),
    "busy host": ({sensors.HOST_CORES: 15.5}, "noise", "others used 13.5 of 16 cores"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_numbers(fault):
    columns, kind, words = FAULTS[fault]
    found = of(columns)
    assert found.starved is (fault in ("stolen", "stolen from all", "throttled", "busy host"))
    assert found.state == ("ok" if kind == "noise" else kind)
    [text], others = (found.noise, found.reasons) if kind == "noise" else (found.reasons, found.noise)
    assert words in text and others == ()
    assert "limit" in text or "Xid" in text


HARMLESS = {
    "a moment's brake, told by its counter": {sensors.CAPPED_BRAKE: until(9, 5.0, 5.05)},
    "the power limit": {sensors.CLOCK_REASONS: 4.0, sensors.CAPPED_POWER: lambda at: at},
    "the power limit for some of the time": {sensors.CLOCK_REASONS: until(11, 0.0, 4.0)},
    "a clock that dithers under the power limit": {
        sensors.CLOCK_REASONS: 4.0,
        sensors.SM_CLOCK: lambda at: 1980e6 - 150e6 * (at % 1 == 0),
    },
    "clocks set by an application": {sensors.CLOCK_REASONS: 2.0},
    "the clock falls a little": {sensors.SM_CLOCK: until(11, 1980e6, 1935e6)},
    "the clock falls while idle": {sensors.SM_CLOCK: until(11, 1980e6, 345e6), sensors.CLOCK_REASONS: until(11, 0, 1)},
    "an Xid of long ago": {sensors.XID: 13.0},
    "an Xid that was cleared": {sensors.XID: until(5, 13.0, 0.0)},
    "memory errors of long ago": {sensors.ECC_DOUBLE_BIT: 3.0},
    "process lists that cannot be told apart": {sensors.FOREIGN_PROCESSES: None},
    "no counter of energy": {sensors.ENERGY: None},
    "the two methods differ a little": {sensors.POWER_INSTANT: 410.0},
    "an idle GPU": dict.fromkeys((sensors.GPU_UTIL, *sensors.PROFILED), 0.0),
    "pressure that was added up late": {sensors.CPU_PRESSURE: until(11, 0.5, 1.4)},
    "rounding above 1": {sensors.ENGINE_ACTIVE: 1.02},
    "a reading lost": {sensors.SM_ACTIVE: lambda at: None if at == 5 else 0.5},
    "others on a host with room": {sensors.HOST_CORES: 10.0},
    "a full host that is all ours": {sensors.OWN_CORES: 15.5, sensors.HOST_CORES: 16.0},
    "before the window": {sensors.CLOCK_REASONS: until(2.1, 8.0, 0.0), sensors.SM_CLOCK: until(2.1, 345e6, 1980e6)},
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_no_fault(what):
    assert of(HARMLESS[what]) == CheckResult()


@pytest.mark.parametrize(("fault", "told"), [("clock under the power limit", 0), ("clock", 1)])
def test_the_halves_of_a_job_differ_and_its_clock_with_them(fault, told):
    """Its prompts come first, and take more power than decoding; a fall without that limit is still told."""
    run = watched_run(planted_telemetry({**WELL, **FAULTS[fault][0]}))
    assert [len(health(run, HOST, even=even).noise) for even in (False, True)] == [told, 1]
    assert len(check(replace(measurement(load=job(9)), run=run)).noise) == told


def test_readings_that_stop():
    stopped = of(until_s=9.0)
    assert (stopped.state, stopped.reasons) == ("ok", ())
    assert stopped.noise == (
        "profiled counters cover 70 % of the window (limit 95 %)",
        "no reading for 3.0 s of the window (limit 2.0 s)",
    )
    plain = of(until_s=9.0, without=sensors.PROFILED, spans=False)
    assert plain == CheckResult(noise=stopped.noise[1:])


def test_a_gap_in_the_middle_without_profiled_counters():
    telemetry = planted_telemetry({sensors.GPU_UTIL: 0.5}, spans=False)
    kept = [i for i, at in enumerate(telemetry.time_s) if not 5 < at < 8]
    columns = {sensors.GPU_UTIL: (0.5,) * len(kept)}
    cut = replace(telemetry, time_s=[telemetry.time_s[i] for i in kept], span_s=[None] * len(kept), columns=columns)
    assert health(watched_run(cut)) == CheckResult(noise=("no reading for 3.0 s of the window (limit 2.0 s)",))


def test_counters_of_the_host_miss_nothing_in_a_gap():
    rows = planted_telemetry({sensors.OWN_CORES: 2.0, sensors.HOST_CORES: 2.1}, interval_s=4.0)
    assert health(watched_run(rows)) == CheckResult()


def test_the_interval_under_way_when_a_run_ends_is_no_gap():
    assert of(until_s=4.75, window_s=(2.0, 4.99)) == CheckResult(), "8 % of the window, but less than an interval"
    (told,) = of(until_s=4.5, window_s=(2.0, 4.99)).noise
    assert told.startswith("profiled counters cover 83.6 % of the window")


def test_a_sensor_that_was_lost():
    found = of(notes=("nvml failed after 12 readings: GPU is lost",))
    assert found == CheckResult(degradations=("a sensor was lost: nvml failed after 12 readings: GPU is lost",))


def test_the_methods_of_energy_are_compared_on_long_windows_only():
    assert of({sensors.POWER_INSTANT: 430.0}, window_s=(2.0, 11.0)) == CheckResult()


def test_few_readings_of_zero_are_no_dead_counter():
    assert of({sensors.SM_ACTIVE: 0.0}, window_s=(2.0, 3.0)) == CheckResult()


def test_without_an_environment_no_host_is_full():
    busy = planted_telemetry({**WELL, sensors.HOST_CORES: 15.5})
    assert health(watched_run(busy)) == CheckResult()


@pytest.mark.parametrize(("sharing", "bound"), [("time-slicing", 2), ("mps", 3), ("mig", 2)])
def test_processes_of_other_replicas_are_not_anothers(sharing, bound):
    replica = Replica("one", 0, 2, "asked", sharing)
    for processes in (bound, bound + 1):
        columns = {**WELL, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: float(processes)}
        found = health(watched_run(planted_telemetry(columns)), HOST, replica)
        assert found.state == ("ok" if processes == bound else "degraded")
        assert processes == bound or f"(limit {bound})" in found.reasons[0]


def test_the_worst_comes_first():
    columns = {sensors.CPU_THROTTLED: 0.5, sensors.FOREIGN_PROCESSES: 1.0, sensors.POWER_INSTANT: 500.0}
    found = of(columns, notes=("nvml failed",))
    assert found.state == "invalid"
    assert ["of others" in reason for reason in found.reasons] == [True, False, False]
    assert found.noise == ("the CPU quota was used up for 50 % of the time (limit 1 %)",), "which is not against it"


@settings(max_examples=300, deadline=None)
@given(any_telemetry(), st.tuples(st.floats(0, 10), st.floats(0, 10)), st.none() | st.integers(0, 64))
def test_health_of_anything(telemetry, window_s, cores):
    found = health(watched_run(telemetry, window_s), Environment(cores=cores))
    assert found.state in ("ok", "degraded", "invalid", "unknown")
    assert (found.state == "ok") is (found.reasons == ())
