"""NVML as a source, through the real pynvml, on a GPU whose load and faults are planted."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pynvml
import pytest
from fake_nvml import (
    BAD_ARGUMENT,
    BUSY,
    GARBAGE,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    UUID,
    FakeNvml,
    State,
    installed,
)
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry import gpu as nvml
from pytest_slmserve.telemetry.gpu import COUNTERS, COUNTERS_S, FIELDS, FUNCTIONS, GPM, NvmlSource, open_nvml
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Reading

OURS, THEIRS = 4711, 815
EVERYTHING = {ask.number for ask in (*FIELDS, *FUNCTIONS)} | set(of.PROFILED)
EVERYTHING |= {of.XID, of.GPU_PROCESSES, of.FOREIGN_PROCESSES}
WITHOUT_GPM = EVERYTHING - set(of.PROFILED)


@pytest.fixture(autouse=True)
def counters_at_every_reading(request, monkeypatch):
    """But for the tests of how often they are asked."""
    if "seldom" not in request.node.name:
        monkeypatch.setattr(nvml, "COUNTERS_S", 0.0)


@contextmanager
def opened(gpu: FakeNvml | None = None, profile: bool = True) -> Iterator[tuple[FakeNvml, NvmlSource]]:
    """A source on the GPU, closed at the end, when nothing may be left behind."""
    with installed(gpu) as gpu:
        source = open_nvml(gpu.uuid, own_pids=lambda: {OURS}, profile=profile)
        try:
            yield gpu, source
        finally:
            source.close()
        assert (gpu.live_samples, gpu.live_event_sets, gpu.initialised, gpu.faults) == (0, 0, 0, [])


def at(gpu: FakeNvml, source: NvmlSource, now_s: float) -> Reading:
    gpu.now_s = now_s
    return source.read(now_s)


def last(gpu: FakeNvml, until_s: float = 2.0, step_s: float = 0.25) -> Reading:
    """The last of readings at even times on a fresh source."""
    with opened(gpu) as (_, source):
        readings = [at(gpu, source, step * step_s) for step in range(round(until_s / step_s) + 1)]
    return readings[-1]


def reasons(reading: Reading, number: int) -> list[str]:
    return [why for why in reading.missing if why.startswith(f"{number}: ")]


# What is planted is read


def test_every_number_is_there_in_its_unit():
    state = State(
        busy=0.9, sm=0.6, occupancy=0.2, tensor=0.15, dram=0.5, power_w=512.5, power_limit_w=650.0, sm_clock_mhz=1755,
        memory_clock_mhz=3201, temperature_c=61, memory_used_bytes=70 << 30, reasons=0x5, ecc_double_bit=3,
        remapped_rows=2, processes=(OURS, THEIRS),
    )  # fmt: skip
    reading = last(FakeNvml(state))
    assert reading.missing == ()
    assert reading.span_s == pytest.approx(0.25)
    assert reading.values == pytest.approx(
        {
            of.GPU_UTIL: 0.9,
            of.ENGINE_ACTIVE: 0.9,
            of.SM_ACTIVE: 0.6,
            of.SM_OCCUPANCY: 0.2,
            of.TENSOR_ACTIVE: 0.15,
            of.DRAM_ACTIVE: 0.5,
            of.POWER: 512.5,
            of.POWER_INSTANT: 512.5,
            of.ENERGY: 1025.0,
            of.POWER_LIMIT: 650.0,
            of.SM_CLOCK: 1755e6,
            of.MEMORY_CLOCK: 3201e6,
            of.TEMPERATURE: 61.0,
            of.MEMORY_USED: float(70 << 30),
            of.CLOCK_REASONS: 5.0,
            of.XID: 0.0,
            of.ECC_DOUBLE_BIT: 3.0,
            of.REMAPPED_ROWS: 2.0,
            of.CAPPED_POWER: 2.0,
            of.CAPPED_SW_THERMAL: 0.0,
            of.CAPPED_HW_THERMAL: 0.0,
            of.CAPPED_BRAKE: 0.0,
            of.GPU_PROCESSES: 2.0,
            of.FOREIGN_PROCESSES: 1.0,
        }
    )
    assert reading.values.keys() == EVERYTHING


ratio = st.floats(0, 1)


@given(
    busy=ratio, sm=ratio, occupancy=ratio, tensor=ratio, dram=st.floats(0, 1.4), power_w=st.floats(60, 700),
    changed_s=st.floats(0.5, 1.5),
)  # fmt: skip
def test_ratios_are_means_over_the_span_that_is_told(busy, sm, occupancy, tensor, dram, power_w, changed_s):
    gpu = FakeNvml(State(busy, sm, occupancy, tensor, dram, power_w))
    gpu.change(changed_s, sm=1 - sm, dram=0.25)
    reading = last(gpu, 1.5, 0.5)
    share = (changed_s - 1.0) / 0.5 if changed_s > 1 else 0.0
    expected = {
        of.ENGINE_ACTIVE: busy,
        of.SM_ACTIVE: share * sm + (1 - share) * (1 - sm),
        of.SM_OCCUPANCY: occupancy,
        of.TENSOR_ACTIVE: tensor,
        of.DRAM_ACTIVE: share * dram + (1 - share) * 0.25,
    }
    assert reading.span_s == 0.5
    assert {number: reading.values[number] for number in of.PROFILED} == pytest.approx(expected, abs=1e-9)
    assert reading.values[of.POWER_INSTANT] == pytest.approx(power_w, abs=1e-3)


def test_a_reading_is_few_calls_and_all_ratios_come_from_one_over_one_pair():
    with opened(FakeNvml(State(processes=(OURS,)))) as (gpu, source):
        assert (source.name, source.unsupported) == ("nvml-gpm", {})
        for now_s in (0.0, 0.25, 0.5):
            gpu.calls.clear()
            at(gpu, source, now_s)
        assert sum(gpu.calls.values()) <= 16
        assert (gpu.calls["nvmlGpmMetricsGet"], gpu.calls["nvmlGpmSampleGet"]) == (1, 1)
        assert gpu.calls["nvmlDeviceGetFieldValues"] == 1


# Spans


@given(st.lists(st.floats(0, 0.35), min_size=1, max_size=60))
def test_no_span_is_short_and_the_newest_old_enough_sample_is_the_baseline(gaps):
    times: list[float] = []
    with opened() as (gpu, source):
        for gap in gaps:
            now_s = (times[-1] if times else 0.0) + gap
            reading = at(gpu, source, now_s)
            old_enough = [now_s - then for then in times if now_s - then >= MIN_SPAN_S]
            times.append(now_s)
            assert reading.span_s == (min(old_enough) if old_enough else None)
            known = reading.values[of.SM_ACTIVE]
            assert known == (pytest.approx(BUSY.sm) if old_enough else None)
            assert len(reasons(reading, of.SM_ACTIVE)) == (0 if old_enough else 1)


@given(st.lists(st.floats(0.001, 0.35), min_size=1, max_size=60))
def test_only_samples_that_can_still_be_a_baseline_are_held(gaps):
    now_s, longest = 0.0, 0
    with opened() as (gpu, source):
        for gap in gaps:
            now_s += gap
            at(gpu, source, now_s)
            longest = max(longest, gpu.live_samples)
    assert longest <= 2 + MIN_SPAN_S / min(gaps)


def test_the_fake_does_give_garbage_over_short_spans():
    with installed() as gpu:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        first, second = (pynvml.nvmlGpmSampleAlloc() for _ in range(2))
        pynvml.nvmlGpmSampleGet(device, first)
        gpu.now_s = 0.09
        pynvml.nvmlGpmSampleGet(device, second)
        request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1, sample1=first, sample2=second)
        request.metrics[0].metricId = 2
        assert pynvml.nvmlGpmMetricsGet(request).metrics[0].value == GARBAGE


# What GPM does not know


@pytest.mark.parametrize(
    ("later", "number", "reason"),
    [
        ({"gpm_nan": frozenset({2})}, of.SM_ACTIVE, "nan"),
        ({"gpm_errors": {2: NOT_SUPPORTED}}, of.SM_ACTIVE, "NVML says Not Supported"),
        *(({"gpm_errors": {metric: UNKNOWN}}, number, "NVML says Unknown Error") for metric, number in GPM.items()),
    ],
)
def test_an_error_of_one_metric_is_its_own(later, number, reason):
    gpu = FakeNvml()
    gpu.change(1.0, **later)
    reading = last(gpu)
    assert [n for n in of.PROFILED if reading.values[n] is None] == [number]
    assert reading.missing == (f"{number}: {reason}",)


def test_a_metric_that_the_gpu_does_not_have_is_left_out():
    with opened(FakeNvml(State(gpm_errors={2: NOT_SUPPORTED}))) as (gpu, source):
        assert source.unsupported == {of.SM_ACTIVE: "NVML says Not Supported"}
        at(gpu, source, 0.0)
        assert at(gpu, source, 1.0).values.keys() == EVERYTHING - {of.SM_ACTIVE}


@pytest.mark.parametrize("code", [UNKNOWN, BAD_ARGUMENT])
def test_what_fails_over_no_time_when_opened_may_work_later(code):
    gpu = FakeNvml(State(sm=0.5, refused={"nvmlGpmMetricsGet": code}))
    gpu.change(0.1, refused={})
    with opened(gpu) as (_, source):
        assert (source.name, source.unsupported) == ("nvml-gpm", {})
        at(gpu, source, 0.5)
        assert at(gpu, source, 1.0).values[of.SM_ACTIVE] == pytest.approx(0.5)


@pytest.mark.parametrize("function", ["nvmlGpmMetricsGet", "nvmlGpmSampleGet", "nvmlGpmSampleAlloc"])
def test_a_call_of_gpm_that_fails_costs_the_ratios_of_that_reading(function):
    gpu = FakeNvml()
    gpu.change(1.0, refused={function: UNKNOWN})
    gpu.change(1.5, refused={})
    with opened(gpu) as (_, source):
        at(gpu, source, 0.5)
        during, after = at(gpu, source, 1.0), at(gpu, source, 1.5)
    assert during.span_s is None
    assert [during.values[number] for number in of.PROFILED] == [None] * 5
    assert during.values[of.POWER] == 500.0
    assert len(during.missing) == 5
    assert after.span_s == (0.5 if function == "nvmlGpmMetricsGet" else 1.0)
    assert after.values[of.SM_ACTIVE] == pytest.approx(BUSY.sm)


# Without GPM


@pytest.mark.parametrize(
    "gpu",
    [
        FakeNvml(gpm=False),
        FakeNvml(missing=frozenset({"nvmlGpmQueryDeviceSupport"})),
        FakeNvml(State(refused={"nvmlGpmSampleGet": NO_PERMISSION})),
        FakeNvml(missing=frozenset({"nvmlGpmMetricsGet"})),
        FakeNvml(State(gpm_errors=dict.fromkeys(GPM, NOT_SUPPORTED))),
    ],
    ids=["an older GPU", "an older driver", "not permitted", "half a driver", "no metric"],
)
def test_without_gpm_there_are_no_ratios_and_a_reason_why(gpu):
    with opened(gpu) as (_, source):
        assert source.name == "nvml"
        assert source.unsupported.keys() == set(of.PROFILED)
        at(gpu, source, 0.0)
        reading = at(gpu, source, 1.0)
    assert reading.values.keys() == WITHOUT_GPM
    assert (reading.span_s, reading.missing) == (None, ())


def test_ratios_that_nobody_asked_for_are_not_taken():
    with opened(profile=False) as (gpu, source):
        assert (source.name, source.unsupported) == ("nvml", {})
        assert at(gpu, source, 1.0).values.keys() == WITHOUT_GPM
        assert not [name for name in gpu.calls if "Gpm" in name]


# Functions that are missing, refuse or fail

ALONE = {
    "nvmlDeviceGetUtilizationRates": {of.GPU_UTIL},
    "nvmlDeviceGetEnforcedPowerLimit": {of.POWER_LIMIT},
    "nvmlDeviceGetClockInfo": {of.SM_CLOCK, of.MEMORY_CLOCK},
    "nvmlDeviceGetComputeRunningProcesses_v3": {of.GPU_PROCESSES, of.FOREIGN_PROCESSES},
    "nvmlDeviceGetSupportedEventTypes": {of.XID},
    "nvmlEventSetCreate": {of.XID},
    "nvmlDeviceRegisterEvents": {of.XID},
}


@pytest.mark.parametrize(("function", "numbers"), ALONE.items())
@pytest.mark.parametrize("how", ["missing", NOT_SUPPORTED, NO_PERMISSION])
def test_what_is_not_there_when_opened_is_never_in_a_reading(function, numbers, how):
    gpu = FakeNvml(missing=frozenset({function})) if how == "missing" else FakeNvml(State(refused={function: how}))
    with opened(gpu) as (_, source):
        assert source.unsupported.keys() == numbers
        assert all(why.startswith("NVML says ") for why in source.unsupported.values())
        gpu.change(0.5, refused={})
        at(gpu, source, 0.5)
        reading = at(gpu, source, 1.0)
    assert reading.values.keys() == EVERYTHING - numbers
    assert reading.missing == ()


LATER = {function: numbers for function, numbers in ALONE.items() if "Event" not in function}
LATER |= {
    "nvmlEventSetWait_v2": {of.XID},
    "nvmlDeviceGetTemperature": {of.TEMPERATURE},
    "nvmlDeviceGetMemoryInfo_v2": {of.MEMORY_USED},
    "nvmlDeviceGetCurrentClocksEventReasons": {of.CLOCK_REASONS},
    "nvmlDeviceGetFieldValues": {field.number for field in FIELDS},
}


@pytest.mark.parametrize(("function", "numbers"), LATER.items())
@pytest.mark.parametrize("code", [UNKNOWN, NOT_SUPPORTED])
def test_what_fails_later_is_none_with_a_reason_and_comes_back(function, numbers, code):
    gpu = FakeNvml()
    gpu.change(1.0, refused={function: code})
    gpu.change(1.5, refused={})
    with opened(gpu) as (_, source):
        at(gpu, source, 0.0)
        before, during, after = (at(gpu, source, now_s) for now_s in (0.5, 1.0, 1.5))
    assert {number for number, value in during.values.items() if value is None} == numbers
    assert sorted(why.partition(":")[0] for why in during.missing) == sorted(map(str, numbers))
    assert before.missing == after.missing == ()
    assert before.values.keys() == during.values.keys() == after.values.keys() == EVERYTHING


def test_a_failure_that_may_pass_does_not_cost_the_number_for_good():
    gpu = FakeNvml(State(refused={"nvmlDeviceGetUtilizationRates": UNKNOWN}))
    gpu.change(1.0, refused={})
    with opened(gpu) as (_, source):
        assert at(gpu, source, 0.5).values[of.GPU_UTIL] is None
        assert at(gpu, source, 1.0).values[of.GPU_UTIL] == 0.0


INSTEAD = {"nvmlDeviceGetCurrentClocksEventReasons": of.CLOCK_REASONS, "nvmlDeviceGetMemoryInfo_v2": of.MEMORY_USED}
if hasattr(pynvml, "nvmlDeviceGetTemperatureV"):  # nvidia-ml-py 12.570 and later
    INSTEAD["nvmlDeviceGetTemperature"] = of.TEMPERATURE


@pytest.mark.parametrize(("function", "number"), INSTEAD.items())
def test_another_function_for_the_same_number_is_taken(function, number):
    with opened(FakeNvml(State(temperature_c=55, reasons=4), missing=frozenset({function}))) as (gpu, source):
        assert source.unsupported == {}
        expected = {of.TEMPERATURE: 55.0, of.CLOCK_REASONS: 4.0, of.MEMORY_USED: float(1 << 29)}
        assert at(gpu, source, 1.0).values[number] == expected[number]


@pytest.mark.parametrize(("field", "number"), [(185, of.POWER), (83, of.ENERGY)])
def test_a_function_stands_in_for_a_field(field, number):
    with opened(FakeNvml(State(power_w=300.0, field_errors={field: NOT_SUPPORTED}))) as (gpu, source):
        assert source.unsupported == {}
        assert at(gpu, source, 2.0).values[number] == {of.POWER: 300.0, of.ENERGY: 600.0}[number]


@pytest.mark.parametrize(
    ("field", "number"), [(4, of.ECC_DOUBLE_BIT), (143, of.REMAPPED_ROWS), (186, of.POWER_INSTANT)]
)
def test_a_field_that_is_not_there_is_left_out_and_one_that_fails_is_none(field, number):
    with opened(FakeNvml(State(field_errors={field: NOT_SUPPORTED}))) as (gpu, source):
        assert source.unsupported == {number: "NVML says Not Supported"}
        assert number not in at(gpu, source, 1.0).values
    gpu = FakeNvml()
    gpu.change(1.0, field_errors={field: UNKNOWN})
    reading = last(gpu)
    assert reading.values[number] is None
    assert reading.missing == (f"{number}: NVML says Unknown Error",)


def test_a_driver_without_any_field_still_has_the_functions():
    with opened(FakeNvml(missing=frozenset({"nvmlDeviceGetFieldValues"}))) as (gpu, source):
        kept = at(gpu, source, 1.0).values.keys()
        assert kept >= {of.POWER, of.ENERGY, of.SM_CLOCK}
        assert source.unsupported.keys() == EVERYTHING - kept
        assert of.CAPPED_POWER in source.unsupported


def test_a_binding_without_a_function_is_like_a_driver_without(monkeypatch):
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(pynvml, "nvmlGpmQueryDeviceSupport")
    with opened(FakeNvml(State(reasons=8))) as (gpu, source):
        assert source.name == "nvml"
        assert at(gpu, source, 1.0).values[of.CLOCK_REASONS] == 8.0


@pytest.mark.parametrize("early_s", [0.0, 0.01])
def test_counters_are_asked_seldom_and_are_not_missing_between(early_s):
    with opened(FakeNvml(State(power_w=100.0))) as (gpu, source):
        for step in range(9):
            late_s = -early_s if step % 4 == 0 and step else 0.0  # a hair early is the reading that was meant
            reading = at(gpu, source, step * COUNTERS_S / 4 + late_s)
            assert (reading.values.keys() >= COUNTERS) == (step % 4 == 0), step
            assert not any(str(number) in why for number in COUNTERS for why in reading.missing)
            assert reading.values.keys() >= EVERYTHING - COUNTERS


def test_seldom_asked_counters_are_in_every_reading_of_a_long_interval_and_not_asked_by_function_between():
    with opened() as (gpu, source):
        assert all(of.ENERGY in at(gpu, source, 2.0 * step).values for step in range(3))
    with opened(FakeNvml(missing=frozenset({"nvmlDeviceGetFieldValues"}))) as (gpu, source):
        assert of.ENERGY in at(gpu, source, 1.0).values
        assert of.ENERGY not in at(gpu, source, 1.25).values


# What is planted over time


def gpu_of(state: State = BUSY, *changes: tuple[float, dict], events: tuple[tuple, ...] = (), **more) -> FakeNvml:
    gpu = FakeNvml(state, **more)
    for at_s, what in changes:
        gpu.change(at_s, **what)
    for event in events:
        gpu.event(*event)
    return gpu


def restarted() -> FakeNvml:
    gpu = FakeNvml(State(power_w=100.0))
    gpu.restart_energy(1.0)
    return gpu


SLOW = {"reasons": 0x4, "sm_clock_mhz": 1200, "power_limit_w": 500.0}
STUCK = State(busy=1.0, sm=0.9, power_w=600.0, gpm_stuck=frozenset({2}))
ABSENT_MPS = frozenset({"nvmlDeviceGetMPSComputeRunningProcesses_v3"})
# By name: the GPU, and by the time of a reading what some numbers are then.
HISTORIES = {
    "a ratio that cannot be": (gpu_of(State(sm=1.294)), {1.0: {}, 2.0: {of.SM_ACTIVE: 1.294}}),
    "a counter stuck at zero": (gpu_of(STUCK), {1.0: {}, 2.0: {of.SM_ACTIVE: 0.0, of.GPU_UTIL: 1.0}}),
    "throttling": (
        gpu_of(BUSY, (1.0, SLOW)),
        {
            0.5: {of.CLOCK_REASONS: 0.0, of.SM_CLOCK: 1980e6, of.POWER_LIMIT: 700.0},
            1.0: {of.CLOCK_REASONS: 4.0, of.SM_CLOCK: 1200e6, of.POWER_LIMIT: 500.0},
        },
    ),
    "average power that lags": (
        gpu_of(State(power_w=100.0), (2.0, {"power_w": 500.0})),
        {2.5: {of.POWER_INSTANT: 500.0, of.POWER: 300.0}},
    ),
    "energy of a driver that is loaded again": (restarted(), {0.9: {of.ENERGY: 90.0}, 1.5: {of.ENERGY: 50.0}}),
    "energy that wraps": (gpu_of(State(power_w=100.0), energy_wraps_j=150.0), {2.0: {of.ENERGY: 50.0}}),
    "the last Xid since opening": (
        gpu_of(events=((-0.5, 0x8, 31), (2.0, 0x8, 13), (2.1, 0x8, 79))),
        {1.0: {of.XID: 0}, 1.9: {of.XID: 0}, 2.0: {of.XID: 13}, 2.5: {of.XID: 79}, 9.0: {of.XID: 79}},
    ),
    "other critical events": (gpu_of(events=((0.5, 0x2, 5), (0.6, 0x10))), {1.0: {of.XID: 0.0}}),
    "a flood of events, which does not hold a reading": (
        gpu_of(events=tuple((0.5, 0x8, number) for number in range(150))),
        {1.0: {of.XID: 99.0}, 1.5: {of.XID: 149.0}},
    ),
    "ECC errors": (
        gpu_of(BUSY, (1.0, {"ecc_double_bit": 2, "remapped_rows": 1})),
        {0.9: {of.ECC_DOUBLE_BIT: 0.0}, 1.0: {of.ECC_DOUBLE_BIT: 2.0, of.REMAPPED_ROWS: 1.0}},
    ),
    "a foreign process that comes": (
        gpu_of(State(processes=(OURS,)), (1.0, {"processes": (OURS, THEIRS)})),
        {0.5: {of.FOREIGN_PROCESSES: 0.0}, 1.0: {of.FOREIGN_PROCESSES: 1.0}},
    ),
    "no list of MPS": (gpu_of(State(processes=(OURS,)), missing=ABSENT_MPS), {1.0: {of.GPU_PROCESSES: 1.0}}),
}


@pytest.mark.parametrize(("gpu", "readings"), HISTORIES.values(), ids=HISTORIES)
def test_what_is_planted_is_read_when_it_is_so(gpu, readings):
    with opened(gpu) as (_, source):
        assert source.unsupported == {}
        for now_s, expected in readings.items():
            values = at(gpu, source, now_s).values
            assert {number: values[number] for number in expected} == pytest.approx(expected)


@pytest.mark.parametrize("ids", [(269, 270, 271), (251, 252, 253)])
def test_capped_times_are_found_where_the_driver_has_them(ids):
    gpu = FakeNvml(slowdown_fields=ids, smoothing=True)
    gpu.change(1.0, reasons=0x4 | 0x40)
    gpu.change(1.5, reasons=0x20)
    gpu.change(1.75, reasons=0x80)
    values = last(gpu, 4.0).values
    assert {number: values[number] for number in values if 1420 <= number <= 1424} == pytest.approx(
        {of.CAPPED_POWER: 0.5, of.CAPPED_HW_THERMAL: 0.5, of.CAPPED_SW_THERMAL: 0.25, of.CAPPED_BRAKE: 2.25}
    )


def test_power_smoothing_is_not_taken_for_a_capped_time():
    absent = dict.fromkeys((251, 252, 253), NOT_SUPPORTED)
    gpu = FakeNvml(State(field_errors=absent), slowdown_fields=(251, 252, 253), smoothing=True)
    with opened(gpu) as (_, source):
        assert source.unsupported.keys() == {of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE}
        assert of.CAPPED_POWER in at(gpu, source, 1.0).values


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(50, 700)), min_size=1, max_size=8))
def test_energy_is_the_integral_of_power_to_the_last_step(phases):
    gpu, now_s, spent_j, last_j = FakeNvml(State(power_w=100.0)), 0.0, 0.0, 0.0
    power_w = 100.0
    for length_s, then_w in phases:
        spent_j, now_s, power_w = spent_j + power_w * length_s, now_s + length_s, then_w
        gpu.change(now_s, power_w=power_w)
    with opened(gpu) as (_, source):
        for step in range(1, 11):
            energy_j = at(gpu, source, now_s * step / 10).values[of.ENERGY]
            assert energy_j >= last_j
            last_j = energy_j
    assert spent_j - 0.1 * 700 - 1e-3 <= last_j <= spent_j + 1e-3


# Errors of the GPU


def test_a_gpu_without_xid_events_has_no_such_number():
    with opened(FakeNvml(event_types=0x2)) as (gpu, source):
        assert source.unsupported == {of.XID: "NVML says Not Supported"}
        assert of.XID not in at(gpu, source, 1.0).values


@pytest.mark.parametrize("profile", [True, False])
def test_a_lost_gpu_ends_it_and_closing_still_works(profile):
    gpu = FakeNvml()
    gpu.change(1.0, lost=True)
    with opened(gpu, profile) as (_, source):
        assert at(gpu, source, 0.5).values[of.POWER] == 500.0
        for now_s in (1.0, 1.25):
            with pytest.raises(SensorFailed, match="does not answer any more: GPU is lost"):
                at(gpu, source, now_s)


# Processes


@pytest.mark.parametrize(
    ("compute", "mps", "count", "foreign"),
    [
        ((), (), 0.0, 0.0),
        ((OURS,), (), 1.0, 0.0),
        ((OURS, THEIRS), (), 2.0, 1.0),
        ((OURS,), (OURS,), 1.0, 0.0),
        ((OURS, THEIRS), (THEIRS, 99), 3.0, 2.0),
        ((), (OURS,), 1.0, 0.0),
    ],
)
def test_each_process_counts_once(compute, mps, count, foreign):
    values = last(FakeNvml(State(processes=compute, mps_processes=mps))).values
    assert (values[of.GPU_PROCESSES], values[of.FOREIGN_PROCESSES]) == (count, foreign)


def test_pids_of_another_namespace_are_not_called_foreign():
    reading = last(FakeNvml(State(processes=(THEIRS, 99))))
    assert (reading.values[of.GPU_PROCESSES], reading.values[of.FOREIGN_PROCESSES]) == (2.0, None)
    assert "namespace" in reasons(reading, of.FOREIGN_PROCESSES)[0]


def test_own_pids_are_not_asked_for_while_the_gpu_has_none():
    with installed() as gpu:
        source = open_nvml(gpu.uuid, own_pids=lambda: pytest.fail("asked"))
        assert source.read(0.0).values[of.FOREIGN_PROCESSES] == 0.0
        source.close()


# MIG


def test_an_instance_has_its_own_counters_and_not_its_parents_numbers():
    with opened(FakeNvml(mig=True)) as (gpu, source):
        assert source.name == "nvml-gpm"
        assert of.GPU_UTIL in source.unsupported
        at(gpu, source, 0.0)
        assert at(gpu, source, 1.0).values[of.SM_ACTIVE] == pytest.approx(BUSY.sm)
        assert gpu.calls["nvmlGpmMigSampleGet"] > 0
        assert gpu.calls["nvmlGpmSampleGet"] == 0


@pytest.mark.parametrize("function", ["nvmlGpmMigSampleGet", "nvmlDeviceGetGpuInstanceId"])
def test_an_instance_whose_counters_cannot_be_had_has_no_ratios(function):
    with opened(FakeNvml(mig=True, missing=frozenset({function}))) as (gpu, source):
        assert source.name == "nvml"
        assert set(of.PROFILED) <= source.unsupported.keys()
        assert not set(of.PROFILED) & at(gpu, source, 1.0).values.keys()


# Opening and closing


@pytest.mark.parametrize(
    ("gpu", "uuid", "words"),
    [
        (FakeNvml(mig_mode=True), UUID, "MIG divides GPU-.*\n  try: CUDA_VISIBLE_DEVICES=MIG-"),
        (FakeNvml(), "GPU-elsewhere", "NVML does not answer for GPU-elsewhere: Not Found\n  try: nvidia-smi -L"),
        (FakeNvml(State(lost=True)), UUID, "GPU is lost"),
        (FakeNvml(State(refused={"nvmlEventSetCreate": 15})), UUID, "GPU is lost"),
        (FakeNvml(State(refused={"nvmlGpmSampleGet": 15})), UUID, "GPU is lost"),
        (FakeNvml(State(refused={"nvmlGpmMetricsGet": 15})), UUID, "GPU is lost"),
    ],
)
def test_a_gpu_that_cannot_be_read_leaves_nothing_open(gpu, uuid, words):
    with installed(gpu):
        with pytest.raises(SensorFailed, match=words):
            open_nvml(uuid, own_pids=set)
        assert (gpu.initialised, gpu.live_event_sets, gpu.live_samples, gpu.faults) == (0, 0, 0, [])


def test_a_library_that_cannot_be_shut_down_does_not_hide_why_a_gpu_cannot_be_read(monkeypatch):
    with installed(FakeNvml(mig_mode=True)) as gpu:
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: pynvml._nvmlCheckReturn(UNKNOWN))
        with pytest.raises(SensorFailed, match="MIG divides"):
            open_nvml(gpu.uuid, own_pids=set)


def test_without_a_driver(monkeypatch):
    with installed() as gpu:
        monkeypatch.setattr(pynvml, "nvmlInit", lambda: pynvml._nvmlCheckReturn(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
        with pytest.raises(SensorFailed, match="Shared Library Not Found"):
            open_nvml(gpu.uuid, own_pids=set)


@pytest.mark.parametrize(
    ("module", "words"),
    [(ModuleType("pynvml"), "not the one of nvidia-ml-py"), (None, "no module pynvml.*\n  try: .*nvidia-ml-py")],
)
def test_without_the_module_of_nvidia_ml_py(monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(SensorFailed, match=words):
        open_nvml("GPU-1", own_pids=set)


def test_closing_twice_is_closing_once():
    with opened() as (gpu, source):
        at(gpu, source, 0.0)
        assert gpu.live_samples == 1
        source.close()
        assert (gpu.live_samples, gpu.initialised) == (0, 0)
    assert gpu.calls["nvmlShutdown"] == 1


def test_two_sources_live_side_by_side():
    with opened() as (gpu, first):
        second = open_nvml(gpu.uuid, own_pids=set)
        at(gpu, first, 0.0)
        at(gpu, second, 0.5)
        second.close()
        assert at(gpu, first, 1.0).span_s == 1.0


def test_the_fake_goes_when_its_block_ends():
    before = pynvml.nvmlLib
    with installed() as gpu:
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)) == "NVIDIA Pretence"
        assert math.isclose(gpu.integral(lambda state: state.power_w, 1.0, 3.0), 2 * BUSY.power_w)
        pynvml.nvmlShutdown()
    assert pynvml.nvmlLib is before
    assert pynvml._nvmlGetFunctionPointer_cache == {}
