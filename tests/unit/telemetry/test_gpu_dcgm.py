"""DCGM, on bindings and an engine constructed from its source, of both generations: each value becomes ours and is
given once, blanks say why, what is refused costs nothing else, and the engine is left as it was.

The bindings are made after NVIDIA/DCGM (testing/python3: dcgm_structs.py, dcgm_fields.py, dcgm_agent.py of 3.1 and of
4.6), not recorded from a running DCGM: names, arguments, error classes and return codes are the real ones'."""
# ruff: noqa: N802 - the names are DCGM's

import math
import sys
import warnings
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.telemetry.gpu import BLANK_FP64, BLANK_INT32, BLANK_INT64, WHY_BLANK, in_our_unit, open_dcgm

SECOND = 1_000_000
THEIRS = [number for number in of.SENSORS if number < of.OURS]
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


@pytest.fixture(params=[3, 4], ids=["DCGM 3", "DCGM 4"])
def engine(request, tmp_path, monkeypatch):
    """A host engine, and its bindings in a folder: `open` finds them there and nowhere else."""
    found = install(monkeypatch, tmp_path, request.param)
    found.release, found.folder = request.param, tmp_path
    found.open = lambda uuid=GPU, interval_s=0.25, **more: open_dcgm(
        uuid, interval_s=interval_s, folders=[tmp_path / "not here", tmp_path], **more
    )
    return found


RAW = {
    of.GPU_UTIL: (97, 0.97), of.POWER: (431.25, 431.25), of.ENERGY: (123_456_789, 123_456.789),
    of.SM_CLOCK: (1980, 1.98e9), of.MEMORY_CLOCK: (3201, 3.201e9), of.MEMORY_USED: (141_000, 141_000 * 2**20),
    of.TEMPERATURE: (64, 64), of.CLOCK_REASONS: (0x4, 4), of.XID: (31, 31), of.SM_ACTIVE: (0.875, 0.875),
    of.CAPPED_POWER: (2_500_000_000, 2.5), of.CAPPED_BRAKE: (500_000_000, 0.5), of.ECC_DOUBLE_BIT: (2, 2),
}  # fmt: skip


def test_dcgm_units_are_converted(engine):
    for number, (raw, _) in RAW.items():
        engine.on_progress(number, raw, SECOND)
    source = engine.open()
    absent = {number for number in THEIRS if number >= LAST_FIELD[engine.release]}
    assert source.unsupported.keys() == absent and bool(absent) == (engine.release == 3)
    values = source.read(0.0).values
    assert values.keys() == set(THEIRS) - absent == engine.watched
    known = {number: value for number, value in values.items() if value is not None}
    assert known == {number: ours for number, (_, ours) in RAW.items() if number not in absent}
    source.close()
    engine.fields = range(1003)  # of an engine older than its client, which is asked what it knows
    source = engine.open()
    assert engine.watched == {number for number in THEIRS if number < 1003}
    assert str(UNKNOWN_FIELD) in source.unsupported[of.DRAM_ACTIVE]


