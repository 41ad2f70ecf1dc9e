"""NVML, NVIDIA's management library, as a source; with GPM, its profiling counters of Hopper and newer GPUs.

GPM's ratios are what DCGM calls PROF fields there: DCGM itself takes them from GPM and divides them by 100
(NVIDIA/DCGM, dcgmlib/src/DcgmGpmManager.cpp). Units of the rest are those of NVIDIA's nvml.h.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.base import MIN_SPAN_S, Reading, known
from pytest_slmserve.telemetry.host_counters import own_pids

PERCENT, MILLI, NANO, MEGA = 1e-2, 1e-3, 1e-9, 1e6
# Numbers are written out where releases of nvidia-ml-py from 12 to 13 do not all have the name.
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, UNKNOWN = 3, 4, 10, 13, 999
UNABLE = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
REFUSED = UNABLE | {2, 25, 26}  # argument, version, deprecated: another call or field may do
LOST = {1, 9, 15, 16, 28}  # uninitialized, no driver, GPU lost, reset required, GPU not found: nothing will answer now


def bindings() -> Any:
    """The module pynvml of nvidia-ml-py; there is another distribution that has a module of that name."""
    hint = "python -m pip uninstall -y pynvml; python -m pip install --force-reinstall nvidia-ml-py"
    try:
        import pynvml
    except ImportError:
        raise SensorFailed("there is no module pynvml, which nvidia-ml-py has", hint) from None
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise SensorFailed("the module pynvml that is imported here is not the one of nvidia-ml-py", hint)
    return pynvml


def gpm_place(nv: Any, device: Any, device_uuid: str) -> tuple[Any, Callable[[Any], object]]:
    """The GPU that has the counters, and what fills a sample with those of this device only."""
    if not device_uuid.startswith("MIG-"):
        return device, partial(call, nv, "nvmlGpmSampleGet", device)
    parent = call(nv, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device)
    instance = call(nv, "nvmlDeviceGetGpuInstanceId", device)
    return parent, partial(call, nv, "nvmlGpmMigSampleGet", parent, instance)


def call(nv: Any, function: str, *arguments: Any) -> Any:
    """Call it; bindings too old to have it and drivers too old to have it raise the same NVMLError."""
    if not hasattr(nv, function):
        raise nv.NVMLError(FUNCTION_NOT_FOUND)
    return getattr(nv, function)(*arguments)


def said(error: Any) -> str:
    """Text of NVML's error for a call. Raises SensorFailed where it means that the GPU will not answer any more."""
    if error.value in LOST:
        raise SensorFailed(
            f"the GPU does not answer any more: {error}", "nvidia-smi, and the kernel's log for an Xid"
        ) from error
    return f"NVML says {error}"


def code_text(nv: Any, code: int) -> str:
    """Text of NVML's error code for one value among several."""
    return f"NVML says {nv.NVMLError(code)}"


def refusal(nv: Any, function: str, *arguments: Any) -> str | None:
    """The reason why NVML refuses the call for good; None where it answers, or fails in a way that may pass."""
    try:
        call(nv, function, *arguments)
    except nv.NVMLError as error:
        why = said(error)
        return why if error.value in REFUSED else None
    return None


def unknown(numbers: Iterable[int], why: str, missing: list[str]) -> dict[int, float | None]:
    """None for each number, and the reason for each."""
    found: dict[int, float | None] = dict.fromkeys(numbers)
    missing.extend(f"{number}: {why}" for number in found)
    return found


def quietly(nv: Any, function: Callable[..., object], *arguments: Any) -> None:
    """Call on the way out, when nothing can be done about an error any more."""
    with suppress(nv.NVMLError):
        function(*arguments)


GPM = {1: of.ENGINE_ACTIVE, 2: of.SM_ACTIVE, 3: of.SM_OCCUPANCY, 5: of.TENSOR_ACTIVE, 10: of.DRAM_ACTIVE}


