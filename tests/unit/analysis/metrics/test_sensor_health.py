"""Findings of the sensors: each fault with its kind and its numbers, the harmless side of each limit, and the worst of
several GPUs. Facts are compared, not sentences."""

from dataclasses import replace

import pytest
from facts import numbers
from hypothesis import given, strategies as st
from strategies import WELL, any_telemetry, measurement, planted_telemetry, watched_run

from pytest_slmserve.analysis.metrics.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics.validity import CheckResult, check, health
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.workload.arrivals import job

HOST = Environment(cores=16)
ON_GPU = {number: column for number, column in WELL.items() if number < of.OURS}
HOT, LOST = {of.CLOCK_REASONS: 64.0}, {"notes": ("nvml failed",)}
UNSAID = {of.FOREIGN_PROCESSES: None}  # whose the processes are
SHARED = {**UNSAID, of.GPU_PROCESSES: 3.0}


def found(columns=(), window_s=(2.0, 12.0), host=HOST, replica=None, **planted):
    return health(watched_run(planted_telemetry({**WELL, **dict(columns)}, **planted), window_s), host, replica)


def until(at_s, before, after):
    """A column that changes at a time."""
    return lambda at: before if at < at_s else after


def test_healthy_gpu_has_no_findings():
    assert [found(**how) for how in ({}, {"spans": False}, {"interval_s": 1.0})] == [CheckResult()] * 3
    blind = [health(watched_run(None)), found(until_s=1.0), found(dict.fromkeys(WELL))]
    assert [(one.state, len(one.reasons), one.noise) for one in blind] == [("unknown", 1, ())] * 3
    assert blind[0] == blind[1] != blind[2], "no reading, and readings without a value"
    # Its prompts come first, and take more power than decoding; a fall without that limit is still told.
    for columns, told in ((CLOCK_UNDER_THE_LIMIT, 0), ({of.SM_CLOCK: until(11.5, 1965e6, 1580e6)}, 1)):
        run = watched_run(planted_telemetry({**WELL, **columns}))
        assert [len(health(run, HOST, even=even).noise) for even in (False, True)] == [told, 1]
        assert len(check(replace(measurement(load=job(9)), run=run)).noise) == told
    stopped = found(until_s=9.0)
    assert ([*map(numbers, stopped.noise)], stopped.state) == ([[70, 95], [3, 2]], "ok")
    plain = {number: column for number, column in WELL.items() if number not in of.PROFILED}
    blind = health(watched_run(planted_telemetry(plain, until_s=9.0, spans=False)), HOST)
    assert blind == CheckResult(noise=stopped.noise[1:])
    assert [numbers(text)[0] for text in found(until_s=4.5, window_s=(2.0, 4.99)).noise] == [83.6]
    for interval_s, limit in ((0.25, 2.0), (0.5, 2.5)):
        telemetry = planted_telemetry({of.GPU_UTIL: 0.5}, interval_s=interval_s, spans=False)
        for gap in (limit, limit + interval_s):
            kept = [at for at in telemetry.time_s if not 5 < at < 5 + gap]
            columns = {of.GPU_UTIL: (0.5,) * len(kept)}
            cut = replace(telemetry, time_s=kept, span_s=[None] * len(kept), columns=columns)
            told = [numbers(text) for text in health(watched_run(cut)).noise]
            assert told == ([] if gap == limit else [[round(gap, 1), limit]])
        rows = planted_telemetry({of.OWN_CORES: 2.0, of.HOST_CORES: 2.1}, interval_s=4.0)
        assert health(watched_run(rows)) == CheckResult(), "counters of the host miss nothing in a gap"


CLOCK_UNDER_THE_LIMIT = {of.SM_CLOCK: until(7.1, 1965e6, 1755e6), of.CLOCK_REASONS: 4.0}