@pytest.mark.parametrize(("asked_s", "watched_us"), [(0.01, 100_000), (0.1, 100_000), (0.25, 250_000)])
def test_only_our_gpu_is_watched(engine, asked_s, watched_us):
    before = list(sys.path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as a constant does that was renamed
        source = engine.open(interval_s=asked_s, address="gpu7:5556")
    assert (source.name, engine.addresses, sys.path) == ("dcgm", ["gpu7:5556"], before)
    assert {(tuple(gpus), every_us) for gpus, _, every_us in engine.watches.values()} == {((1,), watched_us)}
    assert source.interval_s == watched_us / 1e6


@pytest.mark.parametrize("moves", [of.POWER, of.SM_ACTIVE])
def test_dcgm_value_is_given_once(engine, moves):
    for number in (of.POWER, of.SM_ACTIVE):
        engine.on_progress(number, 0.0, 0)
    source = engine.open()
    assert source.read(0.0).values[of.POWER] == 0.0
    engine.on_progress(moves, 0.5, 1)
    second = source.read(0.25)
    (stays,) = {of.POWER, of.SM_ACTIVE} - {moves}
    assert (second.values[moves], second.values[stays]) == (0.5, None)
    assert f"{stays}: not updated" in second.missing and (second.span_s is None) == (stays == of.SM_ACTIVE)
    engine.on_progress(stays, 0.0, 1)
    third = source.read(0.5).values
    assert (third[moves], third[stays]) == (None, 0.0), "by its stamp, though its value is the same"


@pytest.mark.parametrize(("later_us", "span_s"), [
    (250_000, 0.25), (100_000, 0.25), (400_000, 0.4), (500_000, 0.5), (5 * SECOND, 0.5),
])  # fmt: skip
def test_span_follows_counter_stamps(engine, later_us, span_s):
    source = engine.open()
    spans = []
    for step in range(3):
        engine.on_progress(of.SM_ACTIVE, 0.5, SECOND + step * later_us)
        engine.on_progress(of.DRAM_ACTIVE, 0.5, SECOND // 2 + step * later_us)  # the newest counts
        spans.append(source.read(step).span_s)
    assert spans == [0.25, span_s, span_s]


@pytest.mark.parametrize("base", [BLANK_INT32, BLANK_INT64, BLANK_FP64], ids=["int32", "int64", "fp64"])
@pytest.mark.parametrize("after", range(4))
def test_blank_dcgm_value_is_explained(engine, base, after):
    reasons = ["blank", "not found", "not supported", "not permissioned"]
    engine.on_progress(of.ENERGY, base + after, SECOND)
    reading = engine.open().read(0.0)
    assert reading.values[of.ENERGY] is None and f"{of.ENERGY}: {reasons[after]}" in reading.missing
    assert {in_our_unit(number, base + after) for number in THEIRS} == {reasons[after]}
    assert isinstance(in_our_unit(of.POWER, base - 1), float)


@given(st.sampled_from(THEIRS), st.floats() | st.integers(-(2**63), 2**63 - 1) | st.floats(BLANK_FP64))
def test_converted_value_is_finite(number, raw):
    found = in_our_unit(number, raw)
    assert found if isinstance(found, str) else math.isfinite(found)
    assert raw > 2**30 or found not in WHY_BLANK, "what a GPU can say is no blank"
    assert isinstance(found, str) or found >= 0 or number == of.TEMPERATURE
    assert in_our_unit(of.TEMPERATURE, -5.0) == -5.0, "only a temperature is below 0"
    assert not raw >= (BLANK_INT64 if isinstance(raw, int) else BLANK_FP64) or found in WHY_BLANK


@pytest.mark.parametrize(("raw", "status", "reason"), [
    (math.nan, 0, "nan"), (-math.inf, 0, "-inf"), (0.5, -36, "-36"), (None, 0, f"{NO_DATA}"),
])  # fmt: skip
def test_failed_field_costs_no_other(engine, raw, status, reason):
    engine.on_progress(of.POWER, 300.0, SECOND)
    if raw is not None:
        engine.on_progress(of.SM_ACTIVE, raw, SECOND)
    if status:
        engine.statuses[of.SM_ACTIVE] = status
    reading = engine.open().read(0.0)
    assert (reading.values[of.POWER], reading.values[of.SM_ACTIVE], reading.span_s) == (300.0, None, None)
    (why,) = [text for text in reading.missing if text.startswith(f"{of.SM_ACTIVE}: ")]
    assert reason in why


@pytest.mark.parametrize(
    "numbers", [of.PROFILED, (of.SM_ACTIVE,), (of.POWER,), (of.GPU_UTIL,), (of.CAPPED_BRAKE,)], ids=str
)
@pytest.mark.parametrize("status", [REQUIRES_ROOT, MODULE_NOT_LOADED])
def test_refused_field_costs_no_other(engine, numbers, status):
    before = engine.open()
    before.close()
    all_of_them = set(before.numbers)
    engine.refused = dict.fromkeys(numbers, status)
    source = engine.open()
    assert engine.watched == set(source.numbers) == set(source.read(0.0).values) == all_of_them - {*numbers}
    assert all(str(status) in source.unsupported[number] for number in all_of_them & {*numbers})
    assert engine.field_groups.keys() == engine.watches.keys(), "a field group that is refused is destroyed"
    source.close()
    assert not engine.left


ALL_REFUSED = dict.fromkeys(of.SENSORS, REQUIRES_ROOT)
PARAMETERS, AUTO = "c_dcgmConnectV2Params_v2", "--slm-telemetry auto"
NOT_THERE = {
    "refuses all": (lambda e: vars(e).update(refused=ALL_REFUSED), GPU, [REQUIRES_ROOT], AUTO),
    "no library": (lambda e: vars(e).update(has_library=False), GPU, [LIBRARY_NOT_FOUND], "nvidia-dcgm"),
    "does not run": (lambda e: vars(e).update(running=False), GPU, ["localhost:5555"], "systemctl start nvidia-dcgm"),
    "unknown GPU": (lambda e: None, "GPU-0", ["GPU-0", f"{OTHER_GPU}, {GPU}"], AUTO),
    "no GPU": (lambda e: e.gpus.clear(), "GPU-0", ["GPU-0", "none"], AUTO),
    "lacks what we need": (lambda e: vars(sys.modules["dcgm_structs"]).pop(PARAMETERS), GPU, [PARAMETERS], AUTO),
}


@pytest.mark.parametrize(("spoil", "uuid", "facts", "hint"), NOT_THERE.values(), ids=NOT_THERE)
def test_unavailable_dcgm_is_explained(engine, spoil, uuid, facts, hint):
    spoil(engine)
    with refused(*facts, kind=SensorFailed, hint=hint):
        engine.open(uuid)
    assert not engine.left


@pytest.mark.parametrize("text", ["raise ImportError('no ctypes')", "def broken(:", "import not_there_at_all"])
def test_broken_dcgm_bindings_are_refused(engine, monkeypatch, text):
    with refused(f"{engine.folder}/four or {engine.folder}/three", kind=SensorFailed, hint="Install DCGM"):
        open_dcgm(GPU, interval_s=0.25, folders=[engine.folder / "four", engine.folder / "three"])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    agent = sys.modules.pop("dcgm_agent")
    script = engine.folder / "dcgm_agent.py"
    script.write_text(text, encoding="utf-8")
    before = list(sys.path)
    with refused(engine.folder, kind=SensorFailed, hint=AUTO):
        engine.open()
    assert sys.path == before
    monkeypatch.setitem(sys.modules, "the_agent", agent)
    warns = "warnings.warn('of another time', DeprecationWarning)"
    script.write_text(f"import sys, warnings\nsys.modules[__name__] = sys.modules['the_agent']\n{warns}", "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.open().numbers


@pytest.mark.parametrize("end", ["stopped", "closed"])
def test_two_dcgm_sources_never_collide(engine, end):
    first, source = engine.open(), engine.open()
    first.close()
    engine.on_progress(of.POWER, 300.0, SECOND)
    assert source.read(0.0).values[of.POWER] == 300.0
    source.close()
    assert not engine.left
    source = engine.open()
    source.read(0.0)
    source.close() if end == "closed" else vars(engine).update(running=False)
    with pytest.raises(SensorFailed, match=f"localhost:5555.*{CONNECTION_NOT_VALID}"):
        source.read(0.25)
    source.close(), source.close()
    assert bool(engine.left) == (end == "stopped")
