"""DCGM, on bindings and an engine constructed from its source (fake_dcgm.py), of both generations."""

from __future__ import annotations

import importlib
import math
import sys
import warnings

import fake_dcgm
import pytest
from fake_dcgm import GPU, MODULE_NOT_LOADED, OTHER_GPU, REQUIRES_ROOT
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.sensors import (
    CAPPED_POWER,
    CLOCK_REASONS,
    DRAM_ACTIVE,
    ENERGY,
    GPU_UTIL,
    MEMORY_CLOCK,
    MEMORY_USED,
    OURS,
    POWER,
    POWER_LIMIT,
    PROFILED,
    SENSORS,
    SM_ACTIVE,
    SM_CLOCK,
    TEMPERATURE,
    XID,
)
from pytest_slmserve.telemetry.gpu import (
    BLANK_FP64,
    BLANK_INT32,
    BLANK_INT64,
    WHY_BLANK,
    DcgmSource,
    in_our_unit,
    open_dcgm,
)
from pytest_slmserve.telemetry.host import MIN_SPAN_S

MODULES = ("dcgm_structs", "dcgm_fields", "dcgm_agent")
SECOND = 1_000_000


@pytest.fixture(params=[3, 4], ids=["DCGM 3", "DCGM 4"])
def release(request):
    return request.param


@pytest.fixture
def engine(release, tmp_path, monkeypatch):
    """A host engine, and its bindings in a folder: `opened` finds them there and nowhere else."""
    found = fake_dcgm.install(tmp_path, release)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    found.open = lambda uuid=GPU, interval_s=0.25, **more: open_dcgm(
        uuid, interval_s=interval_s, folders=[tmp_path / "not here", tmp_path], **more
    )
    yield found
    for name in MODULES:
        sys.modules.pop(name, None)


def test_each_unit_becomes_ours(engine):
    told = {
        GPU_UTIL: (97, 0.97),
        POWER: (431.25, 431.25),
        ENERGY: (123_456_789, 123_456.789),
        SM_CLOCK: (1980, 1.98e9),
        MEMORY_CLOCK: (3201, 3.201e9),
        MEMORY_USED: (141_000, 141_000 * 2**20),
        TEMPERATURE: (64, 64),
        CLOCK_REASONS: (0x4, 4),
        XID: (31, 31),
        SM_ACTIVE: (0.875, 0.875),
        DRAM_ACTIVE: (0.5, 0.5),
    }
    for number, (raw, _) in told.items():
        engine.on_progress(number, raw, SECOND)
    values = engine.open().read(0.0).values
    assert {number: values[number] for number in told} == {number: ours for number, (_, ours) in told.items()}


def test_nanoseconds_become_seconds_where_the_release_counts_them(engine, release):
    engine.on_progress(CAPPED_POWER, 2_500_000_000, SECOND)
    source = engine.open()
    if release == 3:
        assert CAPPED_POWER not in source.read(0.0).values
        assert source.unsupported[CAPPED_POWER] == "this release of DCGM does not know it"
    else:
        assert source.read(0.0).values[CAPPED_POWER] == 2.5


def test_all_of_dcgms_numbers_of_our_gpu_are_watched_and_none_of_ours(engine, release):
    before = list(sys.path)
    source = engine.open(address="gpu7:5556")
    assert (source.name, engine.addresses, sys.path) == ("dcgm", ["gpu7:5556"], before)
    last = {3: 1076, 4: 1425}[release]
    assert engine.watched == {number for number in SENSORS if number < min(OURS, last)}
    assert set(source.read(0.0).values) == engine.watched
    assert set(source.unsupported) == {number for number in SENSORS if last <= number < OURS}
    assert {tuple(engine.groups[group]) for group, _, _ in engine.watches.values()} == {(1,)}


@pytest.mark.parametrize(("asked_s", "watched_us"), [(0.01, 100_000), (MIN_SPAN_S, 100_000), (0.25, 250_000)])
def test_the_engine_never_looks_more_often_than_is_valid(engine, asked_s, watched_us):
    engine.open(interval_s=asked_s)
    assert {every_us for _, _, every_us in engine.watches.values()} == {watched_us}


def test_a_renamed_constant_is_never_touched(engine, release):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.open().read(0.0)
        if release == 4:
            with pytest.raises(DeprecationWarning):
                sys.modules["dcgm_fields"].DCGM_FI_DEV_GPU_UTIL  # noqa: B018


