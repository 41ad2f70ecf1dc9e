"""Sensors of a GPU: NVML with its profiling counters (GPM), NVIDIA's DCGM, and the page of a dcgm-exporter.

The units of NVML are those of nvml.h. GPM has the ratios that DCGM calls PROF fields on Hopper and newer GPUs: DCGM
takes them from GPM and divides them by 100 (NVIDIA/DCGM, dcgmlib/src/DcgmGpmManager.cpp).

DCGM is read from a running host engine by its own Python bindings, which belong to one release and are found by their
folder. Only functions that 3.x and 4.x share are used (NVIDIA/DCGM, testing/python3/dcgm_agent.py), and fields by
number, because 4.6 renamed most of them. No engine is started, because two on one host disturb each other (NVIDIA/DCGM
issue 108). Its values are those of the last collection, by default every 30 s, which is too rare for a short window.
"""

import http.client
import math
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Answer, Reading, SensorSource, own_pids, reading_of

PERCENT, MILLI, NANO, MEGA = 1e-2, 1e-3, 1e-9, 1e6
# Numbers are written out if not all releases of nvidia-ml-py from 12 to 13 have the name.
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, UNKNOWN = 3, 4, 10, 13, 999
UNABLE = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
REFUSED = UNABLE | {2, 25, 26}  # argument, version, deprecated: another call or field may work
LOST = {1, 9, 15, 16, 28}  # uninitialized, no driver, GPU lost, reset required, GPU not found: permanent
TICK_S = 0.1  # between two changes of GPM's counters on an H100 and an H200, whoever reads them
POLL_S = 0.005
IDLE = 0.01  # of a tick
IDLE_WITHIN_S = 2.0
GPM = {1: of.ENGINE_ACTIVE, 2: of.SM_ACTIVE, 3: of.SM_OCCUPANCY, 5: of.TENSOR_ACTIVE, 10: of.DRAM_ACTIVE}

