"""A GPU for tests: an object in the place of the driver's library, behind the real pynvml.

    with installed() as gpu:                     # pynvml.nvmlInit() and all the rest now talk to `gpu`
        source = open_nvml(gpu.uuid, own_pids=lambda: {1})
        gpu.change(2.0, reasons=0x4, sm_clock_mhz=1200, power_w=700.0)  # from its second 2 on
        gpu.happened.append((3.0, XID_EVENT, 79))
        gpu.now_s = 2.5                          # nothing moves unless told to
        source.read(gpu.now_s)

All it answers is a function of its clock: it goes through states (`State`), each holding from its time on, and what
counts or averages is summed over them. What it knows of real ones: ratios over less than 0.1 s are garbage; energy and
capped time move in steps; power is a mean over a second; events from before they are registered are never told. It
checks its callers: what is left behind or freed twice is seen in `live_samples`, `live_event_sets` and `faults`.
"""

# ruff: noqa: N802 - NVML's names
import ctypes
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import attrgetter
from typing import Any

import pynvml
import pytest

UUID = "GPU-00000000-1111-2222-3333-444444444444"
SUCCESS, UNINITIALIZED, BAD_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION = 0, 1, 2, 3, 4
NOT_FOUND, TOO_SMALL, TIMEOUT, GPU_IS_LOST, UNKNOWN = 6, 7, 10, 15, 999
SW_POWER_CAP, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x4, 0x20, 0x40, 0x80
XID_EVENT = 0x8
GARBAGE = 12_345.0  # percent: what a ratio over too short a time comes out as
SHORTEST_S, STEP_S = 0.1, 0.1  # of a ratio's span; between updates of energy and power
MEMORY, NEW_SLOWDOWNS, OLD_SLOWDOWNS = 150 << 30, (269, 270, 271), (251, 252, 253)


@dataclass(frozen=True, slots=True)
class State:
    """What is so from some time on. Ratios of 1, `busy` being the share of time with a kernel on the GPU.

    refused: error codes by name of function; field_errors and gpm_errors: by id of field and of GPM's metric.
    gpm_nan: metrics that are not a number.
    """

    busy: float = 0.0
    sm: float = 0.0
    occupancy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    power_w: float = 120.0
    power_limit_w: float = 700.0
    sm_clock_mhz: int = 1980
    memory_clock_mhz: int = 3201
    temperature_c: int = 40
    memory_used_bytes: int = 0
    reasons: int = 0
    ecc_double_bit: int = 0
    remapped_rows: int = 0
    processes: tuple[int, ...] = ()
    mps_processes: tuple[int, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)
    field_errors: Mapping[int, int] = field(default_factory=dict)
    gpm_errors: Mapping[int, int] = field(default_factory=dict)
    gpm_nan: frozenset[int] = frozenset()
    lost: bool = False


BUSY = State(busy=1.0, sm=0.6, occupancy=0.2, tensor=0.15, dram=0.5, power_w=500.0, temperature_c=60)
CLOCKS = ("", "sm_clock_mhz", "memory_clock_mhz")
GPM_METRICS = {1: "busy", 2: "sm", 3: "occupancy", 5: "tensor", 10: "dram"}

