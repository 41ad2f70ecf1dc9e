"""Measurements as results of asv: planted costs come out, dearer is a larger number, and old values stay."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_records import BUSY, engine_alone
from strategies import H200, RESOLVED, measurement, planted_telemetry

from pytest_slmserve.commands import asv
from pytest_slmserve.commands.asv import START, BenchmarkHost, Rows, Value
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

statistics = pytest.importorskip("asv_runner.statistics", reason="needs asv")

COMMIT = "c6ef7bc849a86350bcc5e10a995c6a715a4bc8ca", 1_784_937_600
COSTS = ("seconds_per_1000_requests", "ms_per_output_token", "joules_per_1000_output_tokens")
READY = replace(RESOLVED, ready_s=40.0)
KEPT = sorted((Path(__file__).parents[3] / "benchmarks/asv/results").glob("nvidia-h200/*-vllm-*.json"))


def watched(m: Measurement) -> Measurement:
    """The same with the readings of a GPU that is well: 400 W at a limit of 700 W."""
    closes_s = m.run.window_s[1]
    return replace(m, run=replace(m.run, telemetry=planted_telemetry(until_s=1.1 * closes_s, interval_s=closes_s / 32)))


def costs(*measurements: Measurement) -> dict[str, tuple[float, ...]]:
    """Samples by the last part of the benchmark's name, of records that all go to one file and have one load."""
    (rows,) = asv.values(asv.steady_measurements(measurements)).values()
    found = {name.rpartition(".")[2]: [tuple(v.launches.values()) for v in row.values()] for name, row in rows.items()}
    assert all(len(each) == 1 for each in found.values())
    return {name: samples for name, (samples,) in found.items()}


def place_of(m: Measurement) -> BenchmarkHost:
    (place,) = asv.values(asv.steady_measurements([m]))
    return place


def test_planted_costs_come_out() -> None:
    """concurrency 8 at 1000 tokens/s: a step of 8 ms; 32 tokens a request; 400 W."""
    planted = dict(zip((*COSTS, "seconds_to_start"), (32, 8, 400, 40)))
    assert costs(watched(measurement(8, 1000.0, resolved=READY))) == {
        name: (pytest.approx(cost, rel=1e-3),) for name, cost in planted.items()
    }


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 64), st.floats(10, 1000), st.floats(1.01, 4), st.floats(1, 500))
def test_whatever_is_slower_has_the_larger_number_everywhere(concurrency, rate, factor, ready_s) -> None:
    fast = watched(measurement(concurrency, rate, resolved=replace(READY, ready_s=ready_s)))
    slow = watched(measurement(concurrency, rate / factor, resolved=replace(READY, ready_s=ready_s * factor)))
    before, after = costs(fast), costs(slow)
    assert before.keys() == after.keys() == {*COSTS, "seconds_to_start"}
    assert {name: after[name][0] / before[name][0] for name in before} == {
        name: pytest.approx(factor, rel=2e-3) for name in before
    }


def test_without_sensors_there_is_no_energy_and_the_power_limit_is_not_known() -> None:
    assert COSTS[2] not in costs(measurement())
    assert dict(place_of(measurement()).curve)["power limit"] == "unknown"
    assert dict(place_of(watched(measurement())).curve)["power limit"] == "700 W"


def test_samples_are_launches_and_their_statistics_those_of_asv() -> None:
    rates = {"one": (1000.0, 1100.0), "two": (990.0,), "three": (1010.0, 1030.0, 1050.0)}
    made = [measurement(8, r, launch=name, repeat=i) for name, each in rates.items() for i, r in enumerate(each)]
    samples = costs(*made)[COSTS[0]]
    means = [sum(32_000 / r for r in each) / len(each) for each in rates.values()]
    assert sorted(samples) == pytest.approx(sorted(means), rel=1e-3)
    facts = asv.asv_facts(list(samples))
    result, stats = statistics.compute_stats(list(samples), 1)
    assert facts["result"] == pytest.approx(result, rel=1e-5) and facts["samples"] == list(samples)
    assert {name: facts[f"stats_{name}"] for name in stats} == pytest.approx(stats, rel=1e-4)


@pytest.mark.parametrize(
    "other",
    [
        measurement(failures=1),
        measurement(preempted=1),
        measurement(load=OpenLoop(requests=8)),
        measurement(load=ClosedLoop(8, requests=64)),
        replace(measurement(), replica=Replica("g", 0, 2, "s", "mps")),
        replace(measurement(), replica=Replica("g", 0, 1, "s", "mps")),
    ],
    ids=["failed", "preempted", "burst", "counted", "replica", "alone-beside-replicas"],
)
def test_only_valid_measurements_of_a_sweep_of_one_engine_count(other: Measurement) -> None:
    assert asv.steady_measurements([other]) == []
    assert costs(measurement(), other) == costs(measurement())