SM, MEMORY = 1, 2  # kinds of clocks
MEMORY_V2 = 0x02000028  # the version whose "used" excludes the driver's reserve, as DCGM's number does
XID_EVENT = 0x8
CRITICAL_EVENTS = XID_EVENT | 0x2 | 0x800 | 0x1000 | 0x2000 | 0x4000  # double-bit ECC, failed retirement, poison, lost
MOST_EVENTS = 100  # taken per reading
LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
WIDE_TYPES = (2, 3, 4)
# Counters that only grow may be read rarely, and some are expensive: on an H200 with driver 580, energy took 3.5 ms of
# CPU time and a slowdown 1.1 ms, while any other field took 0.1 ms.
SLOWDOWNS = (of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE)
COUNTERS = {of.ENERGY, of.ECC_DOUBLE_BIT, of.REMAPPED_ROWS, of.CAPPED_POWER, *SLOWDOWNS}
COUNTERS_S = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A quantity that NVML returns for a field `id`, or by a `function`.

    Attributes:
        number: of the sensor.
        arguments: those after the device.
        part: attribute of the answer.
        wide: accept only a 64-bit value.
    """

    number: int
    id: int = 0
    unit: float = 1.0
    function: str = ""
    arguments: tuple[int, ...] = ()
    part: str = ""
    wide: bool = False


# Rows of one number are alternatives, the best first. NVIDIA has moved the slowdowns: nvidia-ml-py 12.575 and 13.580.65
# have them at 251 to 253, 13.580.82 and later at 269 to 271. Each uses the other IDs for power smoothing, which has
# small values. A driver of release 580 may have either, so both are read.
FIELDS = (
    Ask(of.POWER, 185, MILLI),
    Ask(of.POWER_INSTANT, 186, MILLI),
    Ask(of.ENERGY, 83, MILLI),
    Ask(of.ECC_DOUBLE_BIT, 4),
    Ask(of.REMAPPED_ROWS, 143),
    Ask(of.CAPPED_POWER, 74, NANO),
    *(Ask(number, 269 + i, NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
    *(Ask(number, 251 + i, NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
)
FUNCTIONS = (
    Ask(of.GPU_UTIL, function="nvmlDeviceGetUtilizationRates", unit=PERCENT, part="gpu"),
    Ask(of.POWER, function="nvmlDeviceGetPowerUsage", unit=MILLI),
    Ask(of.ENERGY, function="nvmlDeviceGetTotalEnergyConsumption", unit=MILLI),
    Ask(of.POWER_LIMIT, function="nvmlDeviceGetEnforcedPowerLimit", unit=MILLI),
    Ask(of.SM_CLOCK, function="nvmlDeviceGetClockInfo", arguments=(SM,), unit=MEGA),
    Ask(of.MEMORY_CLOCK, function="nvmlDeviceGetClockInfo", arguments=(MEMORY,), unit=MEGA),
    Ask(of.TEMPERATURE, function="nvmlDeviceGetTemperature", arguments=(0,)),
    Ask(of.TEMPERATURE, function="nvmlDeviceGetTemperatureV", arguments=(0,)),
    Ask(of.MEMORY_USED, function="nvmlDeviceGetMemoryInfo", arguments=(MEMORY_V2,), part="used"),
    Ask(of.MEMORY_USED, function="nvmlDeviceGetMemoryInfo", part="used"),
    Ask(of.CLOCK_REASONS, function="nvmlDeviceGetCurrentClocksEventReasons"),
    Ask(of.CLOCK_REASONS, function="nvmlDeviceGetCurrentClocksThrottleReasons"),
)


def quietly(failed: type[Exception], undo: Callable[..., object], *arguments: object) -> None:
    """Undo something. Ignore a failure, because a library that is gone holds nothing."""
    with suppress(failed):
        undo(*arguments)


def call(nv: Any, function: str, *arguments: Any) -> Any:
    """Return the result of a function of NVML. Raise NVMLError if it is missing."""
    if not hasattr(nv, function):
        raise nv.NVMLError(FUNCTION_NOT_FOUND)
    return getattr(nv, function)(*arguments)


def error_text(error: Any) -> str:
    """Return the text of an NVML error. Raise SensorFailed if the GPU will not answer any more."""
    if error.value in LOST:
        why = f"the GPU does not answer any more: {error}"
        raise SensorFailed(why, "Run nvidia-smi, and search the kernel's log for an Xid.") from error
    return f"NVML says {error}"


@contextmanager
def errors_become_reasons(nv: Any, reasons: dict[int, Any], numbers: Iterable[int]) -> Iterator[None]:
    """Store an NVML error of the block in `reasons` for each of the numbers."""
    try:
        yield
    except nv.NVMLError as error:
        reasons |= dict.fromkeys(numbers, error_text(error))


class Gpm:
    """Ratios over the time between two samples of a GPU's profiling counters.

    Attributes:
        metrics: sensor number of each metric.
        unsupported: reason for each number without a metric.

    Raises:
        NVMLError: if the device has no GPM.
    """

    def __init__(self, nv: Any, device: Any, device_uuid: str) -> None:
        gpu = device
        self._take: tuple[Any, ...] = ("nvmlGpmSampleGet", device)
        if device_uuid.startswith("MIG-"):  # the counters are on its GPU, which samples the instance
            gpu = call(nv, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device)
            instance = call(nv, "nvmlDeviceGetGpuInstanceId", device)
            self._take = ("nvmlGpmMigSampleGet", gpu, instance)
        if not call(nv, "nvmlGpmQueryDeviceSupport", gpu).isSupportedDevice:
            raise nv.NVMLError(NOT_SUPPORTED)
        self.metrics = dict(GPM)
        self.unsupported: dict[int, str] = {}
        self._nv = nv
        self._samples: list[tuple[float, Any]] = []  # the baseline, and samples that are too young for one
        try:
            for _ in range(2):  # without time between samples, only refusals mean something
                self._samples.append((0.0, self.sample()))
            for metric, answer in zip(GPM, self.between(self._samples[0][1], self._samples[1][1])):
                if answer.nvmlReturn in UNABLE:
                    self.unsupported[self.metrics.pop(metric)] = error_text(nv.NVMLError(answer.nvmlReturn))
        except nv.NVMLError as error:
            if error.value in UNABLE | LOST:
                raise
        finally:
            self.close()

    def ratios(self, now_s: float) -> tuple[dict[int, Answer], float | None]:
        """Return all ratios, and the seconds that they cover."""
        answers: dict[int, Answer] = {}
        with errors_become_reasons(self._nv, answers, self.metrics.values()):
            self._samples.append((now_s, self.sample()))
            # The baseline is the newest sample that is old enough, or else the oldest one.
            while len(self._samples) > 1 and now_s - self._samples[1][0] >= MIN_SPAN_S:
                self.free(self._samples.pop(0)[1])
            span_s = now_s - self._samples[0][0]
            if span_s < MIN_SPAN_S:
                why = f"no sample of the counters is {MIN_SPAN_S:g} s old yet"
                return dict.fromkeys(self.metrics.values(), why), None
            for number, answer in zip(self.metrics.values(), self.between(self._samples[0][1], self._samples[-1][1])):
                code = answer.nvmlReturn
                answers[number] = f"NVML says {self._nv.NVMLError(code)}" if code else answer.value * PERCENT
            return answers, span_s
        return answers, None

    def close(self) -> None:
        while self._samples:
            self.free(self._samples.pop(0)[1])

    def sample(self) -> Any:
        """Return a sample of the counters; release it with `free`."""
        sample = self._nv.nvmlGpmSampleAlloc()
        try:
            call(self._nv, *self._take, sample)
        except self._nv.NVMLError:
            self.free(sample)
            raise
        return sample

    def free(self, sample: Any) -> None:
        quietly(self._nv.NVMLError, self._nv.nvmlGpmSampleFree, sample)

    def between(self, first: Any, last: Any) -> list[Any]:
        """Return the answers to all metrics between two samples."""
        request = self._nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(self.metrics), sample1=first, sample2=last)
        for metric, place in zip(self.metrics, request.metrics):
            place.metricId, place.nvmlReturn = metric, UNKNOWN  # until NVML says otherwise
        self._nv.nvmlGpmMetricsGet(request)
        return list(request.metrics[: len(self.metrics)])


class BusyClock:
    """Seconds in which a kernel ran on a GPU, counted between moments at which it was idle.

    The counters change every TICK_S. Read at arbitrary moments, the busy seconds of a window of a second or two are
    wrong by several percent. A lap therefore ends with an idle tick, and counts in whole ticks. A tick shows only as a
    change of the busy share since the last lap, so there is no sign of one while that share is 0.

    Args:
        lost: error that the calls of `gpm` raise.
    """

    def __init__(self, gpm: Gpm, lost: type[Exception]) -> None:
        self._gpm, self._lost = gpm, lost
        self._place = [*gpm.metrics.values()].index(of.ENGINE_ACTIVE)
        self._since: tuple[float, Any, bool] | None = None  # by the monotonic clock, a sample, and whether at a tick

    def lap(self) -> float | None:
        """Wait until the GPU has been idle for a whole tick, and return the busy seconds since the last lap.

        None for the first lap. If no idle tick is seen within IDLE_WITHIN_S, or the counters fail, it is None for this
        lap and the next.
        """
        gpm, until = self._gpm, time.monotonic() + IDLE_WITHIN_S
        try:
            if self._since is None:
                self._since = time.monotonic(), gpm.sample(), False
            since_s, since, exact = self._since
            ticks, share = list[tuple[float, float]](), None  # times and shares
            while (now_s := time.monotonic()) < until:
                now = gpm.sample()
                try:
                    before, share = share, self._share(since, now)
                except self._lost:
                    gpm.free(now)
                    raise
                if before is not None and share != before:
                    ticks.append((now_s, share))
                    if (busy_s := busy_until_idle(since_s, ticks, exact)) is not None:
                        gpm.free(since)
                        self._since = now_s, now, True
                        return busy_s if exact else None
                gpm.free(now)
                time.sleep(POLL_S)
            self.close()
            self._since = time.monotonic(), gpm.sample(), False  # the next work of the GPU shows ticks
        except self._lost:
            self.close()
        return None

    def _share(self, first: Any, last: Any) -> float:
        answer = self._gpm.between(first, last)[self._place]
        return 0.0 if answer.nvmlReturn or math.isnan(answer.value) else round(answer.value * PERCENT, 9)

    def close(self) -> None:
        if self._since:
            self._gpm.free(self._since[1])
            self._since = None


def busy_until_idle(since_s: float, ticks: Sequence[tuple[float, float]], exact: bool) -> float | None:
    """Return the busy seconds since `since_s`, or None unless the GPU was certainly idle between the last two ticks.

    The busy share then falls as the time grows. A tick that was seen late makes that time wrong by one tick. Two ticks
    are enough if only one count of ticks fits, otherwise three are needed.

    Args:
        ticks: time at which each tick was seen, and the busy share.
        exact: whether `since_s` is a tick too.
    """
    first_s = ticks[0][0]
    last = [(share, TICK_S * round((at_s - first_s) / TICK_S)) for at_s, share in ticks[-3:]]

    def busy_s(before_s: float) -> list[float]:
        return [share * (before_s + after_s) for share, after_s in last]

    def apart_s(found: Sequence[float]) -> float:
        return max(found) - min(found)

    if exact:
        before_s = TICK_S * round((first_s - since_s) / TICK_S)
        tried = [busy_s(before_s + late_s) for late_s in (0.0, TICK_S, -TICK_S)]
        if len(last) > 1 and [apart_s(each[-2:]) < IDLE * TICK_S for each in tried] == [True, False, False]:
            return tried[0][-1]
    else:
        (one, one_s), (other, other_s) = last[0], last[-1]
        tried = [busy_s((other * other_s - one * one_s) / (one - other))] if one > other else [[]]
    best = min(tried, key=lambda each: apart_s(each[-2:]) if each else 0.0)
    return best[-1] if len(best) > 2 and apart_s(best) < IDLE * TICK_S else None


class NvmlSource(SensorSource):
    """Readings of one GPU by NVML, for one thread at a time.

    Attributes:
        unsupported: reason for each number that no reading has.
    """

    def __init__(
        self, nv: Any, device: Any, own_pids: Callable[[], set[int]], undo: ExitStack, each_time: Collection[int] = ()
    ) -> None:
        self.name = "nvml"
        self._each_time = {*each_time}
        self.undo = undo
        self.unsupported: dict[int, str] = {}
        self._nv, self._device, self._own_pids = nv, device, own_pids
        self._asks = self._supported()
        refusals = {name: self._refusal(name) for name in LISTS}  # processes that compute, and MPS's clients
        self._lists = [] if refusals[LISTS[0]] else [name for name, why in refusals.items() if why is None]
        if why := refusals[LISTS[0]]:
            self.unsupported |= {of.GPU_PROCESSES: why, of.FOREIGN_PROCESSES: why}
        self._event_set: Any = None  # it reports no Xid from before its registration (nvml.h)
        with errors_become_reasons(nv, self.unsupported, [of.XID]):
            wanted = call(nv, "nvmlDeviceGetSupportedEventTypes", device) & CRITICAL_EVENTS
            if not wanted & XID_EVENT:
                raise nv.NVMLError(NOT_SUPPORTED)
            event_set = call(nv, "nvmlEventSetCreate")
            undo.callback(quietly, nv.NVMLError, nv.nvmlEventSetFree, event_set)
            nv.nvmlDeviceRegisterEvents(device, wanted, event_set)
            self._event_set = event_set
        self._xid = 0
        self._counted_s = -math.inf
        self.gpm: Gpm | None = None

    def read(self, now_s: float) -> Reading:
        """Return one reading. Most COUNTERS are only in one reading per COUNTERS_S."""
        nv = self._nv
        answers, span_s = self.gpm.ratios(now_s) if self.gpm else ({}, None)
        skipped = COUNTERS - self._each_time
        # A reading may be slightly early.
        if not 0 <= now_s - self._counted_s < COUNTERS_S - MIN_SPAN_S / 2:
            self._counted_s, skipped = now_s, set()
        asks = [ask for ask in self._asks if ask.number not in skipped]
        if fields := [ask for ask in asks if ask.id]:
            with errors_become_reasons(nv, answers, [ask.number for ask in fields]):
                found = nv.nvmlDeviceGetFieldValues(self._device, [ask.id for ask in fields])
                for ask, value in zip(fields, found):
                    code, kind = value.nvmlReturn, VALUE_TYPES[value.valueType]
                    known = f"NVML says {nv.NVMLError(code)}" if code else getattr(value.value, kind) * ask.unit
                    answers[ask.number] = known
        for ask in (ask for ask in asks if ask.function):
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

    def busy_clock(self) -> BusyClock | None:
        """Return a clock with its own samples, which another thread may use."""
        return (
            BusyClock(self.gpm, self._nv.NVMLError)
            if self.gpm and of.ENGINE_ACTIVE in self.gpm.metrics.values()
            else None
        )

    def _supported(self) -> list[Ask]:
        """Return the first way to read each number, and note missing ones in `unsupported`."""
        nv, refusals = self._nv, dict[Ask, str | None]()
        try:
            found = nv.nvmlDeviceGetFieldValues(self._device, [ask.id for ask in FIELDS])
            for ask, answer in zip(FIELDS, found):
                code, refusals[ask] = answer.nvmlReturn, None
                if code in REFUSED or (code and ask.wide):
                    refusals[ask] = f"NVML says {nv.NVMLError(code)}"
                elif ask.wide and answer.valueType not in WIDE_TYPES:
                    refusals[ask] = f"field {ask.id} of this driver is something else"
        except nv.NVMLError as error:
            refusals |= dict.fromkeys(FIELDS, error_text(error))
        have = {ask.number for ask, why in refusals.items() if why is None}
        refusals |= {ask: self._refusal(ask.function, *ask.arguments) for ask in FUNCTIONS if ask.number not in have}
        backwards = [*refusals.items()][::-1]  # the first one of a number stays
        supported = {ask.number: ask for ask, why in backwards if why is None}
        self.unsupported |= {ask.number: why for ask, why in backwards if why and ask.number not in supported}
        return [*supported.values()]

    def _refusal(self, function: str, *arguments: Any) -> str | None:
        """Return the reason why NVML refuses a call permanently."""
        try:
            call(self._nv, function, self._device, *arguments)
        except self._nv.NVMLError as error:
            why = error_text(error)
            return why if error.value in REFUSED else None
        return None


def open_nvml(
    device_uuid: str,
    *,
    own_pids: Callable[[], set[int]] = own_pids,
    profile: bool = True,
    each_time: Collection[int] = (),
) -> NvmlSource:
    """Return the source for the GPU, or the MIG device, with this UUID.

    Args:
        own_pids: returns the process IDs of this run.
        profile: read GPM's ratios if the GPU has them.
        each_time: those of COUNTERS that every reading has.

    Raises:
        SensorFailed: without NVML or the GPU, or if MIG divides it.
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
            undo.callback(quietly, nv.NVMLError, nv.nvmlShutdown)
            device = nv.nvmlDeviceGetHandleByUUID(device_uuid)
            with suppress(nv.NVMLError):
                if not device_uuid.startswith("MIG-") and call(nv, "nvmlDeviceGetMigMode", device)[0]:
                    why = f"MIG divides {device_uuid}, whose counters are those of all instances together"
                    raise SensorFailed(
                        why, "Set CUDA_VISIBLE_DEVICES=MIG-..., to an instance that nvidia-smi -L lists."
                    )
            source = NvmlSource(nv, device, own_pids, undo, each_time)
            if profile:
                with errors_become_reasons(nv, source.unsupported, GPM.values()):
                    gpm = Gpm(nv, device, device_uuid)
                    source.unsupported |= gpm.unsupported
                    if gpm.metrics:
                        source.name, source.gpm = "nvml-gpm", gpm
                        undo.callback(gpm.close)
        except nv.NVMLError as error:
            hint = "Run nvidia-smi -L, which lists the GPUs that the driver has."
            raise SensorFailed(f"NVML does not answer for {device_uuid}: {error}", hint) from None
        source.undo = undo.pop_all()
    return source