# Values, some by the names of their parts, that a function writes where its last arguments point to; of its others.
ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlSystemGetCudaDriverVersion_v2": lambda gpu: 13000,
    "nvmlDeviceGetMigMode": lambda gpu, device: (int(gpu.mig_mode and _address(device) == 1), 0),
    "nvmlDeviceGetGpuInstanceId": lambda gpu, device: 7,
    "nvmlDeviceGetSupportedEventTypes": lambda gpu, device: gpu.event_types,
    "nvmlDeviceGetPowerUsage": lambda gpu, device: round(1000 * gpu.recent("power_w")),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu, device: gpu.energy_mj(),
    "nvmlDeviceGetEnforcedPowerLimit": lambda gpu, device: round(1000 * gpu.state().power_limit_w),
    "nvmlDeviceGetClockInfo": lambda gpu, device, kind: getattr(gpu.state(), CLOCKS[kind]),
    "nvmlDeviceGetTemperature": lambda gpu, device, sensor: gpu.state().temperature_c,
    "nvmlDeviceGetTemperatureV": lambda gpu, device: {"temperature": gpu.state().temperature_c},
    "nvmlDeviceGetMemoryInfo": lambda gpu, device: {"total": MEMORY, "used": gpu.state().memory_used_bytes + (1 << 29)},
    "nvmlDeviceGetMemoryInfo_v2": lambda gpu, device: {"total": MEMORY, "used": gpu.state().memory_used_bytes},
    "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu, device: gpu.state().reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu, device: gpu.state().reasons,
    "nvmlDeviceGetUUID": lambda gpu, *_: gpu.uuid,
    "nvmlDeviceGetName": lambda gpu, *_: "NVIDIA Pretence",
    "nvmlSystemGetDriverVersion": lambda gpu, *_: "580.00",
}