@pytest.mark.parametrize(("columns", "kind", "word", "facts"), [  # facts: what was seen and the limit
    (dict.fromkeys(of.PROFILED, until(11, 0.5, None)), "noise", "", {87.5, 95}),
    ({of.CLOCK_REASONS: until(11, 0.0, 8.0)}, "invalid", "hardware slowdown", {5, 40, 0}),
    ({of.CLOCK_REASONS: until(12, 4096.0, 32.0)}, "invalid", "software thermal", {1, 40, 0}),
    ({of.CLOCK_REASONS: 65.0}, "invalid", "hardware thermal", {40, 0}),
    ({of.CLOCK_REASONS: 128.0}, "invalid", "power brake", {40, 0}),
    ({of.CAPPED_HW_THERMAL: until(9, 5.0, 5.2)}, "invalid", "hardware thermal", {2.1, 1}),
    ({of.CAPPED_SW_THERMAL: until(9, 5.0, 5.2)}, "invalid", "software thermal", {2.1, 1}),
    ({of.CAPPED_BRAKE: until(9, 5.0, 5.2)}, "invalid", "power brake", {2.1, 1}),
    ({of.CAPPED_BRAKE: lambda at: 0.0101 * at}, "invalid", "brake", {1}),
    (CLOCK_UNDER_THE_LIMIT, "noise", "clock", {1965, 1755, -10.7, 5}),
    ({of.SM_CLOCK: until(11.5, 1965e6, 1580e6)}, "noise", "clock", {1580, 1965, 19.6, 5}),
    ({of.SM_CLOCK: until(11.5, 2000e6, 1899e6)}, "noise", "clock", {1899, 2000, 5}),
    ({of.FOREIGN_PROCESSES: until(11, 0.0, 2.0)}, "invalid", "processes of others", {2, 0}),
    ({**UNSAID, of.GPU_PROCESSES: 3.0}, "degraded", "processes computed", {3, 1}),
    ({of.XID: until(11, 0.0, 79.0)}, "invalid", "Xid", {79, 0}),
    ({of.XID: until(11, 13.0, 79.0)}, "invalid", "Xid", {79, 13}),
    ({of.XID: until(2.1, 0.0, 31.0)}, "invalid", "Xid", {31, 0}),  # as the window begins
    ({of.ECC_DOUBLE_BIT: until(11, 1.0, 2.0)}, "invalid", "memory errors", {1, 2}),
    ({of.REMAPPED_ROWS: until(11, 0.0, 1.0)}, "invalid", "memory rows", {0, 1}),
    ({of.POWER_LIMIT: until(11, 700.0, 500.0)}, "invalid", "power limit", {500, 700}),
    ({of.ENERGY: lambda at: 400 * (at % 7)}, "invalid", "energy counter", {2700, 0}),
    ({of.ENERGY: 5e6}, "invalid", "energy counter", {9.8, 1}),
    ({of.POWER: 430.0}, "degraded", "energy counter", {7.5, 5}),
    ({of.POWER: 420.1}, "degraded", "energy counter", {5}),
    ({of.SM_ACTIVE: 0.0}, "invalid", "SM_ACTIVE", {0, 40, 100, 50}),
    ({of.DRAM_ACTIVE: 0.0}, "invalid", "DRAM_ACTIVE", {0, 40, 100, 50}),
    ({of.SM_ACTIVE: until(11, 0.5, 1.051)}, "invalid", "SM_ACTIVE", {1.05, 0}),
    ({of.GPU_UTIL: 97.0}, "invalid", "GPU_UTIL", {97, 0, 1.05}),
    ({of.TENSOR_ACTIVE: -0.1}, "invalid", "TENSOR_ACTIVE", {-0.1, 0, 1.05}),
    ({of.TENSOR_ACTIVE: until(10, 0.1, None)}, "degraded", "TENSOR_ACTIVE", {9, 40, 20}),
    ({of.STOLEN_CORES: 0.1}, "starving", "hypervisor", {0.10, 2, 5}),
    ({of.STOLEN_CORES: 0.0401}, "starving", "hypervisor", {2}),
    ({of.STOLEN_CORES: 0.1, of.OWN_CORES: None}, "starving", "hypervisor", {0.10, 2.5, 4, 2}),
    ({of.CPU_THROTTLED: 0.03}, "starving", "quota", {3, 1}),
    ({of.CPU_THROTTLED: 0.0101}, "starving", "quota", {1}),
    ({of.HOST_CORES: 15.5}, "starving", "others used", {13.5, 16, 10, 3.1}),
    ({of.HOST_CORES: 14.5}, "starving", "others used", {16, 10}),  # a tenth of 16 cores is idle at 14.4
    ({of.OWN_CORES: 13.85, of.HOST_CORES: 15.5}, "starving", "others used", {16, 10}),  # more than a tenth of all
])  # fmt: skip
def test_sensor_fault_shows_its_numbers(columns, kind, word, facts):
    seen = found(columns)
    told_as = "noise" if kind == "starving" else kind
    assert (seen.state, seen.starved) == ("ok" if told_as == "noise" else kind, kind == "starving")
    kinds = {"invalid": seen.problems, "degraded": seen.degradations, "noise": seen.noise}
    [(told, text)] = [(kind, text) for kind, texts in kinds.items() for text in texts]
    assert told == told_as and word in text and facts <= {*numbers(text)}