def test_bindings_that_warn_are_used(engine, tmp_path):
    agent = tmp_path / "dcgm_agent.py"
    warning = "import warnings; warnings.warn('of another time', DeprecationWarning)\n"
    agent.write_text(warning + agent.read_text(encoding="utf-8"), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.open().numbers


# What is given once


def test_each_value_is_given_once_by_its_own_stamp(engine):
    engine.on_progress(POWER, 300.0, SECOND)
    engine.on_progress(SM_ACTIVE, 0.5, SECOND)
    source = engine.open()
    assert source.read(0.0).values[POWER] == 300.0
    engine.on_progress(SM_ACTIVE, 0.25, 2 * SECOND)
    second = source.read(0.25)
    assert (second.values[POWER], second.values[SM_ACTIVE]) == (None, 0.25)
    assert f"{POWER}: not updated" in second.missing
    engine.on_progress(POWER, 300.0, 3 * SECOND)
    assert source.read(0.5).values[POWER] == 300.0


@pytest.mark.parametrize(
    ("later_us", "span_s"),
    [(250_000, 0.25), (100_000, 0.25), (400_000, 0.4), (500_000, 0.5), (5 * SECOND, 0.5)],
)
def test_the_span_is_the_time_between_the_counters(engine, later_us, span_s):
    engine.on_progress(SM_ACTIVE, 0.5, SECOND)
    source = engine.open(interval_s=0.25)
    assert source.read(0.0).span_s == 0.25
    engine.on_progress(SM_ACTIVE, 0.5, SECOND + later_us)
    assert source.read(1.0).span_s == span_s


def test_without_new_counters_there_is_no_span(engine):
    engine.on_progress(SM_ACTIVE, 0.5, SECOND)
    engine.on_progress(POWER, 300.0, SECOND)
    source = engine.open()
    source.read(0.0)
    engine.on_progress(POWER, 300.0, 2 * SECOND)
    assert source.read(0.25).span_s is None


# What is no value


@pytest.mark.parametrize("base", [BLANK_INT32, BLANK_INT64, BLANK_FP64], ids=["int32", "int64", "fp64"])
@pytest.mark.parametrize(
    ("after", "reason"), [(0, "blank"), (1, "not found"), (2, "not supported"), (3, "not permissioned")]
)
@pytest.mark.parametrize("number", [POWER_LIMIT, SM_ACTIVE, ENERGY, MEMORY_USED])
def test_a_blank_is_none_and_says_why(engine, base, after, reason, number):
    engine.on_progress(number, base + after, SECOND)
    reading = engine.open().read(0.0)
    assert reading.values[number] is None
    assert f"{number}: {reason}" in reading.missing


@given(st.floats(BLANK_FP64, allow_nan=False) | st.integers(BLANK_INT64, 2**63 - 1))
def test_all_beyond_a_blank_is_blank(value):
    assert in_our_unit(POWER, value) in WHY_BLANK


@given(st.floats(max_value=1e9) | st.integers(-(2**63), 2**30))
def test_what_a_gpu_can_say_is_no_blank(value):
    assert in_our_unit(POWER, value) not in WHY_BLANK


@given(st.sampled_from([n for n in SENSORS if n < OURS]), st.floats() | st.integers(-(2**63), 2**63 - 1))
def test_a_value_is_finite_or_the_reason_why_there_is_none(number, raw):
    found = in_our_unit(number, raw)
    assert found if isinstance(found, str) else math.isfinite(found)


@pytest.mark.parametrize(
    ("raw", "status", "reason"),
    [
        (float("nan"), 0, "nan"),
        (float("-inf"), 0, "-inf"),
        (0.5, -36, "DCGM Error with code -36"),
        (None, 0, "No data is available"),
    ],
)
def test_a_field_without_a_value_is_none_and_costs_no_other(engine, raw, status, reason):
    engine.on_progress(POWER, 300.0, SECOND)
    if raw is not None:
        engine.on_progress(SM_ACTIVE, raw, SECOND)
    if status:
        engine.statuses[SM_ACTIVE] = status
    reading = engine.open().read(0.0)
    assert (reading.values[POWER], reading.values[SM_ACTIVE], reading.span_s) == (300.0, None, None)
    assert [text for text in reading.missing if text.startswith(f"{SM_ACTIVE}: ")] == [f"{SM_ACTIVE}: {reason}"]


# What is refused


@pytest.mark.parametrize(("status", "words"), [(REQUIRES_ROOT, "non root"), (MODULE_NOT_LOADED, "module")])
def test_refused_counters_are_absent_and_say_why(engine, status, words):
    engine.refused = dict.fromkeys(PROFILED, status)
    engine.on_progress(POWER, 300.0, SECOND)
    source = engine.open()
    reading = source.read(0.0)
    assert reading.values[POWER] == 300.0
    assert not set(PROFILED) & set(reading.values)
    assert all(words in source.unsupported[number] for number in PROFILED)
    assert reading.span_s is None


@pytest.mark.parametrize("number", [SM_ACTIVE, POWER, GPU_UTIL])
def test_one_refused_field_costs_no_other(engine, number):
    engine.refused = {number: MODULE_NOT_LOADED}
    source = engine.open()
    assert number not in engine.watched
    assert set(source.read(0.0).values) == engine.watched
    assert set(PROFILED) - {number} <= engine.watched
    assert engine.field_groups.keys() == engine.watches.keys(), "a field group that is refused is destroyed"


def test_an_engine_older_than_its_client_is_asked_what_it_knows(engine):
    engine.fields = range(1003)
    source = engine.open()
    assert engine.watched == {number for number in SENSORS if number < 1003}
    assert source.unsupported[DRAM_ACTIVE] == "Unknown field"


def test_an_engine_that_refuses_all_is_no_source(engine):
    engine.refused = dict.fromkeys(SENSORS, REQUIRES_ROOT)
    with pytest.raises(SensorFailed, match="watches nothing for us: .* running as non root"):
        engine.open()
    assert_nothing_is_left(engine)


# What is not there


def test_missing_bindings_are_named_with_both_folders(tmp_path):
    with pytest.raises(SensorFailed, match="bindings are not in .*/four or .*/three") as found:
        open_dcgm(GPU, interval_s=0.25, folders=[tmp_path / "four", tmp_path / "three"])
    assert "install DCGM" in found.value.hint


@pytest.mark.parametrize("text", ["raise ImportError('no ctypes')", "def broken(:", "import not_there_at_all"])
def test_broken_bindings_are_no_source(engine, tmp_path, text):
    (tmp_path / "dcgm_agent.py").write_text(text, encoding="utf-8")
    before = list(sys.path)
    with pytest.raises(SensorFailed, match="cannot be imported"):
        engine.open()
    assert sys.path == before


def test_a_missing_library_is_named(engine):
    engine.has_library = False
    with pytest.raises(SensorFailed, match="library could not be found"):
        engine.open()


def test_an_engine_that_does_not_run_is_not_started(engine):
    engine.stop()
    with pytest.raises(SensorFailed, match="localhost:5555 does not answer") as found:
        engine.open()
    assert "systemctl start nvidia-dcgm" in found.value.hint


def test_an_unknown_gpu_is_named_with_those_there(engine):
    with pytest.raises(SensorFailed, match=f"does not know the GPU GPU-0.*{OTHER_GPU}, {GPU}"):
        engine.open("GPU-0")
    assert_nothing_is_left(engine)


def test_bindings_without_what_we_need_are_no_source(engine, tmp_path):
    (tmp_path / "dcgm_structs.py").write_text(
        "class DCGMError(Exception): pass\ndef _dcgmInit(): pass\n", encoding="utf-8"
    )
    with pytest.raises(SensorFailed, match="c_dcgmConnectV2Params_v2"):
        engine.open()


# The end


def assert_nothing_is_left(engine):
    assert not (engine.connections or engine.groups or engine.field_groups or engine.watches or engine.names)


def test_an_engine_that_goes_is_a_failure_and_no_more(engine):
    engine.on_progress(POWER, 300.0, SECOND)
    source = engine.open()
    source.read(0.0)
    engine.stop()
    with pytest.raises(SensorFailed, match="does not answer any more: The connection"):
        source.read(0.25)
    source.close()
    source.close()


def test_a_closed_source_is_a_failure_and_leaves_nothing_in_the_engine(engine):
    source = engine.open()
    assert engine.watches
    source.close()
    assert_nothing_is_left(engine)
    with pytest.raises(SensorFailed):
        source.read(0.0)


def test_two_sources_on_one_engine_do_not_collide(engine):
    first, second = engine.open(), engine.open()
    assert isinstance(first, DcgmSource)
    first.close()
    engine.on_progress(POWER, 300.0, SECOND)
    assert second.read(0.0).values[POWER] == 300.0
    second.close()
    assert_nothing_is_left(engine)
