"""A stand-in for DCGM's Python bindings and the host engine behind them.

Constructed from the source of NVIDIA/DCGM (testing/python3: dcgm_structs.py, dcgm_fields.py, dcgm_agent.py of 3.1 and
of 4.6), not recorded from a running DCGM. `install` writes the three modules of one release into a folder, as the
packages do; what they do is here. Names, arguments, structures, error classes and return codes are the real ones';
the engine is a dictionary.
"""
# ruff: noqa: N802, N803, N815 - the names are DCGM's

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field
from pathlib import Path

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-8888-7777-6666-555555555555"

UNKNOWN_FIELD, NO_DATA, CONNECTION_NOT_VALID, LIBRARY_NOT_FOUND = -13, -14, -21, -25
DUPLICATE_KEY, REQUIRES_ROOT, MODULE_NOT_LOADED = -26, -29, -33
MESSAGES = {
    UNKNOWN_FIELD: "Unknown field",
    NO_DATA: "No data is available",
    CONNECTION_NOT_VALID: "The connection to the host engine is not valid any longer",
    LIBRARY_NOT_FOUND: "DCGM library could not be found",
    DUPLICATE_KEY: "Duplicate key passed to function",
    REQUIRES_ROOT: "This operation is not supported when the host engine is running as non root",
    MODULE_NOT_LOADED: "This request is serviced by a module of DCGM that is not currently loaded",
}


class DCGMError(Exception):
    def __init__(self, value):
        super().__init__(value)
        self.value = value

    def __str__(self):
        return MESSAGES.get(self.value, f"DCGM Error with code {self.value}")


class FieldValueUnion(ctypes.Union):
    _fields_ = (("i64", ctypes.c_int64), ("dbl", ctypes.c_double), ("str", ctypes.c_char * 256))


class FieldValue(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("fieldId", ctypes.c_ushort),
        ("fieldType", ctypes.c_short),
        ("status", ctypes.c_int),
        ("ts", ctypes.c_int64),
        ("value", FieldValueUnion),
    )


class ConnectParams(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("persistAfterDisconnect", ctypes.c_uint),
        ("timeoutMs", ctypes.c_uint),
        ("addressIsUnixSocket", ctypes.c_uint),
    )


@dataclass
class Identifiers:
    uuid: str


@dataclass
class Attributes:
    identifiers: Identifiers


@dataclass
class Engine:
    """What the host engine knows. Values by field: raw, in DCGM's unit, double if a float; stamps in microseconds."""

    gpus: dict[int, str] = field(default_factory=lambda: {0: OTHER_GPU, 1: GPU})
    values: dict[int, float] = field(default_factory=dict)
    stamps: dict[int, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)  # why a field cannot be watched
    fields: range = range(1425)  # that the engine knows, whatever the client does
    has_library: bool = True
    running: bool = True
    collected: set[int] = field(default_factory=set)  # what was watched when all was last updated
    connections: set[int] = field(default_factory=set)
    addresses: list[str] = field(default_factory=list)
    groups: dict[int, list[int]] = field(default_factory=dict)
    field_groups: dict[int, list[int]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    watches: dict[int, tuple[int, list[int], int]] = field(default_factory=dict)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(100))

    def on_progress(self, number: int, value: float, stamp_us: int) -> None:
        self.values[number], self.stamps[number] = value, stamp_us

    def stop(self) -> None:
        self.running = False

    @property
    def watched(self) -> set[int]:
        return {number for _, numbers, _ in self.watches.values() for number in numbers}

    def check(self, handle) -> None:
        if not self.running or handle not in self.connections:
            raise DCGMError(CONNECTION_NOT_VALID)

    def named(self, name: str) -> int:
        if name in self.names.values():
            raise DCGMError(DUPLICATE_KEY)
        number = next(self.numbers)
        self.names[number] = name
        return number

    def answer(self, number: int) -> FieldValue:
        told = FieldValue(fieldId=number, ts=self.stamps.get(number, 0))
        value = self.values.get(number) if number in self.collected else None
        told.status = self.statuses.get(number, 0 if value is not None else NO_DATA)
        told.fieldType = ord("d" if isinstance(value, float) else "i")
        if isinstance(value, float):
            told.value.dbl = value
        elif value is not None:
            told.value.i64 = value
        return told