def test_a_launch_of_a_gate_counts() -> None:
    of_a_gate = replace(measurement(), paired=GateLaunch("g", 1, "candidate", second=True))
    assert costs(of_a_gate) == costs(measurement())


def test_a_degraded_repeat_counts_only_where_there_is_no_sound_one() -> None:
    sound, crowded = engine_alone(1000.0), {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
    degraded = engine_alone(500.0, columns=crowded, launch="two")
    of = [next(iter(asv.values(found).values())) for found in ([sound, degraded], [sound], [degraded])]
    each = [next(value for row in rows.values() for value in row.values()) for rows in of]
    assert each[0].launches == each[1].launches != each[2].launches
    assert [value.degraded for value in each] == [False, False, True]


@pytest.mark.parametrize(
    ("changed", "same_curve", "same_file"),
    [
        ({"driver": "999.1"}, False, False),
        ({"gpu_name": "NVIDIA H100"}, False, False),
        ({"cores": 7}, False, False),
        ({"torch": "9.9"}, True, False),
        ({"host": "another"}, True, True),
        ({"python": "3.99"}, True, True),
        ({"vllm": "0.26.0+cu129"}, True, True),
    ],
)
def test_a_new_driver_begins_a_new_curve_and_a_new_torch_does_not(changed, same_curve, same_file) -> None:
    here, there = place_of(measurement()), place_of(measurement(environment=replace(H200, **changed)))
    assert (here.curve == there.curve, here == there) == (same_curve, same_file)
    assert (here.env_name == there.env_name) == same_file


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"max_num_seqs": 4096}, False),
        ({"dtype": "bfloat16"}, False),
        ({"extra": (("block_size", 32),)}, False),
        ({"env": (("VLLM_USE_X", "1"),)}, False),
        ({"env": (("PYTHONPATH", "/x"),)}, True),
        ({"python": "/opt/python"}, True),
        ({"gpu": 3}, True),
        ({"kv_cache_bytes": 1 << 33}, True),
    ],
)
def test_another_engine_begins_a_new_curve(changed, same) -> None:
    m = measurement()
    assert (place_of(m) == place_of(replace(m, spec=replace(m.spec, **changed)))) == same


def test_other_requests_and_another_way_of_loading_are_other_benchmarks() -> None:
    made = [measurement(), measurement(load=ClosedLoop(8, ramp_up="burst"))]
    other = replace(
        made[0], workload=replace(made[0].workload, hash="ffffff", spec=replace(made[0].workload.spec, seed=1))
    )
    (found,) = asv.values(asv.steady_measurements([*made, other])).values()
    groups = {name.partition(".")[0] for name in found if name != START}
    assert groups == {"64-32-staggered-012345", "64-32-burst-012345", "64-32-staggered-ffffff"}


def test_machines_have_the_names_of_their_gpus_or_the_one_that_is_given() -> None:
    cpu = replace(H200, gpu_name=None, gpu_memory_bytes=None, cpu="Xeon(R) Gold", cores=8)
    both = asv.steady_measurements([measurement(), measurement(environment=cpu)])
    assert {place.machine for place in asv.values(both)} == {"nvidia-h200", "xeon-r-gold-8-cores"}
    assert {place.machine for place in asv.values(both[:1], "runner-1")} == {"runner-1"}
    with pytest.raises(BadUsage, match=r"runner-1 cannot be the name of nvidia-h200 and of xeon"):
        asv.values(both, "runner-1")


def test_a_simulated_engine_is_of_no_release() -> None:
    with pytest.raises(BadUsage, match="names no release"):
        asv.values(asv.steady_measurements([measurement(environment=replace(H200, vllm=None))]))


def test_without_asv_runner_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "asv_runner.statistics", None)
    with pytest.raises(BadUsage, match=r"pip install 'pytest-slmserve\[asv\]'"):
        asv.asv_facts([1.0])


# Files

PLACE = BenchmarkHost("nvidia-h200", "0.26.0", (("gpu", "NVIDIA H200"), ("driver", "1")), "2.11.0")
SAMPLES = st.lists(st.floats(1e-3, 1e6).map(asv.rounded_value), min_size=1, max_size=4).map(tuple)
SERVED = st.tuples(
    st.sampled_from([f"a.{name}" for name in COSTS]), st.sampled_from("xy").map(repr), st.integers(1, 99)
)
Cells = dict[tuple[str, tuple[str, ...]], tuple[float, ...]]


def cells() -> st.SearchStrategy[Cells]:
    """Samples by benchmark and parameters."""
    key = SERVED.map(lambda k: (k[0], (k[1], str(k[2])))) | st.sampled_from("xy").map(lambda m: (START, (repr(m),)))
    return st.dictionaries(key, SAMPLES, max_size=6)