@dataclass(eq=False)
class FakeNvml:
    """One GPU under a virtual clock. Methods named like NVML's functions are what pynvml calls.

    missing: functions that this driver does not have.
    slowdown_fields: ids under which it has the capped times of heat and power brake, which drivers do not agree on.
    event_types: that it can register; mig: whether `uuid` is an instance of a divided GPU. answers: further ones, as
    ANSWERS has them.
    """

    first: State = BUSY
    _: KW_ONLY
    missing: frozenset[str] = frozenset()
    gpm: bool = True
    mig: bool = False
    mig_mode: bool = False
    slowdown_fields: tuple[int, int, int] = NEW_SLOWDOWNS
    smoothing: bool = False
    event_types: int = XID_EVENT | 0x2 | 0x4 | 0x10
    answers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uuid = "MIG-00000000-aaaa-bbbb-cccc-dddddddddddd" if self.mig else UUID
        self.answers = ANSWERS | dict(self.answers)
        self.now_s, self._times, self._states = 0.0, [0.0], [self.first]
        self.counters = {74: SW_POWER_CAP, **dict(zip(self.slowdown_fields, (SW_THERMAL, HW_THERMAL, POWER_BRAKE)))}
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []
        self.initialised, self._next = 0, 0x1000
        self.happened: list[tuple[float, int, int]] = []
        self._samples: dict[int, float] = {}
        self._event_sets: dict[int, tuple[float, int, set[int]]] = {}

    def change(self, at_s: float, **what: Any) -> None:
        """From `at_s` on these fields of the state are so; a change in the past of the last one is an error."""
        assert at_s >= self._times[-1], "changes come in order"
        self._times.append(at_s)
        self._states.append(replace(self._states[-1], **what))

    def state(self, at_s: float | None = None) -> State:
        return self._states[bisect_right(self._times, self.now_s if at_s is None else at_s) - 1]

    def integral(self, of: Callable[[State], float], begin_s: float, end_s: float) -> float:
        """What `of` says of the state, summed over the time."""
        ends = [*self._times[1:], math.inf]
        spans = [max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in zip(self._times, ends)]
        return sum(of(state) * span for state, span in zip(self._states, spans) if span)

    def recent(self, name: str) -> float:
        """A mean over the last second."""
        now_s = self.stepped_s
        return self.integral(attrgetter(name), now_s - 1, now_s) if now_s >= 1 else getattr(self.state(), name)

    def energy_mj(self) -> int:
        return round(1000 * self.integral(attrgetter("power_w"), 0.0, self.stepped_s))

    @property
    def stepped_s(self) -> float:
        """The time of the last update."""
        return math.floor(self.now_s / STEP_S + 1e-6) * STEP_S

    @property
    def live_samples(self) -> int:
        return len(self._samples)

    @property
    def live_event_sets(self) -> int:
        return len(self._event_sets)

    def __call__(self, name: str, *arguments: Any) -> int:
        """One call of NVML's function `name`; the code that it returns."""
        self.calls[name] += 1
        state = self.state()
        if name not in ("nvmlInitWithFlags", "nvmlShutdown", "nvmlGpmSampleFree", "nvmlEventSetFree"):
            if not self.initialised:
                return UNINITIALIZED
            if state.lost:
                return GPU_IS_LOST
            if name in state.refused:
                return state.refused[name]
        if name in self.answers:
            places = [argument._obj for argument in arguments if hasattr(argument, "_obj")]
            inputs = [getattr(argument, "value", argument) for argument in arguments if not hasattr(argument, "_obj")]
            found = self.answers[name](self, *inputs)
            if isinstance(found, str):
                places, found = [arguments[-2]], found.encode()
            for place, value in zip(places, found if isinstance(found, tuple) else (found,), strict=True):
                for part, each in (value if isinstance(value, dict) else {"value": value}).items():
                    setattr(place, part, each)
            return SUCCESS
        return int(getattr(self, name)(*arguments) or SUCCESS)

    def nvmlInitWithFlags(self, flags: int) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> int:
        if not self.initialised:
            return UNINITIALIZED
        self.initialised -= 1
        if not self.initialised and (self._samples or self._event_sets):
            self.faults.append("shut down before all was freed")
        return SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        return _point(device._obj, 2 if self.mig else 1) if uuid.value == self.uuid.encode() else NOT_FOUND

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        return _point(device._obj, 1) if index.value == 0 else BAD_ARGUMENT

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: Any, parent: Any) -> int:
        return _point(parent._obj, 1) if _address(device) == 2 else BAD_ARGUMENT

    def nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = (round(100 * self.recent(name)) for name in ("busy", "dram"))
        return NOT_SUPPORTED if self.mig else SUCCESS

    def nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> None:
        for place in values._obj:
            place.nvmlReturn, place.valueType, value = self._field(place.fieldId)
            setattr(place.value, "uiVal" if place.valueType == 1 else "ullVal", value)

    def _field(self, number: int) -> tuple[int, int, int]:
        """Code, type (1: 32 bits, 3: 64 bits) and value of a field."""
        state = self.state()
        if number in state.field_errors:
            return state.field_errors[number], 0, 0
        if bit := self.counters.get(number, 0):
            return SUCCESS, 3, round(1e9 * self.integral(lambda s: float(bool(s.reasons & bit)), 0.0, self.stepped_s))
        match number:
            case 4:
                return SUCCESS, 3, state.ecc_double_bit
            case 83:
                return SUCCESS, 3, self.energy_mj()
            case 143:
                return SUCCESS, 1, state.remapped_rows
            case 185:
                return SUCCESS, 1, round(1000 * self.recent("power_w"))
            case 186:
                return SUCCESS, 1, round(1000 * self.state(self.stepped_s).power_w)
        smoothing = self.smoothing and number in {*OLD_SLOWDOWNS, *NEW_SLOWDOWNS}
        return (SUCCESS, 1, 1) if smoothing else (NOT_SUPPORTED, 0, 0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, places: Any) -> int:
        return _list(self.state().processes, count, places)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, device: Any, count: Any, places: Any) -> int:
        return _list(self.state().mps_processes, count, places)

    def nvmlEventSetCreate(self, event_set: Any) -> None:
        self._event_sets[self._new(event_set._obj)] = (math.inf, 0, set())

    def nvmlDeviceRegisterEvents(self, device: Any, types: Any, event_set: Any) -> int:
        if types.value & ~self.event_types:
            return NOT_SUPPORTED
        self._event_sets[_address(event_set)] = (self.now_s, types.value, set())
        return SUCCESS

    def nvmlEventSetWait_v2(self, event_set: Any, data: Any, timeout_ms: Any) -> int:
        since_s, types, told = self._event_sets[_address(event_set)]
        for place, (at_s, kind, number) in enumerate(self.happened):
            if since_s <= at_s <= self.now_s and kind & types and place not in told:
                told.add(place)
                data._obj.eventType, data._obj.eventData = kind, number
                return SUCCESS
        if timeout_ms.value:
            self.faults.append("waited for an event")
        return TIMEOUT

    def nvmlEventSetFree(self, event_set: Any) -> None:
        if self._event_sets.pop(_address(event_set), None) is None:
            self.faults.append("an event set was freed twice")

    def nvmlGpmQueryDeviceSupport(self, device: Any, support: Any) -> int:
        if _address(device) != 1:
            return BAD_ARGUMENT
        support._obj.isSupportedDevice = int(self.gpm)
        return SUCCESS

    def nvmlGpmSampleAlloc(self, sample: Any) -> None:
        self._samples[self._new(sample._obj)] = math.nan

    def nvmlGpmSampleGet(self, device: Any, sample: Any) -> int:
        return self._take(sample) if self.gpm and _address(device) == 1 and not self.mig else NOT_SUPPORTED

    def nvmlGpmMigSampleGet(self, device: Any, instance: int, sample: Any) -> int:
        return self._take(sample) if self.gpm and _address(device) == 1 and instance == 7 else BAD_ARGUMENT

    def _take(self, sample: Any) -> int:
        self._samples[_address(sample)] = self.now_s
        return SUCCESS

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        if self._samples.pop(_address(sample), None) is None:
            self.faults.append("a sample was freed twice")

    def nvmlGpmMetricsGet(self, request: Any) -> int:
        wanted = request._obj
        begin_s, end_s = (self._samples[_address(sample)] for sample in (wanted.sample1, wanted.sample2))
        if wanted.version != 1 or end_s < begin_s:
            return BAD_ARGUMENT
        for place in wanted.metrics[: wanted.numMetrics]:
            place.nvmlReturn, place.value = self._metric(place.metricId, begin_s, end_s)
        return SUCCESS

    def _metric(self, metric: int, begin_s: float, end_s: float) -> tuple[int, float]:
        state = self.state()
        if metric not in GPM_METRICS:
            return NOT_SUPPORTED, 0.0
        if metric in state.gpm_errors:
            return state.gpm_errors[metric], 0.0
        if metric in state.gpm_nan or end_s == begin_s:
            return SUCCESS, math.nan
        if end_s - begin_s < SHORTEST_S - 1e-9:
            return SUCCESS, GARBAGE
        return SUCCESS, 100 * self.integral(attrgetter(GPM_METRICS[metric]), begin_s, end_s) / (end_s - begin_s)

    def _new(self, handle: Any) -> int:
        self._next += 0x10
        _point(handle, self._next)
        return self._next


@contextmanager
def installed(gpu: FakeNvml | None = None) -> Iterator[FakeNvml]:
    """pynvml talks to `gpu` inside the block, and to whatever it talked to before after it."""
    gpu = gpu or FakeNvml()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", _Library(gpu))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield gpu


class _Library:
    """What pynvml takes for the shared library: attributes are functions, and those that are not there raise."""

    def __init__(self, gpu: FakeNvml) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Callable[..., int]:
        there = name in self._gpu.answers or (name.startswith("nvml") and hasattr(self._gpu, name))
        if name in self._gpu.missing or not there:
            raise AttributeError(name)
        return lambda *arguments: self._gpu(name, *arguments)


def _point(pointer: Any, address: int) -> int:
    """Let a ctypes pointer hold an address that nobody follows."""
    ctypes.c_void_p.from_buffer(pointer).value = address
    return SUCCESS


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _list(pids: tuple[int, ...], count: Any, places: Any) -> int:
    room, count._obj.value = count._obj.value, len(pids)
    if places is None or room < len(pids):
        return TOO_SMALL if pids else SUCCESS
    for place, pid in zip(places, pids):
        place.pid = pid
    return SUCCESS
