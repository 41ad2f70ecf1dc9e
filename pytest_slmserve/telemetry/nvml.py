"""NVML, NVIDIA's management library, as a source; with GPM, its profiling counters of Hopper and newer GPUs.

GPM's ratios are what DCGM calls PROF fields there: DCGM itself takes them from GPM and divides them by 100
(NVIDIA/DCGM, dcgmlib/src/DcgmGpmManager.cpp). Units of the rest are those of NVIDIA's nvml.h.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Answer, Reading, SensorSource, own_pids, reading_of

PERCENT, MILLI, NANO, MEGA = 1e-2, 1e-3, 1e-9, 1e6
# Numbers are written out if not all releases of nvidia-ml-py from 12 to 13 have the name.
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, UNKNOWN = 3, 4, 10, 13, 999
UNABLE = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
REFUSED = UNABLE | {2, 25, 26}  # argument, version, deprecated: another call or field may do
LOST = {1, 9, 15, 16, 28}  # uninitialized, no driver, GPU lost, reset required, GPU not found: nothing will answer now
GPM = {1: of.ENGINE_ACTIVE, 2: of.SM_ACTIVE, 3: of.SM_OCCUPANCY, 5: of.TENSOR_ACTIVE, 10: of.DRAM_ACTIVE}

SM, MEMORY = 1, 2  # kinds of clocks
MEMORY_V2 = 0x02000028  # the version whose "used" leaves out what the driver reserves, as DCGM's number does
XID_EVENT = 0x8
CRITICAL_EVENTS = XID_EVENT | 0x2 | 0x800 | 0x1000 | 0x2000 | 0x4000  # double-bit ECC, failed retirement, poison, lost
MOST_EVENTS = 100  # taken per reading
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
WIDE_TYPES = (2, 3, 4)
# Counters that only grow miss nothing if they are read rarely, and some are expensive: on an H200 with a driver of
# release 580 energy took 3.5 ms of CPU time and a slowdown 1.1 ms, while any other field took 0.1 ms.
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
    """A number that a function of NVML has. arguments: what follows the device. part: of an answer with several."""

    number: int
    function: str
    arguments: tuple[int, ...] = ()
    unit: float = 1.0
    part: str = ""


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
    Ask(of.GPU_UTIL, "nvmlDeviceGetUtilizationRates", (), PERCENT, "gpu"),
    Ask(of.POWER, "nvmlDeviceGetPowerUsage", (), MILLI),
    Ask(of.ENERGY, "nvmlDeviceGetTotalEnergyConsumption", (), MILLI),
    Ask(of.POWER_LIMIT, "nvmlDeviceGetEnforcedPowerLimit", (), MILLI),
    Ask(of.SM_CLOCK, "nvmlDeviceGetClockInfo", (SM,), MEGA),
    Ask(of.MEMORY_CLOCK, "nvmlDeviceGetClockInfo", (MEMORY,), MEGA),
    Ask(of.TEMPERATURE, "nvmlDeviceGetTemperature", (0,)),
    Ask(of.TEMPERATURE, "nvmlDeviceGetTemperatureV", (0,)),
    Ask(of.MEMORY_USED, "nvmlDeviceGetMemoryInfo", (MEMORY_V2,), part="used"),
    Ask(of.MEMORY_USED, "nvmlDeviceGetMemoryInfo", part="used"),
    Ask(of.CLOCK_REASONS, "nvmlDeviceGetCurrentClocksEventReasons"),
    Ask(of.CLOCK_REASONS, "nvmlDeviceGetCurrentClocksThrottleReasons"),
)


def call(nv: Any, function: str, *arguments: Any) -> Any:
    """Call it; bindings and drivers that are too old to have it raise the same NVMLError."""
    if not hasattr(nv, function):
        raise nv.NVMLError(FUNCTION_NOT_FOUND)
    return getattr(nv, function)(*arguments)


def error_text(error: Any) -> str:
    """Text of NVML's error. Raises SensorFailed if it means that the GPU will not answer any more."""
    if error.value in LOST:
        why = f"the GPU does not answer any more: {error}"
        raise SensorFailed(why, "nvidia-smi, and the kernel's log for an Xid") from error
    return f"NVML says {error}"