def file_of(planted: Cells, old: asv.File | None = None, launch: str = "a", degraded: bool = False) -> asv.File:
    rows: Rows = {}
    for (name, parameters), samples in planted.items():
        launches = {f"{launch}{i}": sample for i, sample in enumerate(samples)}
        rows.setdefault(name, {})[parameters] = Value(launches, 1_767_225_600_000, degraded)
    return asv.result_file(PLACE, COMMIT, rows, old)


def samples_in(file: asv.File) -> Cells:
    rows = asv.result_rows(file).items()
    return {(name, key): tuple(value.launches.values()) for name, row in rows for key, value in row.items()}


@settings(deadline=None)
@given(cells())
def test_what_is_written_is_read_again(planted: Cells) -> None:
    assert samples_in(file_of(planted)) == planted


@settings(deadline=None)
@given(cells(), cells())
def test_joining_keeps_what_was_not_measured_now(old: Cells, new: Cells) -> None:
    joined = file_of(new, file_of(old), launch="b")
    assert samples_in(joined) == {key: old.get(key, ()) + new.get(key, ()) for key in (*old, *new)}
    assert samples_in(file_of(new, joined, launch="b")) == samples_in(joined), "once more changes nothing"
    assert json.loads(json.dumps(joined)) == json.loads(json.dumps(file_of(new, joined, launch="b")))


CELL = ("a.ms_per_output_token", ("'x'", "8"))


def test_a_launch_that_is_measured_further_replaces_itself_alone() -> None:
    old = file_of({CELL: (1.0, 2.0, 3.0)})
    assert samples_in(file_of({CELL: (1.5,)}, old)) == {CELL: (1.5, 2.0, 3.0)}


@pytest.mark.parametrize(
    ("before", "after", "samples"),
    [(False, True, (1.0,)), (True, False, (2.0,)), (True, True, (1.0, 2.0)), (False, False, (1.0, 2.0))],
)
def test_what_is_degraded_gives_way_to_what_is_sound(before, after, samples) -> None:
    old = file_of({CELL: (1.0,)}, degraded=before)
    new = file_of({CELL: (2.0,)}, old, "b", degraded=after)
    assert samples_in(json.loads(json.dumps(new))) == {CELL: samples}


@settings(deadline=None)
@given(cells())
def test_a_row_is_as_asv_wants_it(planted: Cells) -> None:
    """Lists over the product of the parameters, the value being the median of its samples."""
    file = file_of(planted)
    for name, row in file["results"].items():
        columns = dict(zip(file["result_columns"], row, strict=True))
        keys = list(itertools.product(*columns["params"]))
        assert columns["version"] == "1" and {len(columns[c]) for c in asv.PER_VALUE} == {len(keys)}
        for key, value in zip(keys, columns["result"]):
            known = planted.get((name, key))
            assert value == (None if known is None else asv.rounded_value(statistics.quantile(known, 0.5)))
    assert (file["commit_hash"], file["date"]) == (COMMIT[0], 1_784_937_600_000)
    assert file["params"] == {"machine": "nvidia-h200", "gpu": "NVIDIA H200", "driver": "1"}


@settings(deadline=None)
@given(cells(), cells())
def test_the_list_of_benchmarks_has_the_parameters_of_all_files(one: Cells, two: Cells) -> None:
    listed = asv.benchmarks_file([file_of(one), file_of(two)], {"theirs.time_it": {"name": "theirs.time_it"}})
    assert listed.pop("version") == 2 and listed.pop("theirs.time_it") == {"name": "theirs.time_it"}
    assert listed.keys() == {name for name, _ in (*one, *two)}
    for name, parameters in (*one, *two):
        known = listed[name]
        assert known["name"] == name and len(known["params"]) == len(known["param_names"])
        assert all(value in axis for value, axis in zip(parameters, known["params"], strict=True))


def test_parameters_are_in_the_order_of_numbers() -> None:
    planted: Cells = {("a.ms_per_output_token", ("'x'", str(c))): (1.0,) for c in (1024, 8, 96, 2)}
    assert asv.benchmarks_file([file_of(planted)])["a.ms_per_output_token"]["params"][1] == [
        "2",
        "8",
        "96",
        "1024",
    ]


def test_columns_that_asv_left_out_are_not_needed() -> None:
    """asv leaves columns out that are empty and at the end."""
    file = {"result_columns": list(asv.COLUMNS), "results": {START: [[3.5, None], [["'x'", "'y'"]], "1"]}}
    assert asv.benchmarks_file([file])[START]["params"] == [["'x'", "'y'"]]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_kept_file_is_written_as_it_was_read(path: Path) -> None:
    old = json.loads(path.read_text("utf-8"))
    machine, *curve = old["params"].items()
    place = BenchmarkHost(machine[1], old["requirements"]["vllm"], tuple(curve), old["requirements"]["torch"])
    commit = old["commit_hash"], old["date"] // 1000
    assert json.loads(json.dumps(asv.result_file(place, commit, {}, old))) == old
