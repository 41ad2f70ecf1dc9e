"""NVML, through the real pynvml on a GPU whose load and faults are planted: each number means what was planted, ratios
over the span that is told; what a driver lacks is absent, what fails is unknown and comes back; nothing is left."""

import sys
from collections.abc import Collection
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import ModuleType

import pynvml
import pytest
from fake_nvml import BAD_ARGUMENT, BUSY, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, UUID, FakeNvml, State, installed
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry import gpu as sources
from pytest_slmserve.telemetry.gpu import COUNTERS, COUNTERS_S, FIELDS, FUNCTIONS, GPM, NvmlSource, open_nvml
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Reading

OURS, THEIRS = 4711, 815
PROFILED = set(of.PROFILED)
WITHOUT_GPM = {ask.number for ask in (*FIELDS, *FUNCTIONS)} | {of.XID, of.GPU_PROCESSES, of.FOREIGN_PROCESSES}
EVERYTHING = WITHOUT_GPM | PROFILED
busy = partial(replace, BUSY)


@pytest.fixture(autouse=True)
def counters_at_every_reading(request, monkeypatch):
    """But for the tests of how often they are asked."""
    if "seldom" not in request.node.name:
        monkeypatch.setattr(sources, "COUNTERS_S", 0.0)


@contextmanager
def opened(gpu: FakeNvml | None = None, profile=True, each_time: Collection[int] = ()):
    """A source on a copy of the GPU, closed at the end, when nothing may be left behind. Whose processes are ours is
    not asked while the GPU has none."""

    def own_pids():
        assert gpu.state().processes or gpu.state().mps_processes
        return {OURS}

    with installed(deepcopy(gpu)) as gpu:
        source = open_nvml(gpu.uuid, own_pids=own_pids, profile=profile, each_time=each_time)
        try:
            yield gpu, source
        finally:
            source.close()
        assert nothing_left(gpu)


def nothing_left(gpu: FakeNvml) -> bool:
    return (gpu.live_samples, gpu.live_event_sets, gpu.initialised, gpu.faults) == (0, 0, 0, [])


def at(gpu: FakeNvml, source: NvmlSource, now_s: float) -> Reading:
    gpu.now_s = now_s
    return source.read(now_s)


def readings(gpu: FakeNvml, *times: float) -> list[Reading]:
    with opened(gpu) as (gpu, source):
        return [at(gpu, source, now_s) for now_s in times]


def gpu_of(state: State = BUSY, *changes: tuple[float, dict], events: tuple[tuple, ...] = (), **more) -> FakeNvml:
    gpu = FakeNvml(state, **more)
    for at_s, what in changes:
        gpu.change(at_s, **what)
    gpu.happened += events
    return gpu


def numbers_in(missing) -> list[int]:
    return sorted(int(why.partition(":")[0]) for why in missing)


def test_every_nvml_number_is_read():
    state = State(
        busy=0.9, sm=0.6, occupancy=0.2, tensor=0.15, dram=0.5, power_w=512.5, power_limit_w=650.0, sm_clock_mhz=1755,
        memory_clock_mhz=3201, temperature_c=61, memory_used_bytes=70 << 30, reasons=0x5, ecc_double_bit=3,
        remapped_rows=2, processes=(OURS, THEIRS),
    )  # fmt: skip
    *_, reading = readings(FakeNvml(state), 0.0, 1.75, 2.0)
    assert (reading.missing, reading.span_s) == ((), pytest.approx(0.25))
    planted = {
        of.GPU_UTIL: 0.9, of.ENGINE_ACTIVE: 0.9, of.SM_ACTIVE: 0.6, of.SM_OCCUPANCY: 0.2, of.TENSOR_ACTIVE: 0.15,
        of.DRAM_ACTIVE: 0.5, of.POWER: 512.5, of.POWER_INSTANT: 512.5, of.ENERGY: 1025.0, of.POWER_LIMIT: 650.0,
        of.SM_CLOCK: 1755e6, of.MEMORY_CLOCK: 3201e6, of.TEMPERATURE: 61.0, of.MEMORY_USED: float(70 << 30),
        of.CLOCK_REASONS: 5.0, of.XID: 0.0, of.ECC_DOUBLE_BIT: 3.0, of.REMAPPED_ROWS: 2.0, of.CAPPED_POWER: 2.0,
        of.CAPPED_SW_THERMAL: 0.0, of.CAPPED_HW_THERMAL: 0.0, of.CAPPED_BRAKE: 0.0, of.GPU_PROCESSES: 2.0,
        of.FOREIGN_PROCESSES: 1.0,
    }  # fmt: skip
    assert reading.values == pytest.approx(planted) and planted.keys() == EVERYTHING
    with opened(FakeNvml(State(processes=(OURS,)))) as (gpu, source):
        assert (source.name, source.unsupported) == ("nvml-gpm", {})
        for now_s in (0.0, 0.25, 0.5):
            gpu.calls.clear()
            at(gpu, source, now_s)
        once = ("nvmlGpmMetricsGet", "nvmlGpmSampleGet", "nvmlDeviceGetFieldValues")
        assert gpu.calls.total() <= 16 and [gpu.calls[name] for name in once] == [1, 1, 1]
    with opened(profile=False) as (gpu, source):
        assert (source.name, source.unsupported) == ("nvml", {})
        assert at(gpu, source, 1.0).values.keys() == WITHOUT_GPM
        assert not [name for name in gpu.calls if "Gpm" in name]