@contextmanager
def errors_become_reasons(nv: Any, reasons: dict[int, Any], numbers: Iterable[int]) -> Iterator[None]:
    """Put NVML's error into `reasons`, as the reason why none of these numbers is known, if the block ends with one."""
    try:
        yield
    except nv.NVMLError as error:
        reasons |= dict.fromkeys(numbers, error_text(error))


class Gpm:
    """Ratios over the time between two samples of the GPU's counters. Raises NVMLError if the device has none.

    metrics: our number for each of GPM's ids that the GPU has. unsupported: the reason for each number without one.
    """

    def __init__(self, nv: Any, device: Any, device_uuid: str) -> None:
        gpu, self._take = device, partial(call, nv, "nvmlGpmSampleGet", device)
        if device_uuid.startswith("MIG-"):  # its GPU has the counters, and fills a sample with those of the instance
            gpu = call(nv, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device)
            instance = call(nv, "nvmlDeviceGetGpuInstanceId", device)
            self._take = partial(call, nv, "nvmlGpmMigSampleGet", gpu, instance)
        if not call(nv, "nvmlGpmQueryDeviceSupport", gpu).isSupportedDevice:
            raise nv.NVMLError(NOT_SUPPORTED)
        self.metrics = dict(GPM)
        self.unsupported: dict[int, str] = {}
        self._nv = nv
        self._samples: deque[tuple[float, Any]] = deque()  # the baseline, and those that are still too young for one
        try:
            for _ in range(2):  # samples over no time at all: values mean nothing then, refusals do
                self._sample(0.0)
            for metric, answer in zip(GPM, self._ask()):
                if answer.nvmlReturn in UNABLE:
                    self.unsupported[self.metrics.pop(metric)] = error_text(nv.NVMLError(answer.nvmlReturn))
        except nv.NVMLError as error:
            if error.value in UNABLE | LOST:
                raise
        finally:
            self.close()

    def ratios(self, now_s: float) -> tuple[dict[int, Answer], float | None]:
        """All ratios from one pair of samples, and the length of the time between them in seconds."""
        answers: dict[int, Answer] = {}
        with errors_become_reasons(self._nv, answers, self.metrics.values()):
            self._sample(now_s)
            # The baseline is the newest sample that is old enough, or else the oldest.
            while len(self._samples) > 1 and now_s - self._samples[1][0] >= MIN_SPAN_S:
                self._free(self._samples.popleft()[1])
            span_s = now_s - self._samples[0][0]
            if span_s < MIN_SPAN_S:
                why = f"no sample of the counters is {MIN_SPAN_S:g} s old yet"
                return dict.fromkeys(self.metrics.values(), why), None
            for number, answer in zip(self.metrics.values(), self._ask()):
                code = answer.nvmlReturn
                answers[number] = f"NVML says {self._nv.NVMLError(code)}" if code else answer.value * PERCENT
            return answers, span_s
        return answers, None

    def close(self) -> None:
        while self._samples:
            self._free(self._samples.popleft()[1])

    def _sample(self, now_s: float) -> None:
        sample = self._nv.nvmlGpmSampleAlloc()
        try:
            self._take(sample)
        except self._nv.NVMLError:
            self._free(sample)
            raise
        self._samples.append((now_s, sample))

    def _free(self, sample: Any) -> None:
        with suppress(self._nv.NVMLError):
            self._nv.nvmlGpmSampleFree(sample)

    def _ask(self) -> list[Any]:
        """Answers to all metrics over the time from the oldest sample to the newest, in one call."""
        (_, first), (_, last) = self._samples[0], self._samples[-1]
        request = self._nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(self.metrics), sample1=first, sample2=last)
        for metric, place in zip(self.metrics, request.metrics):
            place.metricId, place.nvmlReturn = metric, UNKNOWN  # until NVML says otherwise
        self._nv.nvmlGpmMetricsGet(request)
        return list(request.metrics[: len(self.metrics)])