# DCGM

DEFAULT_FOLDERS = (
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
ADDRESS = "localhost:5555"  # where a host engine listens by default
AUTO = "--slm-telemetry auto"

# DCGM's units in one of ours: percent, mJ, ns, MHz and MiB. The others are the same.
PER_UNIT: dict[int, float] = {
    of.GPU_UTIL: 100,  # a percentage, though 4.6 calls it a ratio (dcgmlib/src/DcgmCacheManager.cpp)
    of.ENERGY: 1000,
    **dict.fromkeys((of.CAPPED_POWER, *SLOWDOWNS), 1_000_000_000),
    **dict.fromkeys((of.SM_CLOCK, of.MEMORY_CLOCK), 1e-6),
    of.MEMORY_USED: 2**-20,
}

# These, and the three after each, are reasons and not values (NVIDIA/DCGM, dcgmlib/dcgm_structs.h).
BLANK_INT32, BLANK_INT64, BLANK_FP64 = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
WHY_BLANK = ("blank", "not found", "not supported", "not permissioned")

_GPU_ENTITY, _EMPTY_GROUP, _DOUBLE = 1, 1, "d"  # DCGM_FE_GPU, DCGM_GROUP_EMPTY, DCGM_FT_DOUBLE
_CONNECT_MS = 2000
_KEPT_S = 30.0  # how long the engine keeps values; only the last is read


def in_our_unit(number: int, value: float) -> Answer:
    """Return a DCGM value in SI units and ratios of 1, or the reason for none."""
    # Integers must be int, because a float cannot distinguish large blanks.
    for base in (BLANK_INT32, BLANK_INT64, BLANK_FP64):
        if base <= value < base + len(WHY_BLANK):
            return WHY_BLANK[int(value - base)]
    if value >= (BLANK_INT64 if isinstance(value, int) else BLANK_FP64):
        return WHY_BLANK[0]
    try:
        ours = value / PER_UNIT.get(number, 1)
    except OverflowError:
        return "an integer that is too large"
    if not math.isfinite(ours):
        return f"{ours}"
    return f"{ours:g}, which is below 0" if ours < 0 and number != of.TEMPERATURE else ours


class DcgmSource(SensorSource):
    """Values of one GPU by DCGM, each returned once.

    Attributes:
        unsupported: reason for each missing field. Profiling counters need root before Hopper.

    Raises:
        SensorFailed: without the GPU or a field; the bindings raise other errors.
    """

    name = "dcgm"

    def __init__(
        self, modules: Sequence[Any], address: str, interval_s: float, device_uuid: str, undo: ExitStack
    ) -> None:
        self.interval_s = max(interval_s, MIN_SPAN_S)  # of the engine's watch
        self.unsupported: dict[int, str] = {}
        self.undo = undo
        structs, fields, self._agent = modules
        self._address, self._failed = address, structs.DCGMError
        self._stamps_us: dict[int, int] = {}
        self._profiled_us: int | None = None
        structs._dcgmInit()
        self._agent.dcgmInit()
        how = structs.c_dcgmConnectV2Params_v2()  # all zero: a TCP address, and watches end with the connection
        how.version, how.timeoutMs = structs.c_dcgmConnectV2Params_version, _CONNECT_MS
        self._handle = self._agent.dcgmConnect_v2(address, how)
        undo.callback(quietly, self._failed, self._agent.dcgmDisconnect, self._handle)
        numbers = self._agent.dcgmGetAllDevices(self._handle)
        gpus = {self._agent.dcgmGetDeviceAttributes(self._handle, gpu).identifiers.uuid: gpu for gpu in numbers}
        if device_uuid not in gpus:
            there = ", ".join(gpus) or "none"
            raise SensorFailed(f"DCGM at {address} does not know the GPU {device_uuid}; it knows {there}", AUTO)
        self._gpu = gpus[device_uuid]
        # All clients of an engine share the names of groups.
        self._name = f"pytest-slmserve-{uuid.uuid4().hex}"
        self._group = self._agent.dcgmGroupCreate(self._handle, _EMPTY_GROUP, self._name)
        undo.callback(quietly, self._failed, self._agent.dcgmGroupDestroy, self._handle, self._group)
        self._agent.dcgmGroupAddDevice(self._handle, self._group, self._gpu)
        wanted = [number for number in of.SENSORS if number < of.OURS]
        theirs = [number for number in wanted if fields.DcgmFieldGetById(number) is not None]
        self.unsupported |= {n: "this release of DCGM does not know it" for n in wanted if n not in theirs}
        self._watch([number for number in theirs if number not in of.PROFILED])
        self._watch([number for number in theirs if number in of.PROFILED])
        self.numbers = [number for number in theirs if number not in self.unsupported]
        if not self.numbers:
            raise SensorFailed(f"DCGM watches nothing for us: {[*self.unsupported.values()][-1]}", AUTO)
        self._agent.dcgmUpdateAllFields(self._handle, 1)

    def read(self, now_s: float) -> Reading:
        """Return the values that are newer than those of the last reading."""
        try:
            found = self._agent.dcgmEntityGetLatestValues(self._handle, _GPU_ENTITY, self._gpu, self.numbers)
        except self._failed as error:
            why = f"DCGM's host engine at {self._address} does not answer any more: {error}"
            raise SensorFailed(why) from error
        answers: dict[int, Answer] = {}
        for each in found:
            raw = each.value.dbl if chr(each.fieldType) == _DOUBLE else each.value.i64
            answer = str(self._failed(each.status)) if each.status else in_our_unit(each.fieldId, raw)
            if not isinstance(answer, str) and each.ts <= self._stamps_us.get(each.fieldId, -1):
                answer = "not updated"
            elif not each.status:
                self._stamps_us[each.fieldId] = each.ts
            answers[each.fieldId] = answer
        reading = reading_of(answers)
        # The span is the time between profiling counters by the engine's clock: one to two watch intervals, because a
        # mean reaches back to the newest sample that is an interval old (NVIDIA/DCGM,
        # dcgmlib/src/DcgmGpmManager.cpp).
        stamps_us = [a.ts for a in found if a.fieldId in of.PROFILED and reading.values[a.fieldId] is not None]
        if not stamps_us:
            return reading
        last_us, self._profiled_us = self._profiled_us, max(stamps_us)
        since_s = 0.0 if last_us is None else (self._profiled_us - last_us) / 1e6
        return replace(reading, span_s=min(max(since_s, self.interval_s), 2 * self.interval_s))

    def _watch(self, numbers: Sequence[int]) -> None:
        """Watch these fields, or without the ones that DCGM refuses."""
        if not numbers:
            return
        agent, handle = self._agent, self._handle
        try:
            with ExitStack() as undo:  # a field group whose watch is refused is destroyed
                group = agent.dcgmFieldGroupCreate(handle, numbers, f"{self._name}-{numbers[0]}-{len(numbers)}")
                undo.callback(quietly, self._failed, agent.dcgmFieldGroupDestroy, handle, group)
                undo.callback(quietly, self._failed, agent.dcgmUnwatchFields, handle, self._group, group)
                agent.dcgmWatchFields(handle, self._group, group, round(self.interval_s * 1e6), _KEPT_S, 0)
                self.undo.enter_context(undo.pop_all())
        except self._failed as error:
            if len(numbers) == 1:
                self.unsupported[numbers[0]] = str(error)
                return
            middle = len(numbers) // 2
            self._watch(numbers[:middle])
            self._watch(numbers[middle:])


def open_dcgm(
    device_uuid: str, *, address: str = ADDRESS, interval_s: float, folders: Sequence[Path] = DEFAULT_FOLDERS
) -> DcgmSource:
    """Return the source for the GPU with this UUID at DCGM's host engine.

    Args:
        address: host:port of the engine.
        interval_s: time between two collections.
        folders: where the bindings may be.

    Raises:
        SensorFailed: if the bindings, the engine or the GPU are missing.
    """
    folder = next((folder for folder in folders if (folder / "dcgm_agent.py").is_file()), None)
    if folder is None:
        where = " or ".join(str(folder) for folder in folders)
        raise SensorFailed(f"DCGM's Python bindings are not in {where}", f"Install DCGM, or use {AUTO}.")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # users cannot fix warnings about this code
            modules = [import_module(name) for name in ("dcgm_structs", "dcgm_fields", "dcgm_agent")]
    except Exception as error:  # code that is not ours
        raise SensorFailed(f"DCGM's Python bindings in {folder} cannot be imported: {error!r}", AUTO) from error
    finally:
        sys.path.remove(str(folder))
    with ExitStack() as undo:
        try:
            source = DcgmSource(modules, address, interval_s, device_uuid, undo)
        except (modules[0].DCGMError, AttributeError, AssertionError) as error:  # what bindings raise
            problem = f"DCGM's host engine at {address} does not answer: {error}"
            raise SensorFailed(problem, f"Run `systemctl start nvidia-dcgm`, or use {AUTO}.") from error
        source.undo = undo.pop_all()
    return source


MOST_BYTES = 1 << 22  # of one answer; a page of a server's metrics has about ten thousand
MOST_INTERIM = 8  # responses before the final one


class FinalResponse(http.client.HTTPResponse):
    """The response after interim ones such as 103 Early Hints, of which Python skips only 100."""

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(MOST_INTERIM):
            status: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]
            if not 100 <= status[1] < 200:
                break
            http.client.parse_headers(self.fp)
        return status