ratio = st.floats(0, 1)


@given(ratio, ratio, ratio, ratio, st.floats(0, 1.4), st.floats(60, 700), st.floats(0.5, 1.5))
def test_ratios_average_over_their_span(busy, sm, occupancy, tensor, dram, power_w, changed_s):
    gpu = gpu_of(State(busy, sm, occupancy, tensor, dram, power_w), (changed_s, {"sm": 1 - sm, "dram": 0.25}))
    *_, reading = readings(gpu, 0.0, 0.5, 1.0, 1.5)
    share = max(0.0, (changed_s - 1.0) / 0.5)
    means = [busy, share * sm + (1 - share) * (1 - sm), occupancy, tensor, share * dram + (1 - share) * 0.25]
    assert reading.span_s == 0.5
    assert [reading.values[number] for number in of.PROFILED] == pytest.approx(means, abs=1e-9)
    assert reading.values[of.POWER_INSTANT] == pytest.approx(power_w, abs=1e-3)


@given(st.lists(st.floats(0, 0.35), min_size=1, max_size=60))
def test_newest_usable_sample_is_baseline(gaps):
    times: list[float] = []
    with opened() as (gpu, source):
        for gap in gaps:
            now_s = (times[-1] if times else 0.0) + gap
            reading = at(gpu, source, now_s)
            old_enough = [now_s - then for then in times if now_s - then >= MIN_SPAN_S]
            times.append(now_s)
            assert reading.span_s == (min(old_enough) if old_enough else None)
            assert reading.values[of.SM_ACTIVE] == (pytest.approx(BUSY.sm) if old_enough else None)
            assert numbers_in(reading.missing) == ([] if old_enough else sorted(PROFILED))
            young = sum(now_s - then < MIN_SPAN_S for then in times)
            assert gpu.live_samples == young + bool(old_enough)


@pytest.mark.parametrize(("function", "code", "number", "then"), [
    ("nvmlGpmMetricsGet", UNKNOWN, of.SM_ACTIVE, 0.5), ("nvmlGpmMetricsGet", BAD_ARGUMENT, of.SM_ACTIVE, 0.5),
    ("nvmlDeviceGetUtilizationRates", UNKNOWN, of.GPU_UTIL, 0.0),
])  # fmt: skip
def test_temporary_opening_failure_recovers(function, code, number, then):
    with opened(gpu_of(State(sm=0.5, refused={function: code}), (0.1, {"refused": {}}))) as (gpu, source):
        assert (source.name, source.unsupported) == ("nvml-gpm", {})
        first, _, last = (at(gpu, source, now_s).values[number] for now_s in (0.05, 0.5, 1.0))
        assert first is None and last == pytest.approx(then)


