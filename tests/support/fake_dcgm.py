"""A stand-in for DCGM's Python bindings and the host engine behind them.

Constructed from the source of NVIDIA/DCGM (testing/python3: dcgm_structs.py, dcgm_fields.py, dcgm_agent.py of 3.1 and
of 4.6), not recorded from a running DCGM. `install` lets the three modules of one release be imported. Names,
arguments, error classes and return codes are the real ones'; the engine is a dictionary.
"""
# ruff: noqa: N802 - the names are DCGM's

import sys
import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-8888-7777-6666-555555555555"
UNKNOWN_FIELD, NO_DATA, CONNECTION_NOT_VALID, LIBRARY_NOT_FOUND = -13, -14, -21, -25
DUPLICATE_KEY, REQUIRES_ROOT, MODULE_NOT_LOADED = -26, -29, -33
LAST_FIELD = {3: 1076, 4: 1425}


class DCGMError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"DCGM Error with code {value}")


class Engine:
    """The host engine, and the functions of dcgm_agent that a client needs. Values are raw, in DCGM's units, double if
    a float; stamps in microseconds; refused: why a field cannot be watched. Handles are plain numbers."""

    def __init__(self) -> None:
        self.gpus = {0: OTHER_GPU, 1: GPU}
        self.values, self.stamps, self.statuses, self.refused = {}, {}, {}, {}
        self.fields = range(1425)  # that the engine knows, whatever the client does
        self.has_library = self.running = True
        self.addresses, self.collected = [], set()  # what was watched when all was last updated
        self.live, self.groups, self.field_groups, self.watches = {}, {}, {}, {}
        self.numbers = count(100)

    def on_progress(self, number: int, value: float, stamp_us: int) -> None:
        self.values[number], self.stamps[number] = value, stamp_us

    @property
    def watched(self) -> set[int]:
        return {number for _, numbers, _ in self.watches.values() for number in numbers}

    @property
    def left(self) -> list[object]:
        return [*self.live, *self.groups, *self.field_groups, *self.watches]

    def named(self, name: object) -> int:
        if name in self.live.values():
            raise DCGMError(DUPLICATE_KEY)
        self.live[number := next(self.numbers)] = name
        return number

    # What follows a handle is checked to come from a live connection

    def dcgmGetAllDevices(self):
        return list(self.gpus)

    def dcgmGetDeviceAttributes(self, gpu):
        return SimpleNamespace(identifiers=SimpleNamespace(uuid=self.gpus[gpu]))

    def dcgmGroupCreate(self, kind, name):
        assert kind == 1  # DCGM_GROUP_EMPTY: with 0 all GPUs would be in it
        self.groups[group := self.named(name)] = []
        return group

    def dcgmGroupAddDevice(self, group, gpu):
        self.groups[group].append(gpu)

    def dcgmGroupDestroy(self, group):
        del self.groups[group], self.live[group]

    def dcgmFieldGroupCreate(self, numbers, name):
        if any(number not in self.fields for number in numbers):
            raise DCGMError(UNKNOWN_FIELD)
        self.field_groups[group := self.named(name)] = list(numbers)
        return group

    def dcgmFieldGroupDestroy(self, group):
        del self.field_groups[group], self.live[group]

    def dcgmWatchFields(self, group, field_group, every_us, keep_s, keep_samples):
        assert (keep_s, keep_samples) == (30.0, 0)
        numbers = self.field_groups[field_group]
        if why := [self.refused[number] for number in numbers if number in self.refused]:
            raise DCGMError(why[0])
        self.watches[field_group] = (self.groups[group], numbers, every_us)

    def dcgmUnwatchFields(self, group, field_group):
        self.watches.pop(field_group, None)

    def dcgmUpdateAllFields(self, wait):
        assert wait
        self.collected = self.watched

    def dcgmEntityGetLatestValues(self, kind, gpu, numbers):
        assert (kind, self.gpus[gpu]) == (1, GPU)  # DCGM_FE_GPU
        return [self.answer(number) for number in numbers]

    def answer(self, number: int) -> SimpleNamespace:
        value = self.values.get(number) if number in self.collected else None
        status = self.statuses.get(number, NO_DATA if value is None else 0)
        is_double = isinstance(value, float)
        told = SimpleNamespace(**{"dbl" if is_double else "i64": 0 if value is None else value})
        kind, stamp_us = ord("d" if is_double else "i"), self.stamps.get(number, 0)
        return SimpleNamespace(fieldId=number, fieldType=kind, status=status, ts=stamp_us, value=told)


class Agent:
    """dcgm_agent."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def dcgmInit(self):
        return 0

    def dcgmConnect_v2(self, address, how):
        assert vars(how) == {"version": 2, "persistAfterDisconnect": 0, "timeoutMs": 2000}
        if not self.engine.running:
            raise DCGMError(CONNECTION_NOT_VALID)
        self.engine.addresses.append(address)
        return self.engine.named(object())

    def __getattr__(self, name):
        def checked(handle, *arguments):
            if not self.engine.running or handle not in self.engine.live:
                raise DCGMError(CONNECTION_NOT_VALID)
            return called(*arguments)

        called = self.engine.live.__delitem__ if name == "dcgmDisconnect" else getattr(self.engine, name)
        return checked if name != "dcgmDisconnect" else lambda handle: checked(handle, handle)


class Fields:
    """dcgm_fields, of which release 4 has renamed most constants."""

    def __init__(self, release: int) -> None:
        self.release = release

    def __getattr__(self, name):
        if self.release == 4 and name.startswith("DCGM_FI_"):
            warnings.warn(f"{name} is deprecated", DeprecationWarning, stacklevel=2)
            return 0
        raise AttributeError(name)

    def DcgmFieldGetById(self, number):
        return object() if 0 < number < LAST_FIELD[self.release] else None


def install(patch: pytest.MonkeyPatch, folder: Path, release: int) -> Engine:
    """Bindings of that release, which the folder seems to have; returns the engine that they reach."""
    engine = Engine()

    def load():
        if not engine.has_library:
            raise DCGMError(LIBRARY_NOT_FOUND)

    how = {"c_dcgmConnectV2Params_v2": lambda: SimpleNamespace(persistAfterDisconnect=0)}
    structs = SimpleNamespace(DCGMError=DCGMError, _dcgmInit=load, c_dcgmConnectV2Params_version=2, **how)
    modules = {"dcgm_structs": structs, "dcgm_fields": Fields(release), "dcgm_agent": Agent(engine)}
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    (folder / "dcgm_agent.py").touch()
    return engine