HARMLESS = (
    {of.CAPPED_BRAKE: until(9, 5.0, 5.05)}, {of.CAPPED_BRAKE: lambda at: 0.0099 * at},  # a moment, told by its counter
    {of.CLOCK_REASONS: 4.0, of.CAPPED_POWER: lambda at: at}, {of.CLOCK_REASONS: until(11, 0.0, 4.0)},  # the power limit
    {of.CLOCK_REASONS: 4.0, of.SM_CLOCK: lambda at: 1980e6 - 150e6 * (at % 1 == 0)},  # under which a clock dithers
    {of.CLOCK_REASONS: 2.0}, {of.SM_CLOCK: until(11.5, 2000e6, 1900e6)},  # clocks set by an application
    {of.SM_CLOCK: until(11, 1980e6, 345e6), of.CLOCK_REASONS: until(11, 0, 1)},  # while idle
    {of.CLOCK_REASONS: until(2.1, 8.0, 0.0), of.SM_CLOCK: until(2.1, 345e6, 1980e6)},  # before the window
    {of.XID: 13.0}, {of.XID: until(5, 13.0, 0.0)}, {of.ECC_DOUBLE_BIT: 3.0},  # of long ago, or cleared
    UNSAID, {of.ENERGY: None}, {of.ENERGY: lambda at: 400 * max(at, 2.6)}, {of.POWER: 419.9},
    dict.fromkeys((of.GPU_UTIL, *of.PROFILED), 0.0),  # an idle GPU, and one that is half idle
    {of.GPU_UTIL: 0.5, of.ENGINE_ACTIVE: 0.0, of.SM_ACTIVE: 0.0},
    {of.CPU_PRESSURE: until(11, 0.5, 1.4)}, {of.ENGINE_ACTIVE: 1.02},  # added up late
    {of.SM_ACTIVE: until(11, 0.5, 1.05)}, {of.SM_ACTIVE: lambda at: None if at == 5 else 0.5},
    {of.TENSOR_ACTIVE: until(10.1, 0.1, None)},  # missing in 8 of 40 readings
    {of.STOLEN_CORES: 0.0399}, {of.CPU_THROTTLED: 0.0099}, {of.HOST_CORES: 14.3},  # others on a host with room
    {of.OWN_CORES: 13.95, of.HOST_CORES: 15.5}, {of.OWN_CORES: 15.5, of.HOST_CORES: 16.0},  # a full host, all ours
)  # fmt: skip