PROCESSES = {of.GPU_PROCESSES, of.FOREIGN_PROCESSES}
ALONE = {
    "nvmlDeviceGetUtilizationRates": {of.GPU_UTIL},
    "nvmlDeviceGetEnforcedPowerLimit": {of.POWER_LIMIT},
    "nvmlDeviceGetClockInfo": {of.SM_CLOCK, of.MEMORY_CLOCK},
    "nvmlDeviceGetComputeRunningProcesses_v3": PROCESSES,
    "nvmlDeviceGetSupportedEventTypes": {of.XID},
    "nvmlEventSetCreate": {of.XID},
    "nvmlDeviceRegisterEvents": {of.XID},
}
FIELDS_ALONE = {4: {of.ECC_DOUBLE_BIT}, 143: {of.REMAPPED_ROWS}, 186: {of.POWER_INSTANT}}
OLD, SLOWDOWNS = (251, 252, 253), {of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE}
# GPUs, and the numbers that they have not.
LACKS = [
    *((FakeNvml(missing=frozenset({function})), numbers) for function, numbers in ALONE.items()),
    *((FakeNvml(busy(refused={function: code})), numbers)
      for function, numbers in ALONE.items() for code in (NOT_SUPPORTED, NO_PERMISSION)),
    *((FakeNvml(busy(field_errors={field: NOT_SUPPORTED})), numbers) for field, numbers in FIELDS_ALONE.items()),
    (FakeNvml(event_types=0x2), {of.XID}),
    (FakeNvml(missing=frozenset({"nvmlDeviceGetMPSComputeRunningProcesses_v3"})), set()),
    (FakeNvml(missing=frozenset({"nvmlDeviceGetFieldValues"})), {f.number for f in FIELDS} - {of.POWER, of.ENERGY}),
    (FakeNvml(busy(gpm_errors={2: NOT_SUPPORTED})), {of.SM_ACTIVE}),
    # power smoothing, which is not taken for a capped time
    (FakeNvml(busy(field_errors=dict.fromkeys(OLD, NOT_SUPPORTED)), slowdown_fields=OLD, smoothing=True), SLOWDOWNS),
    (FakeNvml(mig=True), {of.GPU_UTIL}),  # an instance has its own counters, and not its parent's numbers
    (FakeNvml(mig=True, missing=frozenset({"nvmlGpmMigSampleGet"})), {of.GPU_UTIL, *PROFILED}),
    (FakeNvml(mig=True, missing=frozenset({"nvmlDeviceGetGpuInstanceId"})), {of.GPU_UTIL, *PROFILED}),
    (FakeNvml(gpm=False), PROFILED),
    (FakeNvml(missing=frozenset({"nvmlGpmQueryDeviceSupport"})), PROFILED),
    (FakeNvml(missing=frozenset({"nvmlGpmMetricsGet"})), PROFILED),
    (FakeNvml(busy(refused={"nvmlGpmSampleGet": NO_PERMISSION})), PROFILED),
    (FakeNvml(busy(gpm_errors=dict.fromkeys(GPM, NOT_SUPPORTED))), PROFILED),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "numbers"), LACKS, ids=range(len(LACKS)))
def test_unsupported_numbers_stay_absent(gpu, numbers):
    ratios = not numbers >= PROFILED
    with opened(gpu) as (gpu, source):
        assert source.unsupported.keys() == numbers and all(source.unsupported.values())
        assert source.name == ("nvml-gpm" if ratios else "nvml")
        gpu.change(0.0, processes=(OURS,), refused={})
        at(gpu, source, 0.5)
        reading = at(gpu, source, 1.0)
    *_, whole = readings(FakeNvml(busy(processes=(OURS,))), 0.5, 1.0)
    assert reading.values == pytest.approx({n: value for n, value in whole.values.items() if n not in numbers})
    assert (reading.missing, reading.span_s) == ((), 0.5 if ratios else None)


LATER = {function: numbers for function, numbers in ALONE.items() if "Event" not in function} | {
    "nvmlEventSetWait_v2": {of.XID},
    "nvmlDeviceGetTemperature": {of.TEMPERATURE},
    "nvmlDeviceGetMemoryInfo_v2": {of.MEMORY_USED},
    "nvmlDeviceGetCurrentClocksEventReasons": {of.CLOCK_REASONS},
    "nvmlDeviceGetFieldValues": {field.number for field in FIELDS},
    **dict.fromkeys(("nvmlGpmMetricsGet", "nvmlGpmSampleGet", "nvmlGpmSampleAlloc"), PROFILED),
}
FAILS = [({"refused": {function: code}}, numbers) for function, numbers in LATER.items() for code in (UNKNOWN, 3)]
FAILS += [({"field_errors": {field: UNKNOWN}}, numbers) for field, numbers in FIELDS_ALONE.items()]
FAILS += [({"gpm_errors": {metric: code}}, {number}) for metric, number in GPM.items() for code in (UNKNOWN, 3)]
FAILS += [({"gpm_nan": frozenset({2})}, {of.SM_ACTIVE})]


@pytest.mark.parametrize(("fails", "numbers"), FAILS)
def test_later_reading_failure_recovers(fails, numbers):
    gpu = gpu_of(BUSY, (1.0, fails), (1.5, {key: {} for key in fails}))
    _, before, during, after = readings(gpu, 0.0, 0.5, 1.0, 1.5)
    assert {number for number, value in during.values.items() if value is None} == numbers
    assert numbers_in(during.missing) == sorted(numbers) and before.missing == after.missing == ()
    assert before.values.keys() == during.values.keys() == after.values.keys() == EVERYTHING
    sampled = "nvmlGpmSample" not in str(fails)  # one that was not taken is no baseline
    assert (before.span_s, during.span_s) == (0.5, None if numbers == PROFILED else 0.5)
    assert (after.span_s, after.values[of.SM_ACTIVE]) == (0.5 if sampled else 1.0, pytest.approx(BUSY.sm))


