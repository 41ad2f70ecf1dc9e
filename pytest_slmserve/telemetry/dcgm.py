"""NVIDIA's DCGM: its own Python bindings, and a host engine that runs already.

The bindings come with DCGM and are found by their folder, for their structures belong to one release of the library.
Of them only the thin functions over the C library are used, whose names 3.x and 4.x share (NVIDIA/DCGM,
testing/python3/dcgm_agent.py), and fields by number: 4.6 renamed most, and to name an old one then warns.
An engine is never started here: two on one host disturb each other (NVIDIA/DCGM issue 108).
"""

from __future__ import annotations

import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.base import MIN_SPAN_S, Reading, known

DEFAULT_FOLDERS = (
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
ADDRESS = "localhost:5555"  # where a host engine listens by default
AUTO = "--slm-telemetry auto"

# DCGM's units are percent, mJ, ns, MHz and MiB; the others are ours.
DIVIDE: dict[int, float] = {
    of.GPU_UTIL: 100,  # a percentage, though 4.6 calls it a ratio (dcgmlib/src/DcgmCacheManager.cpp)
    of.ENERGY: 1000,
    **dict.fromkeys((of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE), 1_000_000_000),
}
MULTIPLY: dict[int, float] = {of.SM_CLOCK: 1_000_000, of.MEMORY_CLOCK: 1_000_000, of.MEMORY_USED: 1 << 20}

# These, and the three after each, are no values and say why (NVIDIA/DCGM, dcgmlib/dcgm_structs.h).
BLANK_INT32, BLANK_INT64, BLANK_FP64 = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
WHY_BLANK = ("blank", "not found", "not supported", "not permissioned")

_GPU_ENTITY, _EMPTY_GROUP, _DOUBLE = 1, 1, "d"  # DCGM_FE_GPU, DCGM_GROUP_EMPTY, DCGM_FT_DOUBLE
_CONNECT_MS = 2000
_KEPT_S = 30.0  # how long the engine keeps values for us, who only want the last


def why_blank(value: float) -> str | None:
    """The reason why DCGM has no value, where its value is a blank; None otherwise. Integers come as int: a float
    cannot tell the large ones apart."""
    for base in (BLANK_INT32, BLANK_INT64, BLANK_FP64):
        if base <= value < base + len(WHY_BLANK):
            return WHY_BLANK[int(value - base)]
    return WHY_BLANK[0] if value >= (BLANK_INT64 if isinstance(value, int) else BLANK_FP64) else None


def in_our_unit(number: int, value: float, missing: list[str]) -> float | None:
    """DCGM's value in SI units and ratios of 1; None for no value, and why added to `missing`."""
    if why := why_blank(value):
        missing.append(f"{number}: {why}")
        return None
    return known(number, value * MULTIPLY.get(number, 1) / DIVIDE.get(number, 1), missing)


@dataclass(frozen=True, slots=True)
class _Bindings:
    """The modules of one release; DCGM's errors are `structs.DCGMError`."""

    structs: Any
    fields: Any
    agent: Any


class DcgmSource:
    """The last values of one GPU, each given once: the engine stamps them, and has none newer if we come too early.

    unsupported: fields that are absent, and why: unknown to the release, or refused, as profiling counters are without
    root before Hopper.
    """

    name = "dcgm"

    def __init__(self, bindings: _Bindings, address: str, interval_s: float) -> None:
        self.interval_s = max(interval_s, MIN_SPAN_S)  # of the engine's watch, however often it is asked
        self.unsupported: dict[int, str] = {}
        self._bindings, self._address = bindings, address
        self._undo = ExitStack()
        self._stamps_us: dict[int, int] = {}
        self._profiled_us: int | None = None

    def read(self, now_s: float) -> Reading:
        agent, failed = self._bindings.agent, self._bindings.structs.DCGMError
        try:
            answers = agent.dcgmEntityGetLatestValues(self._handle, _GPU_ENTITY, self._gpu, self.numbers)
        except failed as error:
            raise SensorFailed(f"DCGM's host engine at {self._address} does not answer any more: {error}") from error
        missing: list[str] = []
        values = {answer.fieldId: self._value(answer, missing) for answer in answers}
        profiled = [a.ts for a in answers if a.fieldId in of.PROFILED and values[a.fieldId] is not None]
        return Reading(values, self._span_s(profiled), tuple(missing))

    def close(self) -> None:
        self._undo.close()

    def _value(self, answer: Any, missing: list[str]) -> float | None:
        number = answer.fieldId
        if answer.status:
            missing.append(f"{number}: {self._bindings.structs.DCGMError(answer.status)}")
            return None
        raw = answer.value.dbl if chr(answer.fieldType) == _DOUBLE else answer.value.i64
        value = in_our_unit(number, raw, missing)
        if value is not None and answer.ts <= self._stamps_us.get(number, -1):
            missing.append(f"{number}: not updated")
            return None
        self._stamps_us[number] = answer.ts
        return value

    def _span_s(self, stamps_us: Sequence[int]) -> float | None:
        """Seconds, by the engine's clock, from the last profiling counters to these; None without any.

        At least the interval watched, and at most two: a mean reaches back to the newest sample that is an interval
        old (NVIDIA/DCGM, dcgmlib/src/DcgmGpmManager.cpp), so nothing is known of what came before.
        """
        if not stamps_us:
            return None
        last, self._profiled_us = self._profiled_us, max(stamps_us)
        since_s = 0.0 if last is None else (self._profiled_us - last) / 1e6
        return min(max(since_s, self.interval_s), 2 * self.interval_s)

    def _open(self, device_uuid: str) -> None:
        """Raises SensorFailed, and whatever the bindings raise."""
        agent = self._bindings.agent
        self._handle = self._connected()
        self._gpu = self._gpu_of(device_uuid)
        self._group = agent.dcgmGroupCreate(self._handle, _EMPTY_GROUP, _unique_name())
        self._later(agent.dcgmGroupDestroy, self._handle, self._group)
        agent.dcgmGroupAddDevice(self._handle, self._group, self._gpu)
        theirs = self._known_numbers()
        self._watch([number for number in theirs if number not in of.PROFILED])
        self._watch([number for number in theirs if number in of.PROFILED])
        self.numbers = [number for number in theirs if number not in self.unsupported]
        if not self.numbers:
            raise SensorFailed(f"DCGM watches nothing for us: {[*self.unsupported.values()][-1]}", AUTO)
        agent.dcgmUpdateAllFields(self._handle, 1)

    def _connected(self) -> Any:
        structs, agent = self._bindings.structs, self._bindings.agent
        structs._dcgmInit()
        agent.dcgmInit()
        how = structs.c_dcgmConnectV2Params_v2()  # all zero: a TCP address, and our watches end with the connection
        how.version, how.timeoutMs = structs.c_dcgmConnectV2Params_version, _CONNECT_MS
        handle = agent.dcgmConnect_v2(self._address, how)
        self._later(agent.dcgmDisconnect, handle)
        return handle

    def _gpu_of(self, device_uuid: str) -> int:
        agent = self._bindings.agent
        numbers: list[int] = agent.dcgmGetAllDevices(self._handle)
        gpus = {agent.dcgmGetDeviceAttributes(self._handle, gpu).identifiers.uuid: gpu for gpu in numbers}
        if device_uuid not in gpus:
            there = ", ".join(gpus) or "none"
            raise SensorFailed(f"DCGM at {self._address} does not know the GPU {device_uuid}; it knows {there}", AUTO)
        return gpus[device_uuid]

    def _known_numbers(self) -> list[int]:
        wanted = [number for number in of.SENSORS if number < of.OURS]
        found = [number for number in wanted if self._bindings.fields.DcgmFieldGetById(number) is not None]
        self.unsupported |= {n: "this release of DCGM does not know it" for n in wanted if n not in found}
        return found

    def _watch(self, numbers: Sequence[int]) -> None:
        """All together, or, where that is refused, in halves: down to what is refused itself."""
        if not numbers:
            return
        try:
            self._watch_together(numbers)
        except self._bindings.structs.DCGMError as error:
            if len(numbers) == 1:
                self.unsupported[numbers[0]] = str(error)
                return
            middle = len(numbers) // 2
            self._watch(numbers[:middle])
            self._watch(numbers[middle:])

    def _watch_together(self, numbers: Sequence[int]) -> None:
        agent, handle, group = self._bindings.agent, self._handle, self._group
        with ExitStack() as undo:
            fields = agent.dcgmFieldGroupCreate(handle, numbers, _unique_name())
            undo.callback(self._quietly, agent.dcgmFieldGroupDestroy, handle, fields)
            undo.callback(self._quietly, agent.dcgmUnwatchFields, handle, group, fields)
            agent.dcgmWatchFields(handle, group, fields, round(self.interval_s * 1e6), _KEPT_S, 0)
            self._undo.enter_context(undo.pop_all())

    def _later(self, undo: Callable[..., object], *args: object) -> None:
        self._undo.callback(self._quietly, undo, *args)

    def _quietly(self, undo: Callable[..., object], *args: object) -> None:
        with suppress(self._bindings.structs.DCGMError):  # an engine that is gone has forgotten us already
            undo(*args)


def open_dcgm(
    device_uuid: str, *, address: str = ADDRESS, interval_s: float, folders: Sequence[Path] = DEFAULT_FOLDERS
) -> DcgmSource:
    """The GPU of that UUID as the host engine at `address` (host:port) sees it, watched from now on.

    interval_s: how often the engine shall look, no less than MIN_SPAN_S. folders: where the bindings may be.
    Raises SensorFailed where the bindings, the engine or the GPU are not there.
    """
    bindings = _bindings(folders)
    source = DcgmSource(bindings, address, interval_s)
    try:
        source._open(device_uuid)
    except SensorFailed:
        source.close()
        raise
    except (bindings.structs.DCGMError, AttributeError, AssertionError) as error:  # what bindings raise
        source.close()
        problem = f"DCGM's host engine at {address} does not answer: {error}"
        raise SensorFailed(problem, f"systemctl start nvidia-dcgm, or {AUTO}") from error
    return source


def _bindings(folders: Sequence[Path]) -> _Bindings:
    folder = next((folder for folder in folders if (folder / "dcgm_agent.py").is_file()), None)
    if folder is None:
        where = " or ".join(str(folder) for folder in folders)
        raise SensorFailed(f"DCGM's Python bindings are not in {where}", f"install DCGM, or {AUTO}")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of their code is not for our users
            return _Bindings(*(import_module(name) for name in ("dcgm_structs", "dcgm_fields", "dcgm_agent")))
    except Exception as error:  # code that is not ours
        raise SensorFailed(f"DCGM's Python bindings in {folder} cannot be imported: {error!r}", AUTO) from error
    finally:
        sys.path.remove(str(folder))


def _unique_name() -> str:
    """Groups of all clients of an engine share one space of names."""
    return f"pytest-slmserve-{uuid.uuid4().hex}"