class Gpm:
    """Ratios over the time between two samples of the GPU's counters. metrics: GPM's id of each of our numbers."""

    def __init__(self, nv: Any, take: Callable[[Any], object]) -> None:
        self.metrics = dict(GPM)
        self._nv, self._take = nv, take
        self._samples: deque[tuple[float, Any]] = deque()  # the baseline, and those that are still too young for one

    def leave_out_refused(self) -> dict[int, str]:
        """Drops the metrics that the GPU refuses, and returns the reason for each number. Samples over no time at all:
        values mean nothing then, refusals do."""
        held: list[Any] = []
        try:
            held += [self._sample()]
            held += [self._sample()]
            answers = self._ask(*held)
        except self._nv.NVMLError as error:
            if error.value in UNABLE | LOST:
                raise
            return {}  # what fails over no time may work over some
        finally:
            for sample in held:
                self._free(sample)
        codes = [(metric, answer.nvmlReturn) for metric, answer in zip(self.metrics, answers)]
        return {self.metrics.pop(metric): code_text(self._nv, code) for metric, code in codes if code in UNABLE}

    def ratios(self, now_s: float, missing: list[str]) -> tuple[dict[int, float | None], float | None]:
        """All ratios from one pair of samples, and the length of the time between them in seconds."""
        try:
            newest = self._sample()
            self._samples.append((now_s, newest))
            span_s, baseline = self._baseline(now_s)
            if span_s < MIN_SPAN_S:
                why = f"no sample of the counters is {MIN_SPAN_S:g} s old yet"
                return unknown(self.metrics.values(), why, missing), None
            answers = self._ask(baseline, newest)
        except self._nv.NVMLError as error:
            return unknown(self.metrics.values(), said(error), missing), None
        return {n: self._ratio(n, answer, missing) for n, answer in zip(self.metrics.values(), answers)}, span_s

    def close(self) -> None:
        while self._samples:
            self._free(self._samples.popleft()[1])

    def _sample(self) -> Any:
        sample = self._nv.nvmlGpmSampleAlloc()
        try:
            self._take(sample)
        except self._nv.NVMLError:
            self._free(sample)
            raise
        return sample

    def _free(self, sample: Any) -> None:
        quietly(self._nv, self._nv.nvmlGpmSampleFree, sample)

    def _baseline(self, now_s: float) -> tuple[float, Any]:
        """Age and handle of the newest sample that is old enough, or else of the oldest; older ones are freed."""
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= MIN_SPAN_S:
            self._free(self._samples.popleft()[1])
        at_s, sample = self._samples[0]
        return now_s - at_s, sample

    def _ask(self, first: Any, second: Any) -> list[Any]:
        """Answers to all metrics, in one call."""
        request = self._nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(self.metrics), sample1=first, sample2=second)
        for metric, place in zip(self.metrics, request.metrics):
            place.metricId, place.nvmlReturn = metric, UNKNOWN  # until NVML says otherwise
        self._nv.nvmlGpmMetricsGet(request)
        return list(request.metrics[: len(self.metrics)])

    def _ratio(self, number: int, answer: Any, missing: list[str]) -> float | None:
        if answer.nvmlReturn:
            missing.append(f"{number}: {code_text(self._nv, answer.nvmlReturn)}")
            return None
        return known(number, answer.value * PERCENT, missing)