INSTEAD = [
    ({"missing": frozenset({"nvmlDeviceGetCurrentClocksEventReasons"})}, of.CLOCK_REASONS, 4.0),
    ({"missing": frozenset({"nvmlDeviceGetMemoryInfo_v2"})}, of.MEMORY_USED, float(1 << 29)),
    ({"first": State(power_w=300.0, field_errors={185: NOT_SUPPORTED})}, of.POWER, 300.0),
    ({"first": State(power_w=300.0, field_errors={83: NOT_SUPPORTED})}, of.ENERGY, 600.0),
]
if hasattr(pynvml, "nvmlDeviceGetTemperatureV"):  # nvidia-ml-py 12.570 and later
    INSTEAD.append(({"missing": frozenset({"nvmlDeviceGetTemperature"})}, of.TEMPERATURE, 55.0))


@pytest.mark.parametrize(("lacks", "number", "value"), INSTEAD)
def test_alternative_nvml_source_is_used(lacks, number, value):
    with opened(FakeNvml(**{"first": State(temperature_c=55, reasons=4), **lacks})) as (gpu, source):
        assert source.unsupported == {} and at(gpu, source, 2.0).values[number] == value


@pytest.mark.parametrize("early_s", [0.0, 0.01, 0.0499])
@pytest.mark.parametrize("missing", [(), ("nvmlDeviceGetFieldValues",)])
def test_counters_are_read_seldom(early_s, missing):
    with opened(FakeNvml(missing=frozenset(missing))) as (gpu, source):
        there = EVERYTHING - source.unsupported.keys()
        for step in range(9):
            now_s = step * COUNTERS_S / 4 - (early_s if step % 4 == 0 and step else 0.0)  # a hair early is meant
            reading = at(gpu, source, now_s)
            assert reading.values.keys() == (there - COUNTERS if step % 4 else there), step
            assert not COUNTERS & set(numbers_in(reading.missing))
        assert reading.values.keys() == at(gpu, source, 4.0).values.keys()
        later = [at(gpu, source, now_s).values.keys() for now_s in (3.5, 4.44, 4.46)]  # first, a clock that went back
        assert [bool(COUNTERS & numbers) for numbers in later] == [True, False, True]
    with opened(each_time={of.ENERGY}) as (gpu, source):
        for step in range(5):
            numbers = at(gpu, source, step / 4).values.keys()
            assert COUNTERS & numbers == (COUNTERS if step % 4 == 0 else {of.ENERGY}), step


SLOW = {"reasons": 0x4, "sm_clock_mhz": 1200, "power_limit_w": 500.0}
SLOWED = [(1.0, {"reasons": 0x4 | 0x40}), (1.5, {"reasons": 0x20}), (1.75, {"reasons": 0x80})]
CAPPED = {of.CAPPED_POWER: 0.5, of.CAPPED_HW_THERMAL: 0.5, of.CAPPED_SW_THERMAL: 0.25, of.CAPPED_BRAKE: 2.25}
XIDS = gpu_of(events=((-0.5, 0x8, 31), (2.0, 0x8, 13), (2.1, 0x8, 79)))
# By name: the GPU, and by the time of a reading what some numbers are then.
HISTORIES = {
    "a ratio that cannot be": (gpu_of(State(sm=1.294)), {1.0: {}, 2.0: {of.SM_ACTIVE: 1.294}}),
    "throttling": (gpu_of(BUSY, (1.0, SLOW)),
                   {0.5: {of.CLOCK_REASONS: 0.0, of.SM_CLOCK: 1980e6, of.POWER_LIMIT: 700.0},
                    1.0: {of.CLOCK_REASONS: 4.0, of.SM_CLOCK: 1200e6, of.POWER_LIMIT: 500.0}}),
    "the last Xid since opening": (XIDS, {t: {of.XID: n} for t, n in zip((1, 1.9, 2, 2.5, 9), (0, 0, 13, 79, 79))}),
    "other critical events": (gpu_of(events=((0.5, 0x2, 5), (0.6, 0x10, 0))), {1.0: {of.XID: 0.0}}),
    "a flood of events, which does not hold a reading": (
        gpu_of(events=tuple((0.5, 0x8, number) for number in range(150))), {1.0: {of.XID: 99}, 1.5: {of.XID: 149}}),
    "capped times of a new driver": (gpu_of(BUSY, *SLOWED, smoothing=True), {4.0: CAPPED}),
    "capped times of an older one": (gpu_of(BUSY, *SLOWED, smoothing=True, slowdown_fields=OLD), {4.0: CAPPED}),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "planted"), HISTORIES.values(), ids=HISTORIES)
