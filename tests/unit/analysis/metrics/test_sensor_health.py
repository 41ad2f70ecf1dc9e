"""Findings of the sensors: each fault with its kind and its numbers, the harmless side of each limit, and the worst of
several GPUs. Facts are compared, not sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts import numbers
from hypothesis import given
from hypothesis import strategies as st
from strategies import WELL, any_telemetry, measurement, planted_telemetry, watched_run

from pytest_slmserve.analysis.metrics.validity import CheckResult, check, health
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.workload.arrivals import job

HOST = Environment(cores=16)


def of(columns=(), window_s=(2.0, 12.0), without=(), host=HOST, replica=None, **planted):
    kept = {n: c for n, c in {**WELL, **dict(columns)}.items() if n not in without}
    return health(watched_run(planted_telemetry(kept, **planted), window_s), host, replica)


def until(at_s, before, after):
    """A column that changes at a time."""
    return lambda at: before if at < at_s else after


@pytest.mark.parametrize("how", [{}, {"spans": False}, {"interval_s": 1.0}], ids=str)
def test_a_gpu_that_is_well(how):
    assert of(**how) == CheckResult()


def test_where_nothing_was_seen_nothing_is_known():
    blind = [health(watched_run(None)), of(until_s=1.0), of(dict.fromkeys(WELL))]
    assert [(found.state, len(found.reasons), found.noise) for found in blind] == [("unknown", 1, ())] * 3
    assert blind[0] == blind[1] != blind[2], "no reading, and readings without a value"


def rows_of(found):
    """Kind and text of each finding."""
    kinds = {"invalid": found.problems, "degraded": found.degradations, "noise": found.noise}
    return [(kind, text) for kind, texts in kinds.items() for text in texts]


# The readings, what they are told as, and the numbers of it: what was seen and the limit.
FAULTS = {
    "profiled counters vanish": (dict.fromkeys(sensors.PROFILED, until(11, 0.5, None)), "noise", {87.5, 95}),
    "hardware slowdown": ({sensors.CLOCK_REASONS: until(11, 0.0, 8.0)}, "invalid", {5, 40, 0}),
    "software thermal": ({sensors.CLOCK_REASONS: until(12, 4096.0, 32.0)}, "invalid", {1, 40, 0}),
    "hardware thermal": ({sensors.CLOCK_REASONS: 65.0}, "invalid", {40, 0}),
    "power brake": ({sensors.CLOCK_REASONS: 128.0}, "invalid", {40, 0}),
    "hardware thermal, by its counter": ({sensors.CAPPED_HW_THERMAL: until(9, 5.0, 5.2)}, "invalid", {2.1, 1}),
    "software thermal, by its counter": ({sensors.CAPPED_SW_THERMAL: until(9, 5.0, 5.2)}, "invalid", {2.1, 1}),
    "power brake, by its counter": ({sensors.CAPPED_BRAKE: until(9, 5.0, 5.2)}, "invalid", {2.1, 1}),
    "brake, by a counter asked seldom": (
        {sensors.CAPPED_BRAKE: lambda at: 0.02 * at if at % 1 == 0 else None}, "invalid", {2, 1}
    ),
    "clock under the power limit": (
        {sensors.SM_CLOCK: until(7.1, 1965e6, 1755e6), sensors.CLOCK_REASONS: 4.0}, "noise", {1965, 1755, -10.7, 5}
    ),
    "clock": ({sensors.SM_CLOCK: until(11.5, 1965e6, 1580e6)}, "noise", {1580, 1965, 19.6, 5}),
    "processes of others": ({sensors.FOREIGN_PROCESSES: until(11, 0.0, 2.0)}, "invalid", {2, 0}),
    "processes computed": ({sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}, "degraded", {3, 1}),
    "Xid": ({sensors.XID: until(11, 0.0, 79.0)}, "invalid", {79, 0}),
    "Xid, another": ({sensors.XID: until(11, 13.0, 79.0)}, "invalid", {79, 13}),
    "Xid, as the window begins": ({sensors.XID: until(2.1, 0.0, 31.0)}, "invalid", {31, 0}),
    "memory errors": ({sensors.ECC_DOUBLE_BIT: until(11, 1.0, 2.0)}, "invalid", {1, 2}),
    "memory rows": ({sensors.REMAPPED_ROWS: until(11, 0.0, 1.0)}, "invalid", {0, 1}),
    "power limit": ({sensors.POWER_LIMIT: until(11, 700.0, 500.0)}, "invalid", {500, 700}),
    "energy counter falls": ({sensors.ENERGY: lambda at: 400 * (at % 7)}, "invalid", {2700, 0}),
    "energy counter stands": ({sensors.ENERGY: 5e6}, "invalid", {9.8, 1}),
    "energy counter and power apart": ({sensors.POWER_INSTANT: 430.0}, "degraded", {7.5, 5}),
    "SM_ACTIVE dead": ({sensors.SM_ACTIVE: 0.0}, "invalid", {0, 40, 100, 50}),
    "DRAM_ACTIVE dead": ({sensors.DRAM_ACTIVE: 0.0}, "invalid", {0, 40, 100, 50}),
    "SM_ACTIVE above 1": ({sensors.SM_ACTIVE: until(11, 1.1, 1.29)}, "invalid", {1.29, 0, 1.05}),
    "GPU_UTIL in percent": ({sensors.GPU_UTIL: 97.0}, "invalid", {97, 0, 1.05}),
    "TENSOR_ACTIVE below 0": ({sensors.TENSOR_ACTIVE: -0.1}, "invalid", {-0.1, 0, 1.05}),
    "TENSOR_ACTIVE vanishes": ({sensors.TENSOR_ACTIVE: until(9, 0.1, None)}, "degraded", {13, 40, 20}),
    "hypervisor": ({sensors.STOLEN_CORES: 0.1}, "noise", {0.10, 2, 5}),
    "hypervisor, of all": ({sensors.STOLEN_CORES: 0.1, sensors.OWN_CORES: None}, "noise", {0.10, 2.5, 4, 2}),
    "quota": ({sensors.CPU_THROTTLED: 0.03}, "noise", {3, 1}),
    "others used": ({sensors.HOST_CORES: 15.5}, "noise", {13.5, 16, 10, 3.1}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_numbers(fault):
    columns, kind, facts = FAULTS[fault]
    found = of(columns)
    assert found.starved is (fault.split(",")[0] in ("hypervisor", "quota", "others used"))
    assert found.state == ("ok" if kind == "noise" else kind)
    [(told_as, text)] = rows_of(found)
    assert told_as == kind and facts <= {*numbers(text)}
    assert fault.split(",")[0].split()[0] in text or fault == "profiled counters vanish"


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
    "a counter of energy that moves late": {sensors.ENERGY: lambda at: 400 * max(at, 2.6)},
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


@pytest.mark.parametrize(
    ("number", "harmless", "harmful"),
    [
        (sensors.SM_CLOCK, until(11.5, 2000e6, 1900e6), until(11.5, 2000e6, 1899e6)),
        (sensors.CAPPED_BRAKE, lambda at: 0.0099 * at, lambda at: 0.0101 * at),
        (sensors.SM_ACTIVE, until(11, 0.5, 1.05), until(11, 0.5, 1.051)),
        (sensors.TENSOR_ACTIVE, until(10.1, 0.1, None), until(10, 0.1, None)),  # 8 and 9 of 40 readings
        (sensors.STOLEN_CORES, 0.0399, 0.0401),
        (sensors.CPU_THROTTLED, 0.0099, 0.0101),
        (sensors.HOST_CORES, 14.3, 14.5),  # a tenth of 16 cores is idle at 14.4
        (sensors.POWER_INSTANT, 419.9, 420.1),
    ],
)
def test_each_limit_has_a_harmless_side(number, harmless, harmful):
    assert of({number: harmless}) == CheckResult()
    assert len(rows_of(of({number: harmful}))) == 1


def test_others_disturb_where_they_use_more_than_a_tenth_of_all_cores():
    assert [len(of({sensors.OWN_CORES: own, sensors.HOST_CORES: 15.5}).noise) for own in (13.95, 13.85)] == [0, 1]
    assert (
        of({sensors.HOST_CORES: 15.5}, host=Environment()) == of({sensors.HOST_CORES: 15.5}, host=None) == CheckResult()
    )


@pytest.mark.parametrize(("fault", "told"), [("clock under the power limit", 0), ("clock", 1)])
def test_the_halves_of_a_job_differ_and_its_clock_with_them(fault, told):
    """Its prompts come first, and take more power than decoding; a fall without that limit is still told."""
    run = watched_run(planted_telemetry({**WELL, **FAULTS[fault][0]}))
    assert [len(health(run, HOST, even=even).noise) for even in (False, True)] == [told, 1]
    assert len(check(replace(measurement(load=job(9)), run=run)).noise) == told


def test_readings_that_stop_are_noise():
    stopped = of(until_s=9.0)
    assert [kind for kind, _ in rows_of(stopped)] == ["noise", "noise"]
    assert [numbers(text) for text in stopped.noise] == [[70, 95], [3, 2]], "coverage, and the longest gap in seconds"
    assert of(until_s=9.0, without=sensors.PROFILED, spans=False) == CheckResult(noise=stopped.noise[1:])


@pytest.mark.parametrize(("interval_s", "limit"), [(0.25, 2.0), (0.5, 2.5)])
def test_a_gap_is_told_from_five_intervals_or_two_seconds_on(interval_s, limit):
    for gap in (limit, limit + interval_s):
        telemetry = planted_telemetry({sensors.GPU_UTIL: 0.5}, interval_s=interval_s, spans=False)
        kept = [at for at in telemetry.time_s if not 5 < at < 5 + gap]
        columns = {sensors.GPU_UTIL: (0.5,) * len(kept)}
        cut = replace(telemetry, time_s=kept, span_s=[None] * len(kept), columns=columns)
        told = [numbers(text) for text in health(watched_run(cut)).noise]
        assert told == ([] if gap == limit else [[round(gap, 1), limit]])


def test_counters_of_the_host_miss_nothing_in_a_gap():
    rows = planted_telemetry({sensors.OWN_CORES: 2.0, sensors.HOST_CORES: 2.1}, interval_s=4.0)
    assert health(watched_run(rows)) == CheckResult()


def test_the_interval_under_way_when_a_run_ends_is_no_gap():
    assert of(until_s=4.75, window_s=(2.0, 4.99)) == CheckResult(), "8 % of the window, but less than an interval"
    assert [numbers(text)[0] for text in of(until_s=4.5, window_s=(2.0, 4.99)).noise] == [83.6]


def test_a_sensor_that_was_lost_degrades():
    found = of(notes=("nvml failed after 12 readings: GPU is lost",))
    [(kind, text)] = rows_of(found)
    assert kind == "degraded" and "nvml failed after 12 readings: GPU is lost" in text


def test_short_windows_compare_no_energy_and_few_zeros_are_no_dead_counter():
    assert of({sensors.POWER_INSTANT: 430.0}, window_s=(2.0, 11.75)) == CheckResult()
    assert of({sensors.SM_ACTIVE: 0.0}, window_s=(2.0, 3.0)) == CheckResult()
    assert of({sensors.SM_ACTIVE: 0.0}, window_s=(2.0, 3.25)).state == "invalid", "five of them"
    assert of({sensors.ENERGY: 5e6}, window_s=(2.0, 3.0)) == CheckResult(), "a counter may stand still for 0.75 s"
    assert of({sensors.ENERGY: 5e6}, window_s=(2.0, 3.25)).state == "invalid"


def test_zeros_of_a_gpu_that_is_half_idle_are_no_dead_counter():
    for busy, state in ((0.5, "ok"), (0.51, "invalid")):
        assert of({sensors.GPU_UTIL: busy, sensors.ENGINE_ACTIVE: 0.0, sensors.SM_ACTIVE: 0.0}).state == state


@pytest.mark.parametrize(("sharing", "bound"), [("time-slicing", 2), ("mps", 3), ("mig", 2), ("gpus", 1)])
def test_processes_of_other_replicas_are_not_anothers(sharing, bound):
    replica = Replica("one", 0, 2, "asked", sharing)
    found = [
        of({sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: float(n)}, replica=replica)
        for n in (bound, bound + 1)
    ]
    assert [one.state for one in found] == ["ok", "degraded"]
    assert numbers(found[1].reasons[0]) == [bound + 1, bound]


def test_the_worst_comes_first_and_noise_is_not_against_it():
    columns = {sensors.CPU_THROTTLED: 0.5, sensors.FOREIGN_PROCESSES: 1.0, sensors.POWER_INSTANT: 500.0}
    found = of(columns, notes=("nvml failed",))
    assert (found.state, found.degradations, len(found.noise)) == ("invalid", (), 1)
    assert ["of others" in reason for reason in found.reasons] == [True, False, False]


def gpus(*columns, host=(), replica=None, even=True, **planted):
    """GPUs that are well but for these columns, beside the host."""
    well = {n: c for n, c in WELL.items() if n < sensors.OURS}
    beside = planted_telemetry({sensors.OWN_CORES: 2.0, sensors.HOST_CORES: 3.0, **dict(host)}, **planted)
    each = tuple(planted_telemetry({**well, **one}).columns for one in columns)
    return health(watched_run(replace(beside, gpus=each)), HOST, replica, even)


def test_health_of_several_gpus_is_that_of_the_worst_and_names_it():
    assert gpus({}, {}) == CheckResult()
    hot, unseen = {sensors.CLOCK_REASONS: 64.0}, {number: None for number in WELL if number < sensors.OURS}
    slow = {sensors.SM_CLOCK: until(11.5, 1980e6, 1500e6)}
    found = gpus(slow, hot)
    assert [(kind, text[:6]) for kind, text in rows_of(found)] == [("invalid", "GPU 1:"), ("noise", "GPU 0:")]
    lost = gpus({}, {}, notes=("nvml failed",))
    assert [(kind, text[:6]) for kind, text in rows_of(lost)] == [("degraded", "GPU 0:")], "said once"
    both = gpus({}, hot, notes=("nvml failed",))
    assert both.state == "invalid" and [text[:6] for text in both.reasons] == ["GPU 0:", "GPU 1:"]
    held_up = gpus({}, {}, host={sensors.CPU_THROTTLED: 0.5})
    assert held_up.state == "ok" and held_up.starved and len(held_up.noise) == 1, "the host's is said once"
    shared = {sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
    assert [gpus({}, shared, replica=of_two).state for of_two in (None, Replica("one", 0, 2, "asked", "mps"))] == [
        "degraded",
        "ok",
    ]
    capped = FAULTS["clock under the power limit"][0]
    assert [len(gpus(capped, {}, even=even).noise) for even in (True, False)] == [1, 0]
    assert gpus({}, unseen).state == "unknown" and gpus({}, unseen).reasons[0].startswith("GPU 1:")


@given(any_telemetry(), st.tuples(st.floats(0, 10), st.floats(0, 10)), st.none() | st.integers(0, 64))
def test_health_of_anything_has_reasons_where_it_is_not_ok(telemetry, window_s, cores):
    found = health(watched_run(telemetry, window_s), Environment(cores=cores))
    assert found.state in ("ok", "degraded", "invalid", "unknown")
    assert (found.state == "ok") is (found.reasons == ())