@pytest.mark.parametrize(("columns", "how", "state", "facts"), [
    *((columns, {}, "ok", ()) for columns in HARMLESS),
    *(({of.POWER: watts}, {"window_s": (2.0, 11.75)}, state, facts)  # 0.6 s of 9.75 may be missing
      for watts, state, facts in ((424.0, "ok", ()), (430.0, "degraded", {7.5}), (376.0, "ok", ()))),
    *(({of.POWER: watts}, {"window_s": (2.0, 4.0)}, state, facts)
      for watts, state, facts in ((510.0, "ok", ()), (800.0, "degraded", {100}))),
    ({of.SM_ACTIVE: 0.0}, {"window_s": (2.0, 3.0)}, "ok", ()),  # few zeros are no dead counter
    ({of.SM_ACTIVE: 0.0}, {"window_s": (2.0, 3.25)}, "invalid", {5}),
    ({of.ENERGY: 5e6}, {"window_s": (2.0, 3.0)}, "ok", ()),  # it may stand still for 0.75 s
    ({of.ENERGY: 5e6}, {"window_s": (2.0, 3.25)}, "invalid", {1}),
    ({of.GPU_UTIL: 0.51, of.ENGINE_ACTIVE: 0.0, of.SM_ACTIVE: 0.0}, {}, "invalid", {51, 50}),
    ({of.HOST_CORES: 15.5}, {"host": Environment()}, "ok", ()),
    ({of.HOST_CORES: 15.5}, {"host": None}, "ok", ()),
    ({}, {"until_s": 4.75, "window_s": (2.0, 4.99)}, "ok", ()),  # the interval under way when a run ends is no gap
    ({}, {"notes": ("nvml failed after 12 readings: GPU is lost",)}, "degraded", {12}),
    *(({**UNSAID, of.GPU_PROCESSES: seen}, {"replica": Replica("one", 0, 2, "", sharing)}, state, facts)
      for sharing, bound in (("time-slicing", 2.0), ("mps", 3.0), ("mig", 2.0), ("gpus", 1.0))
      for seen, state, facts in ((bound, "ok", ()), (bound + 1, "degraded", {bound, bound + 1}))),
])  # fmt: skip
def test_harmless_readings_are_no_fault(columns, how, state, facts):
    seen = found(columns, **how)
    assert seen.state == state and (seen == CheckResult()) is (state == "ok")
    assert {*facts} <= {number for text in seen.reasons for number in numbers(text)}


def gpus(*columns, host=(), replica=None, even=True, idle=False, **planted):
    """GPUs that are well but for these columns, beside the host."""
    beside = planted_telemetry({of.OWN_CORES: 2.0, of.HOST_CORES: 3.0, **dict(host)}, **planted)
    each = tuple(planted_telemetry({**ON_GPU, **one}).columns for one in columns)
    return health(watched_run(replace(beside, gpus=each)), HOST, replica, even, idle)


@pytest.mark.parametrize(("columns", "how", "state", "told"), [
    (({}, {}), {}, "ok", []),
    (({of.SM_CLOCK: until(11.5, 1980e6, 1500e6)}, HOT), {}, "invalid", [1, 0]),
    (({}, {}), LOST, "degraded", [0]),  # said once
    (({}, HOT), LOST, "invalid", [0, 1]),
    *((({}, {}), {"host": host}, "ok", [0]) for host in ({of.CPU_THROTTLED: 0.5}, {of.HOST_CORES: 15.5})),  # said once
    (({}, SHARED), {}, "degraded", [1]), (({}, SHARED), {"replica": Replica("one", 0, 2, "", "mps")}, "ok", []),
    ((CLOCK_UNDER_THE_LIMIT, {}), {"even": True}, "ok", [0]),
    ((CLOCK_UNDER_THE_LIMIT, {}), {"even": False}, "ok", []),
    (({}, dict.fromkeys(ON_GPU)), {}, "unknown", [1]),
])  # fmt: skip
def test_worst_gpu_decides_health(columns, how, state, told):
    seen = gpus(*columns, **how)
    named = [text[:6] for text in (*seen.reasons, *seen.noise)]
    assert (seen.state, seen.starved, named) == (state, "host" in how, [f"GPU {i}:" for i in told])


def test_idle_engines_on_several_gpus():
    two = {**UNSAID, of.GPU_PROCESSES: 2.0}
    assert [gpus(two, two, idle=idle).state for idle in (True, False)] == ["ok", "degraded"]


@given(any_telemetry(), st.tuples(st.floats(0, 10), st.floats(0, 10)), st.none() | st.integers(0, 64))
def test_unhealthy_result_always_has_reasons(telemetry, window_s, cores):
    run = watched_run(telemetry, window_s)
    seen, figures = health(run, Environment(cores=cores)), device_figures(run)
    assert seen.state in ("ok", "degraded", "invalid", "unknown") and (seen.state == "ok") is (seen.reasons == ())
    known = [value for value in telemetry.columns.get(of.SM_ACTIVE, ()) if value is not None]
    assert figures.sm_active_max is None or figures.sm_active_max in known
    assert figures.coverage is None or 0 <= figures.coverage <= 1 + 1e-9