def test_readings_follow_gpu_history(gpu, planted):
    with opened(gpu) as (gpu, source):
        assert source.unsupported == {}
        for now_s, expected in planted.items():
            values = at(gpu, source, now_s).values
            assert {number: values[number] for number in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("compute", "mps", "count", "foreign"), [
    ((), (), 0.0, 0.0), ((OURS,), (), 1.0, 0.0), ((OURS, THEIRS), (), 2.0, 1.0), ((OURS,), (OURS,), 1.0, 0.0),
    ((OURS, THEIRS), (THEIRS, 99), 3.0, 2.0), ((), (OURS,), 1.0, 0.0),
    ((THEIRS, 99), (), 2.0, None),  # of another namespace, perhaps, so not called foreign
])  # fmt: skip
def test_each_process_counts_once(compute, mps, count, foreign):
    (reading,) = readings(FakeNvml(State(processes=compute, mps_processes=mps)), 1.0)
    assert (reading.values[of.GPU_PROCESSES], reading.values[of.FOREIGN_PROCESSES]) == (count, foreign)
    assert (of.FOREIGN_PROCESSES in numbers_in(reading.missing)) == (foreign is None)


@pytest.mark.parametrize("profile", [True, False])
def test_lost_gpu_ends_readings(profile):
    gpu = gpu_of(BUSY, (1.0, {"lost": True}))
    with opened(gpu, profile) as (gpu, source):
        assert at(gpu, source, 0.5).values[of.POWER] == 500.0
        for now_s in (1.0, 1.25):
            with pytest.raises(SensorFailed, match="GPU is lost"):
                at(gpu, source, now_s)
    with opened() as (gpu, first):
        second = open_nvml(gpu.uuid, own_pids=set)
        at(gpu, first, 0.0), at(gpu, second, 0.5)
        second.close(), second.close()
        assert at(gpu, first, 1.0).span_s == 1.0 and gpu.calls["nvmlShutdown"] == 1


@pytest.mark.parametrize(("gpu", "uuid", "said", "hint"), [
    (FakeNvml(mig_mode=True), UUID, UUID, "CUDA_VISIBLE_DEVICES=MIG-"),
    (FakeNvml(), "GPU-elsewhere", "GPU-elsewhere", "nvidia-smi -L"),
    (FakeNvml(State(lost=True)), UUID, "GPU is lost", "nvidia-smi"),
    *((FakeNvml(State(refused={function: 15})), UUID, "GPU is lost", "nvidia-smi") for function in
      ("nvmlEventSetCreate", "nvmlGpmSampleGet", "nvmlGpmMetricsGet", "nvmlDeviceGetFieldValues")),
])  # fmt: skip
def test_unreadable_gpu_leaves_nothing_open(gpu, uuid, said, hint):
    with installed(gpu):
        with refused(said, kind=SensorFailed, hint=hint):
            open_nvml(uuid, own_pids=set)
        assert nothing_left(gpu)


@pytest.mark.parametrize(("function", "code", "said"), [
    ("nvmlShutdown", UNKNOWN, "MIG"), ("nvmlInit", 12, "Shared Library Not Found"),
])  # fmt: skip
def test_library_error_tells_first_cause(monkeypatch, function, code, said):
    with installed(FakeNvml(mig_mode=True)) as gpu:
        monkeypatch.setattr(pynvml, function, lambda: pynvml._nvmlCheckReturn(code))
        with refused(said, kind=SensorFailed):
            open_nvml(gpu.uuid, own_pids=set)


@pytest.mark.parametrize("module", [ModuleType("pynvml"), None])
def test_missing_pynvml_function_is_tolerated(monkeypatch, module):
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(pynvml, "nvmlGpmQueryDeviceSupport")
    with opened(FakeNvml(State(reasons=8))) as (gpu, source):
        assert source.name == "nvml" and at(gpu, source, 1.0).values[of.CLOCK_REASONS] == 8.0
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with refused("pynvml", kind=SensorFailed, hint="nvidia-ml-py"):
        open_nvml("GPU-1", own_pids=set)
