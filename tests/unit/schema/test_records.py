"""What must agree before records are compared, what makes the key of a measurement and of a series, and how a place, a
difference, a release and a moment are told."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, strategies as st
from strategies import NAMES, measurement

from pytest_slmserve.schema import records
from pytest_slmserve.schema.records import Environment, Replica
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, ReplicaSpec

M = measurement()
SOFTWARE = ("580", "13", "0.26.0", "2.11", "3.12", "Linux")
OWN = {"pytest_slmserve": "1", "url": "http://h/"}
HERE = Environment("cuda", "NVIDIA H200", 1, *SOFTWARE, "Xeon", 16, "one", "c0ffee", **OWN)
KIND = {"platform", "gpu_name", "gpu_memory_bytes", "driver", "vllm", "torch", "cpu", "cores"}


@pytest.mark.parametrize("field", [field for field, value in vars(HERE).items() if value is not None])
def test_environment_key_ignores_irrelevant_fields(field):
    value = getattr(HERE, field)
    other = value + 1 if isinstance(value, int) else "else"
    far = replace(HERE, platform="remote")
    assert (replace(HERE, **{field: other}).key != HERE.key) is (field in KIND)
    assert (replace(far, **{field: other}).key != far.key) is (field in KIND | {"host", "url"})


@pytest.mark.parametrize(("environment", "title", "mode"), [
    (HERE, "NVIDIA H200", "--slm-gpu"), (replace(HERE, gpu_name=None), "unknown GPU", "--slm-gpu"),
    (replace(HERE, platform="cpu"), "Xeon, 16 cores", "--slm-cpu"),
    (Environment("cpu"), "-", "--slm-cpu"),
    (Environment("simulated"), records.SIMULATED, "--slm-simulate"),
    (replace(HERE, platform="remote"), "http://h/", "--slm-endpoint=http://h/"),
    (Environment("remote"), "endpoint", "--slm-endpoint=None"), (Environment(), "unknown GPU", "--slm-endpoint=None"),
])  # fmt: skip
def test_environment_title_follows_platform(environment, title, mode):
    assert title in environment.title and environment.mode == mode


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_environment_scales_cores_with_gpus(gpus, others, each):
    part = replace(HERE, cores=gpus * each, of_gpus=gpus)
    assert (part.on(others).cores, part.on(others).of_gpus) == (others * each, others)
    assert part.per_gpu_key == replace(HERE, cores=others * each, of_gpus=others).per_gpu_key
    assert HERE.on(others) is HERE and replace(part, cores=None).on(2).cores is None


def test_measurement_keys_separate_cases():
    one, other = {"a": 1, "b": None, "c": 3}, {"a": 1, "c": 4, "b": 2, "d": 5}
    told = ["b not known there, 2 here", "c 3 there, 4 here", "d not set there, 5 here"]
    assert records.differences(one, other) == told and records.differences(one, dict(one)) == []
    assert records.differences(other, one, ("left", "right"))[2] == "d 5 left, not set right"
    spec = EngineSpec("m", platform="remote", interface="endpoint", url="http://x/v1")
    assert HERE.of(spec).url == "http://x/v1" and HERE.of(M.spec) is HERE
    facts = M.spec, M.workload.hash, M.load, M.environment
    far, asked = replace(M.environment, driver="else"), replace(M.workload, hash="else")
    changes = {"spec": replace(M.spec, seed=1), "workload": asked, "load": ClosedLoop(9), "environment": far}
    others = [M, *(replace(M, **{name: value}) for name, value in changes.items())]
    assert len({m.key for m in others}) == len({m.id for m in others}) == 5
    apart = replace(M, launch="x", measured_at="y", neighbours=3, resolved=records.Resolved(), run=None)
    assert apart.key == M.key == records.measurement_key(*facts)
    assert len({M.id, replace(M, launch="x").id, replace(M, measured_at="y").id}) == 3
    loads = ClosedLoop(8), ClosedLoop(64), ClosedLoop(1), ClosedLoop(8, window_s=9)
    eight, many, one, longer = (records.series_key(*facts[:2], load, M.environment) for load in loads)
    assert eight == many == one == records.measurement_key(*facts[:2], ClosedLoop(1), M.environment) != longer
    part = Replica("g", 0, 2, "set", "mps")
    changes = {"group": "h", "index": 1, "set": "else", "count": 3, "sharing": "mig", "pinned": True}
    keys = {name: replace(M, replica=replace(part, **{name: value})).key for name, value in changes.items()}
    mine = replace(M, replica=part)
    assert {name for name, key in keys.items() if key != mine.key} == {"index", "set"} and mine.key != M.key
    assert M.alone and replace(M, replica=replace(part, count=1)).alone and not mine.alone
    both, loads = ReplicaSpec((M.spec, M.spec), "mps"), [ClosedLoop(4), OpenLoop(requests=5)]
    alike = records.replica_set(both, ["a", "b"], loads), records.replica_set(both, ("a", "b"), tuple(loads))
    sliced = records.replica_set(replace(both, sharing="time-slicing"), ["a", "b"], loads)
    swapped = records.replica_set(both, ["b", "a"], loads), records.replica_set(both, ["a", "b"], loads[::-1])
    assert len({*alike, sliced, *swapped}) == 4 and alike[0] == alike[1]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.sampled_from(["", "rc1+cu130", ".dev1", "+c", "-x"]))
def test_release_is_leading_numbers(numbers, rest):
    text = ".".join(map(str, numbers)) + rest
    assert records.release(text) == records.release(f"v{text}") == tuple(numbers)
    assert records.release(f"x{text}") == records.release("") == ()


@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2100, 1, 1)), st.integers(-720, 720))
def test_moment_defaults_to_utc(at, minutes):
    assert records.moment(at.isoformat()) == at.replace(tzinfo=UTC)
    zone = timezone(timedelta(minutes=minutes))
    assert records.moment(at.replace(tzinfo=zone).isoformat()) == at.replace(tzinfo=UTC) - timedelta(minutes=minutes)


@given(st.dictionaries(NAMES, st.integers(), max_size=3))
def test_record_tables_count_rows(more):
    assert len(M.run.samples) == len(M.run.samples.request) and len(M.run.steps) == len(M.run.steps.time_s)
    assert len(records.Failures((1, 2), (0.0, 1.0), (1.0, 2.0), ("a", "b"))) == 2
    assert len(records.Telemetry((), 1.0, (1.0, 2.0, 3.0), (None,) * 3, {})) == 3
    hosts = [replace(M, environment=replace(HERE, host=host)) for host in ("a", "b", "a", None)]
    assert records.hosts_of(hosts) == {"a", "b", None}
    facts = {"tflops": 1.0, "gbps": 2.0}
    assert records.known_fields(records.GpuPeaks, {**more, **facts}) == facts
