"""Plain values: what JSON cannot say is null, no type is lost in silence, CSV has the same facts, and each point, sweep
and benchmark is whole."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import job_point, law, measurement, shared_point

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.points import Summary, job_points
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.as_json import (
    as_csv,
    as_json,
    benchmark_facts,
    case_facts,
    facts,
    plain,
    point_facts,
    sweep_facts,
)
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, load_facts

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    seen: Interval | None
    states: tuple[State, ...] = ()

    @property
    def width(self) -> float:
        return math.inf


def swept(loads=(1, 8, 64), repeats: int = 2):
    return curve_of("opt-1.3b", [measurement(c, law(c), repeat=i) for c in loads for i in range(repeats)])


def test_a_dataclass_is_an_object_of_its_fields():
    row = Row("a", Interval(1.5, -math.inf, math.nan), (State.PASSES, State.FAILS))
    estimate = {"value": 1.5, "low": None, "high": None}
    assert plain(row) == {"name": "a", "seen": estimate, "states": ["passes", "fails"]}
    assert plain(Row("b", None)) == {"name": "b", "seen": None, "states": []}


def test_a_verdict_is_whole():
    verdict = Verdict.from_interval("c", "opt-125m", State.PASSES, "so", Interval(2.0, 1.0, 3.0), 1.5)
    assert plain(verdict) == {
        "claim": "c", "subject": "opt-125m", "state": "passes", "why": "so",
        "value": 2.0, "low": 1.0, "high": 3.0, "threshold": 1.5, "n": 0, "records": [],
        "again": [], "remedy": "",
    }  # fmt: skip


def test_properties_are_facts_where_they_are_named():
    assert plain(facts(Row("a", None), "name", "width")) == {"name": "a", "width": None}
    assert facts(None, "name", "width") == {"name": None, "width": None}


def test_mappings_generators_paths_and_sets_have_one_order():
    assert plain({8: (True, Path("a/b")), "c": map(str, [1])}) == {"8": [True, "a/b"], "c": ["1"]}
    assert plain(frozenset({"b", "c", "a"})) == ["a", "b", "c"]


def test_what_is_no_value_is_an_error():
    with pytest.raises(AssertionError, match="object"):
        as_json([object()])


@given(VALUES)
def test_every_plain_value_is_json_and_finite_numbers_stay(value):
    assert json.loads(as_json(value), parse_constant=pytest.fail) == plain(value)


# CSV


def test_a_table_has_the_head_of_all_rows_and_names_of_what_lies_within():
    rows = [{"a": 1, "b": {"c": None, "d": {"e": 0.5}}}, {"f": ["x", 2, None], "a": True}, {"g": [{"h": 1}]}]
    assert as_csv(rows).split("\n") == [
        "a,b.c,b.d.e,f,g",
        "1,,0.5,,",
        "true,,,x; 2; ,",
        ',,,,"[{""h"": 1}]"',
        "",
    ]


@given(
    st.lists(
        st.dictionaries(st.text("abc", min_size=1), st.text('ab ,;"\n\u2028') | st.integers() | st.none()), max_size=4
    )
)
def test_a_table_is_read_back_with_every_cell(rows):
    heads = {name for row in rows for name in row}
    wanted = [{name: "" if row.get(name) is None else str(row[name]) for name in heads} for row in rows if heads]
    texts = as_csv(rows)
    assert list(csv.DictReader(io.StringIO(texts, newline=""))) == wanted


# Facts


def test_limits_of_an_endpoint_are_not_known():
    made = measurement()
    seen = case_facts(made)
    assert (seen["model"], seen["interface"], seen["max_num_seqs"]) == ("opt-1.3b", "engine", made.spec.max_num_seqs)
    assert (seen["workload"]["requests"], seen["workload"]["longest"]) == (64, 96)
    theirs = replace(made, spec=EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1"))
    assert (case_facts(theirs)["max_num_seqs"], case_facts(theirs)["extra"]) == (None, {})
    assert case_facts(theirs)["url"] == "http://h/v1"


def test_each_point_has_its_case_and_its_figures():
    curve = swept()
    seen = [plain(row) for row in point_facts(Findings(curves=[curve]))]
    assert [(row["kind"], row["subject"], row["concurrency"]) for row in seen] == [
        ("point", "opt-1.3b", c) for c in (1, 8, 64)
    ]
    for row, point in zip(seen, curve.points, strict=True):
        assert row["output_tokens_per_s"] == point.output_tokens_per_s and row["valid"] and row["goodput"] is None
        assert row["load"] == load_facts(ClosedLoop(point.concurrency)) and not {"used", "each"} & row.keys()
    with_slo = point_facts(Findings(curves=[curve], slo=parse_slo("e2e:0.5s")))
    assert [row["goodput"].attainment for row in with_slo] == [1.0, 1.0, 1.0]
    made = job_points([replace(measurement(), load=OpenLoop(requests=20, rate=5.0))])
    (job,) = point_facts(Findings(jobs=made, slo=parse_slo("e2e:9s")))
    assert job["kind"] == "job" and job["goodput"] is not None


def test_kinds_of_points_are_told_apart_and_have_one_set_of_figures():
    alone = replace(swept((32,)), points=(), alone=swept((32,)).points)
    found = Findings(curves=[swept(), alone], shared=[shared_point(2, (900.0,))], jobs=[job_point()])
    seen = list(point_facts(found))
    assert [row["kind"] for row in seen] == ["point"] * 3 + ["alone", "replicas", "job"]
    assert [row["subject"] for row in seen[4:]] == ["2 x opt-1.3b by mps", "opt-6.7b"]
    assert seen[4]["environment"]["gpu_name"] == "NVIDIA H200" and seen[4]["concurrency"] == 96
    assert all({field.name for field in fields(Summary)} < row.keys() for row in seen)


def test_what_all_replicas_share_is_said_once():
    pair = tuple(replace(measurement(8), spec=EngineSpec(m)) for m in ("a", "b"))
    (row,) = point_facts(Findings(shared=[replace(shared_point(2, (9.0,)), used=(pair,))]))
    assert "model" not in row and row["interface"] == "engine" and row["workload"]["requests"] == 64


def test_a_sweep_is_told_as_a_whole():
    curve = swept((64, 128, 256, 512))
    (seen,) = sweep_facts(Findings(curves=[curve]))
    assert seen["plateau"].value == 256 and seen["pareto"] == [p.concurrency for p in curve.pareto_front()]
    assert {"kv_capacity", "cut", "missing", "unneeded"} < seen.keys()


def test_a_benchmark_has_a_round_for_each_repeat_and_plain_numbers_only():
    made = [measurement(8, rate, repeat=i) for i, rate in enumerate((1000.0, 800.0))]
    rounds, info = benchmark_facts(made)
    assert rounds == pytest.approx([32 / 1000, 32 / 800], rel=1e-3)
    assert info["records"] == [m.id for m in made] and info["interface"] == "engine" and info["concurrency"] == 8
    assert all(isinstance(value, int | float | str | list) for value in info.values())
    jobs = [replace(m, load=OpenLoop(requests=20, rate=5.0)) for m in made]
    assert "concurrency" not in benchmark_facts(jobs)[1] and benchmark_facts([]) == ([], {})