class Agent:
    """The functions of dcgm_agent that a client needs; c_void_p handles are plain numbers here."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def dcgmInit(self):
        return 0

    def dcgmStartEmbedded(self, opMode):
        raise AssertionError("an engine of one's own disturbs the one that runs")

    dcgmStartEmbedded_v2 = dcgmStartEmbedded

    def dcgmConnect_v2(self, ip_address, connectParams, version=2):
        assert connectParams.persistAfterDisconnect == 0
        assert connectParams.version == version
        if not self.engine.running:
            raise DCGMError(CONNECTION_NOT_VALID)
        self.engine.addresses.append(ip_address)
        handle = next(self.engine.numbers)
        self.engine.connections.add(handle)
        return handle

    def dcgmDisconnect(self, dcgm_handle):
        self.engine.check(dcgm_handle)
        self.engine.connections.remove(dcgm_handle)

    def dcgmGetAllDevices(self, dcgm_handle):
        self.engine.check(dcgm_handle)
        return list(self.engine.gpus)

    def dcgmGetDeviceAttributes(self, dcgm_handle, gpuId):
        self.engine.check(dcgm_handle)
        return Attributes(Identifiers(self.engine.gpus[gpuId]))

    def dcgmGroupCreate(self, dcgm_handle, type, groupName):
        self.engine.check(dcgm_handle)
        assert type == 1  # DCGM_GROUP_EMPTY: with 0 all GPUs would be in it
        group = self.engine.named(groupName)
        self.engine.groups[group] = []
        return group

    def dcgmGroupAddDevice(self, dcgm_handle, group_id, gpu_id):
        self.engine.check(dcgm_handle)
        self.engine.groups[group_id].append(gpu_id)

    def dcgmGroupDestroy(self, dcgm_handle, group_id):
        self.engine.check(dcgm_handle)
        del self.engine.groups[group_id], self.engine.names[group_id]

    def dcgmFieldGroupCreate(self, dcgm_handle, fieldIds, fieldGroupName):
        self.engine.check(dcgm_handle)
        if any(number not in self.engine.fields for number in fieldIds):
            raise DCGMError(UNKNOWN_FIELD)
        group = self.engine.named(fieldGroupName)
        self.engine.field_groups[group] = list(fieldIds)
        return group

    def dcgmFieldGroupDestroy(self, dcgm_handle, fieldGroupId):
        self.engine.check(dcgm_handle)
        del self.engine.field_groups[fieldGroupId], self.engine.names[fieldGroupId]

    def dcgmWatchFields(self, dcgm_handle, groupId, fieldGroupId, updateFreq, maxKeepAge, maxKeepSamples):
        self.engine.check(dcgm_handle)
        numbers = self.engine.field_groups[fieldGroupId]
        for number in numbers:
            if number in self.engine.refused:
                raise DCGMError(self.engine.refused[number])
        self.engine.watches[fieldGroupId] = (groupId, numbers, updateFreq)

    def dcgmUnwatchFields(self, dcgm_handle, groupId, fieldGroupId):
        self.engine.check(dcgm_handle)
        self.engine.watches.pop(fieldGroupId, None)

    def dcgmUpdateAllFields(self, dcgm_handle, waitForUpdate):
        self.engine.check(dcgm_handle)
        assert waitForUpdate
        self.engine.collected = self.engine.watched

    def dcgmEntityGetLatestValues(self, dcgmHandle, entityGroup, entityId, fieldIds):
        self.engine.check(dcgmHandle)
        assert entityGroup == 1  # DCGM_FE_GPU
        assert self.engine.gpus[entityId] == GPU
        return (FieldValue * len(fieldIds))(*(self.engine.answer(number) for number in fieldIds))


class Structs:
    """What a client needs of dcgm_structs."""

    DCGMError = DCGMError
    c_dcgmConnectV2Params_v2 = ConnectParams
    c_dcgmConnectV2Params_version = 2
    c_dcgmFieldValue_v1 = FieldValue

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def _dcgmInit(self, libDcgmPath=None):
        if not self.engine.has_library:
            raise DCGMError(LIBRARY_NOT_FOUND)


ENGINES: dict[str, Engine] = {}  # by folder, so that a module finds its own

MODULE = """
from fake_dcgm import ENGINES, {kind}
_of = {kind}(ENGINES[{folder!r}])
globals().update({{name: getattr(_of, name) for name in dir(_of) if not name.startswith("__")}})
"""

FIELDS_3 = """
import dcgm_structs
DCGM_FI_MAX_FIELDS = 1076
DCGM_FI_DEV_GPU_UTIL = 203
DCGM_FI_PROF_SM_ACTIVE = 1002
def DcgmFieldGetById(fieldId):
    return object() if 0 < fieldId < DCGM_FI_MAX_FIELDS else None
"""

FIELDS_4 = """
import warnings
import dcgm_structs
DCGM_FI_MAX_FIELDS = 1425
DCGM_FI_DEV_GPU_UTIL_RATIO = 203
DCGM_FI_PROF_SM_UTIL_RATIO = 1002
_RENAMED = {"DCGM_FI_DEV_GPU_UTIL": 203, "DCGM_FI_PROF_SM_ACTIVE": 1002}
def __getattr__(name):
    if name in _RENAMED:
        warnings.warn(name + " is deprecated", DeprecationWarning, stacklevel=2)
        return _RENAMED[name]
    raise AttributeError(name)
def DcgmFieldGetById(fieldId):
    return object() if 0 < fieldId < DCGM_FI_MAX_FIELDS else None
"""


def install(folder: Path, release: int) -> Engine:
    """Bindings of that release in the folder; the engine that they reach."""
    engine = ENGINES[str(folder)] = Engine()
    for name, kind in (("dcgm_structs", "Structs"), ("dcgm_agent", "Agent")):
        text = MODULE.format(kind=kind, folder=str(folder))
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "dcgm_fields.py").write_text(FIELDS_4 if release == 4 else FIELDS_3, encoding="utf-8")
    return engine