def open_nvml(device_uuid: str, *, own_pids: Callable[[], set[int]] = own_pids, profile: bool = True) -> NvmlSource:
    """The source for the GPU, or the MIG device, of that UUID.

    own_pids: process ids of this run, called at every reading that finds processes. profile: take GPM's ratios if the
    GPU has them. Raises SensorFailed if there is no NVML, no such GPU, or one that MIG divides.
    """
    hint = "python -m pip uninstall -y pynvml; python -m pip install --force-reinstall nvidia-ml-py"
    try:
        import pynvml as nv
    except ImportError:
        raise SensorFailed("there is no module pynvml, which nvidia-ml-py has", hint) from None
    if not hasattr(nv, "_nvmlGetFunctionPointer"):
        raise SensorFailed("the module pynvml that is imported here is not the one of nvidia-ml-py", hint)
    with ExitStack() as undo:
        try:
            nv.nvmlInit()
            undo.enter_context(suppress(nv.NVMLError))
            undo.callback(nv.nvmlShutdown)
            device = nv.nvmlDeviceGetHandleByUUID(device_uuid)
            with suppress(nv.NVMLError):
                if not device_uuid.startswith("MIG-") and call(nv, "nvmlDeviceGetMigMode", device)[0]:
                    why = f"MIG divides {device_uuid}, whose counters are those of all instances together"
                    raise SensorFailed(why, "CUDA_VISIBLE_DEVICES=MIG-..., one that nvidia-smi -L lists")
            source = NvmlSource(nv, device, own_pids, undo)
            if profile:
                with errors_become_reasons(nv, source.unsupported, GPM.values()):
                    gpm = Gpm(nv, device, device_uuid)
                    source.unsupported |= gpm.unsupported
                    if gpm.metrics:
                        source.name, source.gpm = "nvml-gpm", gpm
                        undo.callback(gpm.close)
        except nv.NVMLError as error:
            hint = "nvidia-smi -L, which lists what the driver has"
            raise SensorFailed(f"NVML does not answer for {device_uuid}: {error}", hint) from None
        source.undo = undo.pop_all()
    return source