def ask_once(
    method: str, url: str, headers: Mapping[str, str], body: str | None, within_s: float
) -> tuple[int, str, str]:
    """Return status, content type and text of an HTTP answer; a long text is cut off.

    Raises:
        OSError, HTTPException: without an answer in time.
        ValueError: for an invalid port.
    """
    until = time.monotonic() + within_s
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=within_s)
    connection.response_class = FinalResponse
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), body, dict(headers))
        wire, answer, text = connection.sock, connection.getresponse(), bytearray()
        while len(text) < MOST_BYTES and (piece := answer.read1(MOST_BYTES)):
            text += piece
            if (left_s := until - time.monotonic()) <= 0:  # a socket's own limit starts again with every byte
                raise TimeoutError(f"no end within {within_s:g} s")
            if not answer.isclosed():  # Python 3.13 closes it and its socket at the end
                wire.settimeout(left_s)
        return answer.status, answer.headers.get("content-type", ""), text.decode(errors="replace")
    finally:
        connection.close()


EXAMPLE = "http://localhost:9400/metrics"
NUMBERS = {name: number for number, sensor in of.SENSORS.items() if number < of.OURS for name in sensor.names}
# Fields that DCGM 4.7 adds to the older ones (1603, 1604, 1611, 1627), in our units (NVIDIA, Field Identifiers).
IN_OUR_UNITS = {
    "DCGM_FI_DEV_SM_CLOCK_HERTZ": of.SM_CLOCK,
    "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ": of.MEMORY_CLOCK,
    "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL": of.ENERGY,
    "DCGM_FI_DEV_FB_USED_BYTES": of.MEMORY_USED,
}
# In DCGM 4.6 another name of field 203, an integer percentage; in 4.7 field 1613, a ratio of 0 to 1.
EITHER = "DCGM_FI_DEV_GPU_UTIL_RATIO"
DRIVER_4_7 = "dcgm_fi_system_driver_version"  # a label that dcgm-exporter has since 4.9, for DCGM 4.7
ON_A_PAGE = (*NUMBERS, *IN_OUR_UNITS, EITHER)
TIMEOUT_S = 2.0
TWO_NAMES = 0.05  # relative difference of a value under its older and its newer name


