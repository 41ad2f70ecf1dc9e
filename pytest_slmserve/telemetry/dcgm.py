"""NVIDIA's DCGM: its own Python bindings, and a host engine that runs already.

The bindings come with DCGM and are found by their folder, for their structures belong to one release of the library.
Of them only the thin functions over the C library are used, whose names 3.x and 4.x share (NVIDIA/DCGM,
testing/python3/dcgm_agent.py), and fields by number: 4.6 renamed most, and to name an old one then warns.
An engine is never started here: two on one host disturb each other (NVIDIA/DCGM issue 108).
"""

from __future__ import annotations

import math
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.base import MIN_SPAN_S, Answer, Reading, reading_of

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
_KEPT_S = 30.0  # how long the engine keeps values; only the last is read


def in_our_unit(number: int, value: float) -> Answer:
    """DCGM's value in SI units and ratios of 1, or the reason why there is none. Integers are given as int, because a
    float cannot distinguish large blanks."""
    for base in (BLANK_INT32, BLANK_INT64, BLANK_FP64):
        if base <= value < base + len(WHY_BLANK):
            return WHY_BLANK[int(value - base)]
    if value >= (BLANK_INT64 if isinstance(value, int) else BLANK_FP64):
        return WHY_BLANK[0]
    try:
        ours = value * MULTIPLY.get(number, 1) / DIVIDE.get(number, 1)
    except OverflowError:
        return "an integer that is too large"
    return ours if math.isfinite(ours) else f"{ours}"


class DcgmSource:
    """The last values of one GPU, each given once: the engine stamps them, and has none newer if it is read too early.

    unsupported: fields that are absent, and why: unknown to the release, or refused, as profiling counters are without
    root before Hopper. undo: what closing it does. Raises SensorFailed, and whatever the bindings raise.
    """

    name = "dcgm"

    def __init__(
        self, modules: Sequence[Any], address: str, interval_s: float, device_uuid: str, undo: ExitStack
    ) -> None:
        self.interval_s = max(interval_s, MIN_SPAN_S)  # of the engine's watch, however often it is read
        self.unsupported: dict[int, str] = {}
        self.undo = undo
        structs, fields, self._agent = modules
        self._address, self._failed = address, structs.DCGMError
        self._stamps_us: dict[int, int] = {}
        self._profiled_us: int | None = None
        structs._dcgmInit()
        self._agent.dcgmInit()
        how = structs.c_dcgmConnectV2Params_v2()  # all zero: a TCP address, and our watches end with the connection
        how.version, how.timeoutMs = structs.c_dcgmConnectV2Params_version, _CONNECT_MS
        self._handle = self._agent.dcgmConnect_v2(address, how)
        undo.callback(self._quietly, self._agent.dcgmDisconnect, self._handle)
        numbers = self._agent.dcgmGetAllDevices(self._handle)
        gpus = {self._agent.dcgmGetDeviceAttributes(self._handle, gpu).identifiers.uuid: gpu for gpu in numbers}
        if device_uuid not in gpus:
            there = ", ".join(gpus) or "none"
            raise SensorFailed(f"DCGM at {address} does not know the GPU {device_uuid}; it knows {there}", AUTO)
        self._gpu = gpus[device_uuid]
        self._group = self._agent.dcgmGroupCreate(self._handle, _EMPTY_GROUP, _unique_name())
        undo.callback(self._quietly, self._agent.dcgmGroupDestroy, self._handle, self._group)
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
        """The values that are newer than those of the last reading. Raises SensorFailed if the engine is gone."""
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
        # The span is that between the profiling counters by the engine's clock: at least the interval watched, and at
        # most two, because a mean reaches back to the newest sample that is an interval old (NVIDIA/DCGM,
        # dcgmlib/src/DcgmGpmManager.cpp) and nothing is known of what came before.
        stamps_us = [a.ts for a in found if a.fieldId in of.PROFILED and reading.values[a.fieldId] is not None]
        if not stamps_us:
            return reading
        last_us, self._profiled_us = self._profiled_us, max(stamps_us)
        since_s = 0.0 if last_us is None else (self._profiled_us - last_us) / 1e6
        return replace(reading, span_s=min(max(since_s, self.interval_s), 2 * self.interval_s))

    def close(self) -> None:
        self.undo.close()

    def _watch(self, numbers: Sequence[int]) -> None:
        """Watch all of them together or, if that is refused, in halves: down to the number that is refused itself."""
        if not numbers:
            return
        agent, handle = self._agent, self._handle
        try:
            with ExitStack() as undo:  # a field group whose watch is refused is destroyed
                group = agent.dcgmFieldGroupCreate(handle, numbers, _unique_name())
                undo.callback(self._quietly, agent.dcgmFieldGroupDestroy, handle, group)
                undo.callback(self._quietly, agent.dcgmUnwatchFields, handle, self._group, group)
                agent.dcgmWatchFields(handle, self._group, group, round(self.interval_s * 1e6), _KEPT_S, 0)
                self.undo.enter_context(undo.pop_all())
        except self._failed as error:
            if len(numbers) == 1:
                self.unsupported[numbers[0]] = str(error)
                return
            middle = len(numbers) // 2
            self._watch(numbers[:middle])
            self._watch(numbers[middle:])

    def _quietly(self, undo: Callable[..., object], *arguments: object) -> None:
        with suppress(self._failed):  # an engine that is gone has forgotten us already
            undo(*arguments)


def open_dcgm(
    device_uuid: str, *, address: str = ADDRESS, interval_s: float, folders: Sequence[Path] = DEFAULT_FOLDERS
) -> DcgmSource:
    """The GPU of that UUID as the host engine at `address` (host:port) sees it, watched from now on.

    interval_s: how often the engine shall look, no less than MIN_SPAN_S. folders: where the bindings may be.
    Raises SensorFailed if the bindings, the engine or the GPU are not there.
    """
    folder = next((folder for folder in folders if (folder / "dcgm_agent.py").is_file()), None)
    if folder is None:
        where = " or ".join(str(folder) for folder in folders)
        raise SensorFailed(f"DCGM's Python bindings are not in {where}", f"install DCGM, or {AUTO}")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of their code is not for our users
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
            raise SensorFailed(problem, f"systemctl start nvidia-dcgm, or {AUTO}") from error
        source.undo = undo.pop_all()
    return source


def _unique_name() -> str:
    """Groups of all clients of an engine share one space of names."""
    return f"pytest-slmserve-{uuid.uuid4().hex}"