class NvmlSource(SensorSource):
    """Readings of one GPU, from one thread at a time. name: nvml-gpm with ratios, else nvml.

    gpm: the ratios that every reading has. unsupported: why numbers are never in a reading, found once, when opened.
    """

    def __init__(self, nv: Any, device: Any, own_pids: Callable[[], set[int]], undo: ExitStack) -> None:
        self.name = "nvml"
        self.undo = undo
        self.unsupported: dict[int, str] = {}
        self._nv, self._device, self._own_pids = nv, device, own_pids
        rows = self._supported_rows()
        self._fields = [row for row in rows if isinstance(row, Field)]
        self._asks = [row for row in rows if isinstance(row, Ask)]
        refusals = {name: self._refusal(name) for name in LISTS}  # processes that compute, and MPS's clients
        self._lists = [] if refusals[LISTS[0]] else [name for name, why in refusals.items() if why is None]
        if why := refusals[LISTS[0]]:
            self.unsupported |= {of.GPU_PROCESSES: why, of.FOREIGN_PROCESSES: why}
        self._event_set: Any = None  # it tells nothing of an Xid before it is registered (nvml.h)
        with errors_become_reasons(nv, self.unsupported, [of.XID]):
            wanted = call(nv, "nvmlDeviceGetSupportedEventTypes", device) & CRITICAL_EVENTS
            if not wanted & XID_EVENT:
                raise nv.NVMLError(NOT_SUPPORTED)
            event_set = call(nv, "nvmlEventSetCreate")
            undo.enter_context(suppress(nv.NVMLError))
            undo.callback(nv.nvmlEventSetFree, event_set)
            nv.nvmlDeviceRegisterEvents(device, wanted, event_set)
            self._event_set = event_set
        self._xid = 0
        self._counted_s: float | None = None
        self.gpm: Gpm | None = None

    def read(self, now_s: float) -> Reading:
        """One reading. now_s: `time.monotonic()`. Counters are in it once in COUNTERS_S, and left out between. Raises
        SensorFailed if the GPU or the driver is gone."""
        nv = self._nv
        answers, span_s = self.gpm.ratios(now_s) if self.gpm else ({}, None)
        skipped: set[int] = COUNTERS
        # A reading that is a hair early is the one that was meant.
        if self._counted_s is None or not 0 <= now_s - self._counted_s < COUNTERS_S - MIN_SPAN_S / 2:
            self._counted_s, skipped = now_s, set()
        if fields := [field for field in self._fields if field.number not in skipped]:
            with errors_become_reasons(nv, answers, [field.number for field in fields]):
                found = nv.nvmlDeviceGetFieldValues(self._device, [field.id for field in fields])
                for field, value in zip(fields, found):
                    code, kind = value.nvmlReturn, VALUE_TYPES[value.valueType]
                    known = f"NVML says {nv.NVMLError(code)}" if code else getattr(value.value, kind) * field.unit
                    answers[field.number] = known
        for ask in self._asks:
            if ask.number not in skipped:
                with errors_become_reasons(nv, answers, [ask.number]):
                    answer = call(nv, ask.function, self._device, *ask.arguments)
                    answers[ask.number] = float(getattr(answer, ask.part) if ask.part else answer) * ask.unit
        if self._event_set is not None:
            try:
                for _ in range(MOST_EVENTS):
                    event = nv.nvmlEventSetWait_v2(self._event_set, 0)
                    self._xid = event.eventData if event.eventType == XID_EVENT else self._xid
                answers[of.XID] = float(self._xid)
            except nv.NVMLError as error:
                answers[of.XID] = float(self._xid) if error.value == TIMEOUT else error_text(error)
        if self._lists:
            with errors_become_reasons(nv, answers, [of.GPU_PROCESSES, of.FOREIGN_PROCESSES]):
                pids = {process.pid for name in self._lists for process in call(nv, name, self._device)}
                answers[of.GPU_PROCESSES] = float(len(pids))
                foreign = pids - self._own_pids() if pids else pids
                answers[of.FOREIGN_PROCESSES] = float(len(foreign))
                if foreign and foreign == pids:
                    why = "none of the GPU's processes is ours: its driver may count them in another namespace"
                    answers[of.FOREIGN_PROCESSES] = why
        return reading_of(answers, span_s)

    def _supported_rows(self) -> list[Field | Ask]:
        """The first row of each number that the GPU does not refuse. `unsupported` gets the reason if all are."""
        nv, refusals = self._nv, dict[Field | Ask, str | None]()
        try:
            found = nv.nvmlDeviceGetFieldValues(self._device, [field.id for field in FIELDS])
        except nv.NVMLError as error:
            refusals |= dict.fromkeys(FIELDS, error_text(error))
        else:
            for field, answer in zip(FIELDS, found):
                why = f"NVML says {nv.NVMLError(answer.nvmlReturn)}"
                if field.wide and not answer.nvmlReturn and answer.valueType not in WIDE_TYPES:
                    why = f"field {field.id} of this driver is something else"
                elif answer.nvmlReturn not in REFUSED and not (answer.nvmlReturn and field.wide):
                    why = ""
                refusals[field] = why or None
        have = {field.number for field, why in refusals.items() if why is None}
        refusals |= {a: self._refusal(a.function, *a.arguments) for a in ASKS if a.number not in have}
        rows: dict[int, Field | Ask] = {}
        for row, refusal in refusals.items():
            if refusal is None:
                rows.setdefault(row.number, row)
            else:
                self.unsupported.setdefault(row.number, refusal)
        for number in rows:
            self.unsupported.pop(number, None)
        return list(rows.values())

    def _refusal(self, function: str, *arguments: Any) -> str | None:
        """The reason why NVML refuses the call for good; None if it answers, or fails in a way that may pass."""
        try:
            call(self._nv, function, self._device, *arguments)
        except self._nv.NVMLError as error:
            why = error_text(error)
            return why if error.value in REFUSED else None
        return None