SM, MEMORY = 1, 2  # kinds of clocks
MEMORY_V2 = 0x02000028  # the version whose "used" leaves out what the driver reserves, as DCGM's number does
XID_EVENT = 0x8
CRITICAL_EVENTS = XID_EVENT | 0x2 | 0x800 | 0x1000 | 0x2000 | 0x4000  # double-bit ECC, failed retirement, poison, lost
MOST_EVENTS = 100  # taken per reading
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
WIDE_TYPES = (2, 3, 4)
# Counters that only grow miss nothing when they are asked seldom, and some are dear: on an H200 with a driver of
# release 580 energy took 3.5 ms of CPU time and a slowdown 1.1 ms, where any other field took 0.1 ms.
SLOWDOWNS = (of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
COUNTERS = {of.ENERGY, of.ECC_DOUBLE_BIT, of.REMAPPED_ROWS, of.CAPPED_POWER, *SLOWDOWNS}
COUNTERS_S = 1.0


@dataclass(frozen=True, slots=True)
class Field:
    """A number that nvmlDeviceGetFieldValues has under an id. wide: only a 64-bit value is what is meant."""

    number: int
    id: int
    unit: float = 1.0
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """A number that a function of NVML has. arguments: what follows the device."""

    number: int
    function: str
    arguments: tuple[int, ...] = ()
    convert: Callable[[Any], float] = float


Row = TypeVar("Row", Field, Ask)

# Rows of one number are alternatives, the best first. NVIDIA has moved the slowdowns: nvidia-ml-py 12.575 and 13.580.65
# have them at 251 to 253, 13.580.82 and later at 269 to 271, and each gives the other's ids to power smoothing, which
# has small values. A driver of release 580 may go by either, so it is asked for both.
FIELDS = (
    Field(of.POWER, 185, MILLI),
    Field(of.POWER_INSTANT, 186, MILLI),
    Field(of.ENERGY, 83, MILLI),
    Field(of.ECC_DOUBLE_BIT, 4),
    Field(of.REMAPPED_ROWS, 143),
    Field(of.CAPPED_POWER, 74, NANO),
    *(Field(number, 269 + i, NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
    *(Field(number, 251 + i, NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
)
ASKS = (
    Ask(of.GPU_UTIL, "nvmlDeviceGetUtilizationRates", (), lambda rates: rates.gpu * PERCENT),
    Ask(of.POWER, "nvmlDeviceGetPowerUsage", (), lambda milliwatts: milliwatts * MILLI),
    Ask(of.ENERGY, "nvmlDeviceGetTotalEnergyConsumption", (), lambda millijoules: millijoules * MILLI),
    Ask(of.POWER_LIMIT, "nvmlDeviceGetEnforcedPowerLimit", (), lambda milliwatts: milliwatts * MILLI),
    Ask(of.SM_CLOCK, "nvmlDeviceGetClockInfo", (SM,), lambda megahertz: megahertz * MEGA),
    Ask(of.MEMORY_CLOCK, "nvmlDeviceGetClockInfo", (MEMORY,), lambda megahertz: megahertz * MEGA),
    Ask(of.TEMPERATURE, "nvmlDeviceGetTemperature", (0,)),
    Ask(of.TEMPERATURE, "nvmlDeviceGetTemperatureV", (0,)),
    Ask(of.MEMORY_USED, "nvmlDeviceGetMemoryInfo", (MEMORY_V2,), lambda memory: float(memory.used)),
    Ask(of.MEMORY_USED, "nvmlDeviceGetMemoryInfo", (), lambda memory: float(memory.used)),
    Ask(of.CLOCK_REASONS, "nvmlDeviceGetCurrentClocksEventReasons"),
    Ask(of.CLOCK_REASONS, "nvmlDeviceGetCurrentClocksThrottleReasons"),
)


def open_nvml(device_uuid: str, *, own_pids: Callable[[], set[int]] = own_pids, profile: bool = True) -> NvmlSource:
    """The source for the GPU, or the MIG device, of that UUID.

    own_pids: process ids of this run, asked at every reading that finds processes. profile: take GPM's ratios where
    the GPU has them. Raises SensorFailed where there is no NVML, no such GPU, or one that MIG divides.
    """
    nv = bindings()
    undo = ExitStack()
    try:
        nv.nvmlInit()
        undo.callback(quietly, nv, nv.nvmlShutdown)
        device = nv.nvmlDeviceGetHandleByUUID(device_uuid)
        _refuse_divided(nv, device, device_uuid)
        source = NvmlSource(nv, device, own_pids, undo)
        if profile:
            source.take_ratios(device_uuid)
        return source
    except nv.NVMLError as error:
        undo.close()
        hint = "nvidia-smi -L, which lists what the driver has"
        raise SensorFailed(f"NVML does not answer for {device_uuid}: {error}", hint) from None
    except BaseException:
        undo.close()
        raise


class NvmlSource:
    """Readings of one GPU, from one thread at a time. name: nvml-gpm with ratios, else nvml.

    unsupported: why numbers are never in a reading, found out once, when opened.
    """

    def __init__(self, nv: Any, device: Any, own_pids: Callable[[], set[int]], undo: ExitStack) -> None:
        self.name = "nvml"
        self.unsupported: dict[int, str] = {}
        self._nv, self._device, self._own_pids, self._undo = nv, device, own_pids, undo
        self._fields = self._supported_fields()
        self._asks = self._supported_asks()
        self._lists = self._supported_lists()
        self._event_set = self._registered_events()
        self._xid = 0
        self._counted_s: float | None = None
        self._gpm: Gpm | None = None

    def take_ratios(self, device_uuid: str) -> None:
        """Have GPM's ratios in every reading, where the GPU has any."""
        nv = self._nv
        try:
            gpu, take = gpm_place(nv, self._device, device_uuid)
            if not call(nv, "nvmlGpmQueryDeviceSupport", gpu).isSupportedDevice:
                raise nv.NVMLError(NOT_SUPPORTED)
            gpm = Gpm(nv, take)
            self.unsupported |= gpm.leave_out_refused()
        except nv.NVMLError as error:
            self.unsupported |= dict.fromkeys(GPM.values(), said(error))
            return
        if gpm.metrics:
            self.name, self._gpm = "nvml-gpm", gpm
            self._undo.callback(gpm.close)

    def read(self, now_s: float) -> Reading:
        """One reading. now_s: `time.monotonic()`. Counters are in it once in COUNTERS_S, and left out between. Raises
        SensorFailed where the GPU or the driver is gone."""
        missing: list[str] = []
        values: dict[int, float | None] = {}
        span_s = None
        if self._gpm is not None:
            values, span_s = self._gpm.ratios(now_s, missing)
        skipped = set() if self._count_now(now_s) else COUNTERS
        values |= self._read_fields([field for field in self._fields if field.number not in skipped], missing)
        values |= {a.number: self._read_ask(a, missing) for a in self._asks if a.number not in skipped}
        values |= self._read_events(missing)
        values |= self._read_processes(missing)
        return Reading(values, span_s, tuple(missing))

    def close(self) -> None:
        """Free samples and events, and let NVML go; may be called twice."""
        self._undo.close()

    def _count_now(self, now_s: float) -> bool:
        """Are counters due? A reading that is a hair early is the one that was meant."""
        due = self._counted_s is None or not 0 <= now_s - self._counted_s < COUNTERS_S - MIN_SPAN_S / 2
        if due:
            self._counted_s = now_s
        return due

    def _supported_fields(self) -> tuple[Field, ...]:
        try:
            answers = self._nv.nvmlDeviceGetFieldValues(self._device, [field.id for field in FIELDS])
        except self._nv.NVMLError as error:
            self.unsupported |= dict.fromkeys((field.number for field in FIELDS), said(error))
            return ()
        return self._first({field: self._field_refusal(field, answer) for field, answer in zip(FIELDS, answers)})

    def _field_refusal(self, field: Field, answer: Any) -> str | None:
        """The reason why the GPU does not have the field; None where it does, or may have it."""
        if answer.nvmlReturn in REFUSED or (answer.nvmlReturn and field.wide):
            return code_text(self._nv, answer.nvmlReturn)
        if field.wide and answer.valueType not in WIDE_TYPES:
            return f"field {field.id} of this driver is something else"
        return None

    def _supported_asks(self) -> tuple[Ask, ...]:
        have = {field.number for field in self._fields}
        rows = [ask for ask in ASKS if ask.number not in have]
        return self._first({ask: refusal(self._nv, ask.function, self._device, *ask.arguments) for ask in rows})

    def _first(self, refusals: Mapping[Row, str | None]) -> tuple[Row, ...]:
        """The first row of each number that is not refused; `unsupported` keeps the reason where all are."""
        found: dict[int, Row] = {}
        for row, why in refusals.items():
            if why is None:
                found.setdefault(row.number, row)
            else:
                self.unsupported.setdefault(row.number, why)
        for number in found:
            self.unsupported.pop(number, None)
        return tuple(found.values())

    def _supported_lists(self) -> tuple[str, ...]:
        """Functions that list processes: those that compute and, where there is MPS, its clients."""
        refusals = {name: refusal(self._nv, name, self._device) for name in LISTS}
        if why := refusals[LISTS[0]]:
            self.unsupported |= {of.GPU_PROCESSES: why, of.FOREIGN_PROCESSES: why}
            return ()
        return tuple(name for name, why in refusals.items() if why is None)

    def _registered_events(self) -> Any:
        """The set that Xids come to, or None. Those before it is registered are never told (nvml.h)."""
        nv = self._nv
        try:
            wanted = call(nv, "nvmlDeviceGetSupportedEventTypes", self._device) & CRITICAL_EVENTS
            if not wanted & XID_EVENT:
                raise nv.NVMLError(NOT_SUPPORTED)
            event_set = call(nv, "nvmlEventSetCreate")
            self._undo.callback(quietly, nv, nv.nvmlEventSetFree, event_set)
            nv.nvmlDeviceRegisterEvents(self._device, wanted, event_set)
            return event_set
        except nv.NVMLError as error:
            self.unsupported[of.XID] = said(error)
            return None

    def _read_fields(self, rows: Sequence[Field], missing: list[str]) -> dict[int, float | None]:
        if not rows:
            return {}
        try:
            answers = self._nv.nvmlDeviceGetFieldValues(self._device, [field.id for field in rows])
        except self._nv.NVMLError as error:
            return unknown((field.number for field in rows), said(error), missing)
        return {f.number: self._field_value(f, answer, missing) for f, answer in zip(rows, answers)}

    def _field_value(self, field: Field, answer: Any, missing: list[str]) -> float | None:
        if answer.nvmlReturn:
            missing.append(f"{field.number}: {code_text(self._nv, answer.nvmlReturn)}")
            return None
        return known(field.number, getattr(answer.value, VALUE_TYPES[answer.valueType]) * field.unit, missing)

    def _read_ask(self, ask: Ask, missing: list[str]) -> float | None:
        try:
            answer = call(self._nv, ask.function, self._device, *ask.arguments)
        except self._nv.NVMLError as error:
            missing.append(f"{ask.number}: {said(error)}")
            return None
        return known(ask.number, ask.convert(answer), missing)

    def _read_events(self, missing: list[str]) -> dict[int, float | None]:
        if self._event_set is None:
            return {}
        try:
            for _ in range(MOST_EVENTS):
                event = self._nv.nvmlEventSetWait_v2(self._event_set, 0)
                self._xid = event.eventData if event.eventType == XID_EVENT else self._xid
        except self._nv.NVMLError as error:
            if error.value != TIMEOUT:
                return unknown([of.XID], said(error), missing)
        return {of.XID: float(self._xid)}

    def _read_processes(self, missing: list[str]) -> dict[int, float | None]:
        if not self._lists:
            return {}
        try:
            pids = {process.pid for name in self._lists for process in call(self._nv, name, self._device)}
        except self._nv.NVMLError as error:
            return unknown((of.GPU_PROCESSES, of.FOREIGN_PROCESSES), said(error), missing)
        return {of.GPU_PROCESSES: float(len(pids)), of.FOREIGN_PROCESSES: self._foreign(pids, missing)}

    def _foreign(self, pids: set[int], missing: list[str]) -> float | None:
        foreign = pids - self._own_pids() if pids else pids
        if foreign and foreign == pids:
            why = "none of the GPU's processes is ours: its driver may count them in another namespace"
            missing.append(f"{of.FOREIGN_PROCESSES}: {why}")
            return None
        return float(len(foreign))


def _refuse_divided(nv: Any, device: Any, device_uuid: str) -> None:
    """Raises SensorFailed for a whole GPU that MIG divides: what its counters say is the sum over all instances."""
    with suppress(nv.NVMLError):
        if not device_uuid.startswith("MIG-") and call(nv, "nvmlDeviceGetMigMode", device)[0]:
            raise SensorFailed(
                f"MIG divides {device_uuid}, whose counters are those of all instances together",
                "CUDA_VISIBLE_DEVICES=MIG-..., one that nvidia-smi -L lists",
            )
