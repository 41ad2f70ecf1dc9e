"""Plain values: what JSON cannot say is null, no type is lost in silence, CSV has the same facts, and each point, sweep
and benchmark is whole."""

import csv
import io
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from planted import lawful
from sections import difference
from strategies import job_point, measurement, shared_point

from pytest_slmserve.analysis import estimates, points
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import as_json
from pytest_slmserve.report.as_json import plain, point_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, load_facts

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists)
CELLS = st.text('ab ,;"\n\u2028') | st.integers() | st.none()


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    seen: estimates.Interval | None
    states: tuple[State, ...] = ()

    @property
    def width(self) -> float:
        return math.inf


def test_json_values_match_expected_file():
    spec = EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1")
    values = {
        "a dataclass": Row("a", estimates.Interval(1.5, -math.inf, math.nan), (State.PASSES, State.FAILS)),
        "a verdict": Verdict.from_interval("c", "opt-125m", State.PASSES, "so", estimates.Interval(2.0, 1.0, 3.0), 1.5),
        "a mapping, a path and a generator": {8: (True, Path("a/b")), "c": map(str, [1])},
        "a set": frozenset({"b", "c", "a"}),
        "properties": [as_json.facts(each, "name", "width") for each in (Row("a", None), None)],
        "a case": as_json.case_facts(measurement()),
        "of an endpoint": as_json.case_facts(replace(measurement(), spec=spec)),
    }
    rows = [{"a": 1, "b": {"c": None, "d": {"e": 0.5}}}, {"f": ["x", 2, None], "a": True}, {"g": [{"h": 1}]}]
    shown = {name: json.dumps(plain(value)) for name, value in values.items()} | {"CSV": as_json.as_csv(rows)}
    assert difference("values", shown) == ""
    with pytest.raises(AssertionError, match="object"):
        as_json.as_json([object()])


@given(VALUES, st.lists(st.dictionaries(st.text("abc", min_size=1), CELLS), max_size=4))
def test_values_survive_json_or_csv(value, rows):
    assert json.loads(as_json.as_json(value), parse_constant=pytest.fail) == plain(value)
    heads = {name for row in rows for name in row}

    def cell(told: object) -> str:
        formula = isinstance(told, str) and told.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
        return "" if told is None else f"'{told}" if formula else str(told)

    wanted = [{name: cell(row.get(name)) for name in heads} for row in rows if heads]
    assert list(csv.DictReader(io.StringIO(as_json.as_csv(rows), newline=""))) == wanted
    row = dict(zip("abcdefhi", ("=HYPERLINK(1)", "@x", ["+1", "="], "a=b", -1, {"g": -0.5}, [], "\t=")))
    (read,) = csv.DictReader(io.StringIO(as_json.as_csv([row])))
    assert [*read.values()] == ["'=HYPERLINK(1)", "'@x", "'+1; =", "a=b", "-1", "-0.5", "", "'\t="]


def test_point_facts_match_expected_file():
    curve = lawful((1, 8, 64), (1, 1))
    for row, point in zip(point_facts(Findings(curves=[curve])), curve.points, strict=True):
        known = {"kind": "point", "valid": True, "goodput": None, "concurrency": point.concurrency}
        assert row.items() >= known.items()
        assert row["load"] == load_facts(ClosedLoop(point.concurrency)) and not {"used", "each"} & row.keys()
    with_slo = point_facts(Findings(curves=[curve], slo=parse_slo("e2e:0.5s")))
    assert [row["goodput"].attainment for row in with_slo] == [1.0, 1.0, 1.0]
    made = points.job_points([replace(measurement(), load=OpenLoop(requests=20, rate=5.0))])
    (job,) = point_facts(Findings(jobs=made, slo=parse_slo("e2e:9s")))
    assert job["kind"] == "job" and job["goodput"] is not None
    pair = tuple(replace(measurement(8), spec=EngineSpec(m)) for m in ("a", "b"))
    alone = replace(lawful((32,), (1, 1)), points=(), alone=lawful((32,), (1, 1)).points)
    shared = [shared_point(2, (900.0,)), replace(shared_point(2, (9.0,)), used=(pair,))]
    curve = lawful((64, 128, 256, 512), (1, 1))
    found = Findings(curves=[curve, alone], shared=shared, jobs=[job_point()])
    seen = list(point_facts(found))
    assert all({field.name for field in fields(points.Summary)} < row.keys() for row in seen)
    (whole, *_) = as_json.sweep_facts(found)
    assert (whole["plateau"].value, whole["pareto"]) == (256, [p.concurrency for p in curve.pareto_front()])
    named = ("kind", "subject", "model", "interface", "workload", "environment", "concurrency", "output_tokens_per_s")
    shown = {f"{n}": as_json.as_csv([{name: row.get(name) for name in named}]) for n, row in enumerate(seen[3:])}
    assert difference("facts", shown | {"sweep": as_json.as_csv([whole])}) == ""
    made = [measurement(8, rate, repeat=i) for i, rate in enumerate((1000.0, 800.0))]
    rounds, info = as_json.benchmark_facts(made)
    assert rounds == pytest.approx([32 / 1000, 32 / 800], rel=1e-3)
    assert info["records"] == [m.id for m in made] and (info["interface"], info["concurrency"]) == ("engine", 8)
    assert all(isinstance(value, int | float | str | list) for value in info.values())
    jobs = [replace(m, load=OpenLoop(requests=20, rate=5.0)) for m in made]
    assert "concurrency" not in as_json.benchmark_facts(jobs)[1] and as_json.benchmark_facts([]) == ([], {})