def samples(page: str, names: Iterable[str]) -> list[Any]:
    """Return the samples on a Prometheus page whose names begin with one of `names`, in any case.

    Raises:
        ValueError: for a line in another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    # The other lines would take most of the time, and after a comment on its type a counter gets another name.
    begins = tuple(name.lower() for name in names)
    lines = "\n".join(line for line in page.split("\n") if line.lower().startswith(begins))
    try:
        return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
    except (ValueError, IndexError) as error:
        raise ValueError(f"the page is not in Prometheus' format: {error}") from error


def _in_dcgms_unit(name: str, value: float, is_new: bool) -> tuple[int | None, float]:
    """Return the sensor number of a name, if its unit is known, and the value in DCGM's unit."""
    if name in IN_OUR_UNITS:
        number = IN_OUR_UNITS[name]
        return number, value * PER_UNIT[number]
    if name != EITHER:
        return NUMBERS[name], value
    # A 1 is 1% in DCGM 4.6, and 100% in 4.7.
    if is_new or value != value // 1:
        return of.GPU_UTIL, value * PER_UNIT[of.GPU_UTIL]
    return None if value == 1 else of.GPU_UTIL, value


def values_of_gpu(page: Sequence[Any], device_uuid: str) -> dict[int, float]:
    """Return the values of one GPU on a page (without UUIDs, of the only GPU), in DCGM's units.

    Raises:
        SensorFailed: if the GPU is missing, MIG divides it, or two lines contradict each other.
    """
    gpus: dict[str, dict[int, float]] = {}
    divided, contradicted, shown = set[str](), dict[str, str](), dict[str, str]()
    is_new = any(sample.name.upper() in IN_OUR_UNITS for sample in page)
    for sample in page:
        name = sample.name.upper()
        if name not in ON_A_PAGE:
            continue
        labels = {label.lower(): text for label, text in sorted(sample.labels.items(), reverse=True)}  # UUID over uuid
        gpu = str(labels.get("uuid") or f"gpu {labels.get('gpu', '?')}")
        key = gpu.lower()
        shown[key] = gpu
        divided |= {key} if labels.get("gpu_i_id") else set()
        known = gpus.setdefault(key, {})
        number, value = _in_dcgms_unit(name, sample.value, is_new or DRIVER_4_7 in labels)
        if number is None:
            continue
        before = known.setdefault(number, value)
        close = TWO_NAMES if name in (*IN_OUR_UNITS, EITHER) else 0.0  # the older one is rounded
        if before != value and abs(before - value) > close * abs(before):
            contradicted[key] = f"{name} of {gpu} twice, as {before:g} and {value:g}"
    mine = device_uuid.lower()
    if mine not in gpus:
        if len(gpus) != 1 or not next(iter(gpus)).startswith("gpu "):
            known_of = f"{device_uuid}, but of {', '.join(sorted(shown.values())) or 'no GPU at all'}"
            hint = "Use the page of the dcgm-exporter on the host that measures."
            raise SensorFailed(f"the page has no values of {known_of}", hint)
        (mine,) = gpus
    if mine in divided:
        why = f"{shown[mine]} is cut into MIG instances: whose values are whose cannot be told"
        raise SensorFailed(why, "Use a whole GPU.")
    if mine in contradicted:
        raise SensorFailed(f"the page has {contradicted[mine]}", "Use a page with one line for each value of a GPU.")
    return gpus[mine]


