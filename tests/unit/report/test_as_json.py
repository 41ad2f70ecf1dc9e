"""Plain values: what JSON cannot say is null, and no type is lost in silence."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.as_json import as_json, facts, plain


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    seen: Interval | None
    states: tuple[State, ...] = ()

    @property
    def width(self) -> float:
        return math.inf


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


def test_mappings_generators_and_paths():
    assert plain({8: (True, Path("a/b")), "c": map(str, [1])}) == {"8": [True, "a/b"], "c": ["1"]}


def test_what_is_no_value_is_an_error():
    with pytest.raises(AssertionError, match="object is neither"):
        as_json([object()])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_every_plain_value_is_json_and_finite_numbers_stay(value):
    assert json.loads(as_json(value), parse_constant=pytest.fail) == plain(value)


def test_a_set_has_one_order():
    assert plain(frozenset({"b", "c", "a"})) == ["a", "b", "c"]
