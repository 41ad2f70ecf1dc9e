"""NVML, NVIDIA's management library, as a source; with GPM, its profiling counters of Hopper and newer GPUs.

GPM's ratios are what DCGM calls PROF fields there: DCGM itself takes them from GPM and divides them by 100
(NVIDIA/DCGM, dcgmlib/src/DcgmGpmManager.cpp). Units of the rest are those of NVIDIA's nvml.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry import nvml_calls as calls
from pytest_slmserve.telemetry.base import MIN_SPAN_S, Reading, known
from pytest_slmserve.telemetry.gpm import GPM, Gpm
from pytest_slmserve.telemetry.host_counters import own_pids

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
    Field(of.POWER, 185, calls.MILLI),
    Field(of.POWER_INSTANT, 186, calls.MILLI),
    Field(of.ENERGY, 83, calls.MILLI),
    Field(of.ECC_DOUBLE_BIT, 4),
    Field(of.REMAPPED_ROWS, 143),
    Field(of.CAPPED_POWER, 74, calls.NANO),
    *(Field(number, 269 + i, calls.NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
    *(Field(number, 251 + i, calls.NANO, wide=True) for i, number in enumerate(SLOWDOWNS)),
)
ASKS = (
    Ask(of.GPU_UTIL, "nvmlDeviceGetUtilizationRates", (), lambda rates: rates.gpu * calls.PERCENT),
    Ask(of.POWER, "nvmlDeviceGetPowerUsage", (), lambda milliwatts: milliwatts * calls.MILLI),
    Ask(of.ENERGY, "nvmlDeviceGetTotalEnergyConsumption", (), lambda millijoules: millijoules * calls.MILLI),
    Ask(of.POWER_LIMIT, "nvmlDeviceGetEnforcedPowerLimit", (), lambda milliwatts: milliwatts * calls.MILLI),
    Ask(of.SM_CLOCK, "nvmlDeviceGetClockInfo", (SM,), lambda megahertz: megahertz * calls.MEGA),
    Ask(of.MEMORY_CLOCK, "nvmlDeviceGetClockInfo", (MEMORY,), lambda megahertz: megahertz * calls.MEGA),
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
    nv = calls.bindings()
    undo = ExitStack()
    try:
        nv.nvmlInit()
        undo.callback(calls.quietly, nv, nv.nvmlShutdown)
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
            gpu, take = calls.place(nv, self._device, device_uuid)
            if not calls.call(nv, "nvmlGpmQueryDeviceSupport", gpu).isSupportedDevice:
                raise nv.NVMLError(calls.NOT_SUPPORTED)
            gpm = Gpm(nv, take)
            self.unsupported |= gpm.leave_out_refused()
        except nv.NVMLError as error:
            self.unsupported |= dict.fromkeys(GPM.values(), calls.said(error))
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
            self.unsupported |= dict.fromkeys((field.number for field in FIELDS), calls.said(error))
            return ()
        return self._first({field: self._field_refusal(field, answer) for field, answer in zip(FIELDS, answers)})

    def _field_refusal(self, field: Field, answer: Any) -> str | None:
        """The reason why the GPU does not have the field; None where it does, or may have it."""
        if answer.nvmlReturn in calls.REFUSED or (answer.nvmlReturn and field.wide):
            return calls.reason(self._nv, answer.nvmlReturn)
        if field.wide and answer.valueType not in WIDE_TYPES:
            return f"field {field.id} of this driver is something else"
        return None

    def _supported_asks(self) -> tuple[Ask, ...]:
        have = {field.number for field in self._fields}
        rows = [ask for ask in ASKS if ask.number not in have]
        return self._first({ask: calls.refusal(self._nv, ask.function, self._device, *ask.arguments) for ask in rows})

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
        refusals = {name: calls.refusal(self._nv, name, self._device) for name in LISTS}
        if why := refusals[LISTS[0]]:
            self.unsupported |= {of.GPU_PROCESSES: why, of.FOREIGN_PROCESSES: why}
            return ()
        return tuple(name for name, why in refusals.items() if why is None)

    def _registered_events(self) -> Any:
        """The set that Xids come to, or None. Those before it is registered are never told (nvml.h)."""
        nv = self._nv
        try:
            wanted = calls.call(nv, "nvmlDeviceGetSupportedEventTypes", self._device) & CRITICAL_EVENTS
            if not wanted & XID_EVENT:
                raise nv.NVMLError(calls.NOT_SUPPORTED)
            event_set = calls.call(nv, "nvmlEventSetCreate")
            self._undo.callback(calls.quietly, nv, nv.nvmlEventSetFree, event_set)
            nv.nvmlDeviceRegisterEvents(self._device, wanted, event_set)
            return event_set
        except nv.NVMLError as error:
            self.unsupported[of.XID] = calls.said(error)
            return None

    def _read_fields(self, rows: Sequence[Field], missing: list[str]) -> dict[int, float | None]:
        if not rows:
            return {}
        try:
            answers = self._nv.nvmlDeviceGetFieldValues(self._device, [field.id for field in rows])
        except self._nv.NVMLError as error:
            return calls.unknown((field.number for field in rows), calls.said(error), missing)
        return {f.number: self._field_value(f, answer, missing) for f, answer in zip(rows, answers)}

    def _field_value(self, field: Field, answer: Any, missing: list[str]) -> float | None:
        if answer.nvmlReturn:
            missing.append(f"{field.number}: {calls.reason(self._nv, answer.nvmlReturn)}")
            return None
        return known(field.number, getattr(answer.value, VALUE_TYPES[answer.valueType]) * field.unit, missing)

    def _read_ask(self, ask: Ask, missing: list[str]) -> float | None:
        try:
            answer = calls.call(self._nv, ask.function, self._device, *ask.arguments)
        except self._nv.NVMLError as error:
            missing.append(f"{ask.number}: {calls.said(error)}")
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
            if error.value != calls.TIMEOUT:
                return calls.unknown([of.XID], calls.said(error), missing)
        return {of.XID: float(self._xid)}

    def _read_processes(self, missing: list[str]) -> dict[int, float | None]:
        if not self._lists:
            return {}
        try:
            pids = {process.pid for name in self._lists for process in calls.call(self._nv, name, self._device)}
        except self._nv.NVMLError as error:
            return calls.unknown((of.GPU_PROCESSES, of.FOREIGN_PROCESSES), calls.said(error), missing)
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
        if not device_uuid.startswith("MIG-") and calls.call(nv, "nvmlDeviceGetMigMode", device)[0]:
            raise SensorFailed(
                f"MIG divides {device_uuid}, whose counters are those of all instances together",
                "CUDA_VISIBLE_DEVICES=MIG-..., one that nvidia-smi -L lists",
            )