class ExporterSource(SensorSource):
    """Values of one GPU on the page of a dcgm-exporter, scraped at each reading.

    The age of the first page is unknown, so values are returned after its first change.

    Raises:
        BadUsage: for a URL that is not http or https.
        SensorFailed: without the page or the GPU.
    """

    name = "dcgm-exporter"

    def __init__(self, url: str, device_uuid: str) -> None:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # brackets without an address
            fits = False
        if not fits:
            raise BadUsage(f"{url!r} is not the address of a dcgm-exporter's page", f"--slm-telemetry {EXAMPLE}")
        self._url, self._device_uuid = url, device_uuid
        self._page = self._scraped()
        self._numbers = set(self._page)
        self._updated_s: float | None = None

    def read(self, now_s: float) -> Reading:
        """Return the values of the page if it has changed.

        The span is the time since the last change, because the exporter's interval is unknown.
        """
        page, last = self._scraped(), self._page
        self._numbers |= page.keys()
        if str(sorted(page.items())) == str(sorted(last.items())):  # as text, in which NaN equals NaN
            return reading_of(dict.fromkeys(sorted(self._numbers), "not updated"))
        self._page = page
        answers: dict[int, Answer] = dict.fromkeys(sorted(self._numbers), "not on the page")
        reading = reading_of(answers | {number: in_our_unit(number, raw) for number, raw in page.items()})
        last_s, self._updated_s = self._updated_s, now_s
        profiled = any(reading.values.get(number) is not None for number in of.PROFILED)
        return replace(reading, span_s=now_s - last_s) if last_s is not None and profiled else reading

    def _scraped(self) -> dict[int, float]:
        try:
            status, _, text = ask_once("GET", self._url, {}, None, TIMEOUT_S)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no such port
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: {error}", EXAMPLE) from error
        if status != 200:
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: HTTP {status}", EXAMPLE)
        try:
            return values_of_gpu(samples(text, ON_A_PAGE), self._device_uuid)
        except ValueError as error:
            raise SensorFailed(str(error), EXAMPLE) from error
